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
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.optional_inputs import Instruction
from vllm_autoprune.tpdsl.outcome import RefinedTokens
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

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
