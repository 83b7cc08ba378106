"""Accuracy: suites of questions, their scores, and *Acc.* and *Rel.* in tables.

``python -m benchmarks.accuracy`` recomputes the published tables; ``vllm-autoprune eval`` runs a
suite.
"""
