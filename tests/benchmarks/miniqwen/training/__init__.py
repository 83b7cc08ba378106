"""Tests of the training of mini-Qwen3-VL."""
