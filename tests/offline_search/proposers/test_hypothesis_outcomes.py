from __future__ import annotations

import numpy as np
import pytest

from offline_search.candidates import Expectation, Hypothesis
from offline_search.history import History, Trial
from offline_search.ledger import ProposalRecord, Status, TrialRecord
from offline_search.summary import _describe_hypotheses, summarize
from vllm_autoprune.evaluation.questions import Example

EXAMPLES = tuple(Example(image=f"{n}.png", question=f"Q{n}?", answer="a") for n in range(16))
BASE = np.full(16, -3.0)
NOISE = np.tile([-0.2, 0.2], 8)


def trial(
    name: str, values: np.ndarray | None, expect: Expectation | None = None,
    status: Status = "evaluated", parent: str = "", same_as: str = "", reason: str = "",
) -> Trial:  # fmt: skip
    number, index = map(int, name.split("."))
    hypothesis = None
    if expect is not None:
        hypothesis = Hypothesis(purpose="ablate", text=f"Why {name}.", expect=expect)
    proposal = ProposalRecord(
        round=number, index=index, origin="llm", parents=(parent,) if parent else (),
        hypothesis=hypothesis,
    )  # fmt: skip
    result = TrialRecord(
        round=number, index=index, status=status, same_as=same_as, reason=reason,
        objective=None if values is None else float(values.mean()),
    )  # fmt: skip
    return Trial(proposal, result, None, values)


def lines(*trials: Trial) -> list[str]:
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-3.0)
    return list(_describe_hypotheses(History(base, BASE, list(trials), EXAMPLES)))


@pytest.mark.parametrize(
    ("change", "expect", "outcome"),
    [
        (0.5, "higher", "-2500, +500 ± 52: confirmed"),
        (0.5, "same", "-2500, +500 ± 52: not confirmed"),
        (0.5, "lower", "-2500, +500 ± 52: not confirmed"),
        (0.1, "higher", "-2900, +100 ± 52: not confirmed"),
        (0.1, "same", "-2900, +100 ± 52: confirmed"),
        (-0.5, "lower", "-3500, -500 ± 52: confirmed"),
        (-0.5, "higher", "-3500, -500 ± 52: not confirmed"),
        (-0.1, "lower", "-3100, -100 ± 52: not confirmed"),
    ],
)
def test_a_hypothesis_is_confirmed_by_two_standard_errors(
    change: float, expect: Expectation, outcome: str
) -> None:
    parent, child = BASE + 0.0, BASE + change + NOISE
    for name, measured in (("base", []), ("1.0", [trial("1.0", parent)])):
        after = trial("2.0", child, expect, parent="" if name == "base" else name)
        head, line = lines(*measured, after)
        assert head.startswith("Hypotheses of the last round")
        assert line == f"- 2.0 (ablate of {name}, expected {expect}): Why 2.0. => {outcome}"


def test_a_dropped_candidate_is_compared_on_the_questions_it_answered() -> None:
    parent = trial("1.0", np.concatenate([np.full(4, -1.0), np.full(12, -9.0)]))
    _, line = lines(parent, trial("2.0", np.full(4, -2.0) + NOISE[:4], "lower", "dropped", "1.0"))
    assert line.endswith("=> -2000, -1000 ± 115 on the first 4 questions: confirmed")


def test_a_duplicate_has_the_values_of_what_it_repeats() -> None:
    parent = trial("1.0", BASE + 1.0)
    _, one, other = lines(
        parent,
        trial("2.0", None, "same", "same", "1.0", same_as="1.0"),
        trial("2.1", None, "higher", "same", "1.0", same_as="base"),
    )
    assert one.endswith("=> -2000, +0 ± 0: confirmed")
    assert other.endswith("=> -3000, -1000 ± 0: not confirmed")


def test_what_was_not_measured_says_why() -> None:
    _, line = lines(trial("1.0", None, "higher", "unsafe", reason="preserve_budget failed"))
    assert line.endswith("=> not measured, unsafe: preserve_budget failed")
    _, line = lines(trial("1.0", None, "higher", "invalid", reason="x" * 500))
    assert len(line) < 200


def test_one_image_confirms_nothing() -> None:
    for expect in ("higher", "same", "lower"):
        _, line = lines(trial("1.0", np.array([-2.0]), expect, "dropped"))
        assert line.endswith(": not confirmed")


def test_only_the_last_round_is_listed_and_only_with_hypotheses() -> None:
    first, second = trial("1.0", BASE, "higher"), trial("2.0", BASE + 1, "higher", parent="1.0")
    plain = trial("2.1", BASE)
    assert [line[:5] for line in lines(first, second, plain)[1:]] == ["- 2.0"]
    assert lines(first, plain) == [] == lines()


def test_the_summary_has_the_outcomes() -> None:
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-3.0)
    history = History(base, BASE, [trial("1.0", BASE + 1, "higher")], EXAMPLES)
    text = summarize(history)
    assert "\n- 1.0 (ablate of base, expected higher): Why 1.0. => -2000, +1000" in text
