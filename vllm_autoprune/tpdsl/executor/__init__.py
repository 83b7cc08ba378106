"""Execution of states: Materialize, Algorithm 1, the safety check, and transfer."""
