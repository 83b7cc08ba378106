"""One table of accuracy for both yardsticks: mini-LLaVA and mini-Qwen3-VL.

Measured in this process with transformers, on the selection code that a server runs: a case costs a
selection and a pass of the language model, so hundreds of cases take minutes.
"""
