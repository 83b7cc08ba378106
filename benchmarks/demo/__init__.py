"""The demo: one small model served stock and pruned, asked the same questions, one table.

Knows nothing about how tokens are chosen; it only asks servers, except for its picture.
"""
