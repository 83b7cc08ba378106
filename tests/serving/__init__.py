"""Tests of the plugin, from settings to running vLLM servers."""
