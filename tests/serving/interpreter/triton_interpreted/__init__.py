"""Triton backend for the interpreter: reports a CPU and compiles nothing."""
