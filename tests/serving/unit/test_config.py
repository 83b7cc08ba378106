"""Settings against vLLM's configuration: models, modes, processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.conftest import Registered
from tests.serving.unit.samples import LLAVA, places, refusal, served, vllm_config
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving import compat, startup
from vllm_autoprune.serving.compat import worker
from vllm_autoprune.serving.models import BACKBONES, UNSERVED
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.settings import TextTower
from vllm_autoprune.serving.startup import (
    apply_settings,
    attach_settings,
    resolve_settings,
    sleep_problem,
)
from vllm_autoprune.tpdsl.tokens import Need


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (vllm_config(architecture="PixtralForConditionalGeneration"), "has no pruned form"),
        (
            vllm_config(
                vision_config=SimpleNamespace(model_type="siglip_vision_model", hidden_size=24)
            ),
            "no [CLS] token",
        ),
        (vllm_config(vision_feature_layer=[-2, -5]), "several vision layers"),
        (vllm_config(vision_feature_select_strategy="full"), "'full'"),
    ],
    ids=["architecture", "SigLIP", "layers", "strategy"],
)
def test_a_model_that_cannot_be_pruned(config: Any, message: str) -> None:
    (problem,) = refusal({"state": "autoprune"}, config)
    assert problem.where == "model"
    assert message in problem.what


def test_known_models_without_a_pruned_form_are_refused_with_the_reason() -> None:
    from vllm.model_executor.models import ModelRegistry

    assert set(UNSERVED) <= set(ModelRegistry.get_supported_archs())
    assert not set(UNSERVED) & set(BACKBONES)
    for architecture, reason in UNSERVED.items():
        (problem,) = refusal({"state": "autoprune"}, vllm_config(architecture=architecture))
        assert problem.what == f"architecture {architecture!r} has no pruned form: {reason}"
        assert "Qwen3VLForConditionalGeneration" in problem.fix


def test_the_rust_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert places({"state": "autoprune"}) == ["VLLM_USE_RUST_FRONTEND"]


def test_lora_on_the_vision_tower() -> None:
    on, off = (
        vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=enabled))
        for enabled in (True, False)
    )
    assert places({"state": "autoprune"}, on) == ["--enable-tower-connector-lora"]
    assert resolve_settings({"state": "autoprune"}, off).budget == 32


def _settings_with_base(base: str) -> dict[str, object]:
    """Settings of a state with this base policy."""
    return {"state": edited(sample(), {"/base_policy": {"name": base}})}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "qwen2"}, "'qwen2'"),
        ({"bos_token_id": None}, "bos_token_id None"),
        ({"max_position_embeddings": 832}, "832 is below 833"),
    ],
)
def test_a_language_model_that_cannot_be_read(text: dict[str, object], message: str) -> None:
    config = vllm_config()
    resolve_settings(_settings_with_base("fastv"), config)
    vars(config.model_config.hf_config.text_config).update(text)
    (problem,) = refusal(_settings_with_base("fastv"), config)
    assert message in problem.what
    resolve_settings(
        _settings_with_base("divprune"), config
    )  # only policies that read it are affected


def test_unavailable_inputs_only_limit_request_states() -> None:
    config = vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=False))
    served_state = resolve_settings({"state": "autoprune", "requests": "states"}, config)
    unavailable = {need: reason.partition(":")[0] for need, reason in served_state.unavailable}
    assert unavailable == {"merger_input": "model", "language": "--enable-lora"}
    available = {"cls_attention", "instruction", "encoder", "tower", "next_layer", "words"}
    assert served_state.needs == available
    resolve_settings({"state": "autoprune", "requests": "budget:16-64"}, config)


@pytest.mark.parametrize("layer", [-1, 4])
def test_last_tower_layer_has_no_next_layer(layer: int) -> None:
    resolve_settings(_settings_with_base("prumerge_plus"), vllm_config())
    (problem,) = refusal(
        _settings_with_base("prumerge_plus"), vllm_config(vision_feature_layer=layer)
    )
    assert "last layer" in problem.what
    resolve_settings(_settings_with_base("visionzip"), vllm_config(vision_feature_layer=layer))


_WITHOUT_MERGER = [
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
]


@pytest.mark.parametrize("architecture", BACKBONES)
def test_ranking_before_the_merger_is_refused_where_there_is_none(architecture: str) -> None:
    tower: Any = {}
    if architecture.startswith("LlavaOnevision"):
        vision = SimpleNamespace(model_type="siglip_vision_model")
        tower = {"vision_config": vision, "vision_feature_select_strategy": "full"}
    config = vllm_config(architecture=architecture, **tower)
    settings = {"state": edited(sample(), {"/rank_at": "merger_in"})}
    if architecture in _WITHOUT_MERGER:
        (problem,) = [one for one in refusal(settings, config) if "rank_at" in one.what]
        assert "no patch merger" in problem.what
        assert "merger_out" in problem.fix
    else:
        assert resolve_settings(settings, config).needs >= {"encoder", "merger_input"}


@pytest.mark.parametrize("base", ["scope", "mmtok", "prunesid"])
def test_policies_that_read_the_encoder_are_served_where_it_can_be_read(base: str) -> None:
    settings = _settings_with_base(base)
    if base == "prunesid":  # by default it may read [CLS] itself, which no other tower has
        settings = {
            "state": edited(sample(), {"/base_policy": {"name": base, "params": {"mode": "patch"}}})
        }
    for architecture in ("Qwen2_5_VLForConditionalGeneration", "InternVLForConditionalGeneration"):
        resolve_settings(settings, vllm_config(architecture=architecture))
    (problem,) = refusal(settings, vllm_config(architecture="Gemma3ForConditionalGeneration"))
    assert "before the projector" in problem.what


# ---- modes of the server ----

QWEN = "Qwen2_5_VLForConditionalGeneration"


def base(name: str, **params: object) -> dict[str, object]:
    """Settings of a base policy without exchange, so that nothing else is read."""
    changes = {"/base_policy": {"name": name, "params": params}, "/constraints/selector/q_e": 0}
    return {"state": edited(sample(), changes), "requests": "states"}


def changed(part: str, **fields: object) -> Any:
    """vLLM's configuration with other fields of one part."""
    config = vllm_config()
    found = config.model_config.multimodal_config if part == "encoder" else config
    vars(getattr(found, part, found)).update(fields)
    return config


TOWER_NEEDS: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
WITHOUT_A_MERGER: frozenset[Need] = frozenset({"merger_input"})
"""Unavailable on LLaVA under any flags."""

QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
LANGUAGE: frozenset[Need] = frozenset({"language"})

MODES = [
    ("--mm-encoder-tp-mode data", changed("encoder", mm_encoder_tp_mode="data"), TOWER_NEEDS),
    (
        "--compilation-config cudagraph_mm_encoder",
        vllm_config(compiled={"cudagraph_mm_encoder": True}),
        TOWER_NEEDS,
    ),
    (
        "--compilation-config compile_mm_encoder",
        vllm_config(compiled={"compile_mm_encoder": True}),
        TOWER_NEEDS,
    ),
    (
        "--ec-transfer-config",
        changed("", ec_transfer_config=SimpleNamespace(ec_role="ec_producer")),
        QUESTION,
    ),
    (
        "--enable-lora",
        vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=False)),
        LANGUAGE,
    ),
    (
        "--pipeline-parallel-size",
        changed("parallel_config", pipeline_parallel_size=2),
        LANGUAGE,
    ),
]
READERS = {TOWER_NEEDS: "visionzip", QUESTION: "cdpruner", LANGUAGE: "fastv"}
"""A base policy that reads some of what a mode hides."""


@pytest.mark.parametrize(("flag", "config", "hidden"), MODES)
def test_a_mode_is_refused_only_for_states_that_read_what_it_hides(
    flag: str, config: Any, hidden: frozenset[Need]
) -> None:
    assert places(base(READERS[hidden]), config) == [flag]
    served = resolve_settings(base("divprune"), config)
    by_flag = {need for need, reason in served.unavailable if reason.startswith(flag)}
    assert by_flag == hidden - WITHOUT_A_MERGER
    assert not served.needs & hidden, "states of requests cannot read it either"


def test_positions_do_not_reach_later_ranks_of_a_pipeline() -> None:
    config = changed("parallel_config", pipeline_parallel_size=2)
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


# ---- from vLLM's configuration to processes ----


def test_settings_are_moved_to_the_model_config(
    registered: Registered, logged: pytest.LogCaptureFixture
) -> None:
    config = vllm_config({"state": "autoprune", "budget": 16})
    before = config.additional_config
    apply_settings(config)
    served = served_state(config.model_config)
    assert served is not None
    assert served.budget == 16
    assert config.additional_config == {"theirs": {"x": 1}}
    assert "autoprune" in before  # the caller's own dictionary, which another engine may use
    assert [architecture for architecture, _ in registered.models] == [LLAVA]
    (record,) = logged.records
    assert served.state.digest[:12] in record.getMessage()


def test_settings_reach_a_config_of_the_model_alone(registered: Registered) -> None:
    """``vllm launch render`` makes one, and leaves ``additional_config`` out."""
    config = vllm_config()
    config.additional_config = {}
    settings = {"state": "autoprune", "budget": 16}
    attach_settings(config.model_config, {"autoprune": settings})
    apply_settings(config)
    served = served_state(config.model_config)
    assert served is not None and served.budget == 16
    # vLLM verifies some configs of one model more than once.
    config.model_config.architecture = "Unknown"
    apply_settings(config)
    assert served_state(config.model_config) is served


def test_a_mistake_on_the_command_line_ends_with_one_message(registered: Registered) -> None:
    config = vllm_config({"state": "nowhere", "budget": "x", "from_flags": True})
    with pytest.raises(SystemExit) as caught:
        apply_settings(config)
    message = str(caught.value.code)
    assert message.startswith("\nvllm-autoprune: cannot serve pruned: 2 problem(s)")
    assert "--autoprune-state nowhere" in message and "--autoprune-budget" in message
    assert caught.value.__suppress_context__
    assert served_state(config.model_config) is None
    assert registered.models == []


@pytest.mark.parametrize("settings", [{"state": "nowhere"}, "autoprune"], ids=repr)
def test_a_mistake_in_python_is_an_exception(settings: object) -> None:
    with pytest.raises(ConfigError):
        apply_settings(vllm_config(settings))


def test_another_vllm_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "BELOW", compat.LOWEST)
    with pytest.raises(ConfigError, match="outside"):
        apply_settings(vllm_config({"state": "autoprune"}))


def test_a_vllm_in_which_names_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(stock: str) -> None:
        raise ConfigError("vLLM", [Problem("vllm.x", f"is not there for {stock}", "fix")])

    monkeypatch.setattr(startup, "require_hooks", moved)
    with pytest.raises(ConfigError, match=f"not there for {LLAVA}"):
        apply_settings(vllm_config({"state": "autoprune"}))


@pytest.mark.compat
def test_the_state_stays_out_of_the_compile_hash() -> None:
    """Compiled graphs do not depend on it, so another state must not compile them anew."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.utils import get_hash_factors, hash_factors

    class Model(SimpleNamespace):
        def compute_hash(self) -> str:
            return "model"

    def hashed(settings: object) -> str:
        config = VllmConfig.__new__(VllmConfig)
        vars(config).update(vars(stock))
        additional = {"theirs": 1}
        vars(config).update(model_config=Model(**model), additional_config=additional)
        if settings is not None:
            vars(config).update(additional_config={**additional, "autoprune": settings})
            apply_settings(config)
            assert served_state(config.model_config) is not None
        return config.compute_hash()

    stock, model = VllmConfig(), vars(vllm_config().model_config)
    assert hashed({"state": "autoprune"}) == hashed({"state": "autoprune", "budget": 64})
    assert hashed({"state": "autoprune"}) == hashed(None)
    # A model config hashes only the fields it declares.
    bare = ModelConfig.__new__(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        vars(bare)[field.name] = None
    before = hash_factors(get_hash_factors(bare, set()))
    compat.attach(bare, "autoprune", served())
    assert hash_factors(get_hash_factors(bare, set())) == before


TOWER = TextTower("clip", 1, "a test", segment=8, width=12, vision_width=24)


def model_config_of(tower: TextTower | None) -> Any:
    return SimpleNamespace(autoprune=served(tower=tower))


@pytest.mark.parametrize(
    ("model_config", "level", "refused"),
    [
        (model_config_of(TOWER), 2, True),
        (model_config_of(TOWER), 1, False),
        (model_config_of(None), 2, False),
        (SimpleNamespace(), 2, False),
    ],
)
def test_only_sleep_that_discards_the_text_tower_is_refused(
    model_config: Any, level: int, refused: bool
) -> None:
    assert (sleep_problem(model_config, level) is not None) == refused


@pytest.mark.compat
def test_sleep_is_refused_before_the_engine_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    slept: list[int] = []

    def stock(self: object, level: int = 1, mode: str = "abort") -> None:
        slept.append(level)

    monkeypatch.undo()  # this test needs the real shim
    monkeypatch.setattr(EngineCore, "sleep", stock)
    worker.refuse_sleep(sleep_problem)
    engine: Any = EngineCore.__new__(EngineCore)
    engine.vllm_config = SimpleNamespace(model_config=model_config_of(TOWER))
    with pytest.raises(ValueError, match=r"--autoprune-text-tower.*use level 1"):
        engine.sleep(2)
    engine.sleep(1)
    engine.sleep(level=0, mode="wait")
    assert slept == [1, 0]
