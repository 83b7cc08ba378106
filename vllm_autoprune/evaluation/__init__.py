"""Accuracy on questions: suites, scores, and tables with paired bootstrap intervals."""
