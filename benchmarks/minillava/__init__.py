"""The harder mini-LLaVA: scenes on which policies differ, and the models trained on them.

Knows nothing about the plugin; only `evaluate.py` runs the package's base policies.
"""
