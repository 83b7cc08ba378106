from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.samples import places, refusal, vllm_config
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.unserved import UNSERVED
from vllm_autoprune.serving.startup.config import resolve_settings


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


@pytest.mark.parametrize("architecture", UNSERVED)
def test_a_known_model_is_refused_by_name_and_with_the_reason(architecture: str) -> None:
    (problem,) = refusal({"state": "autoprune"}, vllm_config(architecture=architecture))
    assert (
        problem.what
        == f"architecture {architecture!r} has no pruned form: " + (UNSERVED[architecture])
    )
    assert "Qwen3VLForConditionalGeneration" in problem.fix


def test_every_refused_architecture_is_one_that_vllm_serves() -> None:
    from vllm.model_executor.models import ModelRegistry

    assert set(UNSERVED) <= set(ModelRegistry.get_supported_archs())
    assert not set(UNSERVED) & set(BACKBONES)


def test_the_rust_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert places({"state": "autoprune"}) == ["VLLM_USE_RUST_FRONTEND"]


def test_lora_on_the_vision_tower() -> None:
    for enabled, refused in ((True, True), (False, False)):
        config = vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=enabled))
        if refused:
            assert places({"state": "autoprune"}, config) == ["--enable-tower-connector-lora"]
        else:
            assert resolve_settings({"state": "autoprune"}, config).budget == 32


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
