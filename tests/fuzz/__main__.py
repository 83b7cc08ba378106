"""Draw texts of states from a seed, judge each, and count the outcomes: ``python -m tests.fuzz``.

Exit status 0 without faults: no exception but StateError, no disagreement between loader and JSON
Schema, no text that takes long, no accepted state that cannot be written, materialized or checked.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from tests.fuzz.generator import Json, draw_text, state_schema
from vllm_autoprune import BudgetError, PruningState, StateError, load_state, materialize
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.tpdsl.atoms.safety import VERDICTS
from vllm_autoprune.tpdsl.loading import RULES
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import safety_check, synthetic_probes

SLOW = 1.0
"""Seconds of processor time within which any text must be accepted or refused."""

SMALL = 5
"""K at which most states run, on an image of 16 tokens."""

_BUDGETS = (1, 2, 7, 64, 500, MAX_BUDGET, 0, -1, MAX_BUDGET + 1)
_LONGEST_MESSAGE = 64 * 1024
FAULT = "fault: "


def judge(content: str | bytes, file: Path, *, fully: bool = False) -> list[str]:
    """Outcomes of one text: "accepted" or "refused: KIND", its atoms, and faults.

    Faults are violations of what the loader guarantees, any exception but its StateError among
    them. ``fully``: at the state's own K on all probes, and by the full schema. A text that the
    loader would take for a name or a path is read from ``file``.
    """
    outcomes: list[str] = []
    try:
        source: Any = file
        if isinstance(content, str) and content.lstrip(" \t\r\n").startswith("{"):
            source = content
        elif isinstance(content, str):
            file.write_bytes(content.encode("utf-8", "surrogatepass"))
        else:
            file.write_bytes(content)
        state, kinds, begun = None, set[str](), time.process_time()
        try:
            state = load_state(source)
            outcomes.append("accepted")
        except StateError as error:
            kinds = {problem.kind for problem in error.problems}
            outcomes += [f"refused: {kind}" for kind in sorted(kinds)]
            outcomes += (FAULT + fault for fault in _untidy(error))
        if (seconds := time.process_time() - begun) > SLOW:
            outcomes.append(f"{FAULT}took {seconds:.1f} s")
        # No schema can express the rules.
        if state is not None or not kinds <= {*RULES, "more"}:
            outcomes += (FAULT + fault for fault in _disagreements(content, kinds, fully))
        if state is not None:
            outcomes += _use(state, fully)
    except Exception as error:
        outcomes.append(f"{FAULT}{type(error).__name__}: {error}"[:300])
    return outcomes


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


def _disagreements(content: str | bytes, kinds: set[str], fully: bool) -> Iterator[str]:
    """Where the schema says otherwise than the loader, which has refused for these reasons."""
    verdict = f"refuses it for {sorted(kinds)}" if kinds else "accepts it"
    try:
        text = content.decode() if isinstance(content, bytes) else content
        # Python refuses to read longer numbers.
        value = json.loads(text, parse_int=lambda d: int(d) if len(d) < 4000 else math.inf)
    except (ValueError, RecursionError):
        yield f"text is no JSON, but the loader {verdict}"
        return
    accepts = _quick_validator()(value)
    if accepts == bool(kinds):
        yield f"schema {'accepts' if accepts else 'refuses'} it, the loader {verdict}"
    if fully and jsonschema.Draft202012Validator(state_schema()).is_valid(value) != accepts:
        yield "quick and plain jsonschema differ"


@cache
def _quick_validator() -> Callable[[Any], bool]:
    """The verdict of ``jsonschema``, by the branch of a ``oneOf`` that the instance's tag selects.

    The other branches cannot match, because each requires another constant, and with a hundred
    atoms they would take most of the time. Judged fully, a text is compared with the full schema.
    """
    plainly = jsonschema.Draft202012Validator.VALIDATORS["oneOf"]

    def one_of(validator: Any, branches: Any, instance: Any, where: Json) -> Iterator[Any]:
        tag = where.get("discriminator", {}).get("propertyName")
        if tag is None or not isinstance(instance, dict):
            yield from plainly(validator, branches, instance, where)
            return
        for branch in branches:
            described = state_schema()["$defs"][branch["$ref"].rpartition("/")[2]]
            if described["properties"][tag]["const"] == instance.get(tag):
                yield from validator.descend(instance, branch)
                return
        yield jsonschema.ValidationError(f"no branch for {instance.get(tag)!r}")

    extended = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"oneOf": one_of})
    accepts: Callable[[Any], bool] = extended(state_schema()).is_valid
    return accepts


def _use(state: PruningState, fully: bool) -> Iterator[str]:
    """Atoms of an accepted state, why it is unsafe, and faults: written, at every K, checked."""
    text = state.dumps()
    yield from (f"atom: {name}" for name in re.findall(r'"atom":\s*"(\w+)"', text))
    again = load_state(text)
    if again != state or again.digest != state.digest or again.dumps() != text:
        yield f"{FAULT}differs from what it writes"
    if load_state(json.loads(text)) != state or pickle.loads(pickle.dumps(state)) != state:
        yield f"{FAULT}differs from its mapping, or from what it pickles"
    if not _quick_validator()(json.loads(text)):
        yield f"{FAULT}schema refuses what it writes"
    materialize(state)
    for budget in _BUDGETS:
        try:
            policy = materialize(state, budget)
        except BudgetError as error:
            if not error.problems:
                yield f"{FAULT}K = {budget}: refused without a problem"
        else:
            if not 1 <= policy.budget <= MAX_BUDGET or policy.r_min > policy.budget:
                yield f"{FAULT}K = {budget}: {policy.budget} tokens, r_min = {policy.r_min}"
    least = state.constraints.selector.insists_on or 0
    k = min(max(SMALL, least), state.budget.limit or MAX_BUDGET)
    policy = materialize(state) if fully else materialize(state, k)
    probes = _probes()
    one_probe = [probes[int(state.digest[0], 16) % len(probes)]]
    record = safety_check(policy, None if fully else one_probe)
    if [verdict.name for verdict in record.verdicts] != list(VERDICTS):
        yield f"{FAULT}the safety record lacks verdicts"
    for verdict in record.failures():  # without numbers, so that equal reasons count as one
        yield "unsafe: " + re.sub(r"\d+", "#", f"{verdict.name}: {verdict.detail}")[:200]


@cache
def _probes() -> Any:
    return synthetic_probes(SMALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge texts; exit status 1 if there are faults."""
    parser = CommandParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="texts in all")
    parser.add_argument("--first", type=int, default=0, help="index to begin with")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    options = parser.parse_args(arguments)
    outcomes, atoms, faults, begun = Counter[str](), set[str](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.first, options.count):
            content, mutations = draw_text(options.seed, index)
            for outcome in judge(content, Path(folder, "state.json"), fully=index % 500 == 0):
                if outcome.startswith(FAULT):
                    faults.append(f"text {index} ({', '.join(mutations)}): {outcome}")
                elif outcome.startswith("atom: "):
                    atoms.add(outcome.removeprefix("atom: "))
                else:
                    outcomes[outcome] += 1
            if (done := index - options.first) % 250 == 0:
                rate = done / (time.monotonic() - begun)
                print(f"{index} of {options.count}, {len(faults)} faults, {rate:.0f}/s", flush=True)
    print(*(f"{count:7} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    print(f"atoms in accepted states: {len(atoms & {*ATOMS.names()})} of {len(ATOMS)}")
    print(f"{len(faults)} faults", *faults[:50], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
