"""Our own selection: policies, and visual tokens of the random images."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cost.selection.images import Images, Size
from vllm_autoprune import Grid, Instruction, PruningPolicy, VisualTokens, load_state, materialize

STATE = "autoprune"


def build_policy(kept: int, *, exchange: bool = True) -> PruningPolicy:
    """The shipped state at a budget; without ``exchange``, its base policy alone."""
    state = load_state(STATE)
    if not exchange:
        selector = state.constraints.selector.model_copy(update={"q_e": 0, "r_min": None})
        constraints = state.constraints.model_copy(update={"selector": selector})
        state = state.model_copy(update={"constraints": constraints})
    return materialize(state, kept)


def build_tokens(size: Size, images: Images) -> VisualTokens:
    """Visual tokens with nothing computed yet."""
    side = round(size.per_tile**0.5)
    square = side * side == size.per_tile
    grid = Grid(side if square else 1, side if square else size.per_tile, size.tiles)
    used = images.text.new_ones(size.batch, 1).bool()
    instruction = Instruction(images.patches, images.text, used, -1)
    return VisualTokens(images.features, grid, images.cls_attention, instruction)


def select(base: PruningPolicy, size: Size, images: Images) -> Tensor:
    """CDPruner's picks ``(B, K)``, from features to indices."""
    return base.base.select(
        base.state.base_policy.params, build_tokens(size, images), base.budget
    ).picks
