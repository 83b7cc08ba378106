from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.serving.unit.conftest import Registered
from tests.serving.unit.samples import LLAVA, served, vllm_config
from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving import compat
from vllm_autoprune.serving.shared.served_state import served_state
from vllm_autoprune.serving.startup import config as config_module
from vllm_autoprune.serving.startup.config import apply_settings, attach_settings


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


@pytest.mark.parametrize("additional", [{"theirs": 1}, {}, "opaque"], ids=repr)
def test_without_settings_the_config_is_unchanged(
    registered: Registered, additional: object
) -> None:
    config = vllm_config()
    config.additional_config = additional
    attributes = dict(vars(config.model_config))
    attach_settings(config.model_config, additional)
    apply_settings(config)
    assert config.additional_config is additional
    assert vars(config.model_config) == attributes
    assert served_state(config.model_config) is None
    assert registered.models == []


def test_config_without_a_model_keeps_its_settings() -> None:
    config = vllm_config({"state": "autoprune"})
    config.model_config = None
    apply_settings(config)
    assert config.additional_config["autoprune"] == {"state": "autoprune"}


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

    monkeypatch.setattr(config_module, "require_hooks", moved)
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
