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
    resolve_settings,
    sleep_problem,
)
from vllm_autoprune.tpdsl.tokens import Need

NO_CLS = SimpleNamespace(model_type="siglip_vision_model", hidden_size=24)
QWEN, INTERNVL, GEMMA = (
    f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "InternVL", "Gemma3")
)


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
    }
    vars(parts[part]).update(fields)
    return config


def lora(tower: bool) -> Any:
    return changed(lora_config=SimpleNamespace(enable_tower_connector_lora=tower))


def connector(name: str, extra: dict[str, object]) -> Any:
    config = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    return changed(kv_transfer_config=config)


@pytest.mark.parametrize(
    ("settings", "config", "where", "message"),
    [
        (base("divprune"), changed(architecture="Other"), "model", "has no pruned form"),
        (base("divprune"), changed("model", vision_config=NO_CLS), "model", "no [CLS] token"),
        (
            base("divprune"),
            changed("model", vision_feature_layer=[-2, -5]),
            "model",
            "several vision layers",
        ),
        (
            base("divprune"),
            changed("model", vision_feature_select_strategy="full"),
            "model",
            "'full'",
        ),
        (base("divprune"), lora(True), "--enable-tower-connector-lora", "differ between requests"),
        (base("fastv"), changed("text", model_type="qwen2"), "model", "'qwen2'"),
        (base("fastv"), changed("text", bos_token_id=None), "model", "bos_token_id None"),
        (
            base("fastv"),
            changed("text", max_position_embeddings=832),
            "model",
            "832 is below 833",
        ),
        *(
            (base("prumerge_plus"), changed("model", vision_feature_layer=layer), "model", "last")
            for layer in (-1, 4)
        ),
        *(
            (
                base(name, None, **params),
                changed(architecture=GEMMA),
                "model",
                "before the projector",
            )
            for name, params in (("scope", {}), ("mmtok", {}), ("prunesid", {"mode": "patch"}))
        ),
        # Positions of kept tokens do not reach later ranks of a pipeline.
        (
            base("divprune"),
            changed("parallel", architecture=QWEN, pipeline_parallel_size=2),
            "--pipeline-parallel-size",
            "positions",
        ),
    ],
)
def test_what_cannot_be_served_pruned_is_refused(
    settings: object, config: Any, where: str, message: str
) -> None:
    (problem,) = refusal(settings, config)
    assert problem.where == where
    assert message in problem.what


def test_known_models_without_a_pruned_form_are_refused_with_the_reason() -> None:
    from vllm.model_executor.models import ModelRegistry

    assert set(UNSERVED) <= set(ModelRegistry.get_supported_archs())
    assert not set(UNSERVED) & set(BACKBONES)
    for architecture, reason in UNSERVED.items():
        (problem,) = refusal({"state": "autoprune"}, vllm_config(architecture=architecture))
        assert reason in problem.what and "Qwen3VLForConditionalGeneration" in problem.fix


@pytest.mark.parametrize("architecture", BACKBONES)
def test_ranking_before_the_merger_is_refused_where_there_is_none(architecture: str) -> None:
    tower: Any = {}
    if architecture.startswith("LlavaOnevision"):
        tower = {"vision_config": NO_CLS, "vision_feature_select_strategy": "full"}
    config = vllm_config(architecture=architecture, **tower)
    settings = {"state": edited(sample(), {"/rank_at": "merger_in"})}
    if architecture.startswith(("Llava", "Gemma3")):
        (problem,) = [problem for problem in refusal(settings, config) if "rank_at" in problem.what]
        assert "no patch merger" in problem.what
        assert "merger_out" in problem.fix
    else:
        assert resolve_settings(settings, config).needs >= {"encoder", "merger_input"}


# ---- modes of the server ----

INSIDE_THE_TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
LANGUAGE: frozenset[Need] = frozenset({"language"})

MODES = [
    ("--mm-encoder-tp-mode data", changed("encoder", mm_encoder_tp_mode="data"), INSIDE_THE_TOWER),
    *(
        (
            f"--compilation-config {name}",
            vllm_config(compiled={name: True}),
            INSIDE_THE_TOWER,
        )
        for name in ("cudagraph_mm_encoder", "compile_mm_encoder")
    ),
    (
        "--ec-transfer-config",
        changed(ec_transfer_config=SimpleNamespace(ec_role="ec_producer")),
        QUESTION,
    ),
    ("--enable-lora", lora(False), LANGUAGE),
    ("--pipeline-parallel-size", changed("parallel", pipeline_parallel_size=2), LANGUAGE),
]
READERS = {INSIDE_THE_TOWER: "visionzip", QUESTION: "cdpruner", LANGUAGE: "fastv"}
"""A base policy that reads some of what a mode hides."""


@pytest.mark.parametrize(("flag", "config", "hidden"), MODES)
def test_a_mode_is_refused_only_for_states_that_read_what_it_hides(
    flag: str, config: Any, hidden: frozenset[Need]
) -> None:
    assert places(base(READERS[hidden]), config) == [flag]
    served = resolve_settings(base("divprune"), config)
    by_flag = {need for need, reason in served.unavailable if reason.startswith(flag)}
    assert by_flag == hidden - {"merger_input"}, "LLaVA has none under any flag"
    assert not served.needs & hidden, "states of requests cannot read it either"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("installed", "native", "refused"),
    [
        ("0.5.4", False, True),
        ("0.5.5", False, False),
        ("0.5.6", True, True),
        (None, False, False),
    ],
)
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
    def moved(stock: str, family: str) -> None:
        raise ConfigError("vLLM", [Problem("vllm.x", f"is not there for {stock}", "fix")])

    monkeypatch.setattr(startup, "require_hooks", moved)
    with pytest.raises(ConfigError, match=f"there for {LLAVA}"):
        apply_settings(vllm_config({"state": "autoprune"}))
    monkeypatch.setattr(compat, "BELOW", compat.LOWEST)
    with pytest.raises(ConfigError, match="outside"):
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


@pytest.mark.compat
def test_sleep_that_discards_the_text_tower_is_refused_before_the_engine_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine.core import EngineCore

    slept: list[int] = []

    def stock(self: object, level: int = 1, mode: str = "abort") -> None:
        slept.append(level)

    monkeypatch.undo()  # this test needs the real shim
    monkeypatch.setattr(EngineCore, "sleep", stock)
    worker.refuse_sleep(sleep_problem)
    engine: Any = EngineCore.__new__(EngineCore)

    def serve(**model: object) -> None:
        engine.vllm_config = SimpleNamespace(model_config=SimpleNamespace(**model))

    serve(autoprune=served(tower=TOWER))
    with pytest.raises(ValueError, match=r"--autoprune-text-tower.*use level 1"):
        engine.sleep(2)
    engine.sleep(1)
    engine.sleep(level=0, mode="wait")
    serve(autoprune=served())
    engine.sleep(2)
    serve()
    engine.sleep(2)
    assert slept == [1, 0, 2, 2]
