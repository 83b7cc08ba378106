"""Cost model of states: predicted CPU time of one selection, atom by atom.

Every atom declares its work as calls of torch, numbers read or written, and multiplications, as
functions of its parameters and of an image's shape. Three measured rates turn work into
milliseconds of one CPU core (``docs/data/state-cost.csv`` compares predictions with measurements).

The computation of a state's inputs is not included: it is at most one pass over the unpruned image,
which a request without pruning costs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.pools import (
    ClusterPartition,
    CoveragePool,
    JoinedPool,
    PartitionCall,
    PoolCall,
    SizedPool,
)
from vllm_autoprune.tpdsl.atoms.reassembly import (
    RECIPES,
    BlendCall,
    ExchangeCall,
    NearestCall,
    orders_by_quality,
)
from vllm_autoprune.tpdsl.atoms.scoring import (
    ROUNDS,
    CentredKernel,
    ClusterCentroid,
    Contrast,
    Detail,
)
from vllm_autoprune.tpdsl.atoms.selectors import ResidualSelector, resolve_constraints
from vllm_autoprune.tpdsl.atoms.source import ExternalPolicy, PriorCall, is_idle
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.state import Core, PruningState

MS_PER_CALL = 1e-3
MS_PER_NUMBER = 4e-7
MS_PER_PRODUCT = 1.75e-8
"""Rates of one core of the machine that the model was fitted on: a call of torch, one float32 read
and written, one multiply-add of a matrix product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An image of N tokens of width D, of which K are kept; Dv is the width of the tower."""

    tokens: int = 576
    budget: int = 192
    width: int = 4096
    tower: int = 1024


REFERENCE = Shape()
"""The image that states of requests are judged by: LLaVA-1.5's, with a third of it kept."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one atom: torch calls, numbers read or written, and multiplications."""

    calls: float = 0.0
    numbers: float = 0.0
    products: float = 0.0

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.calls + other.calls,
            self.numbers + other.numbers,
            self.products + other.products,
        )

    @property
    def milliseconds(self) -> float:
        """Predicted time on one CPU core."""
        return (
            self.calls * MS_PER_CALL + self.numbers * MS_PER_NUMBER + self.products * MS_PER_PRODUCT
        )


def _cosines_work(shape: Shape) -> _Work:
    """Work of the cosines between all tokens."""
    n, d = shape.tokens, shape.width
    return _Work(12, 3 * n * d + n * n, 0.65 * n * n * d)


def _greedy_work(shape: Shape, steps: int) -> _Work:
    """Work of greedy MAP: every step reads all earlier steps."""
    n = shape.tokens
    return _Work(14 * steps, 8 * n * steps + n * steps * steps / 2, n * steps * steps / 2)


def _farthest_work(tokens: int, steps: int) -> _Work:
    """Work of farthest-point selection, given the distances."""
    return _Work(4 + 5 * steps, 2 * tokens * steps, 0)


def _centring_work(shape: Shape, *, scaled: bool) -> _Work:
    """Work of subtracting the mean token, and of scaling by deviations."""
    return _Work(12, (3 + 4 * scaled) * shape.tokens * shape.width)


WORDS = 16
"""Word tokens of a question, in the cost of policies that cover them."""


def _coverage(shape: Shape, rows: int) -> _Work:
    """Work of greedy coverage: every step reads how well each token covers each row.

    The degrees of one image stay in the cache, so a number takes less than elsewhere.
    """
    return _Work(14 * shape.budget, 0.7 * shape.tokens * rows * shape.budget)


def _tower_cosines(shape: Shape) -> _Work:
    return _cosines_work(replace(shape, width=shape.tower))


def _base_policy_work(name: str, shape: Shape) -> _Work:
    """Work of a base policy on given inputs."""
    n, k, d = shape.tokens, shape.budget, shape.tower
    match name:
        case "cen_divprune":
            geometry = (
                _centring_work(shape, scaled=True) + _cosines_work(shape) + _Work(20, 12 * n * n)
            )
            return geometry + _Work(40 * k, 12 * n * k)
        case "cen_cdpruner":
            geometry = _centring_work(shape, scaled=True) + _cosines_work(shape)
            return geometry + _Work(20, 4 * n * d) + _greedy_work(shape, k)
        case "scope":
            return _tower_cosines(shape) + _coverage(shape, n)
        case "mmtok":
            return _tower_cosines(shape) + _Work(30, 6 * n * n) + _coverage(shape, n + WORDS)
        case "prunesid":
            # In float64: the Gram matrix, and about 9 n^3 of an eigendecomposition.
            solved = _Work(20, 12 * n * d, 2 * n * n * d + 18 * n**3)
            return _tower_cosines(shape) + solved + _Work(4 * n, 12 * n * n)
        case "holov":
            return _Work(60 + 45 * k, 40 * n)
        case "fsr":
            chosen = _cosines_work(shape) + _Work(40 + 16 * k, 12 * n * n + 8 * n * k)
            return chosen + _Work(40, 8 * n * k + 3 * n * shape.width, n * k * shape.width)
        case "idpruner":
            return _cosines_work(shape) + _Work(30 + 50 * k, 6 * n * n + 12 * n * k)
        case "cdpruner":
            return _Work(20, 4 * n * d) + _greedy_work(shape, k)
        case "divprune":
            gram = _Work(10, 3 * n * shape.width + 8 * n * n, n * n * shape.width)
            return gram + _farthest_work(n, k)
        case "visionzip":
            return _Work(60, 6 * n * d + 2 * n * k, n * k * d / 3)
        case "prumerge_plus":
            return _Work(80, 8 * n * d + 30 * n * k, 2 * n * k * d)
        case "trim":
            return _Work(40, 6 * n * d)
        case "dart":
            return _Work(400, 500 * n + 3 * n * shape.width)
    return _Work(40, 256 * n * 8)  # by attention of the language model's first layers


FLAG = "--autoprune-request-cost"

DEFAULT_COST = 200.0
"""Milliseconds that a state of a request may cost; those that ship cost 2 to 50."""


@dataclass(frozen=True, slots=True)
class AtomCost:
    """Predicted milliseconds of one atom of a state, at its JSON pointer."""

    where: str
    atom: str
    milliseconds: float


C = TypeVar("C", bound=AtomCall)
Rule = Callable[[C, Shape], _Work]


def _clusters(clusters: int, rounds: int, shape: Shape) -> _Work:
    """Work of spherical k-means, seeded with farthest points."""
    n, c = shape.tokens, min(clusters, shape.tokens)
    begin = _Work(12 + 5 * c, 3 * n * n + 2 * c * n, 0)
    return begin + _Work(rounds * 14, rounds * 12 * n * c, rounds * n * n * c)


_SIGNALS: Mapping[str, Callable[..., _Work]] = {
    "instruction_guided_visual_relevance": lambda call, s: (
        _Work(14, 4 * s.tokens * s.tower)
        if call.measure == "instruction"
        else _Work(8, 4 * s.tokens * s.width)
    ),
    "attention_proxy_saliency": lambda call, s: _Work(6, 2 * s.tokens),
    "spatial_centrality_prior": lambda call, s: _Work(18, 8 * s.tokens),
    "redundancy_density_penalty": lambda call, s: _Work(10, 9 * s.tokens**2),
    "local_contrast_saliency": lambda call, s: _contrast(call, s),
    "visual_token_norm_saliency": lambda call, s: _Work(4, (call.p == 1) * 3 * s.tokens * s.width),
    "cluster_centroid_representativeness": lambda call, s: _centroid(call, s),
    "global_mean_representativeness": lambda call, s: _Work(8, s.tokens**2),
    "channel_entropy_informativeness": lambda call, s: _Work(9, 14 * s.tokens * s.width),
    "reference_selection_confidence": lambda call, s: _Work(10, 4 * s.tokens),
    "local_detail_energy": lambda call, s: _detail(call, s),
    "mean_dissimilarity_saliency": lambda call, s: _Work(
        20, (6 + 4 * call.scale_variance) * s.tokens * s.width
    ),
}


def _contrast(call: Contrast, shape: Shape) -> _Work:
    if call.neighbours == "four_wrapped":
        return _Work(24, 8 * shape.tokens**2)  # where a grid is not square: the 8 most similar
    return _Work(30, 8 * shape.tokens * (2 * call.radius + 1) ** 2)


def _centroid(call: ClusterCentroid, shape: Shape) -> _Work:
    return _clusters(call.clusters, ROUNDS, shape)


def _detail(call: Detail, shape: Shape) -> _Work:
    return _Work(14, 2 * shape.tokens**2 * (2 + (2 * call.radius + 1) ** 2))


def _partition(call: PartitionCall, shape: Shape) -> _Work:
    if isinstance(call, ClusterPartition):
        return _clusters(call.clusters, call.iters, shape)
    return _Work(14, 4 * shape.tokens)


def _pool(call: PoolCall, shape: Shape, candidates: int) -> tuple[_Work, int]:
    """Work of one pool builder on ``candidates``, and the largest size of its pool."""
    n, k = shape.tokens, shape.budget
    if isinstance(call, JoinedPool):
        size = min(n - k, int(call.pool_ratio * k) + 1)
        total = _Work(12, 10 * n + 4 * n * len(call.sources))
        for source in call.sources:
            total += _pool(source, shape, candidates)[0]
        return total, size
    if isinstance(call, CoveragePool):
        return _Work(40, 40 * n + 4 * n * call.cells**2), candidates
    assert isinstance(call, SizedPool)
    size = min(candidates, n - k, n if call.pool_ratio is None else int(call.pool_ratio * k) + 1)
    if call.atom == "quality_pool_builder":
        return _Work(14, 40 * n), size
    gathered = candidates * (n + candidates + k)
    return _Work(20, 40 * n + 3 * gathered) + _farthest_work(candidates, size), size


def _quota(state: PruningState, shape: Shape) -> int:
    """Exchange quota at the largest K, as requests may ask for another; at most the shape's K."""
    quota, _ = resolve_constraints(state.constraints.selector, MAX_BUDGET)
    return min(quota, shape.budget)


def _selector(state: PruningState, shape: Shape) -> _Work:
    call, n, k = state.constraints.selector, shape.tokens, shape.budget
    quota = _quota(state, shape)
    sort = _Work(24, 60 * n)
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
            capped = _Work(40 * k, 24 * n * k)
            return _partition(state.constraints.partition, shape) + _greedy_work(shape, k) + capped
        case "anchor_controlled_pool_dpp_selector" | "runtime_reference_anchor_pool_dpp_selector":
            return sort + _greedy_work(shape, k)
    return sort


def _prior(call: PriorCall, state: PruningState, shape: Shape) -> _Work:
    if isinstance(call, ExternalPolicy):
        return _Work(10, 4 * shape.tokens) + _base_policy_work(call.policy, shape)
    if call.atom == "native_teacher_mask_prior":
        return _Work(30, 4 * shape.tokens) + _base_policy_work(state.base_policy.name, shape)
    return _Work(6, 4 * shape.tokens)


def _reassembly(call: AtomCall, shape: Shape) -> _Work:
    n, k, d = shape.tokens, shape.budget, shape.width
    kept = _Work(20, 3 * k * d)
    if isinstance(call, BlendCall | ExchangeCall) and call.idle:
        return kept
    recipe = RECIPES[call.atom]
    if isinstance(call, NearestCall) and call.nearest:
        kept += _Work(20, 4 * n * n)
    total = kept + _Work(40, 14 * n * k + n * d, n * k * d)
    if recipe.assign.name == "local":
        total += _Work(14, 6 * n * n)
    if recipe.form.name == "exchange":
        total += _Work(20, 8 * n * k, n * n * k)
    return total


def atom_costs(state: PruningState, shape: Shape = REFERENCE) -> list[AtomCost]:
    """Predicted cost of each atom of a state for one image, in the order of the state."""
    core = 0 if state.core is None else state.core.tokens(shape.budget)
    rows = shape
    if state.rank_at == "merger_in":
        shape = replace(shape, width=shape.tower)
    if state.core is not None and core == shape.budget:
        return _core_costs(state.core, core, shape, alone=True)
    quota = _quota(state, shape)
    base, scores = state.base_policy.name, quota > 0 or orders_by_quality(state.reassembly)
    own = _base_policy_work(base, shape)
    if base in ("visionzip", "prumerge_plus", "trim", "fsr"):
        own += _Work(10, 7 * rows.tokens * rows.width)  # every row is written anew
    costs = [_priced("/base_policy", base, own)]
    cosines = scores or base == "cdpruner"
    if cosines:
        costs.append(_priced("", "cosines between all tokens", _cosines_work(shape)))
    if scores:
        costs += _quality_costs(state, shape)
    if quota > 0:
        costs += _exchange_costs(state, shape)
    reassembly = _reassembly(state.reassembly, rows)
    costs.append(_priced("/reassembly", state.reassembly.atom, reassembly))
    if state.core is not None and core:
        costs += _core_costs(state.core, core, shape, alone=not cosines)
    return costs


def _quality_costs(state: PruningState, shape: Shape) -> list[AtomCost]:
    """Cost of the signals and priors that are read."""
    costs = []
    for i, signal in enumerate(state.scoring.signals):
        if signal.weight > 0:
            work = _SIGNALS[signal.atom](signal, shape) + _Work(6, 6 * shape.tokens)
            costs.append(_priced(f"/scoring/signals/{i}", signal.atom, work))
    for i, prior in enumerate(state.source.priors):
        if not is_idle(prior):
            work = _prior(prior, state, shape)
            costs.append(_priced(f"/source/priors/{i}", prior.atom, work))
    return costs


def _exchange_costs(state: PruningState, shape: Shape) -> list[AtomCost]:
    """Cost of the candidate pool and the exchange."""
    costs, candidates = [], shape.tokens - shape.budget
    for i, pool in enumerate(state.constraints.pool):
        work, candidates = _pool(pool, shape, candidates)
        costs.append(_priced(f"/constraints/pool/{i}", pool.atom, work))
    selector, kernel = state.constraints.selector, state.scoring.kernel
    costs.append(_priced("/constraints/selector", selector.atom, _selector(state, shape)))
    if isinstance(kernel, CentredKernel):  # the others take the cosines that are known
        work = _centring_work(shape, scaled=kernel.scale_variance) + _cosines_work(shape)
        costs.append(_priced("/scoring/kernel", kernel.atom, work))
    return costs


def _core_costs(core: Core, count: int, shape: Shape, *, alone: bool) -> list[AtomCost]:
    """Cost of the core; ``alone``: no other part of the state computes the cosines.

    The steps that condition the delta on the core are among the K steps of the base policy.
    """
    own = replace(shape, budget=count)
    name = core.policy.name
    chosen = _base_policy_work(name, own) + _Work(10, 4 * shape.tokens)
    costs = [_priced("/core/policy", name, chosen)]
    if core.cover == 0:
        return costs
    cover = _Work(24, shape.tokens * count + 60 * shape.tokens)
    if core.strength > 0:
        cover += _Work(40, 14 * shape.tokens * count, shape.tokens * count * shape.width)
    costs.append(_priced("/core/cover", "cover of the core", cover))
    if alone:
        costs.append(_priced("", "cosines between all tokens", _cosines_work(shape)))
    return costs


def _priced(where: str, name: str, work: _Work) -> AtomCost:
    return AtomCost(where, name, work.milliseconds)


def state_cost(state: PruningState, shape: Shape = REFERENCE) -> float:
    """Predicted milliseconds of one selection by a state: the sum over its atoms."""
    return sum(cost.milliseconds for cost in atom_costs(state, shape))


def _dearest(costs: Sequence[AtomCost]) -> list[tuple[str, int, float]]:
    """The three most expensive atoms: name, occurrences, milliseconds."""
    times: dict[str, list[float]] = {}
    for cost in costs:
        times.setdefault(cost.atom, []).append(cost.milliseconds)
    totals = [(atom, len(each), sum(each)) for atom, each in times.items()]
    return sorted(totals, key=lambda total: -total[2])[:3]


@lru_cache(maxsize=256)
def require_affordable(state: PruningState, bound: float) -> None:
    """Raise :class:`StateError` for a state whose selection is predicted to cost more."""
    costs = atom_costs(state)
    total = sum(cost.milliseconds for cost in costs)
    if total <= bound:
        return
    named = ", ".join(
        f"{count} x {atom} ({milliseconds:.0f} ms)" for atom, count, milliseconds in _dearest(costs)
    )
    what = (
        f"one selection is predicted to take {total:.0f} ms of one CPU core, and a request's state "
        f"may take {bound:.0f}; the dearest atoms: {named}"
    )
    fix = f"use fewer or cheaper atoms, or serve with a higher {FLAG}"
    raise StateError("state", [Problem("", what, fix, "cost")])
