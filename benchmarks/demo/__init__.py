"""The demo: one small model served stock and pruned, asked the same questions, one table."""
