"""Golden cases: what the published code of other people's methods returned.

``data/<method>/case_XX.npz`` holds a recipe and what was expected of it. Inputs are not stored:
:mod:`tests.golden.generator` makes them again, bit for bit, and their digests are checked.
"""
