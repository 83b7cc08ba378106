"""What a state says and does, for people: in words, as a table, as pictures.

Knows nothing about servers.
"""
