"""What a proposer is told: the language, the task, the history, and what to write.

Knows nothing about endpoints. The part that never changes comes first and is the same in every
request, so that a server's prefix cache reads it once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Literal

from typing_extensions import TypedDict

from offline_search.history import Trial
from offline_search.menu import Menu
from offline_search.proposal import COMPONENTS, alpha
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.states.catalogue import render_proposer_text
from vllm_autoprune.tpdsl.states.state import PruningState


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = tuple[Message, ...]


@cache
def language(settings: Settings) -> str:
    """The unchanging part: what is designed, in which language, and how it is scored."""
    policy = BASE_POLICIES[settings.base_policy]
    budget = settings.source_budget
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. The base policy {policy.name} picks {budget} of them: {policy.doc} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for better candidates. Higher scores are better; a small q_e is safe, \
diverse signals help. Use only these atoms:

{render_proposer_text(COMPONENTS).strip()}

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...}}"""


def task(settings: Settings) -> str:
    """What is asked of whoever writes JSON."""
    return f"{language(settings)}\n\nAnswer with one such object and nothing else."


def propose(
    settings: Settings,
    summary: str,
    example: PruningState,
    number: int,
    count: int,
    menu: Menu | None = None,
) -> Messages:
    """Algorithm 2's LLMPropose: one of ``count`` candidates, given H_(t-1), of a menu's atoms."""
    shown = json.dumps(alpha(example), separators=(",", ":"))
    asked = (
        f"{summary}\n\nA valid candidate looks like this:\n{shown}\n\n"
        f"Propose candidate {number + 1} of {count}: change atoms, weights or q_e where the "
        f"history says that it pays. {_offered(menu)}JSON only."
    )
    return ({"role": "system", "content": task(settings)}, {"role": "user", "content": asked})


def cross(settings: Settings, parents: Sequence[Trial], menu: Menu | None = None) -> Messages:
    """EvoPrompting: parents with their scores, and the score a child should exceed."""
    told = []
    for parent in parents:
        assert parent.state is not None and parent.objective is not None
        shown = json.dumps(alpha(parent.state), separators=(",", ":"))
        told.append(f"Score {1000 * parent.objective:+.0f}:\n{shown}")
    aim = max(parent.objective or 0.0 for parent in parents)
    asked = (
        "Parents:\n" + "\n".join(told) + "\n\nCombine the parents and change one thing, to score "
        f"above {1000 * aim:+.0f}. {_offered(menu)}JSON only."
    )
    return ({"role": "system", "content": task(settings)}, {"role": "user", "content": asked})


def _offered(menu: Menu | None) -> str:
    return "" if menu is None else f"{menu.told()} "


def repair(asked: Messages, reply: str, problems: Sequence[str]) -> Messages:
    """The same conversation, with what was wrong with the reply."""
    told = "\n".join(f"- {problem[:300]}" for problem in problems[:8])
    wrong: Message = {
        "role": "user",
        "content": f"That is not valid:\n{told}\nWrite the corrected JSON object, nothing else.",
    }
    said: Message = {"role": "assistant", "content": reply[:4000]}
    return (*asked, said, wrong)
