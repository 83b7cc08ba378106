"""Explanations of what a state does: text, pictures and HTML pages. Needs no server."""
