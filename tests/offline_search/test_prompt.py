from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from offline_search.candidates import (
    PURPOSES,
    Expectation,
    Hypothesis,
    base_state,
    minimal_state,
    paper_state,
)
from offline_search.history import History, Trial
from offline_search.ledger import ProposalRecord, Status, TrialRecord
from offline_search.prompt import crossover_prompt, list_prompt, proposal_prompt, repair_list_prompt
from offline_search.settings import Settings
from offline_search.summary import _describe_hypotheses, summarize
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.state import PruningState

SETTINGS = Settings(budgets=(8,), base_policy="visionzip", proposer="scripted")
LISTS = SETTINGS.model_copy(update={"proposals_per_reply": 5})
DART = Settings(budgets=(8,), base_policy="dart")
ADVICE = re.compile(
    r"\b(safe|safer|helps?|should|prefer\w*|avoid|recommend\w*|pays?|usually|try|good|advice|"
    r"instead|better to|don't|not to repeat)\b",
    re.IGNORECASE,
)
EXAMPLES = tuple(
    Example(image=f"{number}.png", question=f"Q{number}?", answer="a", category=category)
    for number, category in enumerate(["text"] * 4 + ["relation"] * 12)
)


def trial(
    name: str, state: PruningState, values: list[float], status: Status = "evaluated",
    parents: tuple[str, ...] = (), same_as: str = "",
) -> Trial:  # fmt: skip
    number, index = map(int, name.split("."))
    proposal = ProposalRecord(round=number, index=index, origin="llm", parents=parents)
    result = TrialRecord(
        round=number, index=index, status=status, same_as=same_as, examples=len(values),
        objective=float(np.mean(values)) if values else None,
    )  # fmt: skip
    return Trial(proposal, result, state, np.array(values) if values else None)


@pytest.fixture
def history() -> History:
    paper = paper_state(SETTINGS)
    changed = paper_state(SETTINGS, quota=4)
    merge = paper.reassembly.model_copy(update={"strength": 1.0})
    other = paper.model_copy(update={"reassembly": merge})
    return History(
        TrialRecord(round=0, index=0, status="evaluated", objective=-3.0),
        np.full(16, -3.0),
        [
            trial("1.0", paper, [-1.0] * 4 + [-2.0] * 12),
            trial("2.0", changed, [-1.1] * 4 + [-1.9] * 12, parents=("1.0",)),
            trial("2.1", minimal_state(SETTINGS), [-2.5] * 2, "dropped"),
            trial("2.2", other, [], "same", same_as="1.0"),
            trial("2.3", other, [0.0] * 4 + [-1.0] * 12, parents=("1.0",)),
        ],
        EXAMPLES,
    )


def test_prompts_give_no_advice(history: History) -> None:
    """A proposer is told what it may write and what was measured, not what to conclude."""
    prompts = [
        proposal_prompt(SETTINGS, summarize(history), minimal_state(SETTINGS), 0, 5),
        crossover_prompt(SETTINGS, history.ranked()[:2]),
        list_prompt(LISTS, summarize(history), minimal_state(LISTS), 0, 5, 5, list(PURPOSES)),
    ]
    prompts.append(repair_list_prompt(prompts[-1], "reply", {2: ["is invalid"]}, 5))
    for messages in prompts:
        text = "\n".join(message["content"] for message in messages)
        assert not ADVICE.findall(text)


def test_every_category_has_a_row_and_the_worst_its_questions(history: History) -> None:
    text = summarize(history)
    assert "- relation: 12, -3000, -1000, 100%" in text
    assert "- text: 4, -3000, +0, 0%" in text
    assert "Questions of relation that lose most: Q4?; Q5?" in text


def test_a_category_that_gains_has_a_negative_share_of_the_loss(history: History) -> None:
    history.trials.append(trial("3.0", paper_state(SETTINGS), [1.0] * 4 + [-1.0] * 12))
    text = summarize(history)
    assert "- relation: 12, -3000, -1000, 150%" in text
    assert "- text: 4, -3000, +1000, -50%" in text


def test_a_dropped_candidate_names_questions_and_not_answers_at_each_budget(
    history: History,
) -> None:
    (dropped,) = (one for one in history.trials if one.result.status == "dropped")
    twice = dropped.result.model_copy(update={"examples": 4})
    history.trials[history.trials.index(dropped)] = dataclasses.replace(dropped, result=twice)
    assert "2.1 was dropped after 2 questions at about " in summarize(history)


def test_every_candidate_is_a_line_with_its_changes(history: History) -> None:
    text = summarize(history)
    assert "- 2.3: -750; 1.0 with /reassembly/strength 0.0005 -> 1" in text
    assert "- 2.0: -1700 (-950 ± " in text and "1.0 with /constraints/selector/q_e 2 -> 4" in text
    assert "2.2 kept the same tokens as 1.0." in text
    assert "2.1 was dropped after 2 questions at about " in text


def test_differences_have_an_error_and_ties_are_named(history: History) -> None:
    history.trials = history.trials[:2]
    line = next(line for line in summarize(history).splitlines() if line.startswith("- 2.0"))
    assert line.startswith("- 2.0: -1700; ")
    history.trials.append(
        trial("3.0", minimal_state(SETTINGS), [-1.6] * 4 + [-1.3] * 6 + [-2.6] * 6)
    )
    assert re.search(r"- 3\.0: -186\d \(-16\d ± \d+, tied\)", summarize(history))


def test_best_and_median_of_every_round_are_a_line(history: History) -> None:
    history.trials.append(trial("3.0", paper_state(SETTINGS, quota=1), [-0.5] * 16))
    history.trials.append(trial("3.1", paper_state(SETTINGS, quota=8), [-0.25] * 16))
    text = summarize(history)
    scores = re.search(r"by round, best and median: 1: -1750, -1750; 2: (.*); 3: (.*)\.", text)
    assert scores is not None and scores.groups() == ("-750, -1700", "-250, -375")
    history.trials = history.trials[:1]
    assert "by round" not in summarize(history), "one round is no trend"


def test_numbers_at_the_end_of_their_range_are_named(history: History) -> None:
    assert "At the upper end of its range in 2.3: reassembly/strength = 1" in summarize(history)


def test_base_policies_are_named_where_a_model_chooses_them(history: History) -> None:
    settings = SETTINGS.model_copy(update={"other_bases": ("dart", "trim")})
    paper = history.trials[0].require_state()
    other = paper.model_copy(update={"base_policy": base_state(DART).base_policy})
    history.trials.append(trial("3.0", other, [0.0] * 16, parents=("1.0",)))
    history.names_bases = True
    messages = proposal_prompt(settings, summarize(history), other, 0, 5)
    for name in settings.bases:
        assert f"- {name}: {BASE_POLICIES[name].doc}" in messages[0]["content"]
    assert "1.0 with /base_policy/name visionzip -> dart\n" in messages[1]["content"]
    assert '"base_policy":{"name":"dart"}' in messages[1]["content"]
    assert "base_policy" not in proposal_prompt(SETTINGS, "", other, 0, 5)[0]["content"]


def test_a_selector_says_what_does_not_act_on_it() -> None:
    text = proposal_prompt(SETTINGS, "", minimal_state(SETTINGS), 0, 5)[0]["content"]
    (line,) = (line for line in text.splitlines() if "runtime_reference_anchor_pool" in line)
    assert "signals act by the pool, the kernel not" in line


QUESTIONS = tuple(Example(image=f"{n}.png", question=f"Q{n}?", answer="a") for n in range(16))
BASE = np.full(16, -3.0)
NOISE = np.tile([-0.2, 0.2], 8)


def expecting(
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
    return list(_describe_hypotheses(History(base, BASE, list(trials), QUESTIONS)))


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
    for name, measured in (("base", []), ("1.0", [expecting("1.0", parent)])):
        after = expecting("2.0", child, expect, parent="" if name == "base" else name)
        head, line = lines(*measured, after)
        assert head.startswith("Hypotheses of the last round")
        assert line == f"- 2.0 (ablate of {name}, expected {expect}): Why 2.0. => {outcome}"


def test_a_dropped_candidate_is_compared_on_the_questions_it_answered() -> None:
    parent = expecting("1.0", np.concatenate([np.full(4, -1.0), np.full(12, -9.0)]))
    _, line = lines(
        parent, expecting("2.0", np.full(4, -2.0) + NOISE[:4], "lower", "dropped", "1.0")
    )
    assert line.endswith("=> -2000, -1000 ± 115 on the first 4 questions: confirmed")


def test_a_duplicate_has_the_values_of_what_it_repeats() -> None:
    parent = expecting("1.0", BASE + 1.0)
    _, one, other = lines(
        parent,
        expecting("2.0", None, "same", "same", "1.0", same_as="1.0"),
        expecting("2.1", None, "higher", "same", "1.0", same_as="base"),
    )
    assert one.endswith("=> -2000, +0 ± 0: confirmed")
    assert other.endswith("=> -3000, -1000 ± 0: not confirmed")


def test_what_was_not_measured_says_why() -> None:
    _, line = lines(expecting("1.0", None, "higher", "unsafe", reason="preserve_budget failed"))
    assert line.endswith("=> not measured, unsafe: preserve_budget failed")
    _, line = lines(expecting("1.0", None, "higher", "invalid", reason="x" * 500))
    assert len(line) < 200


def test_one_image_confirms_nothing() -> None:
    for expect in ("higher", "same", "lower"):
        _, line = lines(expecting("1.0", np.array([-2.0]), expect, "dropped"))
        assert line.endswith(": not confirmed")


def test_only_the_last_round_is_listed_and_only_with_hypotheses() -> None:
    first, second = (
        expecting("1.0", BASE, "higher"),
        expecting("2.0", BASE + 1, "higher", parent="1.0"),
    )
    plain = expecting("2.1", BASE)
    assert [line[:5] for line in lines(first, second, plain)[1:]] == ["- 2.0"]
    assert lines(first, plain) == [] == lines()


def test_the_summary_has_the_outcomes() -> None:
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-3.0)
    history = History(base, BASE, [expecting("1.0", BASE + 1, "higher")], QUESTIONS)
    text = summarize(history)
    assert "\n- 1.0 (ablate of base, expected higher): Why 1.0. => -2000, +1000" in text
