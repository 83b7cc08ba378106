"""Who writes proposals: any OpenAI-compatible endpoint, with its cost kept and its failures borne.

Knows nothing about what becomes of a proposal.
"""
