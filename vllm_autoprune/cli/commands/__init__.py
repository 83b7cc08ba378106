"""The sub-commands of `vllm-autoprune`, one file each.

Knows nothing about them: ``cli.main`` lists them. What a command needs that is slow to import, it
imports when it runs.
"""
