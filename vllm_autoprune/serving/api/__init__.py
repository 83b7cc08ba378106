"""Modules of the API server: request fields, plans, cache identities, the state endpoint."""
