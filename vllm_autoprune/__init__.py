"""Visual-token pruning for vLLM: keep K of N visual tokens of an image, as a frozen state decides.

Importing this package does not import vLLM; the plugin is :mod:`vllm_autoprune.serving`.
"""

from vllm_autoprune import base_policies  # noqa: F401  (registers the base policies)
from vllm_autoprune.errors import (
    AutopruneError,
    BudgetError,
    ConfigError,
    RequestError,
    SelectionError,
    StateError,
    UnsupportedModelError,
)
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens

__version__ = "0.1.0"

__all__ = [
    "AutopruneError",
    "BudgetError",
    "ConfigError",
    "Grid",
    "Instruction",
    "PruningPolicy",
    "PruningState",
    "RefinedTokens",
    "RequestError",
    "SafetyRecord",
    "SelectionError",
    "StateError",
    "UnsupportedModelError",
    "VisualTokens",
    "load_state",
    "materialize",
    "refine",
    "safety_check",
]
