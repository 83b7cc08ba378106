"""Offline search for pruning states: a language model proposes them, a served model is measured."""
