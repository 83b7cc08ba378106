"""`python -m benchmarks.cost state-cost`: predicted and measured time of one selection, by state.

States: the shipped ones, and ``autoprune`` with other atoms in one of its places. Times are CPU
seconds of one core, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_autoprune import Grid, Instruction, VisualTokens, load_state, materialize, refine
from vllm_autoprune.tpdsl.executor.state_cost import state_cost
from vllm_autoprune.tpdsl.executor.work import REFERENCE
from vllm_autoprune.tpdsl.language_prefix import RecordedPrefix
from vllm_autoprune.tpdsl.optional_inputs import NextLayer, TowerStates, Words
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.load import shipped_states
from vllm_autoprune.tpdsl.states.state import PruningState

HEADS, TEXT = 32, 16


def draw_image() -> VisualTokens:
    """A random image of the reference shape, with every input that a state may read."""
    side, width, tower = math.isqrt(REFERENCE.tokens), REFERENCE.width, REFERENCE.tower
    source = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=source)

    features, patches = rows(REFERENCE.tokens, width), rows(REFERENCE.tokens, tower)
    length = 1 + REFERENCE.tokens + TEXT
    entering = rows(length, width)
    return VisualTokens(
        features,
        Grid(side, side),
        cls_attention=rows(REFERENCE.tokens).softmax(dim=1),
        instruction=Instruction(patches, rows(1, tower), torch.ones(1, 1, dtype=torch.bool), -1),
        tower=TowerStates(
            patches=patches,
            keys=rows(REFERENCE.tokens, 64),
            project=lambda low: low.new_zeros(*low.shape[:-1], width),
            cls=rows(1, tower),
            next_layer=NextLayer(rows(REFERENCE.tokens).softmax(dim=1), patches),
        ),
        language=RecordedPrefix(
            start=1,
            text=torch.ones(1, TEXT, dtype=torch.bool),
            recorded_embeddings=entering,
            recorded_states=entering,
            recorded_normed=entering,
            recorded_keys=rows(HEADS, length, 16),
            recorded_attention=rows(HEADS, TEXT, length).softmax(dim=-1),
        ),
        encoder=patches,
        words=Words(rows(TEXT, width), torch.ones(1, TEXT, dtype=torch.bool)),
    )


def build_states() -> Iterator[tuple[str, PruningState]]:
    """Names and states: shipped ones of different behaviour, then variations of ``autoprune``."""
    behaviours = set()
    for name in sorted(shipped_states()):
        state = load_state(name)
        behaviour = repr((state.base_policy, state.scoring, state.constraints))
        if behaviour not in behaviours:
            behaviours.add(behaviour)
            yield name, state
    for name in ATOMS.names("scoring"):
        yield f"4 x {name}", _changed(signals=[{"atom": name, "weight": 0.5}] * 4)
    many = {"atom": "cluster_centroid_representativeness", "clusters": 64, "weight": 0.5}
    yield "32 x clusters of 64", _changed(signals=[many] * 32)
    for name in ATOMS.names("selection_constraints"):
        selector: dict[str, object] = {"atom": name}
        if "q_e" in ATOMS[name].call.model_fields:
            selector["q_e"] = 64
        yield name, _changed(selector=selector)
    for name in ("spatial_coverage_pool_builder", "quality_pool_builder", "diversity_pool_builder"):
        yield f"8 x {name}", _changed(pool=[{"atom": name}] * 8)
    inner = [{"atom": "diversity_pool_builder", "pool_ratio": 8.0}] * 8
    joined = {"atom": "multi_source_pool_builder", "pool_ratio": 8.0, "sources": inner}
    yield "8 x 8 pools", _changed(pool=[joined] * 8)
    for policy in ("cdpruner", "divprune", "prumerge_plus", "visionzip", "trim", "dart", "fastv"):
        prior = {"atom": "external_policy", "policy": policy}
        yield f"8 x external {policy}", _changed(priors=[prior] * 8)
    for name in (
        "weighted_average",
        "spatial_local_residual_merge",
        "similarity_weighted_residual_merge",
    ):
        yield name, _changed(reassembly={"atom": name, "strength": 0.25})
    yield "anchor_exchange", _changed(reassembly={"atom": "anchor_exchange", "margin": 0.1})


def _changed(**parts: object) -> PruningState:
    """The shipped ``autoprune`` with these parts replaced."""
    body = load_state("autoprune").model_dump(mode="json")
    places = {"priors": "source", "signals": "scoring", "pool": "constraints",
              "selector": "constraints"}  # fmt: skip
    for name, value in parts.items():
        (body[places[name]] if name in places else body)[name] = value
    return load_state(body | {"provenance": {}})


def measure(state: PruningState, seconds: float) -> float:
    """Milliseconds of one selection: the median of at most 20, over ``seconds`` of CPU time."""
    policy = materialize(state, REFERENCE.budget)
    times: list[float] = []
    tokens, until = draw_image(), time.process_time() + seconds
    while not times or (time.process_time() < until and len(times) < 20):
        fresh = VisualTokens(
            tokens.features,
            tokens.grid,
            tokens.cls_attention,
            tokens.instruction,
            tower=tokens.tower,
            language=tokens.language,
            encoder=tokens.encoder,
            words=tokens.words,
        )  # nothing computed yet
        begin = time.process_time()
        refine(policy, fresh)
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time for each state")
    parser.add_argument("--only", default="", metavar="TEXT", help="states whose name contains it")


def run(options: argparse.Namespace) -> int:
    """Print one row a state, then the median and the largest error of the prediction."""
    torch.set_num_threads(1)
    errors = []
    print(f"{'state':44} {'predicted ms':>12} {'measured ms':>12} {'ratio':>6}")
    for name, state in build_states():
        if options.only not in name:
            continue
        predicted, measured = state_cost(state), measure(state, options.seconds)
        errors.append(abs(math.log2(predicted / measured)))
        row = f"{name:44} {predicted:12.1f} {measured:12.1f} {predicted / measured:6.2f}"
        print(row, flush=True)
    typical, worst = 2 ** statistics.median(errors), 2 ** max(errors)
    print(f"off by a factor of {typical:.2f} (median), {worst:.2f} (worst)")
    return 0
