"""The accuracy suite of mini-LLaVA."""
