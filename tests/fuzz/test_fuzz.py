"""The loader on generated states, which a judge accepts or finds fault with.

``--exhaustive`` draws five thousand texts in place of some hundreds.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.generator import REQUEST_KINDS, SCHEMA, draw_request, texts
from vllm_autoprune import (
    BudgetError,
    PruningState,
    StateError,
    load_state,
    materialize,
)
from vllm_autoprune.tpdsl.atoms.safety import VERDICTS
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.loading import RULES
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import safety_check, synthetic_probes

SLOW = 1.0
"""Seconds of processor time within which any text must be accepted or refused."""

SMALL = 5
"""K at which most states run, on an image of 16 tokens."""

BUDGETS = (1, 2, 7, 64, 500, MAX_BUDGET, 0, -1, MAX_BUDGET + 1)

schema_accepts: Callable[[Any], bool] = jsonschema.Draft202012Validator(SCHEMA).is_valid


def judge(
    content: str | bytes, file: Path, fully: bool = False
) -> PruningState | set[str]:
    """The state of a text, or the kinds of its problems; fails where the loader's promises do.

    ``fully``: at the state's own K on all probes. A text that the loader would take for a name or a
    path is read from ``file``.
    """
    source: Any = file
    if isinstance(content, str) and content.lstrip(" \t\r\n").startswith("{"):
        source = content
    else:
        raw = (
            content
            if isinstance(content, bytes)
            else content.encode("utf-8", "surrogatepass")
        )
        file.write_bytes(raw)
    state = None
    refusal = None
    kinds = set[str]()
    begun = time.process_time()
    try:
        state = load_state(source)
    except StateError as error:
        refusal = error
    if refusal is not None:
        kinds = {problem.kind for problem in refusal.problems}
        message = str(refusal).replace("\n", "")
        assert len(message) <= 64 * 1024 and message.isprintable(), message[:999]
        assert kinds, "refused without a problem"
        for problem in refusal.problems:
            assert problem.what and problem.fix and problem.kind, problem
            assert not problem.where or problem.where.startswith("/"), "no JSON pointer"
    assert (seconds := time.process_time() - begun) < SLOW, f"took {seconds:.1f} s"
    if not kinds or not kinds <= {*RULES, "more"}:  # no schema can express the rules
        compare_with_schema(content, kinds)
    if state is None:
        return kinds
    use(state, fully)
    return state


def compare_with_schema(content: str | bytes, kinds: set[str]) -> None:
    """The schema accepts what the loader has not refused for any of these reasons."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        # Python refuses to read longer numbers.
        value = json.loads(
            text, parse_int=lambda d: int(d) if len(d) < 4000 else math.inf
        )
    except (ValueError, RecursionError):
        assert kinds, "text is no JSON, but the loader accepts it"
        return
    accepts = schema_accepts(value)
    assert accepts is not bool(kinds), (
        f"schema accepts: {accepts}, the loader refuses for {kinds}"
    )


@cache
def probes() -> Any:
    return synthetic_probes(SMALL)


def use(state: PruningState, fully: bool) -> None:
    """An accepted state can be written, read again, materialized at every K and checked."""
    text = state.dumps()
    again = load_state(text)
    assert (again, again.digest, again.dumps()) == (state, state.digest, text)
    assert load_state(json.loads(text)) == state == pickle.loads(pickle.dumps(state))
    assert schema_accepts(json.loads(text)), "schema refuses what it writes"
    shipped = materialize(state)
    for budget in BUDGETS:
        with suppress(BudgetError):
            policy = materialize(state, budget)
            assert 1 <= policy.budget <= MAX_BUDGET and policy.r_min <= policy.budget, (
                budget
            )
    minimum = state.constraints.selector.explicit_r_min or 0
    k = min(max(SMALL, minimum), state.budget.limit or MAX_BUDGET)
    probe = probes()[int(state.digest[0], 16) % len(probes())]
    record = safety_check(
        shipped if fully else materialize(state, k), None if fully else [probe]
    )
    assert [verdict.name for verdict in record.verdicts] == list(VERDICTS)


@pytest.mark.parametrize(
    ("number", "fully"),
    [
        (0, False),
        (1, True),
        *(pytest.param(n, False, marks=pytest.mark.exhaustive) for n in range(2, 22)),
    ],
)
def test_texts_are_accepted_or_refused_as_promised(
    tmp_path: Path, number: int, fully: bool
) -> None:
    examples = 250
    outcomes = Counter[str]()
    atoms = set[str]()

    # Some hundreds each, because Hypothesis remembers all that it has drawn.
    @seed(number)
    @settings(
        max_examples=20 if fully else examples, suppress_health_check=list(HealthCheck)
    )
    @given(texts())
    def judge_text(text: str | bytes) -> None:
        outcome = judge(text, tmp_path / "state.json", fully)
        outcomes.update(["accepted"] if isinstance(outcome, PruningState) else outcome)
        if isinstance(outcome, PruningState):
            atoms.update(
                name for name in ATOMS.names() if f'"{name}"' in outcome.dumps()
            )

    judge_text()
    # Valid and invalid texts must both be frequent for the sample to be informative.
    if not fully:
        assert 0.2 < outcomes["accepted"] / examples < 0.8
        assert len(outcomes) > 8 and len(atoms) > len(ATOMS) / 4


def test_every_kind_of_request_is_drawn_and_repeated_by_its_seed() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "a"},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    requests, again = (
        [draw_request([body], Random(f"0/{n}"), ("m", "adapter")) for n in range(150)]
        for _ in range(2)
    )
    assert requests == again
    assert {request.kind for request in requests} - {"spoilt"} == set(REQUEST_KINDS)
