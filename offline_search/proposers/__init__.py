"""Proposers: prompts, the client that requests proposals, endpoints, and the embedded model."""
