"""Our side of every comparison: tokens of an image, and a policy over them.

Knows nothing about timing.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.ops.images import Images, Size
from vllm_autoprune import Grid, Instruction, PruningPolicy, VisualTokens, load_state, materialize

STATE = "autoprune"


def policy(kept: int, *, exchange: bool = True) -> PruningPolicy:
    """The shipped state at a budget, with its exchange or as its base policy alone."""
    state = load_state(STATE)
    if not exchange:
        selector = state.constraints.selector.model_copy(update={"q_e": 0, "r_min": None})
        constraints = state.constraints.model_copy(update={"selector": selector})
        state = state.model_copy(update={"constraints": constraints})
    return materialize(state, kept)


def tokens(of: Size, images: Images) -> VisualTokens:
    """A record that nothing has been computed from yet."""
    side = round(of.per_tile**0.5)
    square = side * side == of.per_tile
    grid = Grid(side if square else 1, side if square else of.per_tile, of.tiles)
    used = images.text.new_ones(of.batch, 1).bool()
    instruction = Instruction(images.patches, images.text, used, -1)
    return VisualTokens(images.features, grid, images.cls_attention, instruction)


def select(base: PruningPolicy, of: Size, images: Images) -> Tensor:
    """CDPruner's picks ``(B, K)``: features to indices, nothing kept from before."""
    return base.base.select(base.state.base_policy.params, tokens(of, images), base.budget).picks
