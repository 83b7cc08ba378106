"""The suite on mini-LLaVA: one server, every case a state that requests bring along.

Knows nothing about what is made of answers.
"""
