"""Comparison of search strategies on the yardsticks: searches, winners confirmed, tables."""
