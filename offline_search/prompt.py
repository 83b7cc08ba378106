"""Prompts of the proposer: the language of atoms or the task in code, and a summary of the history.

The constant part comes first, so that a server's prefix cache computes it once. Prompts say what is
asked for and what was measured, and give no advice on what to propose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from typing_extensions import TypedDict

from offline_search.candidates import BASE_PARENT, MAX_HYPOTHESIS, PROPOSALS, PURPOSES
from offline_search.components import BASE, compact_text, searched_components
from offline_search.history import Trial
from offline_search.programs import SIGNALS
from offline_search.search_space import describe_space, excluded_atoms
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.reference import render_proposer_text
from vllm_autoprune.tpdsl.state import PruningState


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = tuple[Message, ...]

_MAX_SHOWN_REPLY = 4000
"""Characters of an invalid proposal that are sent back with its problems."""

_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)

INITIAL_PROGRAM = """import numpy as np


def select(features, signals, K):
    kept = [int(index) for index in signals["reference"]]
    norms = np.linalg.norm(features, axis=1)
    kept[-1] = next(int(index) for index in np.argsort(-norms) if index not in kept)
    return kept
"""
"""The base policy's picks with the last one exchanged: what the smallest state does."""


@cache
def describe_task(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, from what, and how it is scored."""
    budget, policy = settings.source_budget, BASE_POLICIES[settings.base_policy]
    score = "mean log-probability of the reference answers"
    if settings.objective == "mme":
        score = (
            "MME total of the model (accuracy and accuracy+ of each category in per cent, summed)"
        )
    score = f"A score is the {score} less that of the model with all tokens; higher is better."
    if settings.writes_code:
        signals = "\n".join(f"- {name}: {effect}" for name, effect in SIGNALS.items())
        return f"""You design a policy that decides which {budget} visual tokens of an \
image a vision-language model keeps. It is a Python function select(features, signals, K) that \
returns the indices of K different tokens. features is a numpy array (N, D), the tokens as the \
language model reads them; signals is a dict of numpy arrays:

{signals}

The base policy is {policy.name}: {policy.doc} The function is called once for each image and \
question. {score} The program may import numpy, math and random; \
it has no files and no network, and returns the same indices each time."""
    base = f"The base policy {policy.name} picks {budget} of them: {policy.doc}"
    if settings.bases:
        listed = "\n".join(f"- {name}: {BASE_POLICIES[name].doc}" for name in settings.bases)
        base = (
            f"A base policy picks {budget} of them, one of:\n{listed}\n"
            f'Scores of "base policy alone" are those of {policy.name}.'
        )
    atoms = render_proposer_text(searched_components(settings), excluded_atoms(settings))
    library = ""
    if settings.library == "paper":
        library = (
            f' "source", "budget" and "safety" may be added; K is {budget}, whatever the budget.'
        )
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. {base} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for candidates. {describe_space(settings.space)}{score} \
These atoms can be used:

{atoms.strip()}

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...\
{', "core": {"share": ..., ...} or null' if settings.core else ""}\
{', "rank_at": ...' if settings.rank_at else ""}\
{f', "{BASE}": {{"name": ...}}' if settings.bases else ""}}}{library}"""


def _ask(settings: Settings, request: str) -> Messages:
    """A request with the description of the task, and the form of the answer."""
    system = describe_task(settings)
    if settings.proposals_per_reply > 1:
        purposes = "\n".join(f"  - {name}: {meaning}" for name, meaning in PURPOSES.items())
        system += f"""

Answer with {{"{PROPOSALS}": [...]}} and nothing else: a list of such objects, each beginning with

- "purpose", one of
{purposes}
- "hypothesis", a sentence of at most {MAX_HYPOTHESIS} characters: what the change does, and why
- "parent", the name of the candidate that is changed, or "{BASE_PARENT}" for the base policy alone
- "expect", the score compared with the parent's: "higher", "same" or "lower"

A hypothesis is confirmed if the measured difference to the parent is as expected: more than two \
standard errors for higher or lower, less for same."""
    elif not settings.writes_code:
        system += "\n\nAnswer with one such object and nothing else."
    form = "Python" if settings.writes_code else "JSON"
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": f"{request} {form} only."},
    )


def proposal_prompt(
    settings: Settings, summary: str, example: PruningState, number: int, count: int
) -> Messages:
    """Prompt for one of ``count`` candidates, given the summary H_(t-1) and an example."""
    which = f"Propose candidate {number + 1} of {count}, with a higher score."
    return _ask(settings, f"{_show_history(settings, summary, example)}{which}")


def list_prompt(
    settings: Settings,
    summary: str,
    example: PruningState,
    begin: int,
    count: int,
    total: int,
    purposes: Sequence[str],
) -> Messages:
    """Prompt for ``count`` of a round's ``total`` candidates, given the summary and an example."""
    which = f"candidate {begin + 1}" if count == 1 else f"candidates {begin + 1} to {begin + count}"
    request = (
        f"Propose {which} of {total}, each different from all others, in search of a higher "
        f"score. Their purposes, in order: {', '.join(purposes)}."
    )
    return _ask(settings, f"{_show_history(settings, summary, example)}{request}")


def program_prompt(settings: Settings, number: int, count: int) -> Messages:
    """Prompt for one of ``count`` programs, before any is measured."""
    which = f"Write program {number + 1} of {count}, with a higher score."
    return _ask(settings, f"A valid program looks like this:\n{_fence(INITIAL_PROGRAM)}\n\n{which}")


def crossover_prompt(settings: Settings, parents: Sequence[Trial]) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = "\n".join(
        f"Score {format_score(parent.score)}:\n"
        + (
            _fence(parent.proposal.program)
            if settings.writes_code
            else compact_text(parent.require_state(), bool(settings.bases))
        )
        for parent in parents
    )
    best = format_score(max(parent.score for parent in parents))
    return _ask(settings, f"Parents:\n{described}\n\nCombine the parents, to score above {best}.")


def repair_prompt(request: Messages, reply: str, problems: Sequence[str]) -> Messages:
    """The conversation so far with the problems of its reply, asking for a corrected one."""
    listed = "\n".join(f"- {problem[:300]}" for problem in problems[:8])
    correction = f"That is not valid:\n{listed}\nWrite the corrected JSON object, nothing else."
    return _correct(request, reply[:_MAX_SHOWN_REPLY], correction)


def repair_list_prompt(
    request: Messages, reply: str, problems: Mapping[int, Sequence[str]], count: int
) -> Messages:
    """As :func:`repair_prompt`, for the proposals of a list that are invalid, by their number."""
    listed = "\n".join(
        f"- proposal {number}: {'; '.join(texts)[:300]}" for number, texts in problems.items()
    )
    correction = (
        f"Not valid are:\n{listed}\nWrite a list of these {len(problems)} proposals, "
        "corrected, in this order, and nothing else."
    )
    return _correct(request, reply[: _MAX_SHOWN_REPLY * count], correction)


def _correct(request: Messages, reply: str, correction: str) -> Messages:
    return (
        *request,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": correction},
    )


def extract_program(reply: str) -> str:
    """The program in a reply, fenced or not; raises :class:`ValueError` if there is none."""
    for block in _FENCED.findall(reply) or [reply]:
        if "def select(" in block:
            return f"{block.strip()}\n"
    raise ValueError("the reply defines no function select(features, signals, K)")


def format_score(value: float) -> str:
    """A score as prompts show it: an objective in thousandths."""
    return f"{1000 * value:+.0f}"


def _show_history(settings: Settings, summary: str, example: PruningState) -> str:
    text = compact_text(example, bool(settings.bases))
    return f"{summary}\n\nA valid candidate looks like this:\n{text}\n\n"


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
