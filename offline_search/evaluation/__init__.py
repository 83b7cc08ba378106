"""Evaluation of candidates: safety check, measurement on served models, comparison, history."""
