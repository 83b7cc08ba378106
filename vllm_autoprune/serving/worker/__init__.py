"""Modules of the GPU or CPU worker: features, relevance, selection, positions, metrics."""
