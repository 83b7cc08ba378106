"""Registration of the pruned classes, and supported sleep levels."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.unit.conftest import Registered
from tests.serving.unit.samples import LLAVA, served, vllm_config
from vllm_autoprune.serving.compat import worker
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.serving.startup import activation
from vllm_autoprune.serving.startup.activation import sleep_problem
from vllm_autoprune.serving.startup.config import apply_settings

TOWER = TextTower("clip", 1, "a test", segment=8, width=12, vision_width=24)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_process_that_receives_the_config_registers_the_pruned_classes(
    how: str, registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without the flags learns of a state by the model config alone."""
    sent = vllm_config({"state": "autoprune"})
    apply_settings(sent)
    assert [architecture for architecture, _ in registered.models] == [LLAVA]
    monkeypatch.setattr(activation, "_active", set())  # as in another process
    travels = getattr(sent.model_config, activation.ATTRIBUTE)
    received = pickle.loads(pickle.dumps(travels)) if how == "pickle" else copy.deepcopy(travels)
    assert received.architecture == LLAVA
    assert [architecture for architecture, _ in registered.models] == [LLAVA, LLAVA]


def config(tower: TextTower | None) -> Any:
    return SimpleNamespace(autoprune=served(tower=tower))


@pytest.mark.parametrize(
    ("model_config", "level", "refused"),
    [
        (config(TOWER), 2, True),
        (config(TOWER), 1, False),
        (config(None), 2, False),
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
    engine.vllm_config = SimpleNamespace(model_config=config(TOWER))
    with pytest.raises(ValueError, match=r"--autoprune-text-tower.*use level 1"):
        engine.sleep(2)
    engine.sleep(1)
    engine.sleep(level=0, mode="wait")
    assert slept == [1, 0]
