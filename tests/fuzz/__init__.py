"""Fuzzing of the loader, the JSON Schema and the safety check with generated and mutated states."""
