"""Search for states with a shared core, against the best states without one."""
