"""TPDSL: the language of pruning states and its executor.

Knows nothing about vLLM: everything below this package needs torch and pydantic only.
"""
