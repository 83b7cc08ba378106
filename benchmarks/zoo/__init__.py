"""The shipped states: built from one source, measured on mini-LLaVA, written with that evidence."""
