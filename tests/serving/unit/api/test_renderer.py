from __future__ import annotations

from typing import Any

import pytest

from vllm_autoprune.serving.api.renderer import _INSTRUCTIONS, _add_salt, _pass_instructions
from vllm_autoprune.serving.api.request_fields import SALT, CacheSalt

pytestmark = pytest.mark.compat


def handed(asked: object, **others: object) -> Any:
    prompt: Any = {"prompt_token_ids": [1], _INSTRUCTIONS: ["what?"]}
    if asked != "nothing":
        prompt["mm_processor_kwargs"] = {"autoprune": asked, **others}
    return _pass_instructions(prompt)


def test_the_instructions_reach_the_processor_and_the_note_is_gone() -> None:
    prompt = handed("nothing")
    assert prompt == {
        "prompt_token_ids": [1],
        "mm_processor_kwargs": {"autoprune": {"instructions": ["what?"]}},
    }


def test_what_the_request_asked_stays() -> None:
    kwargs = handed({"budget": 16}, num_crops=4)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": {"budget": 16, "instructions": ["what?"]}, "num_crops": 4}


def test_a_null_entry_asks_for_nothing_and_keeps_the_instruction() -> None:
    kwargs = handed(None)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": {"instructions": ["what?"]}}


@pytest.mark.parametrize("asked", [[16], 16, "16", False], ids=repr)
def test_a_malformed_entry_is_left_for_the_processor_to_refuse(asked: object) -> None:
    assert handed(asked)["mm_processor_kwargs"] == {"autoprune": asked}


def test_the_caller_s_own_dictionaries_are_not_changed() -> None:
    kwargs = {"autoprune": {"budget": 16}}
    prompt: Any = {"prompt_token_ids": [1], _INSTRUCTIONS: ["a"], "mm_processor_kwargs": kwargs}
    _pass_instructions(prompt)
    assert kwargs == {"autoprune": {"budget": 16}}


def test_a_prompt_without_a_note_is_passed_on() -> None:
    prompt: Any = {"prompt_token_ids": [1]}
    assert _pass_instructions(prompt) is prompt
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
