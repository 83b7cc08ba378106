"""The embedded proposer: SmolLM2-135M-Instruct, from a package on PyPI to a local `vllm serve`.

Knows nothing about proposals. It is there so that a search runs end to end without an account
anywhere; a model fifty times its size proposes better.
"""
