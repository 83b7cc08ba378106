"""State files: a pruning state, and in its provenance the accuracy measured on mini-LLaVA."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from vllm_autoprune import PruningState

EVALUATED_ON = (
    "the embedded mini-LLaVA through vLLM on a CPU, test split, every kind of question, "
    "greedy; K is given by the request; `python -m benchmarks.zoo measure`"
)
_LINE_WIDTH = 96


class Row(BaseModel):
    """Accuracy at one budget, in per cent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int
    accuracy: float
    accuracy_plus: float
    prompt_tokens: float


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
        update={"evaluated_on": EVALUATED_ON, "scores": evidence.model_dump(mode="json")}
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
