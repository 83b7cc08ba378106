"""Refusals of requests, as vLLM answers them: status 400, with the place and kind for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import Counter
from vllm.exceptions import VLLMValidationError

from vllm_autoprune.errors import AutopruneError, Problem, Refusal, RequestError

_STATE = "state"
_MALFORMED = "malformed"
REFUSED = Counter(
    "autoprune_requests_refused",
    "Requests whose autoprune entry was refused, by the kind of their first problem: 'state' for "
    "any broken rule of a state, 'malformed' for none.",
    ["reason"],
)
for _reason in (*Refusal, _STATE, _MALFORMED):
    REFUSED.labels(_reason)  # 0 from the start, so that a rate sees the first refusal


class RefusedRequest(RequestError, VLLMValidationError):
    """The error of a refused request, which every endpoint of vLLM answers by 400.

    ``parameter`` is the ``param`` of OpenAI's error object: WHERE#KIND of the first problem, whose
    kind may be empty (docs/clients.md).
    """

    def __init__(self, subject: str, problems: Sequence[Problem]) -> None:
        super().__init__(subject, problems)
        problem = self.problems[0]
        self.parameter = f"{problem.where}#{problem.kind}"
        self.value = None

    # The inherited __str__ would add the parameter, but the message already begins with the place.
    __str__ = Exception.__str__


@contextmanager
def refusing_requests() -> Iterator[None]:
    """Count a request that is refused, and raise its problems as an error that vLLM answers by 400.

    In some steps vLLM answers only its own errors by 400.
    """
    try:
        yield
    except AutopruneError as error:
        REFUSED.labels(_find_reason(error.problems[0])).inc()
        raise RefusedRequest(error.subject, error.problems) from None


def _find_reason(problem: Problem) -> str:
    """Metric label of a problem: one of a fixed set, whatever a client sends."""
    if problem.kind in [*Refusal]:
        return problem.kind
    return _STATE if problem.kind else _MALFORMED
