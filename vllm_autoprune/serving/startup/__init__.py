"""Modules of start-up: flags, settings, checks of this vLLM, registration of the pruned classes."""
