"""Training of the second language model, on conversations of several turns about one image."""
