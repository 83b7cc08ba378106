"""Judgement of one text by loader, schema, round trip, Materialize and SafetyCheck."""

from __future__ import annotations

import json
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from tests.fuzz.generator import Json
from vllm_autoprune import (
    BudgetError,
    PruningState,
    StateError,
    VisualTokens,
    load_state,
    materialize,
    safety_check,
)
from vllm_autoprune.tpdsl.atoms.safety import VERDICTS
from vllm_autoprune.tpdsl.loading import RULES
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.safety import synthetic_probes

Accepts = Callable[[Any], bool]


def make_quick_validator(schema: Json) -> Accepts:
    """The verdict of ``jsonschema``, by the branch of a ``oneOf`` that the instance's tag selects.

    The other branches cannot match, because each requires another constant, and with a hundred
    atoms they would take most of the time. Judged fully, a text is compared with the full schema.
    """
    plainly = jsonschema.Draft202012Validator.VALIDATORS["oneOf"]

    def one_of(validator: Any, branches: Any, instance: Any, where: Json) -> Iterator[Any]:
        field = where.get("discriminator", {}).get("propertyName")
        if field is None or not isinstance(instance, dict):
            yield from plainly(validator, branches, instance, where)
            return
        for branch in branches:
            described = schema["$defs"][branch["$ref"].rpartition("/")[2]]
            if described["properties"][field]["const"] == instance.get(field):
                yield from validator.descend(instance, branch)
                return
        yield jsonschema.ValidationError(f"no branch for {instance.get(field)!r}")

    extended = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"oneOf": one_of})
    accepts: Accepts = extended(schema).is_valid
    return accepts


SLOW = 1.0
"""Seconds of processor time within which any text must be accepted or refused."""

SMALL = 5
"""K at which most states run, on an image of 16 tokens."""

_BUDGETS = (1, 2, 7, 64, 500, MAX_BUDGET, 0, -1, MAX_BUDGET + 1)
_LONGEST_MESSAGE = 64 * 1024


@dataclass
class Finding:
    """Outcome of one text; ``faults`` are violations of what the loader guarantees."""

    accepted: bool = False
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0
    atoms: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)


class Judge:
    """Judges texts; ``folder`` holds the file that a text is read from."""

    def __init__(self, folder: Path) -> None:
        schema = PruningState.model_json_schema()
        self._plainly = jsonschema.Draft202012Validator(schema).is_valid
        self._accepts = make_quick_validator(schema)
        self._file = folder / "state.json"

    def look(self, content: str | bytes, *, fully: bool = False) -> Finding:
        """Judge one text. ``fully``: at the state's own K on all probes, and by the full schema.

        Any exception but the loader's StateError is recorded as a fault and not raised.
        """
        finding = Finding()
        try:
            state = self._load(content, finding)
        except Exception as error:
            finding.faults.append(f"loader raised {type(error).__name__}: {error}"[:300])
            return finding
        try:
            finding.faults += self._disagreements(content, finding, fully)
            if state is not None:
                finding.atoms = tuple(re.findall(r'"atom":\s*"(\w+)"', state.dumps()))
                finding.faults += _round_trip(state, self._accepts)
                finding.faults += _budgets(state)
                least = state.constraints.selector.insists_on or 0
                k = min(max(SMALL, least), state.budget.limit or MAX_BUDGET)
                policy = materialize(state) if fully else materialize(state, k)
                probes = _probes()
                one_probe = [probes[int(state.digest[0], 16) % len(probes)]]
                record = safety_check(policy, None if fully else one_probe)
                if [verdict.name for verdict in record.verdicts] != list(VERDICTS):
                    finding.faults.append("the safety record lacks verdicts")
                # Numbers are removed, so that equal reasons count as one.
                report = (f"{v.name}: {v.detail}" for v in record.failures())
                finding.broken = tuple(re.sub(r"\d+", "#", reason)[:200] for reason in report)
        except Exception as error:
            finding.faults.append(f"after loading: {type(error).__name__}: {error}"[:300])
        return finding

    def _load(self, content: str | bytes, finding: Finding) -> PruningState | None:
        source: str | Path = self._file
        if isinstance(content, str) and content.lstrip(" \t\r\n").startswith("{"):
            source = content
        elif isinstance(content, str):
            self._file.write_bytes(content.encode("utf-8", "surrogatepass"))
        else:
            self._file.write_bytes(content)
        begun = time.process_time()
        try:
            state = load_state(source)
            finding.accepted = True
            return state
        except StateError as error:
            finding.kinds = tuple(sorted({problem.kind for problem in error.problems}))
            finding.faults += _untidy(error)
            return None
        finally:
            finding.seconds = time.process_time() - begun
            if finding.seconds > SLOW:
                finding.faults.append(f"took {finding.seconds:.1f} s")

    def _disagreements(self, content: str | bytes, finding: Finding, fully: bool) -> Iterator[str]:
        """Compare loader and schema, except for the rules that no schema can express."""
        if not finding.accepted and set(finding.kinds) <= {*RULES, "more"}:
            return
        try:
            text = content.decode() if isinstance(content, bytes) else content
            value = json.loads(text, parse_int=_parse_int)
        except (ValueError, RecursionError):
            unread = "is no JSON, but the loader"
            yield f"text {unread} {'accepts it' if finding.accepted else f'says {finding.kinds}'}"
            return
        accepts = self._accepts(value)
        if accepts != finding.accepted:
            message = "accepts" if accepts else "refuses"
            yield f"schema {message} it, the loader says {finding.kinds or 'yes'}"
        if fully and self._plainly(value) != accepts:
            yield "quick and plain jsonschema differ"


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) < 4000 else math.inf


def _untidy(error: StateError) -> Iterator[str]:
    """Faults of an error message."""
    if not error.problems:
        yield "refused without a problem"
    if len(str(error)) > _LONGEST_MESSAGE or not str(error).replace("\n", "").isprintable():
        yield "message is too long, or does not print"
    for problem in error.problems:
        if not (problem.what and problem.fix and problem.kind):
            yield f"says too little: {problem!r}"
        if problem.where and not problem.where.startswith("/"):
            yield f"no JSON pointer: {problem.where!r}"


def _round_trip(state: PruningState, accepts: Any) -> Iterator[str]:
    text = state.dumps()
    again = load_state(text)
    if again != state or again.digest != state.digest or again.dumps() != text:
        yield "differs from what it writes"
    if load_state(json.loads(text)) != state:
        yield "differs from its mapping"
    if pickle.loads(pickle.dumps(state)) != state:
        yield "differs from what it pickles"
    if not accepts(json.loads(text)):
        yield "schema refuses what it writes"


def _budgets(state: PruningState) -> Iterator[str]:
    """Materialize succeeds at the state's own K, and at others succeeds or raises BudgetError."""
    materialize(state)
    for budget in _BUDGETS:
        try:
            policy = materialize(state, budget)
        except BudgetError as error:
            if not error.problems:
                yield f"K = {budget}: refused without a problem"
        else:
            if not 1 <= policy.budget <= MAX_BUDGET or policy.r_min > policy.budget:
                yield f"K = {budget}: {policy.budget} tokens, r_min = {policy.r_min}"


@lru_cache(maxsize=1)
def _probes() -> list[VisualTokens]:
    return synthetic_probes(SMALL)
