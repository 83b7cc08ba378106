"""What a server serves, on the model config of every process: state, rules, KV cache, metrics."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import ValidationError
from vllm.config import CacheConfig

from vllm_autoprune.errors import BudgetError, Problem, StateError
from vllm_autoprune.serving.compat import attach, depends_on, get_attachment
from vllm_autoprune.serving.plan import (
    MAX_CACHED_STATES,
    Chooser,
    ItemPlan,
    decode_state,
    encode_state,
    plan_error,
)
from vllm_autoprune.serving.settings import DEFAULT_RULES, REQUESTS_FLAG, RequestRules, TextTower
from vllm_autoprune.tpdsl.cost import require_affordable
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import (
    MAX_BUDGET,
    PruningPolicy,
    core_policy,
    materialize,
    recall_policy,
)
from vllm_autoprune.tpdsl.safety import MAX_PROBED_BUDGET, safety_check
from vllm_autoprune.tpdsl.state import PruningState, required_inputs
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# ServedState: the immutable state and settings of a server, pickled to every process.


ATTRIBUTE = "autoprune"

UnavailableInputs = tuple[tuple[Need, str], ...]
"""Inputs that this server cannot provide, each with the reason."""


@dataclass(frozen=True)
class ServedState:
    """The state that a server runs, with its default budget, text tower and request rules.

    ``budget_varies`` is true if K depends on the image size; ``budget`` is then the largest K.
    ``rules`` are the permissions of requests; ``unavailable`` are inputs that request states cannot
    read. Workers write metrics to ``metrics_folder``, nowhere if it is empty; ``kv_bytes`` is the
    size of one token in the KV cache.
    """

    architecture: str
    state: PruningState
    budget: int
    tower: TextTower | None
    cache_bytes: int
    budget_varies: bool = False
    rules: RequestRules = DEFAULT_RULES
    unavailable: UnavailableInputs = ()
    metrics_folder: str = ""
    kv_bytes: int = 0

    def policy(self, budget: int | None = None, keep: Chooser = "state") -> PruningPolicy:
        """The policy at the server's budget, or at a request's; raises BudgetError."""
        if budget is None and not self.budget_varies:
            budget = self.budget
        return make_policy(self.state, budget, keep)

    def state_for_plan(self, plan: ItemPlan) -> PruningState:
        """The state in a plan, or the server's own."""
        return decode_state(plan.state) if plan.state else self.state

    def policy_for_plan(self, plan: ItemPlan) -> PruningPolicy:
        """Policy of a plan: of the state in the plan, or of the server's own.

        For a core it is the one that keeps the core alone, for a delta that of both parts, for a
        recall the one that chooses its tokens. Raises BudgetError.
        """
        state = self.state_for_plan(plan)
        if plan.part == "recall":
            return recall_policy(_chosen_state(state, plan.keep), plan.budget)
        if plan.part == "whole":
            return make_policy(state, plan.budget, plan.keep)
        if plan.part == "core":
            return core_policy(state, plan.core)
        return make_policy(state, plan.image_budget, plan.keep, plan.core)

    def selection_identity(self, state: PruningState) -> str:
        """Identity of the selection: everything it depends on except image, K and instruction."""
        tower = "" if self.tower is None else f"|{self.tower.path}|{self.tower.sign}"
        return state.digest + tower

    @property
    def splits(self) -> bool:
        """Whether any request may have an image's tokens split into core and delta."""
        return self.state.core is not None or self.rules.allows("shipped-states")

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that any request may make the workers read: quotas grow with K.

        If requests may bring states, these are all available inputs: features are computed once per
        image, before it is known which inputs later states read.
        """
        quota, _ = self.state.constraints.selector.bounds(MAX_BUDGET)
        of_state = required_inputs(self.state, exchange=quota > 0)
        if not self.rules.allows("shipped-states"):
            return of_state
        return of_state | (frozenset(NEEDS) - {need for need, _ in self.unavailable})

    def __reduce__(self) -> tuple[object, ...]:
        # As text, because parameter models are made from the registry and have no import path.
        rest = {name: value for name, value in vars(self).items() if name != "state"}
        return _revive, (self.state.dumps(), rest)


NEEDS: tuple[Need, ...] = get_args(Need)


def _revive(state: str, rest: Mapping[str, Any]) -> ServedState:
    return ServedState(state=load_state(state), **rest)


@lru_cache(maxsize=512)
def make_policy(
    state: PruningState, budget: int | None, keep: Chooser = "state", core: int | None = None
) -> PruningPolicy:
    """Policy of a state at a budget; without exchange if the plan keeps the reference."""
    return materialize(_chosen_state(state, keep), budget, core)


def _chosen_state(state: PruningState, keep: Chooser) -> PruningState:
    return state if keep == "state" else state.without_exchange()


def served_state(model_config: ModelConfig) -> ServedState | None:
    """The served state of a model config; None for a stock server."""
    served = get_attachment(model_config, ATTRIBUTE)
    assert served is None or isinstance(served, ServedState)
    return served


# Safety check of a state before it is served (Algorithm 1, line 4).


_logger = logging.getLogger("vllm.autoprune")

CHECKED_REQUEST_BUDGET = 64
"""Bound of K for states of requests, which the API server checks between its requests."""

MAX_WARNINGS = 16
"""Warnings of one process: requests bring states, and clients could fill its log with them."""

_warnings = itertools.count(1)


def replace_unsafe_state(state: PruningState, budget: int) -> PruningState:
    """The state to serve at a budget: itself, or its base policy where the check fails.

    A failing state is replaced where it lists ``fallback_to_selection``, with a warning in the
    log; otherwise :class:`StateError` is raised.
    """
    least = state.constraints.selector.insists_on or 0
    policy = materialize(state, max(min(budget, MAX_PROBED_BUDGET), least))
    record = safety_check(policy)
    if record.valid:
        return state
    failures = "; ".join(f"{v.name}: {v.detail}" for v in record.failures())
    if not policy.falls_back:
        fix = 'fix the state, or list "fallback_to_selection" under safety'
        problem = Problem("/safety", f"the safety check fails ({failures})", fix, "safety")
        raise StateError(f"state {state.name!r}", [problem])
    if (number := next(_warnings)) <= MAX_WARNINGS:
        _logger.warning(
            "State %r fails its safety check (%s): serving its base policy.%s",
            *(state.name, failures),
            " Further states that fail are not logged." if number == MAX_WARNINGS else "",
        )
    return state.without_exchange()


# Checks of plans against the rules of the server.
#
# The server's own API makes only plans that its rules allow. But vLLM's ``/inference/v1/generate``
# takes processed inputs, plans among them, from its client. They are checked twice: the API server
# refuses a request with a plan that is not allowed; the worker, which must survive any input,
# replaces the plan (``worker.selection``).


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules for plans: those of the served state, and the language model's vocabulary size."""

    served: ServedState
    vocabulary: int

    def check(self, plan: ItemPlan, placeholders: int) -> None:
        """Raise :class:`RequestError` unless a request with this plan may be served.

        ``placeholders`` is the number of rows that the prompt has room for.
        """
        if plan.profile:
            raise plan_error("is one of memory profiling")
        if plan.budget != placeholders:
            raise plan_error(f"keeps K = {plan.budget} tokens for {placeholders} placeholders")
        # No more tokens than the server's state and rules allow.
        rules = self.served.rules
        by_request = rules.maximum if rules.allows("budget") else 0
        most = max(self.served.budget, by_request, *rules.detail.as_dict().values())
        budget, *recalls = [*(choice.budget for choice in plan.earlier), plan.budget]
        if plan.part == "delta":
            budget = plan.image_budget
        if budget > most:
            raise plan_error(f"keeps K = {budget} tokens, and requests may keep {most}")
        if (recall := max(recalls, default=0)) > (most := max(rules.recall, by_request)):
            raise plan_error(f"recalls {recall} tokens, and requests may recall {most}")
        self.check_choice(plan)

    def check_choice(self, plan: ItemPlan) -> None:
        """Raise for what a worker cannot look up, or requests may not set: ids, chooser, state."""
        served = self.served
        # Looking up an id beyond its vocabulary would crash the worker.
        size = self.vocabulary if served.tower is None else served.tower.vocabulary
        reads = [plan.read, *((choice.instruction, choice.language) for choice in plan.earlier)]
        for instruction, language in reads:
            if max(instruction, default=0) >= size:
                raise plan_error(f"has a token id for relevance beyond the vocabulary of {size}")
            if max(language, default=0) >= self.vocabulary:
                raise plan_error(f"has a token id beyond the vocabulary of {self.vocabulary}")
        if plan.keep != "state" and not served.rules.allows("budget"):
            raise plan_error(
                f"has keep = {plan.keep!r}, and requests may set nothing ({REQUESTS_FLAG})"
            )
        if plan.state and (problem := _state_problem(served, plan.state)):
            raise plan_error(f"carries a state that {problem}")
        if plan.part != "whole" and plan.keep == "resized":
            raise plan_error("is a part of an image that is resized")
        if plan.core and plan.keep == "random":
            raise plan_error("is a part of an image whose tokens are drawn at random")
        if plan.part != "whole" and plan.keep != "random":
            try:
                for item in (plan, *plan.items_before()):
                    served.policy_for_plan(item)
            except BudgetError as error:
                raise plan_error(f"is a part of an image: {error}") from None
        if plan.state and (missing := served.policy_for_plan(plan).needs - served.needs):
            raise plan_error(f"carries a state that reads {', '.join(sorted(missing))}")


@lru_cache(maxsize=MAX_CACHED_STATES)
def _state_problem(served: ServedState, text: bytes) -> str:
    """Why a server refuses the state in a plan; empty where it accepts it."""
    rules = served.rules
    if not rules.allows("shipped-states"):
        return f"requests may not bring: they may set {rules} ({REQUESTS_FLAG})"
    if not rules.allows("states") and text not in _shipped():
        return f"does not ship, and requests may only name those that do ({REQUESTS_FLAG})"
    try:
        state = decode_state(text)
        if encode_state(state) != text:
            return "is not in its canonical form"
        require_affordable(state, rules.cost)
    except (ValidationError, StateError) as error:
        return f"cannot be served: {str(error)[:400]}"
    return ""


@cache
def _shipped() -> frozenset[bytes]:
    """The states that requests may name, as plans carry them; each alone and without exchange."""
    states = [load_state(file) for file in shipped_states().values()]
    return frozenset(encode_state(s) for state in states for s in (state, state.without_exchange()))


# Size of KV blocks, which the API server aligns the shared part of an image to.


_KV_CACHE = "autoprune_kv_cache"


def attach_kv_blocks(vllm_config: VllmConfig) -> None:
    """Put the cache config itself on the model config: vLLM sets its block size later on."""
    attach(vllm_config.model_config, _KV_CACHE, vllm_config.cache_config)


@depends_on("vllm.config:CacheConfig", "block_size")
def kv_block_size(model_config: ModelConfig) -> int | None:
    """Tokens of a KV block, None without a prefix cache."""
    config = get_attachment(model_config, _KV_CACHE)
    assert config is None or isinstance(config, CacheConfig)
    if config is None or not config.enable_prefix_caching:
        return None
    return config.block_size


# Folder of the workers' metrics, and the size of a token in the KV cache.
#
# Workers write files that the API servers' ``/metrics`` reads, in prometheus_client's own format
# for several processes. With several API servers vLLM has set that up, and any file in its folder
# is exported; for a single one a folder of the plugin's is added. Workers on another machine than
# the API server write to a folder that is never read.


_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable: where there are several API servers, vLLM has set it."""


@cache
def open_metrics_folder() -> str:
    """The folder, made and read from now on if vLLM has none; before workers start."""
    if configured := os.environ.get(_MULTIPROCESS):
        return configured
    folder = tempfile.TemporaryDirectory(prefix="vllm-autoprune-metrics-")
    _FOLDERS.append(folder)
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    return folder.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, which removes them."""


def count_kv_bytes(vllm_config: VllmConfig) -> int:
    """Keys and values of one token in all layers and ranks, with full attention in every layer."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    heads = model.get_total_num_kv_heads() * model.get_head_size()
    return int(2 * model.get_total_num_hidden_layers() * heads * dtype.itemsize)
