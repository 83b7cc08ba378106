"""Prompts of the proposer: the language of atoms, the task, and a summary of the history.

The constant part comes first, so that a server's prefix cache computes it once. Prompts say what is
asked for and what was measured, and give no advice on what to propose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Literal

from typing_extensions import TypedDict

from offline_search.candidates.components import compact_json, searched_components
from offline_search.candidates.menu import Menu
from offline_search.evaluation.history import Trial
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
def describe_language(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, from which atoms, how it is scored."""
    policy = BASE_POLICIES[settings.base_policy]
    budget = settings.source_budget
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. The base policy {policy.name} picks {budget} of them: {policy.doc} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for candidates. A score is the mean log-probability of the reference \
answers less that of the model with all tokens; higher is better. These atoms can be used:

{render_proposer_text(searched_components(settings.core, settings.rank_at)).strip()}

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...\
{', "core": {"share": ..., ...} or null' if settings.core else ""}\
{', "rank_at": ...' if settings.rank_at else ""}}}"""


def _system_prompt(settings: Settings) -> str:
    return f"{describe_language(settings)}\n\nAnswer with one such object and nothing else."


def proposal_prompt(
    settings: Settings,
    summary: str,
    example: PruningState,
    number: int,
    count: int,
    menu: Menu | None = None,
) -> Messages:
    """Prompt for one of ``count`` candidates, given the summary H_(t-1) and an example."""
    request = (
        f"{summary}\n\nA valid candidate looks like this:\n{_components(example)}\n\n"
        f"Propose candidate {number + 1} of {count}, with a higher score. "
        f"{_menu_sentence(menu)}JSON only."
    )
    return _conversation(settings, request)


def crossover_prompt(
    settings: Settings, parents: Sequence[Trial], menu: Menu | None = None
) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = [
        f"Score {_score(parent.score)}:\n{_components(parent.require_state())}"
        for parent in parents
    ]
    best = max(parent.score for parent in parents)
    request = (
        "Parents:\n" + "\n".join(described) + "\n\nCombine the parents, to "
        f"score above {_score(best)}. {_menu_sentence(menu)}JSON only."
    )
    return _conversation(settings, request)


def repair_prompt(request: Messages, reply: str, problems: Sequence[str]) -> Messages:
    """The conversation so far with the problems of its reply, asking for a corrected one."""
    listed = "\n".join(f"- {problem[:300]}" for problem in problems[:8])
    correction: Message = {
        "role": "user",
        "content": f"That is not valid:\n{listed}\nWrite the corrected JSON object, nothing else.",
    }
    return (*request, {"role": "assistant", "content": reply[:4000]}, correction)


def _conversation(settings: Settings, request: str) -> Messages:
    system: Message = {"role": "system", "content": _system_prompt(settings)}
    return (system, {"role": "user", "content": request})


def _components(state: PruningState) -> str:
    return json.dumps(compact_json(state), separators=(",", ":"))


def _menu_sentence(menu: Menu | None) -> str:
    return "" if menu is None else f"{menu.describe()} "


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"
