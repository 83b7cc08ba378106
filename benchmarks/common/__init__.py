"""What every benchmark shares: statistics, reports, the streaming client and its fake server."""
