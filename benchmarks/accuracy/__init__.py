"""Accuracy: suites that are run, and what is made of their scores: tables, *Acc.* and *Rel.*

Knows nothing about how a policy chooses tokens. ``python -m benchmarks.accuracy`` computes the
published tables anew; ``vllm-autoprune eval`` runs a suite.
"""
