"""Settings resolved to a served state on the model config; reports all problems at once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_autoprune.errors import AutopruneError, ConfigError, Problem, StateError
from vllm_autoprune.serving.compat import (
    attach,
    get_attachment,
    require_vllm,
    uses_rust_frontend,
)
from vllm_autoprune.serving.models import BACKBONES, Backbone
from vllm_autoprune.serving.models.unserved import UNSERVED
from vllm_autoprune.serving.shared.description import format_summary
from vllm_autoprune.serving.shared.kv_blocks import attach_kv_blocks
from vllm_autoprune.serving.shared.metrics_setup import attach_metrics_setup
from vllm_autoprune.serving.shared.request_rules import parse_rules
from vllm_autoprune.serving.shared.served_state import (
    ATTRIBUTE,
    NEEDS,
    ServedState,
    UnavailableInputs,
)
from vllm_autoprune.serving.shared.state_safety import replace_unsafe_state
from vllm_autoprune.serving.startup.activation import ATTRIBUTE as ACTIVATION
from vllm_autoprune.serving.startup.activation import Activation
from vllm_autoprune.serving.startup.flags import SETTINGS_KEY
from vllm_autoprune.serving.startup.hooks import require_hooks
from vllm_autoprune.serving.startup.mode_checks import (
    find_connector_problems,
    find_mode_problems,
)
from vllm_autoprune.serving.startup.settings import (
    SETTINGS,
    read_budget,
    read_cache_bytes,
    read_detail_budgets,
    read_recall,
    read_request_cost,
    read_state,
    read_tower,
)
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.autoprune")

_SETTINGS = "autoprune_settings"
"""Attribute of a model config with settings that are not applied yet."""


def attach_settings(model_config: ModelConfig, additional: object) -> None:
    """Put the plugin's settings, if ``additional_config`` has any, on a new model config.

    ``vllm launch render`` makes a config of the model alone, without ``additional_config``.
    """
    if isinstance(additional, Mapping) and SETTINGS_KEY in additional:
        attach(model_config, _SETTINGS, dict(additional))


def apply_settings(vllm_config: VllmConfig) -> None:
    """Apply the plugin's settings from ``additional_config``, or from the model config, checked.

    Raises :class:`ConfigError` before any weight is loaded. Where the settings came from the
    command line the process ends with that message alone instead of a traceback.
    """
    if vllm_config.model_config is None:
        return
    additional = _take_settings(vllm_config)
    if SETTINGS_KEY not in additional:
        return
    settings = additional[SETTINGS_KEY]
    try:
        require_vllm()
        served = resolve_settings(settings, vllm_config)
        require_hooks(BACKBONES[served.architecture].stock)
    except AutopruneError as error:
        if isinstance(settings, Mapping) and settings.get("from_flags"):
            raise SystemExit(f"\nvllm-autoprune: {error}") from None
        raise
    attach(vllm_config.model_config, ACTIVATION, Activation(served.architecture))
    attach(vllm_config.model_config, ATTRIBUTE, served)
    attach_metrics_setup(vllm_config)
    attach_kv_blocks(vllm_config)
    logger.info("%s", format_summary(served))


def _take_settings(vllm_config: VllmConfig) -> Mapping[str, object]:
    """The settings under their key, if there are any to apply; removed from where they were."""
    attached = get_attachment(vllm_config.model_config, _SETTINGS)
    if attached is not None:
        attach(vllm_config.model_config, _SETTINGS, None)
    additional = vllm_config.additional_config
    if isinstance(additional, Mapping) and SETTINGS_KEY in additional:
        # Out of additional_config before vLLM hashes it: the compiled graphs do not depend on it.
        vllm_config.additional_config = {k: v for k, v in additional.items() if k != SETTINGS_KEY}
        return additional
    return attached if isinstance(attached, Mapping) else {}


def resolve_settings(settings: object, vllm_config: VllmConfig) -> ServedState:
    """Check all settings against the state and the model; raises ConfigError with all problems."""
    if not isinstance(settings, Mapping):
        problem = Problem(
            f"additional_config/{SETTINGS_KEY}", "not an object", 'give {"state": ...}'
        )
        raise ConfigError("settings", [problem])
    problems = [
        Problem(
            f"additional_config/{SETTINGS_KEY}/{name}",
            "unknown setting",
            f"use: {', '.join(SETTINGS)}",
        )
        for name in settings
        if name not in (*SETTINGS, "from_flags")
    ]
    state = read_state(settings.get("state"), problems)
    budget = read_budget(settings.get("budget"), state, problems)
    tower = read_tower(settings.get("text_tower"), problems)
    cache_bytes = read_cache_bytes(settings.get("feature_cache_gb"), problems)
    rules = parse_rules(settings.get("requests"), problems)
    detail = read_detail_budgets(settings.get("detail"), state, rules, problems)
    cost = read_request_cost(settings.get("request_cost"), problems)
    recall = read_recall(settings.get("recall"), rules, problems)
    rules = replace(rules, cost=cost, detail=detail, recall=recall)
    architecture, backbone = _find_backbone(vllm_config, problems)
    if recall and backbone is not None and backbone.unsplittable:
        what = f"later turns cannot recall tokens: this model {backbone.unsplittable}"
        problems.append(Problem("--autoprune-recall", what, "leave it out"))
    if state is not None and budget is not None and not problems:
        state = _check_safety(state, budget, problems)
    if tower is not None and backbone is not None:
        problems += backbone.tower_problems(vllm_config.model_config.hf_config, tower)
    if problems or state is None or budget is None:
        raise ConfigError("cannot serve pruned", problems)
    follows = settings.get("budget") is None and materialize(state).varies
    lacks = _find_unavailable(vllm_config, backbone)
    served = ServedState(architecture, state, budget, tower, cache_bytes, follows, rules, lacks)
    if problems := _input_problems(vllm_config, backbone, served.needs):
        raise ConfigError("cannot serve pruned", problems)
    return served


def _find_backbone(vllm_config: VllmConfig, problems: list[Problem]) -> tuple[str, Backbone | None]:
    model = vllm_config.model_config
    architecture = str(model.architecture)
    if uses_rust_frontend():
        fix = "unset VLLM_USE_RUST_FRONTEND"
        problems.append(Problem("VLLM_USE_RUST_FRONTEND", "bypasses Python processors", fix))
    backbone = BACKBONES.get(architecture)
    if backbone is None:
        reason = UNSERVED.get(architecture)
        what = f"architecture {architecture!r} has no pruned form"
        what += "" if reason is None else f": {reason}"
        problems.append(Problem("model", what, f"serve one of: {', '.join(BACKBONES)}"))
        return architecture, None
    problems += backbone.problems(model.hf_config)
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        # Features are kept by image alone, and LoRA layers bypass the hook that reads attention.
        what = "the vision tower would differ between requests"
        problems.append(Problem("--enable-tower-connector-lora", what, "serve without it"))
    problems += find_connector_problems(vllm_config)
    if backbone.mrope and vllm_config.parallel_config.pipeline_parallel_size > 1:
        # vLLM asks for the positions of kept tokens where it encodes images: on the first rank.
        what = "later ranks would not know the positions of the tokens that are kept"
        fix = "serve without it, for example with --tensor-parallel-size"
        problems.append(Problem("--pipeline-parallel-size", what, fix))
    return architecture, backbone


def _find_unavailable(vllm_config: VllmConfig, backbone: Backbone | None) -> UnavailableInputs:
    wrong = ((need, _input_problems(vllm_config, backbone, {need})) for need in NEEDS)
    return tuple((need, f"{first[0].where}: {first[0].what}") for need, first in wrong if first)


def _input_problems(
    vllm_config: VllmConfig, backbone: Backbone | None, needs: Collection[Need]
) -> list[Problem]:
    """Problems of inputs that the checkpoint, or the way it is served, cannot provide."""
    problems: list[Problem] = []
    if backbone is not None:
        problems += backbone.input_problems(vllm_config.model_config.hf_config, needs)
    return problems + find_mode_problems(vllm_config, needs)


def _check_safety(state: PruningState, budget: int, problems: list[Problem]) -> PruningState:
    try:
        return replace_unsafe_state(state, budget)
    except StateError as error:
        problems += [Problem(f"state#{p.where}", p.what, p.fix) for p in error.problems]
        return state
