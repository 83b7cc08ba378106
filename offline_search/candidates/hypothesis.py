"""Hypothesis of a proposal: what the change is for, and the measured difference it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Literal, get_args

from pydantic import Field, JsonValue

from offline_search.candidates.components import JsonObject
from vllm_autoprune.record_file import FrozenModel

Expectation = Literal["higher", "same", "lower"]
"""Expected score of a proposal, compared with its parent's."""

EXPLORE = "explore"

PURPOSES: Mapping[str, str] = {
    "exploit": "the best candidate with other numbers",
    "ablate": "a candidate without one of its parts, or with that part replaced by a simpler one",
    EXPLORE: "a structure that is not listed",
    "combine": "parts of two or more candidates",
    "worst_category": "a change for the category with the largest share of the loss",
}
"""What proposals are asked for, in this order, and what each means in a prompt."""

MAX_CHARACTERS = 200
"""Length of a hypothesis; a longer one is cut, because prompts repeat it."""

BASE_PARENT = "base"
"""Name of the base policy alone, where a proposal names its parent."""


class Hypothesis(FrozenModel):
    """Purpose, reason and expectation of a proposal; empty where the reply has none."""

    purpose: str = ""
    text: str = Field(default="", max_length=MAX_CHARACTERS)
    expect: Expectation = "higher"


def list_purposes(first: int, count: int, measured: bool) -> Sequence[str]:
    """Purposes of ``count`` proposals, in turn from the place ``first`` on.

    Before a candidate is measured, all explore.
    """
    return list(islice(cycle(PURPOSES if measured else [EXPLORE]), first, first + count))


def parse_hypothesis(proposal: Mapping[str, JsonValue]) -> Hypothesis:
    """The hypothesis in a proposal; fields with other values than asked for are left out."""
    purpose, text, expect = (proposal.get(name) for name in ("purpose", "hypothesis", "expect"))
    words = " ".join(text.split()) if isinstance(text, str) else ""
    printable = "".join(character for character in words if character.isprintable())
    return Hypothesis(
        purpose=purpose if isinstance(purpose, str) and purpose in PURPOSES else "",
        text=printable[:MAX_CHARACTERS],
        expect=next((one for one in get_args(Expectation) if one == expect), "higher"),
    )


def hypothesis_fields() -> JsonObject:
    """JSON Schemas of the fields that a proposal of a list has beside its components."""
    return {
        "purpose": {"enum": list(PURPOSES)},
        "hypothesis": {"type": "string", "maxLength": MAX_CHARACTERS},
        "parent": {"type": "string", "maxLength": 8},
        "expect": {"enum": list(get_args(Expectation))},
    }
