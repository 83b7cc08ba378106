"""The zoo: builds the shipped states, measures each on the embedded model, writes its evidence.

Knows nothing about searching for states.
"""
