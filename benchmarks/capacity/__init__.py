"""How many requests a KV cache of fixed size holds at once, stock and pruned.

Knows nothing about time.
"""
