"""Modules of both API server and workers: plans, states and rules that travel between them."""
