"""Tensor operations of the selection: batched, and without synchronising with the device."""
