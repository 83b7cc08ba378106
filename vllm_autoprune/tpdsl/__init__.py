"""TPDSL, the typed domain-specific language of pruning states, and its executor.

Everything in this package needs torch and pydantic only and never imports vLLM.
"""
