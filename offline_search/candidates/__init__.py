"""Candidate states: components, JSON Schema, parsing of proposals, and sampling of new ones."""
