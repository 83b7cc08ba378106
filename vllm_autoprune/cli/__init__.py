"""The `vllm-autoprune` command: parse arguments, call one function of the library, print."""
