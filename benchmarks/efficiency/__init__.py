"""What pruning saves, as a table: FLOPs, prefill, decode, KV cache, memory and score side by side.

Knows nothing about load: requests are asked one at a time.
"""
