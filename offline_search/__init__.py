"""Offline search: a language model designs pruning states, measured on a served model.

Knows nothing about how a server prunes: it is a client of one, and of a language model.
"""
