"""The sub-commands of `vllm-autoprune`, listed in ``cli.main``.

Modules that are slow to import are imported when a command runs.
"""
