"""Benchmarks and demos that are not part of the installed package."""
