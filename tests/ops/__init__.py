"""Tests of the selection loops."""
