"""Accuracy measured on mini-LLaVA, kept in the provenance of state files; and its table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from benchmarks.zoo.states import SEARCH_RESULTS, SOURCE, build_states
from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.evaluation.journal import RESIZED
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.materialize import PruningPolicy

EVALUATED_ON = (
    "the embedded mini-LLaVA through vLLM on a CPU, test split, every kind of question, "
    "greedy; K is given by the request; `python -m benchmarks.zoo measure`"
)
_LINE_WIDTH = 96


class Row(BaseModel):
    """Accuracy at one budget, in per cent.

    ``resized`` is that of the resize control on the same questions, ``less_resized`` the state less
    the control; None where it was not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int
    accuracy: float
    accuracy_plus: float
    prompt_tokens: float
    resized: float | None = None
    less_resized: Estimate | None = None


class Evidence(BaseModel):
    """Measurements of a state; ``behaviour`` is the digest of the state that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    questions: int
    behaviour: str
    rows: tuple[Row, ...]


def read_evidence(state: PruningState) -> Evidence | None:
    """The evidence in a state's provenance, or None where its scores have another form."""
    try:
        return Evidence.model_validate(state.provenance.scores)
    except ValidationError:
        return None


def with_evidence(state: PruningState, evidence: Evidence) -> PruningState:
    """The state with this evidence; its digest stays the same, as provenance is outside it."""
    provenance = state.provenance.model_copy(
        update={
            "evaluated_on": EVALUATED_ON,
            "scores": evidence.model_dump(mode="json", exclude_none=True),
        }
    )
    return state.model_copy(update={"provenance": provenance})


def write_state(state: PruningState, path: Path) -> None:
    """Write a state with all of its defaults, so that later releases serve the same policy."""
    path.write_text(format_json(json.loads(state.dumps())) + "\n", encoding="utf-8")


def format_json(value: JsonValue, indent: int = 0, key: str = "") -> str:
    """Indented JSON in which a list or an object that fits on one line stays on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    lead = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    fits = indent > 0 and indent + len(lead) + len(flat) < _LINE_WIDTH
    if not isinstance(value, dict | list) or not value or fits:
        return lead + flat
    if isinstance(value, dict):
        parts = [format_json(item, indent + 2, name) for name, item in value.items()]
    else:
        parts = [format_json(item, indent + 2) for item in value]
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    inner = ",\n".join(" " * (indent + 2) + part for part in parts)
    return f"{lead}{start}\n{inner}\n{' ' * indent}{end}"


def as_markdown() -> str:
    """One row per state; the transferred states behave as their source and share its row."""
    entries = build_states(load_state(SOURCE), [load_state(name) for name in SEARCH_RESULTS])
    evidence = {e.state.name: read_evidence(load_state(e.state.name)) for e in entries}
    budgets = sorted({row.budget for e in evidence.values() if e for row in e.rows}, reverse=True)
    head = ["state", "what it is", *(f"K = {k}" for k in budgets)]
    lines = [_row(head), _row(["---", "---", *("--:" for _ in budgets)])]
    rows = [row for e in evidence.values() if e for row in e.rows if row.resized is not None]
    resized = {row.budget: row.resized for row in rows if row.resized is not None}
    if resized:
        figures = [f"{resized[k]:.1f}" if k in resized else "not measured" for k in budgets]
        lines.append(_row([RESIZED, "no policy: all tokens pooled to K cells", *figures]))
    for entry in entries:
        if entry.family == "transfer":
            continue
        policy = materialize(entry.state)
        cells = [f"`{entry.state.name}`", _describe(entry.family, policy)]
        lines.append(_row([*cells, *_figures(evidence[entry.state.name], budgets)]))
    transferred = [f"`{e.state.name}`" for e in entries if e.family == "transfer"]
    setups = {(e.model, e.questions) for e in evidence.values() if e}
    setup = "; ".join(f"{model}, {questions} questions" for model, questions in sorted(setups))
    return "\n".join([
        *lines, "",
        f"Per cent right, {setup}. `{SOURCE}` for the budgets and backbones of the paper: "
        f"{', '.join(transferred)}.",
    ]) + "\n"  # fmt: skip


def _describe(family: str, policy: PruningPolicy) -> str:
    question_free = "" if policy.reads_instruction else ", no instruction"
    if family == "base policy":
        return f"base policy alone{question_free}"
    if family == "instruction-free":
        return f"`{SOURCE}` upon {policy.base.name}, which reads no instruction"
    if family == "source":
        return f"the paper's released policy: {policy.base.name}, {policy.quota} tokens exchanged"
    if family == "search result":
        core = policy.state.core
        shared = "" if core is None else f", {core.share:.0%} of K the same for every question"
        model = SEARCH_RESULTS[policy.state.name]
        return f"found by a search on {model}, upon {policy.base.name}{shared}{question_free}"
    return policy.state.provenance.notes.rstrip(".")


def _figures(evidence: Evidence | None, budgets: Iterable[int]) -> list[str]:
    rows = {} if evidence is None else {row.budget: row.accuracy for row in evidence.rows}
    return [f"{rows[k]:.1f}" if k in rows else "not measured" for k in budgets]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
