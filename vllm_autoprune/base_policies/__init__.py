"""Base policies: published token selectors, one module each, behind one interface."""

from vllm_autoprune.base_policies import (
    cdpruner,
    dart,
    divprune,
    fastv,
    prumerge_plus,
    pyramiddrop,
    sparsevlm,
    trim,
    visionzip,
)

__all__ = [
    "cdpruner",
    "dart",
    "divprune",
    "fastv",
    "prumerge_plus",
    "pyramiddrop",
    "sparsevlm",
    "trim",
    "visionzip",
]
