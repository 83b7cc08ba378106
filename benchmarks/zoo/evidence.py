"""Evidence: what was measured on a state, as its provenance carries it.

Knows nothing about how it was measured.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_autoprune import PruningState

EVALUATED_ON = (
    "the embedded mini-LLaVA through vLLM on a CPU, test split, every kind of question, "
    "greedy; K is given by the request; `python -m benchmarks.zoo measure`"
)


class Row(BaseModel):
    """Per cent right at one budget."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int
    accuracy: float
    accuracy_plus: float
    prompt_tokens: float


class Evidence(BaseModel):
    """Figures of one state on one model; ``behaviour`` tells if the state has changed since."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    questions: int
    behaviour: str
    rows: tuple[Row, ...]


def known(state: PruningState) -> Evidence | None:
    """The evidence that a state carries, if it carries any of this form."""
    try:
        return Evidence.model_validate(state.provenance.scores)
    except ValidationError:
        return None


def with_evidence(state: PruningState, evidence: Evidence) -> PruningState:
    """The state with this evidence; its digest stays, for provenance is outside it."""
    provenance = state.provenance.model_copy(
        update={"evaluated_on": EVALUATED_ON, "scores": evidence.model_dump(mode="json")}
    )
    return state.model_copy(update={"provenance": provenance})
