"""Tests of the demo against a fake server."""
