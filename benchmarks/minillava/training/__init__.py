"""Training of mini-LLaVA; the held-out splits are drawn from scene seeds that it never uses."""
