"""Cost model of states: predicted CPU time of one selection, atom by atom.

Every atom declares its work as calls of torch, numbers read or written, and multiplications, as
functions of its parameters and of an image's shape. Three measured rates turn work into
milliseconds of one CPU core (``docs/data/state-cost.csv`` compares predictions with measurements).

The computation of a state's inputs is not included: it is at most one pass over the unpruned image,
which a request without pruning costs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.pools import (
    ClusterPartition,
    CoveragePool,
    JoinedPool,
    PoolCall,
    SizedPool,
)
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES, NearestCall, orders_by_quality
from vllm_autoprune.tpdsl.atoms.scoring import ROUNDS, CentredKernel
from vllm_autoprune.tpdsl.atoms.selectors import ResidualSelector
from vllm_autoprune.tpdsl.atoms.source import ExternalPolicy, PriorCall
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.state import Core, PruningState

_MS_PER_CALL, _MS_PER_NUMBER, _MS_PER_PRODUCT = 1e-3, 4e-7, 1.75e-8
"""Rates of one core of the machine that the model was fitted on: a call of torch, one float32 read
and written, one multiply-add of a matrix product."""

FLAG = "--autoprune-request-cost"

DEFAULT_COST = 200.0
"""Milliseconds that a state of a request may cost; those that ship cost 2 to 50."""

_WORDS = 16
"""Word tokens of a question, in the cost of policies that cover them."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """An image of N tokens of width D, of which K are kept; Dv is the width of the tower.

    By default the image that states of requests are judged by: LLaVA-1.5's, with a third kept.
    """

    tokens: int = 576
    budget: int = 192
    width: int = 4096
    tower: int = 1024


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one atom: torch calls, numbers read or written, and multiplications."""

    calls: float = 0.0
    numbers: float = 0.0
    products: float = 0.0

    def __add__(self, other: _Work) -> _Work:
        calls, numbers = self.calls + other.calls, self.numbers + other.numbers
        return _Work(calls, numbers, self.products + other.products)


def _priced(atom: str, work: _Work) -> tuple[str, float]:
    numbers, products = work.numbers * _MS_PER_NUMBER, work.products * _MS_PER_PRODUCT
    return atom, work.calls * _MS_PER_CALL + numbers + products


def _cosines(tokens: int, width: int) -> _Work:
    """Work of the cosines between all tokens."""
    return _Work(12, 3 * tokens * width + tokens**2, 0.65 * tokens**2 * width)


def _greedy(tokens: int, steps: int) -> _Work:
    """Work of greedy MAP: every step reads all earlier steps."""
    again = tokens * steps**2 / 2
    return _Work(14 * steps, 8 * tokens * steps + again, again)


def _farthest(tokens: int, steps: int) -> _Work:
    """Work of farthest-point selection, given the distances."""
    return _Work(4 + 5 * steps, 2 * tokens * steps)


def _coverage(shape: _Shape, rows: int) -> _Work:
    """Work of greedy coverage: every step reads how well each token covers each row.

    The degrees of one image stay in the cache, so a number takes less than elsewhere.
    """
    covered = _Work(14 * shape.budget, 0.7 * shape.tokens * rows * shape.budget)
    return _cosines(shape.tokens, shape.tower) + covered


def _clusters(clusters: int, rounds: int, shape: _Shape) -> _Work:
    """Work of spherical k-means, seeded with farthest points."""
    n, c = shape.tokens, min(clusters, shape.tokens)
    seeds = _Work(12 + 5 * c, 3 * n * n + 2 * c * n)
    return seeds + _Work(rounds * 14, rounds * 12 * n * c, rounds * n * n * c)


def _centred(shape: _Shape, *, scaled: bool = True) -> _Work:
    """Work of the cosines of tokens less their mean, and divided by their deviations."""
    centring = _Work(12, (3 + 4 * scaled) * shape.tokens * shape.width)
    return centring + _cosines(shape.tokens, shape.width)


def _policy(name: str, shape: _Shape) -> _Work:
    """Work of a base policy on given inputs."""
    n, k, d, dv = shape.tokens, shape.budget, shape.width, shape.tower
    match name:
        case "cen_divprune":
            return _centred(shape) + _Work(20 + 40 * k, 12 * n * n + 12 * n * k)
        case "cen_cdpruner":
            return _centred(shape) + _Work(20, 4 * n * dv) + _greedy(n, k)
        case "scope":
            return _coverage(shape, n)
        case "mmtok":
            return _Work(30, 6 * n * n) + _coverage(shape, n + _WORDS)
        case "prunesid":
            # In float64: the Gram matrix, and about 9 n^3 of an eigendecomposition.
            solved = _Work(20, 12 * n * dv, 2 * n * n * dv + 18 * n**3)
            return _cosines(n, dv) + solved + _Work(4 * n, 12 * n * n)
        case "holov":
            return _Work(60 + 45 * k, 40 * n)
        case "fsr":
            scan = _Work(80 + 16 * k, 12 * n * n + 16 * n * k + 3 * n * d, n * k * d)
            return _cosines(n, d) + scan
        case "idpruner":
            return _cosines(n, d) + _Work(30 + 50 * k, 6 * n * n + 12 * n * k)
        case "cdpruner":
            return _Work(20, 4 * n * dv) + _greedy(n, k)
        case "divprune":
            return _Work(10, 3 * n * d + 8 * n * n, n * n * d) + _farthest(n, k)
        case "visionzip":
            return _Work(60, 6 * n * dv + 2 * n * k, n * k * dv / 3)
        case "prumerge_plus":
            return _Work(80, 8 * n * dv + 30 * n * k, 2 * n * k * dv)
        case "trim":
            return _Work(40, 6 * n * dv)
        case "dart":
            return _Work(400, 500 * n + 3 * n * d)
    return _Work(40, 256 * n * 8)  # by attention of the language model's first layers


_WRITING = ("visionzip", "prumerge_plus", "trim", "fsr")
"""Base policies that write every row anew."""

_SIGNALS: Mapping[str, Callable[..., _Work]] = {
    "instruction_guided_visual_relevance": lambda call, s: (
        _Work(14, 4 * s.tokens * s.tower)
        if call.measure == "instruction"
        else _Work(8, 4 * s.tokens * s.width)
    ),
    "attention_proxy_saliency": lambda call, s: _Work(6, 2 * s.tokens),
    "spatial_centrality_prior": lambda call, s: _Work(18, 8 * s.tokens),
    "redundancy_density_penalty": lambda call, s: _Work(10, 9 * s.tokens**2),
    "local_contrast_saliency": lambda call, s: (
        _Work(24, 8 * s.tokens**2)  # where a grid is not square: the 8 most similar
        if call.neighbours == "four_wrapped"
        else _Work(30, 8 * s.tokens * (2 * call.radius + 1) ** 2)
    ),
    "visual_token_norm_saliency": lambda call, s: _Work(4, (call.p == 1) * 3 * s.tokens * s.width),
    "cluster_centroid_representativeness": lambda call, s: _clusters(call.clusters, ROUNDS, s),
    "global_mean_representativeness": lambda call, s: _Work(8, s.tokens**2),
    "channel_entropy_informativeness": lambda call, s: _Work(9, 14 * s.tokens * s.width),
    "reference_selection_confidence": lambda call, s: _Work(10, 4 * s.tokens),
    "local_detail_energy": lambda call, s: _Work(
        14, 2 * s.tokens**2 * (2 + (2 * call.radius + 1) ** 2)
    ),
    "mean_dissimilarity_saliency": lambda call, s: _Work(
        20, (6 + 4 * call.scale_variance) * s.tokens * s.width
    ),
}


def _prior(call: PriorCall, base: str, shape: _Shape) -> _Work:
    if isinstance(call, ExternalPolicy):
        return _Work(10, 4 * shape.tokens) + _policy(call.policy, shape)
    if call.atom == "native_teacher_mask_prior":
        return _Work(30, 4 * shape.tokens) + _policy(base, shape)
    return _Work(6, 4 * shape.tokens)


def _pool(call: PoolCall, shape: _Shape, candidates: int) -> tuple[_Work, int]:
    """Work of one pool builder on ``candidates``, and the largest size of its pool."""
    n, k = shape.tokens, shape.budget
    if isinstance(call, JoinedPool):
        total = _Work(12, 10 * n + 4 * n * len(call.sources))
        for source in call.sources:
            total += _pool(source, shape, candidates)[0]
        return total, min(n - k, int(call.pool_ratio * k) + 1)
    if isinstance(call, CoveragePool):
        return _Work(40, 40 * n + 4 * n * call.cells**2), candidates
    assert isinstance(call, SizedPool)
    size = min(candidates, n - k, n if call.pool_ratio is None else int(call.pool_ratio * k) + 1)
    if call.atom == "quality_pool_builder":
        return _Work(14, 40 * n), size
    gathered = candidates * (n + candidates + k)
    return _Work(20, 40 * n + 3 * gathered) + _farthest(candidates, size), size


def _quota(state: PruningState, shape: _Shape) -> int:
    """Exchange quota at the largest K, as requests may ask for another; at most the shape's K."""
    return min(state.constraints.selector.bounds(MAX_BUDGET)[0], shape.budget)


def _selector(state: PruningState, shape: _Shape) -> _Work:
    call, n, k = state.constraints.selector, shape.tokens, shape.budget
    quota, sort = _quota(state, shape), _Work(24, 60 * n)
    if isinstance(call, ResidualSelector) and call.lam is not None:
        return sort + _Work(20 + 24 * quota, 4 * n * n + quota * 12 * n)
    match call.atom:
        case "reference_strict_preservation_selector" | "quality_topk_selector":
            return _Work(4, 30 * n)
        case "reference_strict_margin_exchange_selector" | (
            "maximal_marginal_relevance_pool_selector"
        ):
            return sort + _Work(24 * quota, n * n + quota * n * (12 + quota / 2))
        case "constrained_pool_dpp_selector":
            partition = state.constraints.partition
            labels = _Work(14, 4 * n)
            if isinstance(partition, ClusterPartition):
                labels = _clusters(partition.clusters, partition.iters, shape)
            return labels + _greedy(n, k) + _Work(40 * k, 24 * n * k)
        case "anchor_controlled_pool_dpp_selector" | "runtime_reference_anchor_pool_dpp_selector":
            return sort + _greedy(n, k)
    return sort


def _reassembly(call: AtomCall, shape: _Shape) -> _Work:
    n, k, d = shape.tokens, shape.budget, shape.width
    total = _Work(20, 3 * k * d)
    if call.idle:
        return total
    recipe = RECIPES[call.atom]
    if isinstance(call, NearestCall) and call.nearest:
        total += _Work(20, 4 * n * n)
    total += _Work(40, 14 * n * k + n * d, n * k * d)
    if recipe.assign.name == "local":
        total += _Work(14, 6 * n * n)
    if recipe.form.name == "exchange":
        total += _Work(20, 8 * n * k, n * n * k)
    return total


_COSINES = "cosines between all tokens"


def atom_costs(state: PruningState) -> Iterator[tuple[str, float]]:
    """Each atom of a state with its predicted milliseconds of one core, in the order of the state.

    For one image; an atom that is listed twice comes twice.
    """
    rows, constraints = _Shape(), state.constraints
    shape = replace(rows, width=rows.tower) if state.rank_at == "merger_in" else rows
    core = 0 if state.core is None else state.core.tokens(shape.budget)
    if state.core is not None and core == shape.budget:
        yield from _core_costs(state.core, shape, alone=True)
        return
    base, quota = state.base_policy.name, _quota(state, shape)
    written = _Work(10, 7 * rows.tokens * rows.width) if base in _WRITING else _Work()
    yield _priced(base, _policy(base, shape) + written)
    scores = quota > 0 or orders_by_quality(state.reassembly)
    cosines = scores or base == "cdpruner"
    if cosines:
        yield _priced(_COSINES, _cosines(shape.tokens, shape.width))
    if scores:
        for signal in state.scoring.signals:
            if signal.weight > 0:
                normalised = _Work(6, 6 * shape.tokens)
                yield _priced(signal.atom, _SIGNALS[signal.atom](signal, shape) + normalised)
        for prior in state.source.priors:
            if not prior.idle:
                yield _priced(prior.atom, _prior(prior, base, shape))
    if quota > 0:
        candidates = shape.tokens - shape.budget
        for pool in constraints.pool:
            work, candidates = _pool(pool, shape, candidates)
            yield _priced(pool.atom, work)
        yield _priced(constraints.selector.atom, _selector(state, shape))
        kernel = state.scoring.kernel
        if isinstance(kernel, CentredKernel):  # the others take the cosines that are known
            yield _priced(kernel.atom, _centred(shape, scaled=kernel.scale_variance))
    yield _priced(state.reassembly.atom, _reassembly(state.reassembly, rows))
    if state.core is not None and core:
        yield from _core_costs(state.core, replace(shape, budget=core), alone=not cosines)


def _core_costs(core: Core, shape: _Shape, *, alone: bool) -> Iterator[tuple[str, float]]:
    """Cost of the core's K tokens; ``alone``: no other part of the state computes the cosines.

    The steps that condition the delta on the core are among the K steps of the base policy.
    """
    n, k = shape.tokens, shape.budget
    yield _priced(core.policy.name, _policy(core.policy.name, shape) + _Work(10, 4 * n))
    if core.cover > 0:
        merged = _Work(40, 14 * n * k, n * k * shape.width) if core.strength > 0 else _Work()
        yield _priced("cover of the core", _Work(24, n * k + 60 * n) + merged)
        if alone:
            yield _priced(_COSINES, _cosines(n, shape.width))


def state_cost(state: PruningState) -> float:
    """Predicted milliseconds of one selection by a state: the sum over its atoms."""
    return sum(milliseconds for _, milliseconds in atom_costs(state))


@lru_cache(maxsize=256)
def require_affordable(state: PruningState, bound: float) -> None:
    """Raise :class:`StateError` for a state whose selection is predicted to cost more."""
    times: dict[str, list[float]] = {}
    for atom, milliseconds in atom_costs(state):
        times.setdefault(atom, []).append(milliseconds)
    total = sum(map(sum, times.values()))
    if total <= bound:
        return
    dearest = sorted(times.items(), key=lambda item: -sum(item[1]))[:3]
    named = ", ".join(f"{len(each)} x {atom} ({sum(each):.0f} ms)" for atom, each in dearest)
    what = (
        f"one selection is predicted to take {total:.0f} ms of one CPU core, and a request's state "
        f"may take {bound:.0f}; the dearest atoms: {named}"
    )
    fix = f"use fewer or cheaper atoms, or serve with a higher {FLAG}"
    raise StateError("state", [Problem("", what, fix, "cost")])
