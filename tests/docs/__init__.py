"""What is written in docs/ and can go stale."""
