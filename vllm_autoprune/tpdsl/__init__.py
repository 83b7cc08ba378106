"""TPDSL, the typed domain-specific language of pruning states, and its executor.

This package needs only torch and pydantic, and never imports vLLM.
"""
