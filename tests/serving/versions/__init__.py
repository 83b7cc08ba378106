"""Releases of vLLM that cannot be installed here, known by what their sources say of our hooks.

``python -m tests.serving.versions 0.33.0`` writes the file of a release, or with ``--check`` holds
the one that is there to the release's wheel.
"""
