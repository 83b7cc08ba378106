"""Start-up: turn settings into a served state on the model config, or report all their problems."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Gauge
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import JsonValue
from vllm.utils.torch_utils import (
    kv_cache_dtype_str_to_dtype,
    set_default_torch_num_threads,
)
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from vllm_autoprune import __version__
from vllm_autoprune.errors import AutopruneError, ConfigError, StateError
from vllm_autoprune.serving import compat
from vllm_autoprune.serving.api import engine_requests, image_cache, request_checks
from vllm_autoprune.serving.api.engine_requests import make_kv_bytes_counter
from vllm_autoprune.serving.compat import (
    Runner,
    attach,
    find_runner,
    get_attachment,
    require_vllm,
    runner_v1,
    worker,
)
from vllm_autoprune.serving.description import describe
from vllm_autoprune.serving.encoder_steps import CACHE_MANAGER
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import LINE
from vllm_autoprune.serving.served_state import (
    ATTRIBUTE,
    KV_CACHE,
    ServedState,
    served_state,
)
from vllm_autoprune.serving.settings import (
    SETTINGS_KEY,
    WAITING_SETTINGS,
    locate,
    read_settings,
)
from vllm_autoprune.serving.startup_rules import ServedModel, find_startup_problems
from vllm_autoprune.serving.state_safety import replace_unsafe_state
from vllm_autoprune.tpdsl.materialize import materialize

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, VllmConfig

# Registration of the pruned model class, its processor and renderer, in each process.

_ACTIVATION = "autoprune_activation"

_active: set[str] = set()


def _activate(architecture: str, runner: Runner) -> None:
    """Replace vLLM's classes for one architecture by the pruned ones; idempotent.

    The pruned classes serve stock models unchanged, because each looks for a state on its own
    model's config.
    """
    if architecture in _active:
        return
    _active.add(architecture)
    backbone = BACKBONES[architecture]
    compat.register_model(architecture, backbone.model)
    if not backbone.mrope:
        worker.keep_positions()
    if runner == "v1":
        runner_v1.request_positions_on_cpu()
        runner_v1.resend_features()
    engine_requests.watch_requests()
    request_checks.check_requests()
    image_cache.cache_without_plans()
    compat.register_renderer(
        "hf", "vllm_autoprune.serving.api.renderer", "AutopruneHfRenderer"
    )
    worker.refuse_sleep(_sleep_problem)


class _Activation:
    """Attribute of the model config that activates the plugin in every process that unpickles it.

    vLLM pickles the config for its engine cores and workers, and a process must have the plugin's
    classes registered before it builds the model.
    """

    def __init__(self, architecture: str, runner: Runner) -> None:
        _activate(architecture, runner)
        self.architecture = architecture
        self.runner = runner

    def __reduce__(self) -> tuple[type[_Activation], tuple[str, Runner]]:
        return _Activation, (self.architecture, self.runner)


def _sleep_problem(model_config: ModelConfig, level: int) -> str | None:
    """Reason why a server cannot wake up from a sleep level; None if it can.

    Level 2 discards weights, and reloading the checkpoint's weights does not reload the text
    tower's.
    """
    served = served_state(model_config)
    if level < 2 or served is None or served.text_tower is None:
        return None
    return (
        f"sleep level {level} would discard the weights of --autoprune-text-tower, which are not "
        "part of the checkpoint and are not loaded again; use level 1"
    )


# Resolution of settings to a served state on the model config; reports all problems at once.

logger = logging.getLogger("vllm.autoprune")

# A gauge, because an Info cannot be collected from several processes.
_INFO = Gauge(
    "autoprune_info",
    "The served state: its digest and name, its budget, a digest of all settings, and the version "
    "of the plugin; always 1.",
    ["digest", "version", "state", "budget", "settings"],
    multiprocess_mode="max",
)


def apply_settings(vllm_config: VllmConfig) -> None:
    """Check and apply the plugin's settings from ``additional_config`` or from the model config.

    Raises :class:`ConfigError` before any weight is loaded. If the settings came from the command
    line, the process ends with that message alone instead of a traceback.
    """
    model_config = vllm_config.model_config
    additional = vllm_config.additional_config
    if model_config is None:
        return
    waiting = get_attachment(model_config, WAITING_SETTINGS)
    if waiting is not None:
        attach(model_config, WAITING_SETTINGS, None)
    if isinstance(additional, Mapping) and SETTINGS_KEY in additional:
        # Removed before vLLM hashes additional_config, because compiled graphs do not depend on it.
        vllm_config.additional_config = {
            k: v for k, v in additional.items() if k != SETTINGS_KEY
        }
        waiting = additional
    if not isinstance(waiting, Mapping):
        return
    settings = waiting[SETTINGS_KEY]
    try:
        require_vllm()
        # The safety check runs policies, and `LLM()` with CUDA then forks the engine core. A fork
        # does not copy libgomp's threads, so the child's first parallel region would wait for them
        # forever.
        # Remove when: 0.32 is no longer supported; 0.33 ends these threads before it forks.
        with set_default_torch_num_threads(1):
            served = _resolve_settings(settings, vllm_config)
    except AutopruneError as error:
        if isinstance(settings, Mapping) and settings.get("from_flags"):
            raise SystemExit(f"\nvllm-autoprune: {error}") from None
        raise
    runner = find_runner(vllm_config)
    attach(model_config, _ACTIVATION, _Activation(served.architecture, runner))
    # vLLM's own place for a class that bounds steps by what inputs cost.
    vllm_config.ec_manager_config = replace(
        vllm_config.ec_manager_config, encoder_cache_manager_cls=CACHE_MANAGER
    )
    kv_bytes = _count_kv_bytes(model_config, vllm_config.cache_config)
    if kv_bytes is not None:
        make_kv_bytes_counter()
    served = replace(served, metrics_folder=_open_metrics_folder(), kv_bytes=kv_bytes)
    attach(model_config, ATTRIBUTE, served)
    if served.capabilities.axes == LINE:
        worker.keep_axes(model_config, LINE)
    attach(model_config, KV_CACHE, vllm_config.cache_config)
    description = describe(served)
    del description["evidence"]
    _INFO.labels(**_label_info(served, description)).set(1)
    logger.info("Serving pruned: %s", json.dumps(description))
    if isinstance(settings, Mapping) and settings.get("budget") is None:
        logger.warning(
            "No --autoprune-budget is given: K = %s is the state's own. To start with, this model "
            "is served at --autoprune-budget %s.",
            served.budget.rule(),
            BACKBONES[served.architecture].budget,
        )


def _label_info(
    served: ServedState, description: Mapping[str, JsonValue]
) -> dict[str, str]:
    """Labels of ``autoprune_info``, equal on replicas that prune alike."""
    settings = json.dumps({**description, "version": None}, sort_keys=True)
    return {
        "digest": served.state.digest,
        "version": __version__,
        "state": served.state.name,
        "budget": str(served.budget.rule()),
        "settings": hashlib.sha256(settings.encode()).hexdigest()[:12],
    }


_DENSE = frozenset({KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})
"""Quantisation modes of the KV cache that store each number in the bytes of its dtype, with no
scales."""


def _count_kv_bytes(model_config: ModelConfig, cache_config: CacheConfig) -> int | None:
    """Bytes of one token's keys and values on all ranks, if every layer has full attention.

    None if a worker's attention backend decides the size, because it packs numbers of 4 bits with
    scales, and None if layers differ.
    """
    name = cache_config.cache_dtype
    if get_kv_quant_mode(name) not in _DENSE or cache_config.kv_cache_dtype_skip_layers:
        return None
    dtype = kv_cache_dtype_str_to_dtype(name, model_config)
    heads = model_config.get_total_num_kv_heads() * model_config.get_head_size()
    return int(2 * model_config.get_total_num_hidden_layers() * heads * dtype.itemsize)


_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable, which vLLM sets if there are several API servers."""


@cache
def _open_metrics_folder() -> str:
    """The folder of the workers' metrics, which is read from now on; called before workers start.

    Workers write files in prometheus_client's own format for several processes, and the API
    servers' ``/metrics`` reads them. With several API servers, vLLM has set that up and exports
    every file in its folder; for a single API server, a folder of the plugin's is added. Workers on
    another machine than the API server write to a folder that is never read.
    """
    if configured := os.environ.get(_MULTIPROCESS):
        return configured
    folder = tempfile.TemporaryDirectory(prefix="vllm-autoprune-metrics-")
    atexit.register(folder.cleanup)
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    return folder.name


def _resolve_settings(raw: object, vllm_config: VllmConfig) -> ServedState:
    """Check all settings against the state and the model; raises ConfigError with all problems."""
    settings, problems = read_settings(raw)
    problems += find_startup_problems(vllm_config, settings)
    if problems or settings is None:
        raise ConfigError("cannot serve pruned", problems)
    policy = materialize(settings.state, settings.budget)
    try:
        state = replace_unsafe_state(settings.state, policy.budget)
    except StateError as error:
        problems = locate("state", error)
        raise ConfigError("cannot serve pruned", problems) from None
    architecture = str(vllm_config.model_config.architecture)
    model = ServedModel(BACKBONES[architecture], vllm_config)
    served = ServedState(
        architecture,
        state,
        settings.budget or state.budget,
        settings.text_tower,
        int(settings.feature_cache_gb * (1 << 30)),
        settings.rules,
        model.find_capabilities(),
        cells=settings.cells,
        tower=settings.tower,
        video_budget=settings.video_budget,
        positions=settings.positions,
    )
    if problems := model.find_input_problems(served.needs):
        raise ConfigError("cannot serve pruned", problems)
    return served
