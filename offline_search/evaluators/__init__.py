"""What measures candidates: one protocol, and what stands behind it.

Knows nothing about searching.
"""

from offline_search.evaluators.protocol import EvaluationFailed, Evaluator, Job

__all__ = ["EvaluationFailed", "Evaluator", "Job"]
