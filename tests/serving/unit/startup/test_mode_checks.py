from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.samples import places, vllm_config
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.serving.shared.identities import make_cache_identity
from vllm_autoprune.serving.startup.config import resolve_settings
from vllm_autoprune.tpdsl.tokens import Need

QWEN = "Qwen2_5_VLForConditionalGeneration"


def base(name: str, **params: object) -> dict[str, object]:
    """Settings of a base policy without exchange, so that nothing else is read."""
    changes = {"/base_policy": {"name": name, "params": params}, "/constraints/selector/q_e": 0}
    return {"state": edited(sample(), changes), "requests": "states"}


def data_parallel_tower() -> Any:
    config = vllm_config()
    config.model_config.multimodal_config.mm_encoder_tp_mode = "data"
    return config


def separate_encoder() -> Any:
    config = vllm_config()
    config.ec_transfer_config = SimpleNamespace(ec_role="ec_producer")
    return config


def pipeline() -> Any:
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    return config


def adapters() -> Any:
    return vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=False))


TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
WITHOUT_A_MERGER: frozenset[Need] = frozenset({"merger_input"})
"""Unavailable on LLaVA under any flags."""

QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
LANGUAGE: frozenset[Need] = frozenset({"language"})

MODES = [
    ("--mm-encoder-tp-mode data", data_parallel_tower, TOWER, "visionzip"),
    (
        "--compilation-config cudagraph_mm_encoder",
        lambda: vllm_config(compiled={"cudagraph_mm_encoder": True}),
        TOWER,
        "visionzip",
    ),
    (
        "--compilation-config compile_mm_encoder",
        lambda: vllm_config(compiled={"compile_mm_encoder": True}),
        TOWER,
        "prumerge_plus",
    ),
    ("--ec-transfer-config", separate_encoder, QUESTION, "cdpruner"),
    ("--enable-lora", adapters, LANGUAGE, "fastv"),
    ("--pipeline-parallel-size", pipeline, LANGUAGE, "fastv"),
]


@pytest.mark.parametrize(("flag", "config", "hidden", "refused"), MODES)
def test_a_mode_is_refused_only_for_states_that_read_what_it_hides(
    flag: str, config: Any, hidden: frozenset[Need], refused: str
) -> None:
    assert places(base(refused), config()) == [flag]
    served = resolve_settings(base("divprune"), config())
    by_flag = {need for need, reason in served.unavailable if reason.startswith(flag)}
    assert by_flag == hidden - WITHOUT_A_MERGER
    assert not served.needs & hidden, "states of requests cannot read it either"


@pytest.mark.parametrize("name", ["cudagraph_mm_encoder", "compile_mm_encoder"])
def test_modes_that_are_off(name: str) -> None:
    served = resolve_settings(base("visionzip"), vllm_config(compiled={name: False}))
    assert {need for need, _ in served.unavailable} == WITHOUT_A_MERGER


def test_all_modes_are_reported_at_once() -> None:
    config = adapters()
    config.parallel_config.pipeline_parallel_size = 2
    assert places(base("fastv"), config) == ["--enable-lora", "--pipeline-parallel-size"]


def test_positions_do_not_reach_later_ranks_of_a_pipeline() -> None:
    config = pipeline()
    config.model_config.architecture = QWEN
    assert "--pipeline-parallel-size" in places(base("divprune"), config)


def connector(name: str, extra: dict[str, object]) -> Any:
    config = vllm_config()
    config.kv_transfer_config = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    return config


@pytest.mark.parametrize(
    ("installed", "native", "refused"),
    [
        ("0.5.4", False, True),
        ("0.5.5", False, False),
        ("0.5.6", False, False),
        ("0.5.6", True, True),
        (None, False, False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_connectors_that_shorten_identities(
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    native: bool,
    refused: bool,
    nested: bool,
) -> None:
    def version(name: str) -> str:
        if name != "lmcache" or installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    extra: dict[str, object] = {"use_native": native}
    config = connector("LMCacheConnectorV1", extra)
    if nested:
        inner = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
        config = connector("MultiConnector", {"connectors": [inner]})
    if refused:
        assert places(base("divprune"), config) == ["--kv-transfer-config LMCacheConnectorV1"]
    else:
        resolve_settings(base("divprune"), config)


def test_other_connectors_are_not_judged() -> None:
    resolve_settings(base("cdpruner"), connector("ExampleConnector", {}))


def test_an_identity_is_a_hexadecimal_number_in_lower_case() -> None:
    """Connectors read it as one: ``hex_hash_to_int16`` of vLLM's ``lmcache_integration``."""
    identity = make_cache_identity("image", "state", 32, "state", None)
    assert f"{int(identity, 16):064x}" == identity
