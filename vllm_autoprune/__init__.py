"""Visual-token pruning for vLLM: keep K of N visual tokens of an image, as a frozen state decides.

Importing this package does not import vLLM; the plugin is :mod:`vllm_autoprune.serving`.
"""

import sys

from vllm_autoprune.errors import (
    AutopruneError,
    BudgetError,
    ConfigError,
    RequestError,
    SelectionError,
    StateError,
    UnsupportedModelError,
)

try:
    from vllm_autoprune import base_policies  # noqa: F401  (registers the base policies)
    from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
    from vllm_autoprune.tpdsl.base_policy import RefinedTokens
    from vllm_autoprune.tpdsl.loading import load_state
    from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
    from vllm_autoprune.tpdsl.refine import refine
    from vllm_autoprune.tpdsl.safety import safety_check
    from vllm_autoprune.tpdsl.state import PruningState
    from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens
except ImportError:
    # The command goes on without torch, to say what is missing; `-m` runs `__main__` after this.
    if "vllm_autoprune_command" not in sys.modules and sys.argv[0] != "-m":
        raise
except KeyboardInterrupt:
    if sys.argv[0] != "-m":
        raise
    print("vllm-autoprune: stopped", file=sys.stderr)
    sys.exit(130)

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
