"""The paper's benchmarks through lmms-eval, which runs in a separate process."""
