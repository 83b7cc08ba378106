"""A split as a task that lmms-eval reads: pictures, a JSON Lines file, a YAML file, functions.

Knows nothing about models; lmms-eval is not needed to write a task, only to run it.
"""
