"""Prompts for candidates in free code: the task, the function's inputs, and earlier programs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from offline_search.evaluation.history import Trial
from offline_search.programs.selection import SIGNALS
from offline_search.proposers.prompt import Message, Messages, describe_score
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

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
        settings,
        f"A valid program looks like this:\n{_fence(example)}\n\nWrite program {number + 1} of "
        f"{count}, with a higher score. Python only.",
    )


def program_crossover_prompt(settings: Settings, parents: Sequence[Trial]) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = [f"Score {_score(one.score)}:\n{_fence(one.proposal.program)}" for one in parents]
    best = max(parent.score for parent in parents)
    return _conversation(
        settings,
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


def _conversation(settings: Settings, request: str) -> Messages:
    system: Message = {"role": "system", "content": describe_code_task(settings)}
    return (system, {"role": "user", "content": request})


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"
