"""Aggregates of benchmark scores, *Acc.* and *Rel.*, and what the published tables print.

Knows nothing about models: it is given scores.
"""
