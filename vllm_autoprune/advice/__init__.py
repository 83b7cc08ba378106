"""Which pruning pays for which traffic: a cost model, and what a running server measures for it."""
