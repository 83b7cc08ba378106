"""A check that people run on their own machine: tiny random models of every backbone, served."""
