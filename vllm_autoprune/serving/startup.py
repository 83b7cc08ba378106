"""Start-up: settings become a served state on the model config, or all their problems are told."""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from packaging.version import Version
from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.utils.torch_utils import (
    kv_cache_dtype_str_to_dtype,
    set_default_torch_num_threads,
)
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from vllm_autoprune.errors import AutopruneError, ConfigError, Problem, StateError
from vllm_autoprune.serving import compat
from vllm_autoprune.serving.api import engine_requests, request
from vllm_autoprune.serving.compat import (
    attach,
    get_attachment,
    require_vllm,
    reuses_memory_plan,
    uses_rust_frontend,
    worker,
)
from vllm_autoprune.serving.encoder_steps import EncoderSteps
from vllm_autoprune.serving.models import (
    BACKBONES,
    Backbone,
    find_packed_reason,
    find_problems,
)
from vllm_autoprune.serving.plan import LINE, MROPE
from vllm_autoprune.serving.served_state import (
    ATTRIBUTE,
    KV_CACHE,
    NEEDS,
    ServedState,
    replace_unsafe_state,
    served_state,
)
from vllm_autoprune.serving.settings import (
    CELLS_FLAG,
    POSITIONS_FLAG,
    SETTINGS_KEY,
    VIDEO_BUDGET_FLAG,
    WAITING_SETTINGS,
    read_settings,
)
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.tokens import Need, Positions

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, VllmConfig

# Registration of the pruned model class, its processor and renderer, in each process.

_ACTIVATION = "autoprune_activation"

_active: set[str] = set()


def _activate(architecture: str) -> None:
    """Replace vLLM's classes for one architecture by the pruned ones; idempotent.

    They serve stock models unchanged, because each looks for a state on its own model's config.
    """
    if architecture in _active:
        return
    _active.add(architecture)
    backbone = BACKBONES[architecture]
    compat.register_model(architecture, backbone.model)
    worker.keep_positions()
    worker.request_positions_on_cpu()
    engine_requests.watch_requests()
    request.check_requests()
    engine_requests.cache_without_plans()
    compat.register_renderer(
        "hf", "vllm_autoprune.serving.api.renderer", "AutopruneHfRenderer"
    )
    worker.bound_encoder_steps(EncoderSteps)
    worker.resend_features()
    worker.refuse_sleep(_sleep_problem)


class _Activation:
    """Attribute of the model config that activates every process which unpickles the config.

    vLLM pickles the config for its engine cores and workers, and a process must have our classes
    registered before it builds the model.
    """

    def __init__(self, architecture: str) -> None:
        _activate(architecture)
        self.architecture = architecture

    def __reduce__(self) -> tuple[type[_Activation], tuple[str]]:
        return _Activation, (self.architecture,)


def _sleep_problem(model_config: ModelConfig, level: int) -> str | None:
    """Reason why a server cannot wake up from a sleep level; None if it can.

    Level 2 discards weights, and what reloads the checkpoint's does not reload the text tower's.
    """
    served = served_state(model_config)
    if level < 2 or served is None or served.tower is None:
        return None
    return (
        f"sleep level {level} would discard the weights of --autoprune-text-tower, which are not "
        "part of the checkpoint and are not loaded again; use level 1"
    )


# Settings resolved to a served state on the model config; reports all problems at once.

logger = logging.getLogger("vllm.autoprune")


def apply_settings(vllm_config: VllmConfig) -> None:
    """Apply the plugin's settings from ``additional_config``, or from the model config, checked.

    Raises :class:`ConfigError` before any weight is loaded. Where the settings came from the
    command line the process ends with that message alone instead of a traceback.
    """
    model_config = vllm_config.model_config
    additional = vllm_config.additional_config
    if model_config is None:
        return
    waiting = get_attachment(model_config, WAITING_SETTINGS)
    if waiting is not None:
        attach(model_config, WAITING_SETTINGS, None)
    if isinstance(additional, Mapping) and SETTINGS_KEY in additional:
        # Out of additional_config before vLLM hashes it: the compiled graphs do not depend on it.
        vllm_config.additional_config = {
            k: v for k, v in additional.items() if k != SETTINGS_KEY
        }
        waiting = additional
    if not isinstance(waiting, Mapping):
        return
    settings = waiting[SETTINGS_KEY]
    try:
        require_vllm()
        # The safety check runs policies, and `LLM()` then forks the engine core where there is
        # CUDA: libgomp, whose threads a fork does not copy, would wait for them in the child's
        # first parallel region.
        # Remove when: 0.32 is no longer supported; 0.33 ends these threads before it forks.
        with set_default_torch_num_threads(1):
            served = _resolve_settings(settings, vllm_config)
    except AutopruneError as error:
        if isinstance(settings, Mapping) and settings.get("from_flags"):
            raise SystemExit(f"\nvllm-autoprune: {error}") from None
        raise
    attach(model_config, _ACTIVATION, _Activation(served.architecture))
    kv_bytes = _count_kv_bytes(model_config, vllm_config.cache_config)
    if kv_bytes is not None:
        engine_requests.make_kv_bytes_counter()
    served = replace(served, metrics_folder=_open_metrics_folder(), kv_bytes=kv_bytes)
    attach(model_config, ATTRIBUTE, served)
    if served.axes == LINE:
        worker.keep_axes(model_config, LINE)
    attach(model_config, KV_CACHE, vllm_config.cache_config)
    description = served.describe()
    del description["evidence"]
    logger.info("Serving pruned: %s", json.dumps(description))


_DENSE = frozenset({KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})
"""Forms of the KV cache in which a number takes the bytes of its dtype, and nothing beside it."""


def _count_kv_bytes(model_config: ModelConfig, cache_config: CacheConfig) -> int | None:
    """Bytes of one token's keys and values on all ranks, with full attention in every layer.

    None where the attention backend of a worker decides: it packs numbers of 4 bits, and scales
    beside them. Also where layers differ.
    """
    name = cache_config.cache_dtype
    if get_kv_quant_mode(name) not in _DENSE or cache_config.kv_cache_dtype_skip_layers:
        return None
    dtype = kv_cache_dtype_str_to_dtype(name, model_config)
    heads = model_config.get_total_num_kv_heads() * model_config.get_head_size()
    return int(2 * model_config.get_total_num_hidden_layers() * heads * dtype.itemsize)


_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable: where there are several API servers, vLLM has set it."""


@cache
def _open_metrics_folder() -> str:
    """The folder of the workers' metrics, read from now on; before workers start.

    Workers write files that the API servers' ``/metrics`` reads, in prometheus_client's own format
    for several processes. With several API servers vLLM has set that up, and any file in its folder
    is exported; for a single one a folder of the plugin's is added. Workers on another machine than
    the API server write to a folder that is never read.
    """
    if configured := os.environ.get(_MULTIPROCESS):
        return configured
    folder = tempfile.TemporaryDirectory(prefix="vllm-autoprune-metrics-")
    atexit.register(folder.cleanup)
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    return folder.name


def _resolve_settings(raw: object, vllm_config: VllmConfig) -> ServedState:  # noqa: C901, PLR0915
    """Check all settings against the state and the model; raises ConfigError with all problems."""
    settings, problems = read_settings(raw)
    model = vllm_config.model_config
    architecture = str(model.architecture)
    if uses_rust_frontend():
        fix = "unset VLLM_USE_RUST_FRONTEND"
        problems.append(
            Problem("VLLM_USE_RUST_FRONTEND", "bypasses Python processors", fix)
        )
    if reuses_memory_plan():
        # Filed under vLLM's hash of its configuration, of which our settings are no part.
        what = "would reuse the memory plan of a server without a state, or with another one"
        fix = "unset VLLM_ENABLE_STARTUP_PLAN"
        problems.append(Problem("VLLM_ENABLE_STARTUP_PLAN", what, fix))
    backbone = BACKBONES.get(architecture)
    problems += find_problems(architecture, model.hf_config)
    whole_only = "" if backbone is None else backbone.whole_only
    encodes_only = bool(getattr(model.multimodal_config, "mm_encoder_only", False))
    if not getattr(model.multimodal_config, "mm_device_do_normalize", False):
        whole_only = (
            whole_only
            or "gets pixels that are normalised before, and cannot be compared"
        )
    # Where the model has no language model, that cannot embed the time of each frame.
    clips = (
        backbone is not None
        and backbone.clips
        and not (backbone.embeds_text and encodes_only)
    )
    if backbone is not None:
        # Modes in which no state serves the model.
        if model.trust_remote_code and not backbone.remote_processor:
            problems += _processor_problems(model.model, model.revision)
        lora = vllm_config.lora_config
        connector = vllm_config.kv_transfer_config
        if lora is not None and lora.enable_tower_connector_lora:
            # Features are kept by image alone, and LoRA layers bypass the hook on attention.
            what = "the vision tower would differ between requests"
            problems.append(
                Problem("--enable-tower-connector-lora", what, "serve without it")
            )
        if vars(vllm_config.compilation_config).get("cudagraph_mm_encoder"):
            flag = "--compilation-config cudagraph_mm_encoder"
            what = "encoder graphs would hand on all tokens of an image"
            problems.append(Problem(flag, what, "serve without it"))
        if connector is not None:
            extra = connector.kv_connector_extra_config
            problems += _connector_problems(str(connector.kv_connector), extra)
        if backbone.embeds_text and encodes_only and not backbone.clips:
            what = "the language model embeds the text between the tokens of an image"
            problems.append(Problem("--mm-encoder-only", what, "serve without it"))
        if getattr(model.multimodal_config, "video_pruning_rate", None):
            what = "both it and --autoprune-state say which tokens of a prompt are left"
            fix = "leave one out; a state with `frames` prunes videos"
            problems.append(Problem("--video-pruning-rate", what, fix))
        if backbone.mrope and vllm_config.parallel_config.pipeline_parallel_size > 1:
            # vLLM asks for the positions of kept tokens where it encodes images: on rank 0.
            what = (
                "later ranks would not know the positions of the tokens that are kept"
            )
            fix = "serve without it, for example with --tensor-parallel-size"
            problems.append(Problem("--pipeline-parallel-size", what, fix))
    if settings is not None and backbone is not None:
        if settings.recall and backbone.unsplittable:
            what = (
                f"later turns cannot recall tokens: this model {backbone.unsplittable}"
            )
            problems.append(Problem("--autoprune-recall", what, "leave it out"))
        if settings.cells is not None and whole_only:
            what = f"no cell can be dropped: this model {whole_only}"
            problems.append(
                Problem(CELLS_FLAG, what, "give none, or leave it and /cells out")
            )
        if settings.video_budget is not None and not clips:
            what = "no token of a video can be chosen: this server's are left whole"
            problems.append(Problem(VIDEO_BUDGET_FLAG, what, "leave it out"))
        if settings.positions is not None:
            problems += _position_problems(settings.positions, backbone, vllm_config)
        if settings.text_tower is not None:
            problems += backbone.tower_problems(model.hf_config, settings.text_tower)
    if problems or settings is None or backbone is None:
        raise ConfigError("cannot serve pruned", problems)
    policy = materialize(settings.state, settings.budget)
    try:
        state = replace_unsafe_state(settings.state, policy.budget)
    except StateError as error:
        problems = [Problem(f"state#{p.where}", p.what, p.fix) for p in error.problems]
        raise ConfigError("cannot serve pruned", problems) from None
    packed_only = _find_packed_reason(backbone, vllm_config)
    unavailable = tuple(
        (need, f"{problem.where}: {problem.what}")
        for need in NEEDS
        for problem in _input_problems(vllm_config, backbone, {need})[:1]
    )
    served = ServedState(
        architecture,
        state,
        settings.budget or state.budget,
        settings.text_tower,
        int(settings.feature_cache_gb * (1 << 30)),
        settings.rules,
        unavailable,
        cells=settings.cells,
        whole_only=whole_only,
        clips=clips,
        video_budget=settings.video_budget,
        frame=backbone.frame(model.hf_config) if clips and backbone.frame else None,
        positions=settings.positions,
        axes=0 if packed_only else MROPE if backbone.mrope else LINE,
        packed_only=packed_only,
    )
    if problems := _input_problems(vllm_config, backbone, served.needs):
        raise ConfigError("cannot serve pruned", problems)
    return served


def _find_packed_reason(backbone: Backbone, vllm_config: VllmConfig) -> str:
    """Why kept tokens stand one after the other in any case; empty where they need not."""
    model = vllm_config.model_config
    if backbone.mrope:
        return "" if model.uses_mrope else "is served without the axes of its M-RoPE"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return (
            "is served on pipeline ranks, of which the later do not know which are kept"
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.uses_draft_kv_cache():
        return "has a draft model, whose keys and values vLLM places by the positions of tokens"
    return find_packed_reason(backbone, model.hf_config)


def _position_problems(
    positions: Positions, backbone: Backbone, vllm_config: VllmConfig
) -> Iterator[Problem]:
    """Refuse positions that this model cannot have."""
    reason = _find_packed_reason(backbone, vllm_config)
    only = "packed"
    if not reason and backbone.mrope:
        reason = "has M-RoPE, under which kept tokens keep their places"
        only = "true"
    if reason and positions != only:
        yield Problem(
            f"{POSITIONS_FLAG} {positions}", f"this model {reason}", "leave it out"
        )


def _processor_problems(model: str, revision: str | None) -> Iterator[Problem]:
    """Refuse image processors that are Python code of the checkpoint, and would be run."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        named = (get_hf_file_to_dict(name, model, revision) or {}).get("auto_map", {})
        if kinds := named.keys() & {"AutoProcessor", "AutoImageProcessor"}:
            what = f"{name} has auto_map.{min(kinds)} {named[min(kinds)]!r}, which is not known"
            fix = "serve without --trust-remote-code, or without a state"
            yield Problem("model", what, fix)


_INSIDE_THE_TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
"""What hooks within the vision tower read."""

_QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
"""What is made of the question."""

_LANGUAGE: frozenset[Need] = frozenset({"language"})


def _input_problems(
    vllm_config: VllmConfig, backbone: Backbone, needs: Collection[Need]
) -> list[Problem]:
    """Problems of inputs that the checkpoint, or the way it is served, cannot provide.

    Features of the image, after the vision tower and its projector, are there in every mode.
    """
    modes: list[tuple[frozenset[Need], str, str]] = []
    """Ways of serving that are on: what they hide from the plugin, the flag, and why."""
    if vllm_config.lora_config is not None:
        why = "the state reads the language model's first layers, which are run without adapters"
        modes.append((_LANGUAGE, "--enable-lora", why))
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        why = "the state reads the language model's first layers on every rank"
        modes.append((_LANGUAGE, "--pipeline-parallel-size", why))
    multimodal = vllm_config.model_config.multimodal_config
    # vLLM has reset it to "weights" where the model cannot do it.
    if multimodal is not None and multimodal.mm_encoder_tp_mode == "data":
        why = "a rank encodes some images, and the state reads the vision tower of all of them"
        modes.append((_INSIDE_THE_TOWER, "--mm-encoder-tp-mode data", why))
    if vars(vllm_config.compilation_config).get("compile_mm_encoder"):
        why = "the state reads the inside of the vision tower, where hooks would not be called"
        modes.append(
            (_INSIDE_THE_TOWER, "--compilation-config compile_mm_encoder", why)
        )
    if vllm_config.ec_transfer_config is not None:
        why = "images are encoded without their question, which the state reads"
        modes.append((_QUESTION, "--ec-transfer-config", why))
    fix = "serve without it, or a state that does not read this"
    hidden = [
        Problem(flag, why, fix)
        for hides, flag, why in modes
        if not hides.isdisjoint(needs)
    ]
    return [
        *backbone.input_problems(vllm_config.model_config.hf_config, needs),
        *hidden,
    ]


_LMCACHE = Version("0.5.5")
"""The oldest LMCache that keeps a whole identity; 0.5.4 keeps 16 bits of it."""


def _connector_problems(name: str, extra: object) -> Iterator[Problem]:
    """Refuse KV connectors that keep 16 bits of an image's identity.

    Two images, or two questions about one, would be given each other's KV. vLLM's own copy of
    LMCache's integration (``use_native``) does so in 0.32 and 0.33.
    """
    extra = extra if isinstance(extra, Mapping) else {}
    inner = extra.get("connectors")
    for part in inner if isinstance(inner, list) else ():  # of a MultiConnector
        if isinstance(part, Mapping):
            inner_extra = part.get("kv_connector_extra_config")
            yield from _connector_problems(str(part.get("kv_connector")), inner_extra)
    if not name.startswith("LMCache"):
        return
    where = f"--kv-transfer-config {name}"
    what = "keeps 16 bits of an image's identity"
    if extra.get("use_native"):
        yield Problem(where, f"use_native {what}", "leave use_native out")
        return
    try:
        version = Version(importlib.metadata.version("lmcache"))
    except importlib.metadata.PackageNotFoundError:
        return  # vLLM says so itself
    if version < _LMCACHE:
        yield Problem(
            where, f"LMCache {version} {what}", f"install lmcache>={_LMCACHE}"
        )
