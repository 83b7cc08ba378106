"""From settings to a resolved state on the model config, with every problem told at once.

Knows nothing about requests: what is decided here holds for the life of the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_autoprune.errors import AutopruneError, BudgetError, ConfigError, Problem, StateError
from vllm_autoprune.serving.cli import KEY
from vllm_autoprune.serving.compat import attach, attached, require_vllm, rust_frontend
from vllm_autoprune.serving.models import BACKBONES, Backbone
from vllm_autoprune.serving.plan import Keep
from vllm_autoprune.serving.towers import TextTower, describe_tower
from vllm_autoprune.tpdsl.check import safety_check
from vllm_autoprune.tpdsl.constraints import resolve_constraints
from vllm_autoprune.tpdsl.load import load_state
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, PruningPolicy, inputs_read, materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.autoprune")

ATTRIBUTE = "autoprune"
DEFAULT_CACHE_GB = 0.25
CHECKED_BUDGET = 256
_KNOWN = ("state", "budget", "text_tower", "feature_cache_gb")


@dataclass(frozen=True)
class ServedState:
    """What a server runs: a state, its default budget, and where relevance comes from."""

    architecture: str
    state: PruningState
    budget: int
    tower: TextTower | None
    cache_bytes: int
    follows: bool = False
    """True where K follows from an image's size, as the state has it; budget is then the most."""

    def policy(self, budget: int | None = None, keep: Keep = "state") -> PruningPolicy:
        """The policy at the server's budget, or at a request's; raises BudgetError."""
        if budget is None and not self.follows:
            budget = self.budget
        return _policy(self.state, budget, keep == "state")

    @property
    def identity(self) -> str:
        """What decides which tokens are kept, beside image, K and instruction."""
        tower = "" if self.tower is None else f"|{self.tower.path}|{self.tower.sign}"
        return self.state.digest + tower

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that any budget a request may ask for can read: quotas grow with K."""
        quota, _ = resolve_constraints(self.state.constraints.selector, MAX_BUDGET)
        return inputs_read(self.state, exchange=quota > 0)

    def __reduce__(self) -> tuple[object, ...]:
        # As text, because parameter models are made from the registry and have no import path;
        # and because a process that receives a state must start to serve it.
        arguments = (self.state.dumps(), self.budget, self.tower, self.cache_bytes, self.follows)
        return _revive, (self.architecture, *arguments)


def _revive(
    architecture: str,
    text: str,
    budget: int,
    tower: TextTower | None,
    cache_bytes: int,
    follows: bool,
) -> ServedState:
    from vllm_autoprune.serving.plugin import activate

    activate(architecture)
    return ServedState(architecture, load_state(text), budget, tower, cache_bytes, follows)


@lru_cache(maxsize=1024)
def _policy(state: PruningState, budget: int | None, exchange: bool) -> PruningPolicy:
    return materialize(state if exchange else state.without_exchange(), budget)


def served_state(model_config: ModelConfig) -> ServedState | None:
    """The state that this model is served with; None where it is served stock."""
    found = attached(model_config, ATTRIBUTE)
    assert found is None or isinstance(found, ServedState)
    return found


def adopt(vllm_config: VllmConfig) -> None:
    """Move our settings from ``additional_config`` to the model config, resolved and checked.

    Raises :class:`ConfigError` before any weight is loaded. Where the settings came from the
    command line the process ends with that message alone instead of a traceback.
    """
    additional = vllm_config.additional_config
    if vllm_config.model_config is None or not isinstance(additional, Mapping):
        return
    if KEY not in additional:
        return
    settings = additional[KEY]
    # Out of additional_config before vLLM hashes it: the compiled graphs do not depend on it.
    vllm_config.additional_config = {k: v for k, v in additional.items() if k != KEY}
    try:
        require_vllm()
        served = resolve(settings, vllm_config)
    except AutopruneError as error:
        if isinstance(settings, Mapping) and settings.get("from_flags"):
            raise SystemExit(f"\nvllm-autoprune: {error}") from None
        raise
    from vllm_autoprune.serving.plugin import activate

    activate(served.architecture)
    attach(vllm_config.model_config, ATTRIBUTE, served)
    _announce(served)


def resolve(settings: object, vllm_config: VllmConfig) -> ServedState:
    """Check every setting against the state and the model; raises ConfigError listing all."""
    if not isinstance(settings, Mapping):
        problem = Problem(f"additional_config/{KEY}", "not an object", 'give {"state": ...}')
        raise ConfigError("settings", [problem])
    problems = [
        Problem(f"additional_config/{KEY}/{name}", "unknown setting", f"use: {', '.join(_KNOWN)}")
        for name in settings
        if name not in (*_KNOWN, "from_flags")
    ]
    state = _state(settings.get("state"), problems)
    budget = _budget(settings.get("budget"), state, problems)
    tower = _tower(settings.get("text_tower"), problems)
    cache_bytes = _cache_bytes(settings.get("feature_cache_gb"), problems)
    architecture, backbone = _backbone(vllm_config, problems)
    if state is not None and budget is not None and not problems:
        state = _safe(state, budget, problems)
    if tower is not None and backbone is not None:
        problems += backbone.tower_problems(vllm_config.model_config.hf_config, tower)
    if problems or state is None or budget is None:
        raise ConfigError("cannot serve pruned", problems)
    follows = settings.get("budget") is None and materialize(state).varies
    served = ServedState(architecture, state, budget, tower, cache_bytes, follows)
    if backbone is not None:
        problems += backbone.input_problems(vllm_config.model_config.hf_config, served.needs)
    problems += _input_problems(vllm_config, served.needs)
    if problems:
        raise ConfigError("cannot serve pruned", problems)
    return served


def _state(value: object, problems: list[Problem]) -> PruningState | None:
    if value is None:
        what = "no state is given, and the other settings mean nothing without one"
        problems.append(Problem("--autoprune-state", what, "give a file or a shipped name"))
        return None
    if isinstance(value, PruningState):
        return value
    try:
        return load_state(_as_json(value) if isinstance(value, Mapping) else str(value))
    except StateError as error:
        for p in error.problems:
            where = f"--autoprune-state {str(value)[:80]}" if not isinstance(value, Mapping) else ""
            problems.append(Problem(f"{where}#{p.where}", p.what, p.mend))
        return None


def _as_json(value: Mapping[object, object]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a dictionary holds anything
        what = f"not JSON: {str(error)[:200]}"
        mend = "give a dictionary such as json.load returns"
        raise StateError("state", [Problem("", what, mend)]) from None


def _budget(value: object, state: PruningState | None, problems: list[Problem]) -> int | None:
    flag, budget = "--autoprune-budget", None
    if value is not None:
        try:
            budget = int(str(value))
        except ValueError:
            what = f"{value!r} is not a whole number"
            problems.append(Problem(flag, what, "give the number of tokens to keep, such as 64"))
            return None
    if state is None:
        if budget is not None and budget < 1:
            what = f"K = {budget} is not a number of tokens"
            problems.append(Problem(flag, what, "give 1 or more"))
        return None
    try:
        return materialize(state, budget).budget
    except BudgetError as error:
        problems += [
            Problem(f"{flag if budget is not None else 'state'}#{p.where}", p.what, p.mend)
            for p in error.problems
        ]
        return None


def _tower(value: object, problems: list[Problem]) -> TextTower | None:
    if value is None:
        return None
    try:
        return describe_tower(str(value))
    except ConfigError as error:
        problems += error.problems
        return None


def _cache_bytes(value: object, problems: list[Problem]) -> int:
    try:
        size = DEFAULT_CACHE_GB if value is None else float(str(value))
    except ValueError:
        size = -1.0
    if not 0 <= size <= 1024:
        what = f"{value!r} is not a size in GB"
        mend = "give a number from 0 to 1024"
        problems.append(Problem("--autoprune-feature-cache-gb", what, mend))
        return 0
    return int(size * (1 << 30))


def _backbone(vllm_config: VllmConfig, problems: list[Problem]) -> tuple[str, Backbone | None]:
    model = vllm_config.model_config
    architecture = str(model.architecture)
    if rust_frontend():
        mend = "unset VLLM_USE_RUST_FRONTEND"
        problems.append(Problem("VLLM_USE_RUST_FRONTEND", "bypasses Python processors", mend))
    backbone = BACKBONES.get(architecture)
    if backbone is None:
        what = f"architecture {architecture!r} has no pruned form"
        problems.append(Problem("model", what, f"serve one of: {', '.join(BACKBONES)}"))
        return architecture, None
    problems += backbone.problems(model.hf_config)
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        # Features are kept by image alone, and LoRA layers bypass the hook that reads attention.
        what = "the vision tower would differ between requests"
        problems.append(Problem("--enable-tower-connector-lora", what, "serve without it"))
    return architecture, backbone


def _input_problems(vllm_config: VllmConfig, needs: Collection[Need]) -> list[Problem]:
    """How the model is served, against what the state reads of it."""
    if "language" not in needs:
        return []
    problems, mend = [], "serve without it, or another state"
    what = "the state reads the language model's first layers, which are run as they are"
    if vllm_config.lora_config is not None:
        problems.append(Problem("--enable-lora", what, mend))
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        what = "the state reads the language model's first layers on every rank"
        problems.append(Problem("--pipeline-parallel-size", what, mend))
    return problems


def _safe(state: PruningState, budget: int, problems: list[Problem]) -> PruningState:
    """Algorithm 1, line 4: an invalid policy is replaced by its base policy, or refused."""
    # Start-up must not wait for a very large K: promises are kept or broken at a smaller one.
    least = state.constraints.selector.insists_on or 0
    policy = materialize(state, min(budget, max(CHECKED_BUDGET, least)))
    record = safety_check(policy)
    if record.valid:
        return state
    told = "; ".join(f"{v.name}: {v.detail}" for v in record.failures())
    if not policy.falls_back:
        mend = 'mend the state, or list "fallback_to_selection" under safety'
        problems.append(Problem("state#/safety", f"the safety check fails ({told})", mend))
        return state
    logger.warning(
        "State %r fails its safety check (%s): serving its base policy.", state.name, told
    )
    return state.without_exchange()


def _announce(served: ServedState) -> None:
    policy = served.policy()
    logger.info(
        "Serving pruned: state %r (%s), base policy %s, K = %d, q_e = %d, r_min = %d.",
        served.state.name,
        served.state.digest[:12],
        policy.base.name,
        policy.budget,
        policy.quota,
        policy.r_min,
    )
    if policy.reads_instruction:
        logger.info("Relevance: %s", reason_of_relevance(served.tower))


def reason_of_relevance(tower: TextTower | None) -> str:
    """Where relevance comes from, and why, in one line for the log."""
    if tower is None:
        return (
            "the language model's input embeddings, sign +1, because no --autoprune-text-tower "
            "is given."
        )
    return f"CLIP text tower {tower.path}, sign {tower.sign:+d}, because {tower.reason}."
