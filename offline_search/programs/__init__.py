"""Programs that a language model wrote, run where they can do no harm.

Knows nothing about what they are for.
"""
