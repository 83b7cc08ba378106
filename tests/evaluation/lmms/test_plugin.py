"""The plugin of lmms-eval: its entry point, and the fingerprints of images."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from vllm_autoprune.evaluation.lmms import output

PLUGIN = Path(output.__file__).with_name("plugin")

Message = dict[str, object]


class Model:
    """Replaces the parent class: builds the messages of every request."""

    def __init__(self) -> None:
        completions = SimpleNamespace(create=partial(dict[str, object], model="m"))
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=completions))

    def generate_until(self, requests: Sequence[SimpleNamespace]) -> list[str]:
        return [str(request.arguments[1](request.arguments[3])) for request in requests]


def make_manifest(name: str, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(model_id=name, **fields)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin's module, imported with replacements for the modules of lmms-eval."""
    replacements: dict[str, dict[str, object]] = {
        **{name: {} for name in ("", ".models", ".models.chat", ".api")},
        ".models.registry_v2": {"ModelManifest": make_manifest},
        ".models.chat.openai": {"OpenAICompatible": Model},
        ".api.instance": {"GenerationResult": str, "Instance": SimpleNamespace},
    }
    for name, contents in replacements.items():
        module = ModuleType(f"lmms_eval{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("autoprune_lmms", "autoprune_lmms.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("autoprune_lmms.model")


def messages(colour: str, text: str = "?") -> list[Message]:
    image = Image.new("RGB", (2, 2), colour)
    content = [{"type": "image", "url": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def test_its_entry_point_names_an_existing_class(plugin: ModuleType) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(PLUGIN)])
    (entry,) = distribution.entry_points
    assert (entry.group, entry.name) == ("lmms_eval.models", "openai")
    manifest = entry.load()()
    module, _, name = manifest.chat_class_path.rpartition(".")
    assert manifest.model_id == "openai"
    assert issubclass(vars(importlib.import_module(module))[name], Model)


def test_images_are_recorded_and_requests_are_unchanged(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.FILE, str(tmp_path / output.IMAGES))
    monkeypatch.setenv(plugin.PRUNING, "{}")
    colours = ["red", "red", "blue"]

    def answers(model: type[Model]) -> list[str]:
        """To requests as lmms-eval's; the document is a number."""
        build: Callable[[int], list[Message]] = lambda number: messages(colours[number])  # noqa: E731
        requests = [SimpleNamespace(arguments=("c", build, {}, n, "t", "test")) for n in range(3)]
        texts = model().generate_until(requests)
        return [text.partition("<PIL")[0] for text in texts]

    assert answers(plugin.OpenAIWithImages) == answers(Model)
    lines = [json.loads(line) for line in (tmp_path / output.IMAGES).read_text().splitlines()]
    assert [(line["task"], line["doc_id"]) for line in lines] == [("t", 0), ("t", 1), ("t", 2)]
    red, again, blue = (line["image"] for line in lines)
    assert red == again != blue
    # A fingerprint does not depend on the text.
    assert plugin.fingerprint(messages("red", "a")) == plugin.fingerprint(messages("red", "b"))
    assert plugin.fingerprint([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == ""


@pytest.mark.parametrize("pruning", [{}, {"budget": 8, "state": "visionzip"}])
def test_every_request_carries_the_options_of_its_case(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, pruning: dict[str, object]
) -> None:
    monkeypatch.setenv(plugin.PRUNING, json.dumps(pruning))
    request = plugin.OpenAIWithImages().client.chat.completions.create(temperature=0)
    extra = {"extra_body": {"mm_processor_kwargs": {"autoprune": pruning}}} if pruning else {}
    assert request == {"model": "m", "temperature": 0, **extra}
