"""Golden cases: recorded outputs of the published code of other methods.

``data/<method>/case_XX.npz`` holds a recipe for the inputs and the recorded outputs. Inputs are not
stored: :mod:`tests.golden.case` makes them again, and their digests are checked.
"""
