"""PruningState and what is done with it as data: loading, validation, comparison, documentation."""
