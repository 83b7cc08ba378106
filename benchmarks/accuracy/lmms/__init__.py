"""The paper's benchmarks through lmms-eval, which runs as a process of its own.

Knows nothing about what is made of answers.
"""
