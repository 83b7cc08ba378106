"""Tests of mini-LLaVA."""
