"""The plugin of lmms-eval: found by its entry point, and it tells images apart by their pixels."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from benchmarks.accuracy.lmms import process

PLUGIN = Path(process.__file__).with_name("plugin")

Message = dict[str, object]


@dataclass
class Request:
    """Stands in for lmms-eval's; the place of a document is its number."""

    arguments: tuple[str, Callable[[object], list[Message]], dict[str, object], int, str, str]


@dataclass(frozen=True)
class Manifest:
    model_id: str
    chat_class_path: str


class Model:
    """Stands in for the model that is extended: asks for the messages of every request."""

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        return [str(request.arguments[1](request.arguments[3])) for request in requests]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As imported in lmms-eval's process, with stand-ins for what it takes from there."""
    taken: dict[str, dict[str, object]] = {
        "lmms_eval.models.registry_v2": {"ModelManifest": Manifest},
        "lmms_eval.models.chat.openai": {"OpenAICompatible": Model},
        "lmms_eval.api.instance": {"GenerationResult": str, "Instance": Request},
    }
    parents = ("lmms_eval", "lmms_eval.models", "lmms_eval.models.chat", "lmms_eval.api")
    for name in (*parents, *taken):
        module = ModuleType(name)
        vars(module).update(taken.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("autoprune_lmms", "autoprune_lmms.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("autoprune_lmms.model")


def messages(colour: str, text: str = "?") -> list[Message]:
    picture = Image.new("RGB", (2, 2), colour)
    content = [{"type": "image", "url": picture}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def test_its_entry_point_names_a_class_that_is_there(plugin: ModuleType) -> None:
    (found,) = importlib.metadata.distributions(path=[str(PLUGIN)])
    (entry,) = found.entry_points
    assert (entry.group, entry.name) == ("lmms_eval.models", "openai")
    manifest = entry.load()()
    module, _, name = manifest.chat_class_path.rpartition(".")
    assert manifest.model_id == "openai"
    assert issubclass(vars(importlib.import_module(module))[name], Model)


def test_every_question_s_image_is_written_down_and_nothing_else_changes(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.FILE, str(tmp_path / process.IMAGES))
    colours = ["red", "red", "blue"]

    def asked() -> list[Request]:
        return [
            Request(("c", lambda number: messages(colours[int(str(number))]), {}, n, "t", "test"))
            for n in range(3)
        ]

    texts = [
        text.partition("<PIL")[0] for text in plugin.OpenAIWithImages().generate_until(asked())
    ]
    assert texts == [text.partition("<PIL")[0] for text in Model().generate_until(asked())]
    lines = [json.loads(line) for line in (tmp_path / process.IMAGES).read_text().splitlines()]
    assert [(line["task"], line["doc_id"]) for line in lines] == [("t", 0), ("t", 1), ("t", 2)]
    first, second, third = (line["image"] for line in lines)
    assert first == second != third


def test_the_text_is_no_part_of_an_image(plugin: ModuleType) -> None:
    assert plugin.fingerprint(messages("red", "a")) == plugin.fingerprint(messages("red", "b"))
    only_text = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert plugin.fingerprint(only_text) == ""
