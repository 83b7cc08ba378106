"""Tests of the base policies."""
