"""Tests of `benchmarks.overhead`."""
