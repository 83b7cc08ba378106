"""The human-designed base policies, one file each, behind one interface.

Knows nothing about residual refinement or about serving.
"""

from vllm_autoprune.base_policies import cdpruner, divprune

__all__ = ["cdpruner", "divprune"]
