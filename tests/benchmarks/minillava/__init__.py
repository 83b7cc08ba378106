"""Tests of the harder mini-LLaVA."""
