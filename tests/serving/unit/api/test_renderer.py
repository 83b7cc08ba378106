from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer

from tests.serving.unit.samples import served
from vllm_autoprune.serving.api import renderer as under_test
from vllm_autoprune.serving.api.engine_requests import RenderedHashes
from vllm_autoprune.serving.api.renderer import (
    _MESSAGE_FIELDS,
    AutopruneHfRenderer,
    _add_salt,
    _pass_fields,
)
from vllm_autoprune.serving.api.request_fields import SALT, CacheSalt, RecallTurn
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE

pytestmark = pytest.mark.compat


TURN = {"images": 1, "text": "and now?"}
FIELDS = {"instructions": ["what?"], "details": ["low"], "turns": [0], "recall_turns": [TURN]}


def handed(asked: object, **others: object) -> Any:
    prompt: Any = {"prompt_token_ids": [1], _MESSAGE_FIELDS: FIELDS}
    if asked != "nothing":
        prompt["mm_processor_kwargs"] = {"autoprune": asked, **others}
    return _pass_fields(prompt)


def test_a_prompt_with_images_stores_the_fields_of_its_messages() -> None:
    renderer: Any = SimpleNamespace(model_config=SimpleNamespace())
    parts = [{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}, "what?"]
    messages: Any = [{"role": "user", "content": parts}]

    turns = [RecallTurn(images=1, text="and now?")]

    def stored(prompt: Any) -> Any:
        return AutopruneHfRenderer._store_fields(renderer, messages, prompt, turns)

    images = {"multi_modal_data": {"image": ["x"]}}
    assert stored({**images}) == images
    attach(renderer.model_config, ATTRIBUTE, served())
    assert stored({**images}) == {**images, _MESSAGE_FIELDS: FIELDS}
    assert stored({"prompt": "what?"}) == {"prompt": "what?"}


def test_fields_of_the_messages_reach_the_processor_and_leave_the_prompt() -> None:
    prompt = handed("nothing")
    assert prompt == {
        "prompt_token_ids": [1],
        "mm_processor_kwargs": {"autoprune": FIELDS},
    }


def test_fields_of_the_request_are_kept() -> None:
    kwargs = handed({"budget": 16}, num_crops=4)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": {"budget": 16, **FIELDS}, "num_crops": 4}


def test_fields_that_a_client_writes_are_replaced_by_those_of_its_messages() -> None:
    kwargs = handed({"instructions": ["forged"], "details": ["high"], "recall_turns": []})[
        "mm_processor_kwargs"
    ]
    assert kwargs == {"autoprune": FIELDS}


def test_a_null_entry_asks_for_nothing_and_keeps_the_fields_of_the_messages() -> None:
    kwargs = handed(None)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": FIELDS}


@pytest.mark.parametrize("asked", [[16], 16, "16", False], ids=repr)
def test_a_malformed_entry_is_left_for_the_processor_to_refuse(asked: object) -> None:
    assert handed(asked)["mm_processor_kwargs"] == {"autoprune": asked}


def test_the_caller_s_own_dictionaries_are_not_changed() -> None:
    kwargs = {"autoprune": {"budget": 16}}
    prompt: Any = {"prompt_token_ids": [1], _MESSAGE_FIELDS: FIELDS, "mm_processor_kwargs": kwargs}
    _pass_fields(prompt)
    assert kwargs == {"autoprune": {"budget": 16}}


def test_a_prompt_without_messages_is_passed_on() -> None:
    prompt: Any = {"prompt_token_ids": [1]}
    assert _pass_fields(prompt) is prompt
    assert prompt == {"prompt_token_ids": [1]}


def test_the_cache_salt_reaches_the_processor_in_a_type_of_its_own() -> None:
    given = {"autoprune": {"budget": 8}, SALT: "what a client wrote"}
    prompt: Any = {"prompt_token_ids": [1], "cache_salt": "tenant", "mm_processor_kwargs": given}
    kwargs = _add_salt(prompt)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": {"budget": 8}, SALT: "tenant"}
    assert isinstance(kwargs[SALT], CacheSalt)
    assert given[SALT] == "what a client wrote"


def test_a_prompt_without_a_salt_is_left_as_it_is() -> None:
    prompt: Any = {"prompt_token_ids": [1]}
    assert _add_salt(prompt) == {"prompt_token_ids": [1]}


@pytest.mark.parametrize(
    ("template", "space"),
    [
        ("{% for p in messages[0].content %}{{ '<image>\n' if p.type == 'image' else p.text }}"
         "{% endfor %}", "\n"),
        ("{% for p in messages[0].content %}{{ '<v><image></v>' if p.type == 'image' else p.text }}"
         "{% endfor %}", ""),
        ("{{ 'USER: ' + messages[0].content }}", "\n"),
    ],
    ids=["a line of its own", "a wrapper", "text alone"],
)  # fmt: skip
def test_white_space_after_an_image_is_the_template_s(
    monkeypatch: pytest.MonkeyPatch, template: str, space: str
) -> None:
    """The last template takes no parts: vLLM answers by an error, and joins by line breaks."""

    def apply(config: object, tokenizer: object, conversation: object, **options: Any) -> str:
        try:
            return str(jinja2.Template(options["chat_template"]).render(messages=conversation))
        except TypeError as error:
            raise VLLMValidationError(str(error)) from error

    monkeypatch.setattr(under_test, "safe_apply_chat_template", apply)
    renderer: Any = SimpleNamespace(_spaces={}, model_config=None, get_tokenizer=lambda: None)
    found = AutopruneHfRenderer._space_after_image(renderer, "<image>", template)
    assert found == space
    assert renderer._spaces == {template: space}


def test_prompt_embeddings_beside_images_leave_the_request_countable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM replaces the hashes by a plain dictionary, which a client could have sent as well."""

    def replaced(self: object, engine_input: Any) -> None:
        engine_input["mm_hashes"] = {**engine_input["mm_hashes"], "prompt_embeds": ["b"]}

    monkeypatch.setattr(HfRenderer, "_apply_prompt_embeds_to_engine_input", replaced)
    renderer = object.__new__(AutopruneHfRenderer)
    hashes = RenderedHashes({"image": ["a"]})
    rendered: Any = {"mm_hashes": hashes}
    renderer._apply_prompt_embeds_to_engine_input(rendered)
    assert rendered["mm_hashes"] is hashes
    assert hashes == {"image": ["a"], "prompt_embeds": ["b"]}
