"""The hot loops: batched, sync-free selection over tensors.

Knows nothing about atoms, states or models.
"""
