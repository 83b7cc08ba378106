"""Conversations about one image: a language model trained on them, and its accuracy by turn."""
