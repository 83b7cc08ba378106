"""A pruned server kept busy for long: no error, memory that stays flat, metrics that add up.

``python -m benchmarks.soak --minutes 30`` says whether all of that holds.
"""
