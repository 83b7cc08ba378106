"""Ways of serving that hide from the plugin what a state reads, each refused by its flag."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FIX = "serve without it, or a state that does not read this"

LMCACHE = Version("0.5.5")
"""The oldest LMCache that keeps a whole identity; 0.5.4 keeps 16 bits of it."""

_INSIDE_THE_TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
"""What hooks within the vision tower read."""

_QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
"""What is made of the question."""


@dataclass(frozen=True, slots=True)
class ServingMode:
    """A way of serving, and the inputs that a state cannot have with it."""

    flag: str
    hides: frozenset[Need]
    why: str


def find_mode_problems(vllm_config: VllmConfig, needs: Collection[Need]) -> list[Problem]:
    """Problems of a state that reads ``needs`` under the modes of this configuration.

    Features of the image, after the vision tower and its projector, are there in every mode.
    """
    return [
        Problem(mode.flag, mode.why, _FIX)
        for mode in _find_modes(vllm_config)
        if not mode.hides.isdisjoint(needs)
    ]


def _find_modes(vllm_config: VllmConfig) -> Iterator[ServingMode]:
    if vllm_config.lora_config is not None:
        why = "the state reads the language model's first layers, which are run without adapters"
        yield ServingMode("--enable-lora", frozenset({"language"}), why)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        why = "the state reads the language model's first layers on every rank"
        yield ServingMode("--pipeline-parallel-size", frozenset({"language"}), why)
    multimodal = vllm_config.model_config.multimodal_config
    # vLLM has reset it to "weights" where the model cannot do it.
    if multimodal is not None and multimodal.mm_encoder_tp_mode == "data":
        why = "a rank encodes some images, and the state reads the vision tower of all of them"
        yield ServingMode("--mm-encoder-tp-mode data", _INSIDE_THE_TOWER, why)
    for name in ("cudagraph_mm_encoder", "compile_mm_encoder"):
        if vars(vllm_config.compilation_config).get(name):
            why = "the state reads the inside of the vision tower, where hooks would not be called"
            yield ServingMode(f"--compilation-config {name}", _INSIDE_THE_TOWER, why)
    if vllm_config.ec_transfer_config is not None:
        why = "images are encoded without their question, which the state reads"
        yield ServingMode("--ec-transfer-config", _QUESTION, why)


def find_connector_problems(vllm_config: VllmConfig) -> list[Problem]:
    """Refuse KV connectors that keep 16 bits of an image's identity.

    Two images, or two questions about one, would be given each other's KV. vLLM's own copy of
    LMCache's integration (``use_native``) does so in 0.32 and 0.33.
    """
    config = vllm_config.kv_transfer_config
    if config is None:
        return []
    extra = config.kv_connector_extra_config
    return list(_connector_problems(str(config.kv_connector), extra))


def _connector_problems(name: str, extra: Mapping[str, object]) -> Iterator[Problem]:
    inner = extra.get("connectors")
    for one in inner if isinstance(inner, list) else ():  # of a MultiConnector
        if isinstance(one, Mapping):
            more = one.get("kv_connector_extra_config")
            yield from _connector_problems(
                str(one.get("kv_connector")), more if isinstance(more, Mapping) else {}
            )
    if not name.startswith("LMCache"):
        return
    where, what = f"--kv-transfer-config {name}", "keeps 16 bits of an image's identity"
    if extra.get("use_native"):
        yield Problem(where, f"use_native {what}", "leave use_native out")
        return
    try:
        version = Version(importlib.metadata.version("lmcache"))
    except importlib.metadata.PackageNotFoundError:
        return  # vLLM says so itself
    if version < LMCACHE:
        yield Problem(where, f"LMCache {version} {what}", f"install lmcache>={LMCACHE}")
