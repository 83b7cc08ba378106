"""Benchmarks of the offline search on mini-LLaVA: comparison of strategies, evaluation speed."""
