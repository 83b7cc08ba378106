"""Tests of the language and its executor."""
