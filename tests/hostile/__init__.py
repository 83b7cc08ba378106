"""What a hostile client may send, and what has to hold afterwards."""
