"""Tests of conversations on mini-LLaVA."""
