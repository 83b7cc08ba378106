"""Explanations of what a state does: text and pictures. Needs no server."""
