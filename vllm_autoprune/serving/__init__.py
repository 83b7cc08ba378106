"""The plugin: the only rooms that import vLLM.

Knows nothing about what a state says: it finds the inputs, calls the executor, serves the rows.
"""
