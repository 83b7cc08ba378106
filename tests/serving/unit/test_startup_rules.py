"""What cannot be served pruned: checkpoints, flags and modes of the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.configurations import (
    LLAVA,
    places,
    pretend,
    refusal,
    vllm_config,
)
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune import RequestError
from vllm_autoprune.serving import startup_rules
from vllm_autoprune.serving.models import BACKBONES, find_packed_reason
from vllm_autoprune.serving.plan import LINE, MROPE
from vllm_autoprune.serving.settings import CELLS_FLAG, POSITIONS_FLAG
from vllm_autoprune.serving.startup import _resolve_settings
from vllm_autoprune.tpdsl.tokens import POSITIONS, Need

NO_CLS = SimpleNamespace(
    model_type="siglip_vision_model", hidden_size=24, image_size=28, patch_size=14
)


PIPELINE = "--pipeline-parallel-size"


def base(name: str, q_e: int | None = 0, **params: object) -> dict[str, object]:
    """Settings of a base policy, without exchange unless ``q_e`` is None."""
    changes: dict[str, object] = {"/base_policy": {"name": name, "params": params}}
    if q_e is not None:
        changes["/constraints/selector/q_e"] = q_e
    return {"state": edited(sample(), changes), "requests": "states"}


def changed(part: str = "", *, architecture: str = LLAVA, **fields: Any) -> Any:
    """vLLM's configuration with other fields of one part."""
    config = vllm_config(architecture=architecture)
    model = config.model_config
    parts = {
        "": config,
        "model": model.hf_config,
        "text": model.hf_config.text_config,
        "encoder": model.multimodal_config,
        "parallel": config.parallel_config,
        "compilation": config.compilation_config,
        "manager": config.ec_manager_config,
    }
    vars(parts[part]).update(fields)
    return config


def lora(tower: bool) -> Any:
    return SimpleNamespace(enable_tower_connector_lora=tower)


@parametrize_from_file("policy", "settings", "part", "fields", "where", "message")
def test_what_cannot_be_served_pruned_is_refused(
    policy: dict[str, Any],
    settings: dict[str, object],
    part: str,
    fields: dict[str, Any],
    where: str,
    message: str,
) -> None:
    (problem,) = refusal({**base(**policy), **settings}, changed(part, **fields))
    assert problem.where == where
    assert message in problem.what


def test_parts_of_a_configuration_that_are_no_values_are_refused_too() -> None:
    cells = edited(shipped("divprune"), {"/cells": {"rule": "flat"}})
    drafts = SimpleNamespace(uses_draft_kv_cache=lambda: True)
    without_cls: Any = {"architecture": "InternVLChatModel", "vision_config": NO_CLS}
    true = {**base("divprune"), "positions": "true"}
    ocr = changed(architecture="GlmOcrForConditionalGeneration")
    for settings, config, where, message in (
        ({"state": cells}, ocr, CELLS_FLAG, "no cell can be dropped: this model"),
        (base("divprune"), changed("model", **without_cls), "model", "qk_norm"),
        (
            base("divprune"),
            changed(lora_config=lora(True)),
            "--enable-tower-connector-lora",
            "",
        ),
        (
            true,
            changed(speculative_config=drafts),
            f"{POSITIONS_FLAG} true",
            "draft model",
        ),
    ):
        (problem,) = refusal(settings, config)
        assert problem.where == where and message in problem.what


@pytest.mark.parametrize("architecture", BACKBONES)
def test_kept_tokens_are_packed_only_where_a_model_cannot_place_them(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a state or a request asks; rows that say why have layers with windows or chunks."""
    monkeypatch.setattr(
        startup_rules, "find_problems", lambda *_: []
    )  # of the checkpoint
    row = BACKBONES[architecture]
    served = _resolve_settings(
        {**base("divprune")}, vllm_config(architecture=architecture)
    )
    assert served.capabilities.axes == (
        0 if row.packed else MROPE if row.mrope else LINE
    )
    windows = ("gemma3", "gemma4", "cohere2_vision", "step3p7", "exaone4_5")
    packed = (*windows, "llama4")
    assert bool(row.packed) == (row.name in packed)
    possible = {"true"} if row.mrope else {"packed"} if row.packed else {*POSITIONS}
    for where in POSITIONS:
        state = served.state.model_copy(update={"positions": where})
        assert served.positions_of(state) == (
            where if len(possible) > 1 else min(possible)
        )
        if where in possible:
            assert served.positions_of(served.state, where) == where
        else:
            with pytest.raises(RequestError, match="positions"):
                served.positions_of(served.state, where)


@parametrize_from_file("fields", "slides")
def test_tokens_are_packed_where_any_layer_has_a_window(
    fields: dict[str, Any], slides: bool
) -> None:
    text = SimpleNamespace(rope_parameters={"rope_theta": 1e4}, **fields)
    config: Any = SimpleNamespace(get_text_config=lambda: text)
    assert bool(find_packed_reason(BACKBONES[LLAVA], config)) == slides
    named: Any = SimpleNamespace(llm_config=text)  # InternVL's, as it is published
    assert bool(find_packed_reason(BACKBONES[LLAVA], named)) == slides
    bare: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert "no rotary positions" in find_packed_reason(BACKBONES[LLAVA], bare)


@pytest.mark.parametrize("architecture", BACKBONES)
def test_ranking_before_the_merger_is_refused_where_there_is_none(
    architecture: str,
) -> None:
    tower: Any = {}
    if architecture.startswith("LlavaOnevision"):
        tower = {"vision_config": NO_CLS, "vision_feature_select_strategy": "full"}
    config = vllm_config(architecture=architecture, **tower)
    settings = {"state": edited(sample(), {"/rank_at": "merger_in"})}
    if architecture.startswith(("Llava", "Gemma3", "Step")):
        (problem,) = [
            problem
            for problem in refusal(settings, config)
            if "rank_at" in problem.what
        ]
        assert "no patch merger" in problem.what and "merger_out" in problem.fix
    else:
        assert _resolve_settings(settings, config).needs >= {"encoder", "merger_input"}


TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)


QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})


LANGUAGE: frozenset[Need] = frozenset({"language"})


PRODUCER = SimpleNamespace(ec_role="ec_producer")


@pytest.mark.parametrize(
    ("flag", "config", "hidden"),
    [
        (
            "--mm-encoder-tp-mode data",
            changed("encoder", mm_encoder_tp_mode="data"),
            TOWER,
        ),
        (
            "--compilation-config compile_mm_encoder",
            changed("compilation", compile_mm_encoder=True),
            TOWER,
        ),
        ("--ec-transfer-config", changed(ec_transfer_config=PRODUCER), QUESTION),
        ("--enable-lora", changed(lora_config=lora(False)), LANGUAGE),
        (PIPELINE, changed("parallel", pipeline_parallel_size=2), LANGUAGE),
    ],
)
def test_a_mode_is_refused_only_for_states_that_read_what_it_hides(
    flag: str, config: Any, hidden: frozenset[Need]
) -> None:
    # A base policy that reads some of what a mode hides.
    readers = {TOWER: "visionzip", QUESTION: "cdpruner", LANGUAGE: "fastv"}
    assert places(base(readers[hidden]), config) == [flag]
    resolved = _resolve_settings(base("divprune"), config)
    by_flag = {
        need
        for need, reason in resolved.capabilities.unavailable
        if reason.startswith(flag)
    }
    assert by_flag == hidden - {"merger_input"}, "LLaVA has none under any flag"
    assert not resolved.needs & hidden, "states of requests cannot read it either"


def test_graphs_of_the_tower_are_captured_where_they_are_replayed_before_pruning() -> (
    None
):
    qwen = "Qwen2_5_VLForConditionalGeneration"

    def captured(architecture: str, v2: bool) -> Any:
        config = changed(
            "compilation", architecture=architecture, cudagraph_mm_encoder=True
        )
        config.use_v2_model_runner = v2
        return config

    flag = "--compilation-config cudagraph_mm_encoder"
    resolved = _resolve_settings(base("divprune"), captured(qwen, True))
    hidden = dict(resolved.capabilities.unavailable)
    assert hidden["cls_attention"].startswith(flag)
    assert flag in places(base("visionzip"), captured(qwen, True))
    assert places(base("divprune"), captured(qwen, False)) == [flag]
    assert places(base("divprune"), captured(LLAVA, True)) == [flag]


def test_without_a_language_model_no_text_stands_between_tokens() -> None:
    """Videos are left whole; images that hold text are refused."""
    name = "InternVLForConditionalGeneration"
    for encodes_only in (False, True):
        config = changed("encoder", architecture=name, mm_encoder_only=encodes_only)
        capabilities = _resolve_settings(base("divprune"), config).capabilities
        assert capabilities.prunes_videos != encodes_only
    name = "Idefics3ForConditionalGeneration"
    config = changed("encoder", architecture=name, mm_encoder_only=True)
    assert places(base("divprune"), config) == ["--mm-encoder-only"]


def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert places(base("divprune")) == ["VLLM_USE_RUST_FRONTEND"]


def test_a_memory_plan_of_an_earlier_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of stock vLLM, or of another state: all are filed under one fingerprint."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    assert places(base("divprune")) == ["VLLM_ENABLE_STARTUP_PLAN"]
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "0")
    _resolve_settings(base("divprune"), vllm_config())


@parametrize_from_file("installed", "native", "refused")
def test_connectors_that_shorten_identities_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, native: bool, refused: bool
) -> None:
    pretend(monkeypatch, lmcache=installed)
    name = "LMCacheConnectorV1"
    extra = {"use_native": native}
    connector = {"kv_connector": name, "kv_connector_extra_config": extra}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [connector]},
    }
    for fields in (connector, multi):
        config = changed(kv_transfer_config=SimpleNamespace(**fields))
        if refused:
            assert places(base("divprune"), config) == [f"--kv-transfer-config {name}"]
        else:
            _resolve_settings(base("divprune"), config)
