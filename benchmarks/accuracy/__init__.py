"""Accuracy of mini-LLaVA in every case of the paper, and an audit of the published tables.

``python -m benchmarks.accuracy`` recomputes the published tables, ``python -m
benchmarks.accuracy.minillava`` measures. What all evaluations share is in the installed package,
:mod:`vllm_autoprune.evaluation`.
"""
