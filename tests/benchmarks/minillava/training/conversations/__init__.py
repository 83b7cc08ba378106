"""Tests of training on conversations with mini-LLaVA."""
