"""The human-designed base policies, one file each, behind one interface.

Knows nothing about residual refinement or about serving.
"""

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
