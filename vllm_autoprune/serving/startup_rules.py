"""Start-up rules: models, options of vLLM and settings that are refused, each with its reason."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.compat import (
    find_runner,
    reuses_memory_plan,
    uses_rust_frontend,
    vllm_version,
)
from vllm_autoprune.serving.encoder_steps import CACHE_MANAGER
from vllm_autoprune.serving.models import (
    BACKBONES,
    Backbone,
    find_packed_reason,
    find_problems,
)
from vllm_autoprune.serving.plan import LINE, MROPE
from vllm_autoprune.serving.served_state import NEEDS, Capabilities
from vllm_autoprune.serving.settings import (
    CELLS_FLAG,
    CUT_FLAG,
    POSITIONS_FLAG,
    RECALL_FLAG,
    VIDEO_BUDGET_FLAG,
    Settings,
)
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class ServedModel:
    """What is known of a model at start-up: its family, and vLLM's configuration for serving it."""

    backbone: Backbone
    config: VllmConfig

    @property
    def model_config(self) -> ModelConfig:
        """vLLM's configuration of only the model."""
        return self.config.model_config

    @property
    def encodes_only(self) -> bool:
        """Whether vLLM runs only the encoder, so that text between tokens cannot be embedded."""
        return self._reads("mm_encoder_only") and self.backbone.embeds_text

    @property
    def has_pipeline(self) -> bool:
        """Whether the language model's layers are distributed over several ranks."""
        return self.config.parallel_config.pipeline_parallel_size > 1

    @property
    def whole_only(self) -> str:
        """Why no cell of an image can be dropped before the tower; empty if one can be."""
        reason = self.backbone.whole_only
        if not reason and not self._reads("mm_device_do_normalize"):
            return "gets pixels that are normalised before, and cannot be compared"
        return reason

    @property
    def whole_tower(self) -> str:
        """Why no cell of an image can be dropped inside the tower; empty if one can be."""
        if self.backbone.whole_tower:
            return self.backbone.whole_tower
        if vars(self.config.compilation_config).get("compile_mm_encoder"):
            return "is served with a compiled tower, whose layers cannot be entered"
        if _splits_images(self):
            return "is served with a tower whose ranks encode different images"
        return ""

    @property
    def prunes_videos(self) -> bool:
        """Whether tokens of videos can be chosen."""
        return self.backbone.videos and not self.encodes_only

    @property
    def packed_only(self) -> str:
        """Why kept tokens can only stand one after the other; empty if they need not."""
        if self.backbone.mrope:
            uses_axes = self.model_config.uses_mrope
            return "" if uses_axes else "is served without the axes of its M-RoPE"
        if self.has_pipeline:
            return "is served on pipeline ranks, of which the later do not know which are kept"
        drafts = self.config.speculative_config
        if drafts is not None and drafts.uses_draft_kv_cache():
            return "has a draft model, whose keys and values vLLM places by the positions of tokens"
        return find_packed_reason(self.backbone, self.model_config.hf_config)

    def find_capabilities(self) -> Capabilities:
        """What the model can do with this configuration."""
        unavailable = []
        for need in NEEDS:
            if problems := self.find_input_problems({need}):
                reason = f"{problems[0].where}: {problems[0].what}"
                unavailable.append((need, reason))
        axes = MROPE if self.backbone.mrope else LINE
        frame = None
        if self.prunes_videos and self.backbone.frame:
            frame = self.backbone.frame(self.model_config.hf_config)
        return Capabilities(
            tuple(unavailable),
            self.whole_only,
            self.whole_tower,
            self.packed_only,
            axes=0 if self.packed_only else axes,
            prunes_videos=self.prunes_videos,
            frame=frame,
        )

    def find_input_problems(self, needs: Collection[Need]) -> list[Problem]:
        """Problems of inputs that the checkpoint, or the way it is served, cannot provide.

        Features of the image after the vision tower and its projector are always available.
        """
        fix = "serve without it, or a state that does not read this"
        problems = self.backbone.input_problems(self.model_config.hf_config, needs)
        problems += (
            Problem(mode.flag, mode.why, fix)
            for mode in _HIDING_MODES
            if mode.is_on(self) and not mode.hides.isdisjoint(needs)
        )
        return problems

    @property
    def captures_tower(self) -> bool:
        """Whether vLLM captures CUDA graphs of the vision tower."""
        compilation = vars(self.config.compilation_config)
        return bool(compilation.get("cudagraph_mm_encoder"))

    def _reads(self, option: str) -> bool:
        """A boolean option of vLLM's multi-modal configuration; False in versions without it."""
        return bool(getattr(self.model_config.multimodal_config, option, False))


# Rules, by the name of what they check. Each yields its problems.


def _refuse_mode(
    flag: str,
    is_on: Callable[[ServedModel], object],
    what: str,
    fix: str = "serve without it",
) -> Callable[[ServedModel], list[Problem]]:
    """The rule that an option of vLLM must be off."""
    problem = Problem(flag, what, fix)
    return lambda model: [problem] if is_on(model) else []


def _check_processor(model: ServedModel) -> Iterator[Problem]:
    """Refuse image processors that are Python code of the checkpoint, because it would be run."""
    config = model.model_config
    if model.backbone.remote_processor or not config.trust_remote_code:
        return
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = get_hf_file_to_dict(name, config.model, config.revision) or {}
        classes = file.get("auto_map", {})
        if kinds := classes.keys() & {"AutoProcessor", "AutoImageProcessor"}:
            kind = min(kinds)
            what = f"{name} has auto_map.{kind} {classes[kind]!r}, which is not known"
            fix = "serve without --trust-remote-code, or without a state"
            yield Problem("model", what, fix)


_LMCACHE = Version("0.5.5")
"""The oldest LMCache that keeps whole identities; 0.5.4 keeps only 16 bits."""


def _check_connector(model: ServedModel) -> Iterator[Problem]:
    """Refuse KV connectors that keep only 16 bits of an image's identity."""
    connector = model.config.kv_transfer_config
    if connector is not None:
        extra = connector.kv_connector_extra_config
        yield from _find_connector_problems(str(connector.kv_connector), extra)


def _find_connector_problems(name: str, extra: object) -> Iterator[Problem]:
    """Problems of a connector, or of the connectors within a MultiConnector.

    With 16 bits, two images, or two questions about one image, could get each other's KV. vLLM's
    own copy of LMCache's integration (``use_native``) keeps 16 bits in 0.32 and 0.33.
    """
    extra = extra if isinstance(extra, Mapping) else {}
    parts = extra.get("connectors")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping):
            part_extra = part.get("kv_connector_extra_config")
            yield from _find_connector_problems(
                str(part.get("kv_connector")), part_extra
            )
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
        return  # vLLM reports it itself
    if version < _LMCACHE:
        fix = f"install lmcache>={_LMCACHE}"
        yield Problem(where, f"LMCache {version} {what}", fix)


_GRAPHS = "--compilation-config cudagraph_mm_encoder"


def _has_tower_adapters(model: ServedModel) -> bool:
    # Features are cached by image only, and LoRA layers bypass the hook on attention.
    lora = model.config.lora_config
    return lora is not None and bool(lora.enable_tower_connector_lora)


_MODEL_RULES: Mapping[str, Callable[[ServedModel], Iterable[Problem]]] = {
    "Python code of the checkpoint": _check_processor,
    "adapters of the vision tower": _refuse_mode(
        "--enable-tower-connector-lora",
        _has_tower_adapters,
        "the vision tower would differ between requests",
    ),
    "graphs of the vision tower": _refuse_mode(
        _GRAPHS,
        lambda model: (
            model.captures_tower
            and not (model.backbone.graphs and find_runner(model.config) == "v2")
        ),
        "encoder graphs would hand on all tokens of an image, under model runner V1 and of "
        "models that do not replay them before pruning",
    ),
    "bound of encoder steps": _refuse_mode(
        "--ec-manager-config encoder_cache_manager_cls",
        lambda model: (
            model.config.ec_manager_config.encoder_cache_manager_cls
            not in (None, CACHE_MANAGER)
        ),
        "another manager would let a step encode many more images than fit",
    ),
    "identities in KV connectors": _check_connector,
    "text between tokens": _refuse_mode(
        "--mm-encoder-only",
        lambda model: model.encodes_only and not model.backbone.videos,
        "the language model embeds the text between the tokens of an image",
    ),
    "pixels that nothing normalizes": _refuse_mode(
        "--mm-device-do-normalize",
        lambda model: (
            model.backbone.host_norm
            and vllm_version() < Version("0.33")
            and model._reads("mm_device_do_normalize")
        ),
        "vLLM 0.32 leaves it to this model's tower to normalize pixels, which it does not do",
        "serve with --no-mm-device-do-normalize",
    ),
    "pruning by vLLM": _refuse_mode(
        "--video-pruning-rate",
        lambda model: model._reads("video_pruning_rate"),
        "both it and --autoprune-state say which tokens of a prompt are left",
        "leave one out; a state with `frames` prunes videos",
    ),
    # vLLM asks for the positions of kept tokens on the rank that encodes images: rank 0.
    "M-RoPE on pipeline ranks": _refuse_mode(
        "--pipeline-parallel-size",
        lambda model: model.backbone.mrope and model.has_pipeline,
        "later ranks would not know the positions of the tokens that are kept",
        "serve without it, for example with --tensor-parallel-size",
    ),
}
"""Rules for options of vLLM with which no state can be served."""


def _check_recall(model: ServedModel, settings: Settings) -> Iterator[Problem]:
    reason = model.backbone.unsplittable
    if settings.recall and reason:
        what = f"later turns cannot recall tokens: this model {reason}"
        yield Problem(RECALL_FLAG, what, "leave it out")


def _check_cells(model: ServedModel, settings: Settings) -> Iterator[Problem]:
    if settings.cells is not None and model.whole_only:
        what = f"no cell can be dropped: this model {model.whole_only}"
        yield Problem(CELLS_FLAG, what, "give none, or leave it and /cells out")


def _check_cut(model: ServedModel, settings: Settings) -> Iterator[Problem]:
    if settings.tower is not None and model.whole_tower:
        what = f"no cell can leave the tower: this model {model.whole_tower}"
        yield Problem(CUT_FLAG, what, "give none, or leave it and /tower out")


def _check_video_budget(model: ServedModel, settings: Settings) -> Iterator[Problem]:
    if settings.video_budget is not None and not model.prunes_videos:
        what = "no token of a video can be chosen: this server's are left whole"
        yield Problem(VIDEO_BUDGET_FLAG, what, "leave it out")


def _check_positions(model: ServedModel, settings: Settings) -> Iterator[Problem]:
    if settings.positions is None:
        return
    reason = model.packed_only
    possible = "packed"
    if not reason and model.backbone.mrope:
        reason = "has M-RoPE, under which kept tokens keep their places"
        possible = "true"
    if reason and settings.positions != possible:
        where = f"{POSITIONS_FLAG} {settings.positions}"
        yield Problem(where, f"this model {reason}", "leave it out")


def _check_text_tower(model: ServedModel, settings: Settings) -> list[Problem]:
    if settings.text_tower is None:
        return []
    config = model.model_config.hf_config
    return model.backbone.tower_problems(config, settings.text_tower)


_SETTING_RULES: Mapping[str, Callable[[ServedModel, Settings], Iterable[Problem]]] = {
    "recalls": _check_recall,
    "cells": _check_cells,
    "cells inside the tower": _check_cut,
    "videos": _check_video_budget,
    "positions": _check_positions,
    "text tower": _check_text_tower,
}
"""Rules for settings that ask for something that the model cannot do."""


def find_startup_problems(
    config: VllmConfig, settings: Settings | None
) -> Iterator[Problem]:
    """Problems of a model and of how it is served, and of ``settings`` unless they are None.

    ``settings`` is None if the settings themselves are not valid.
    """
    if uses_rust_frontend():
        name = "VLLM_USE_RUST_FRONTEND"
        yield Problem(name, "bypasses Python processors", f"unset {name}")
    if reuses_memory_plan():
        # The plan is stored under vLLM's hash of its configuration, which leaves out our settings.
        name = "VLLM_ENABLE_STARTUP_PLAN"
        what = "would reuse the memory plan of a server without a state, or with another one"
        yield Problem(name, what, f"unset {name}")
    architecture = str(config.model_config.architecture)
    yield from find_problems(architecture, config.model_config.hf_config)
    if architecture not in BACKBONES:
        return
    model = ServedModel(BACKBONES[architecture], config)
    for check_model in _MODEL_RULES.values():
        yield from check_model(model)
    if settings is not None:
        for check_setting in _SETTING_RULES.values():
            yield from check_setting(model, settings)


# Inputs of states that a way of serving hides.

_INSIDE_THE_TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
"""Inputs that hooks within the vision tower read."""

_QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
"""Inputs that are made from the question."""

_LANGUAGE: frozenset[Need] = frozenset({"language"})


@dataclass(frozen=True)
class _HidingMode:
    """A way of serving that hides inputs from the plugin."""

    flag: str
    hides: frozenset[Need]
    is_on: Callable[[ServedModel], bool]
    why: str


def _splits_images(model: ServedModel) -> bool:
    multimodal = model.model_config.multimodal_config
    # vLLM has reset the mode to "weights" if the model cannot distribute images.
    return multimodal is not None and multimodal.mm_encoder_tp_mode == "data"


_HIDING_MODES = (
    _HidingMode(
        "--enable-lora",
        _LANGUAGE,
        lambda model: model.config.lora_config is not None,
        "the state reads the language model's first layers, which are run without adapters",
    ),
    _HidingMode(
        "--pipeline-parallel-size",
        _LANGUAGE,
        lambda model: model.has_pipeline,
        "the state reads the language model's first layers on every rank",
    ),
    _HidingMode(
        "--mm-encoder-tp-mode data",
        _INSIDE_THE_TOWER,
        _splits_images,
        "a rank encodes some images, and the state reads the vision tower of all of them",
    ),
    _HidingMode(
        _GRAPHS,
        _INSIDE_THE_TOWER,
        lambda model: model.captures_tower,
        "the state reads the inside of the vision tower, which a replayed graph does not show",
    ),
    _HidingMode(
        "--compilation-config compile_mm_encoder",
        _INSIDE_THE_TOWER,
        lambda model: bool(
            vars(model.config.compilation_config).get("compile_mm_encoder")
        ),
        "the state reads the inside of the vision tower, where hooks would not be called",
    ),
    _HidingMode(
        "--ec-transfer-config",
        _QUESTION,
        lambda model: model.config.ec_transfer_config is not None,
        "images are encoded without their question, which the state reads",
    ),
)
