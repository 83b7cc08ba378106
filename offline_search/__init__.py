"""Offline search for pruning states, proposed by a language model, measured on a served model."""
