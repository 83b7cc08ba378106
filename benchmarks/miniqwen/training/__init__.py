"""Training of mini-Qwen3-VL; the held-out splits are drawn from seeds that it never uses."""
