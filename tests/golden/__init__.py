"""Golden cases: what the published code of other people's methods returned.

Knows nothing about this project's code: the tests of each part compare with it.

``data/<method>/case_XX.npz`` holds a recipe and what was expected of it. Inputs are not stored:
:mod:`tests.golden.generator` makes them again, bit for bit, and their digests are checked.
"""
