"""Accuracy of both small models in every case of the paper, and an audit of published tables."""
