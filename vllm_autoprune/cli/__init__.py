"""The `vllm-autoprune` command: thin, parse -> call -> print.

Knows nothing that the library does not know.
"""
