"""Tests of mini-Qwen3-VL."""
