"""Robustness tests: hostile requests, and checks that the server still works afterwards."""
