"""Tests of the demo, with a fake server in the place of a real one."""
