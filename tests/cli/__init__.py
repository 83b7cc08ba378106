"""Tests of the `vllm-autoprune` command."""
