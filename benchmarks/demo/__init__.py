"""The demo: two models, served stock and pruned and asked the same questions, in one table."""
