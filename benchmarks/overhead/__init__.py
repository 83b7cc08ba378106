"""What pruning itself costs: time to first token, memory, and nothing at all without a state.

Knows nothing about answers; models here may have dummy weights.
"""
