"""Self-test: tiny random models of every backbone, served and checked on the user's machine."""
