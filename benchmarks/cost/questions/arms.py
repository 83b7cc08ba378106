"""Arms that differ in what questions on an image share, and the shapes that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.common.shapes import write_clip, write_llava
from benchmarks.cost.efficiency.models import Model, load_model
from benchmarks.load.arms import Arm
from vllm_autoprune import load_state
from vllm_autoprune.backbones import LLAVA_7B
from vllm_autoprune.tpdsl.states.state import Core, PruningState

STOCK, TODAY, SPLIT, FREE = ARMS = ("stock", "question-reading", "split", "question-free")
BLOCK = 32
"""Tokens of a KV block: the smallest that vLLM's CPU attention takes."""

REQUEST_FLAGS = ("--autoprune-requests", "shipped-states", "--autoprune-request-cost", "1000")
"""Of a server whose requests choose their arm."""

HALF, HALF_WIDTH, HALF_TOWER = "llava-1.5-half", 2048, 2
"""Half of LLaVA-1.5-7B's width, with a tower of two layers: small enough to be served whole."""


def split_state(state: str, share: float) -> PruningState:
    """The state with a core of ``share`` of its tokens, chosen by DivPrune."""
    return load_state(state).model_copy(update={"core": Core.model_validate({"share": share})})


def load_shape(name: str, layers: int, out: Path) -> Model:
    """A shape of the efficiency table, or :data:`HALF` of one."""
    if name != HALF:
        return load_model(name, layers, out)
    folder = write_llava(
        out / f"{HALF}-{layers}-layers", layers, tower_layers=HALF_TOWER, width=HALF_WIDTH
    )
    return Model(
        name=HALF,
        folder=folder,
        geometry=replace(LLAVA_7B, name=HALF, layers=layers, width=HALF_WIDTH),
        depth=layers,
        side=336,
        flags=("--load-format", "dummy", "--max-model-len", "2048"),
        scored=False,
    )


def state_of(arm: str, state: str, share: float, out: Path) -> str | None:
    """What an arm serves: the name or file of a state, None for stock; writes the split state."""
    if arm == SPLIT:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "split.json"
        path.write_text(split_state(state, share).dumps())
        return str(path)
    return {STOCK: None, TODAY: state, FREE: "divprune"}[arm]


def find_digest(arm: str, state: str, share: float) -> str | None:
    """Digest of the state that an arm serves, None for stock."""
    if arm == SPLIT:
        return split_state(state, share).digest
    return {STOCK: None, TODAY: load_state(state).digest, FREE: load_state("divprune").digest}[arm]


def build_arms(
    model: Model,
    names: tuple[str, ...],
    state: str,
    share: float,
    budget: int,
    out: Path,
    text_tower: bool = True,
) -> list[Arm]:
    """Servers of the named arms, which differ in the state alone."""
    tower = write_clip(out / "clip") if text_tower else None
    states = {name: state_of(name, state, share, out) for name in names}
    return [
        Arm(
            name=name,
            model=str(model.folder),
            flags=tuple(_flags(model, served, budget, tower)),
            digest=find_digest(name, state, share),
        )
        for name, served in states.items()
    ]


def request_settings(
    names: tuple[str, ...], state: str, budget: int
) -> dict[str, dict[str, object]]:
    """What requests to the split's server set for each pruned arm.

    Unpruned requests have a server of their own: an image's last partial KV block is computed again
    from vLLM's encoder cache, which the other arms' images would empty.
    """
    settings: dict[str, dict[str, object]] = {
        TODAY: {"state": state, "budget": budget},
        SPLIT: {},
        FREE: {"state": "divprune", "budget": budget},
    }
    return {name: settings[name] for name in names if name != STOCK}


def _flags(model: Model, state: str | None, budget: int, tower: Path | None) -> Iterator[str]:
    yield from (*model.flags, "--enforce-eager", "--block-size", str(BLOCK))
    yield from ("--max-num-seqs", "8", "--enable-prompt-tokens-details")
    if state is not None:
        yield from ("--autoprune-state", state, "--autoprune-budget", str(budget))
    if state is not None and tower is not None:
        yield from ("--autoprune-text-tower", str(tower))
