"""A Triton backend for the interpreter: it says that there is a CPU, and compiles nothing."""
