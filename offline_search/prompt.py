"""Prompts of the proposer: the language of atoms, the task, and a summary of the history.

The constant part comes first, so that a server's prefix cache computes it once. Prompts say what is
asked for and what was measured, and give no advice on what to propose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from typing_extensions import TypedDict

from offline_search.candidates import BASE_PARENT, MAX_CHARACTERS, PROPOSALS, PURPOSES
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


def describe_score(settings: Settings) -> str:
    """What the scores in prompts are."""
    if settings.objective == "mme":
        return (
            "the MME total of the model (accuracy and accuracy+ of each category in per cent, "
            "summed) less that of the model with all tokens; higher is better"
        )
    return (
        "the mean log-probability of the reference answers less that of the model with all "
        "tokens; higher is better"
    )


@cache
def describe_language(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, from which atoms, how it is scored."""
    budget = settings.source_budget
    whole = settings.library == "paper"
    added = f'"source", "budget" and "safety" may be added; K is {budget}, whatever the budget.'
    library = f" {added}" if whole else ""
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. {_describe_bases(settings)} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for candidates. {describe_space(settings.space)}A score is \
{describe_score(settings)}. These atoms can be used:

{_render_atoms(settings).strip()}

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...\
{', "core": {"share": ..., ...} or null' if settings.core else ""}\
{', "rank_at": ...' if settings.rank_at else ""}\
{f', "{BASE}": {{"name": ...}}' if settings.bases else ""}}}{library}"""


def _describe_bases(settings: Settings) -> str:
    budget = settings.source_budget
    if not settings.bases:
        policy = BASE_POLICIES[settings.base_policy]
        return f"The base policy {policy.name} picks {budget} of them: {policy.doc}"
    listed = "\n".join(f"- {name}: {BASE_POLICIES[name].doc}" for name in settings.bases)
    return (
        f"A base policy picks {budget} of them, one of:\n{listed}\n"
        f'Scores of "base policy alone" are those of {settings.base_policy}.'
    )


def _render_atoms(settings: Settings) -> str:
    components = searched_components(settings.core, settings.rank_at, settings.library)
    return render_proposer_text(components, excluded_atoms(settings.library, settings.space))


def _system_prompt(settings: Settings) -> str:
    language = describe_language(settings)
    if settings.proposals_per_reply == 1:
        return f"{language}\n\nAnswer with one such object and nothing else."
    purposes = "\n".join(f"  - {name}: {meaning}" for name, meaning in PURPOSES.items())
    return f"""{language}

Answer with {{"{PROPOSALS}": [...]}} and nothing else: a list of such objects, each beginning with

- "purpose", one of
{purposes}
- "hypothesis", a sentence of at most {MAX_CHARACTERS} characters: what the change does, and why
- "parent", the name of the candidate that is changed, or "{BASE_PARENT}" for the base policy alone
- "expect", the score compared with the parent's: "higher", "same" or "lower"

A hypothesis is confirmed if the measured difference to the parent is as expected: more than two \
standard errors for higher or lower, less for same."""


def proposal_prompt(
    settings: Settings,
    summary: str,
    example: PruningState,
    number: int,
    count: int,
) -> Messages:
    """Prompt for one of ``count`` candidates, given the summary H_(t-1) and an example."""
    request = (
        f"{summary}\n\nA valid candidate looks like this:\n{_components(example, settings)}\n\n"
        f"Propose candidate {number + 1} of {count}, with a higher score. "
        "JSON only."
    )
    return _conversation(_system_prompt(settings), request)


def list_prompt(
    settings: Settings,
    summary: str,
    example: PruningState,
    first: int,
    count: int,
    total: int,
    purposes: Sequence[str],
) -> Messages:
    """Prompt for ``count`` of a round's ``total`` candidates, given the summary and an example."""
    which = f"candidate {first + 1}" if count == 1 else f"candidates {first + 1} to {first + count}"
    request = (
        f"{summary}\n\nA valid candidate looks like this:\n{_components(example, settings)}\n\n"
        f"Propose {which} of {total}, each different from all others, in search of a higher "
        f"score. Their purposes, in order: {', '.join(purposes)}. JSON only."
    )
    return _conversation(_system_prompt(settings), request)


def crossover_prompt(settings: Settings, parents: Sequence[Trial]) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = [
        f"Score {_score(parent.score)}:\n{_components(parent.require_state(), settings)}"
        for parent in parents
    ]
    best = max(parent.score for parent in parents)
    request = (
        "Parents:\n" + "\n".join(described) + "\n\nCombine the parents, to "
        f"score above {_score(best)}. JSON only."
    )
    return _conversation(_system_prompt(settings), request)


def repair_prompt(request: Messages, reply: str, problems: Sequence[str]) -> Messages:
    """The conversation so far with the problems of its reply, asking for a corrected one."""
    listed = "\n".join(f"- {problem[:300]}" for problem in problems[:8])
    correction: Message = {
        "role": "user",
        "content": f"That is not valid:\n{listed}\nWrite the corrected JSON object, nothing else.",
    }
    return (*request, {"role": "assistant", "content": reply[:_MAX_SHOWN_REPLY]}, correction)


def repair_list_prompt(
    request: Messages, reply: str, problems: Mapping[int, Sequence[str]], count: int
) -> Messages:
    """As :func:`repair_prompt`, for the proposals of a list that are invalid, by their number."""
    listed = "\n".join(
        f"- proposal {number}: {'; '.join(texts)[:300]}" for number, texts in problems.items()
    )
    correction: Message = {
        "role": "user",
        "content": f"Not valid are:\n{listed}\nWrite a list of these {len(problems)} proposals, "
        "corrected, in this order, and nothing else.",
    }
    shown = reply[: _MAX_SHOWN_REPLY * count]
    return (*request, {"role": "assistant", "content": shown}, correction)


def _conversation(system: str, request: str) -> Messages:
    return ({"role": "system", "content": system}, {"role": "user", "content": request})


def _components(state: PruningState, settings: Settings) -> str:
    return compact_text(state, bool(settings.bases))


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"


_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)

FUNCTION = "select"
"""Name of the function that a program defines."""

INITIAL_PROGRAM = """import numpy as np


def select(features, signals, K):
    kept = [int(index) for index in signals["reference"]]
    norms = np.linalg.norm(features, axis=1)
    kept[-1] = next(int(index) for index in np.argsort(-norms) if index not in kept)
    return kept
"""
"""The base policy's picks with the last one exchanged: what the smallest state does."""


def describe_code_task(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, its inputs, and how it is scored."""
    policy = BASE_POLICIES[settings.base_policy]
    signals = "\n".join(f"- {name}: {effect}" for name, effect in SIGNALS.items())
    return f"""You design a policy that decides which {settings.source_budget} visual tokens of an \
image a vision-language model keeps. It is a Python function select(features, signals, K) that \
returns the indices of K different tokens. features is a numpy array (N, D), the tokens as the \
language model reads them; signals is a dict of numpy arrays:

{signals}

The base policy is {policy.name}: {policy.doc} The function is called once for each image and \
question. A score is {describe_score(settings)}. The program may import numpy, math and random; \
it has no files and no network, and returns the same indices each time."""


def program_prompt(settings: Settings, example: str, number: int, count: int) -> Messages:
    """Prompt for one of ``count`` programs, given an example."""
    return _conversation(
        describe_code_task(settings),
        f"A valid program looks like this:\n{_fence(example)}\n\nWrite program {number + 1} of "
        f"{count}, with a higher score. Python only.",
    )


def program_crossover_prompt(settings: Settings, parents: Sequence[Trial]) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = [f"Score {_score(one.score)}:\n{_fence(one.proposal.program)}" for one in parents]
    best = max(parent.score for parent in parents)
    return _conversation(
        describe_code_task(settings),
        "Parents:\n" + "\n".join(described) + "\n\nCombine the parents, to score above "
        f"{_score(best)}. Python only.",
    )


def extract_program(reply: str) -> str:
    """The program in a reply, fenced or not; raises :class:`ValueError` if there is none."""
    blocks = _FENCED.findall(reply) or [reply]
    programs = [block for block in blocks if f"def {FUNCTION}(" in block]
    if not programs:
        raise ValueError(f"the reply defines no function {FUNCTION}(features, signals, K)")
    return f"{programs[0].strip()}\n"


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
