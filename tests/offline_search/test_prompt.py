"""Prompts: what a language model is told of the task, and of what was measured."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from offline_search.candidates import (
    PURPOSES,
    Expectation,
    base_state,
    minimal_state,
    paper_state,
)
from offline_search.history import History, Trial
from offline_search.prompt import (
    crossover_prompt,
    describe_request,
    proposal_prompt,
    repair_prompt,
    summarize,
)
from offline_search.settings import Settings
from tests.offline_search.synthetic import Searches, list_reply, trial
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import AtomCall, default_call
from vllm_autoprune.tpdsl.state import PruningState

SETTINGS = Settings(budgets=(8,), base_policy="visionzip", proposer="scripted")
ADVICE = re.compile(
    r"\b(safe|safer|helps?|should|prefer\w*|avoid|recommend\w*|pays?|usually|try|good|advice|"
    r"instead|better to|don't|not to repeat)\b",
    re.IGNORECASE,
)
EXAMPLES = tuple(
    Example(
        image=f"{number}.png", question=f"Q{number}?", answer="a", category=category
    )
    for number, category in enumerate(["text"] * 4 + ["relation"] * 12)
)
BASE = np.full(16, -3.0)
NOISE = np.tile([-0.2, 0.2], 8)


def history_of(*trials: Trial) -> History:
    return History(trial("0.0", BASE), list(trials), EXAMPLES)


@pytest.fixture
def history() -> History:
    paper = paper_state(SETTINGS)
    changed = paper_state(SETTINGS, quota=4)
    merge = paper.reassembly.model_copy(update={"strength": 1.0})
    other = paper.model_copy(update={"reassembly": merge})
    return history_of(
        trial("1.0", [-1.0] * 4 + [-2.0] * 12, paper),
        trial("2.0", [-1.1] * 4 + [-1.9] * 12, changed, parent="1.0"),
        trial("2.1", [-2.5] * 2, minimal_state(SETTINGS), "dropped"),
        trial("2.2", None, other, "same", reason="1.0"),
        trial("2.3", [0.0] * 4 + [-1.0] * 12, other, parent="1.0"),
        *(
            trial(f"2.{n}", None, None, "invalid", reason="no such atom")
            for n in (4, 5, 6)
        ),
    )


def test_prompts_give_no_advice(history: History) -> None:
    """A proposer is told what it may write and what was measured, not what to conclude."""
    lists = SETTINGS.model_copy(update={"proposals_per_reply": 5})
    prompts = [
        proposal_prompt(
            SETTINGS,
            summarize(history),
            minimal_state(SETTINGS),
            describe_request(0, 5),
        ),
        crossover_prompt(SETTINGS, history.ranked()[:2]),
        proposal_prompt(
            lists,
            summarize(history),
            minimal_state(lists),
            describe_request(0, 5, list(PURPOSES)),
        ),
    ]
    prompts.append(repair_prompt(prompts[-1], "reply", {2: ["is invalid"]}, 5))
    for messages in prompts:
        text = "\n".join(message["content"] for message in messages)
        assert not ADVICE.findall(text)


def test_a_summary_has_categories_with_the_questions_that_lose_most(
    history: History,
) -> None:
    lines = summarize(history).splitlines()
    assert lines[0] == "Base policy alone: -3000 on 16 questions."
    assert "- relation: 12, -3000, -1000, 100%" in lines
    assert "- text: 4, -3000, +0, 0%" in lines
    assert "Questions of relation that lose most: Q4?; Q5?" in lines
    # A category that gains has a negative share of the loss.
    history.trials.append(trial("3.0", [1.0] * 4 + [-1.0] * 12, paper_state(SETTINGS)))
    text = summarize(history)
    assert "- relation: 12, -3000, -1000, 150%" in text
    assert "- text: 4, -3000, +1000, -50%" in text


def test_a_summary_has_the_best_of_each_structure_as_changes_of_its_parent(
    history: History,
) -> None:
    text = summarize(history)
    lines = text.splitlines()
    (line,) = (line for line in lines if line.startswith("- 2.3: -750 on 16 ("))
    assert line.endswith("; 1.0 with reassembly strength 0.0005 -> 1")
    assert "text +0 ± 0; relation -1000 ± 0; better 16, worse 0 than its parent" in line
    assert re.search(r"- 2\.0: -1700 on 16 \(-950 ± \d+, worse; text -1100 ± ", text)
    assert "1.0 with selector q_e 2 -> 4" in text
    assert not any(line.startswith("- 1.0") for line in lines), (
        "2.3 is the best of its structure"
    )


def test_a_summary_has_trends_duplicates_and_failures(history: History) -> None:
    lines = summarize(history).splitlines()
    assert "Scores by round, best and median: 1: -1750, -1750; 2: -750, -1700." in lines
    assert "2.2 kept the same tokens as 1.0." in lines
    assert "- no such atom (3 times)" in lines
    assert not any(line.startswith("Dropped in earlier rounds") for line in lines)
    history.trials.append(trial("3.0", BASE))
    lines = summarize(history).splitlines()
    listed = lines.index("Dropped in earlier rounds, and never measured again:")
    assert lines[listed + 1].startswith(
        "- visual_token_norm_saliency; pairwise_cosine_kernel;"
    )
    assert not any("was dropped after" in line for line in lines)


def test_a_dropped_candidate_names_questions_not_answers_at_several_budgets(
    history: History,
) -> None:
    dropped = history.trials[2]
    twice = dropped.result.model_copy(update={"examples": 4})
    history.trials[2] = dataclasses.replace(dropped, result=twice)
    line = "2.1 was dropped after 2 questions, from which its score is estimated as "
    assert line in summarize(history)


def test_a_change_names_its_atom_wherever_the_parent_has_it() -> None:
    """A number that the parent leaves open, of a signal that the child has at another place."""
    paper = paper_state(SETTINGS)
    call = default_call(AtomCall, "redundancy_density_penalty")
    dense = call.model_copy(update={"m": None})

    def with_signals(*signals: AtomCall) -> PruningState:
        scoring = paper.scoring.model_copy(update={"signals": signals})
        return paper.model_copy(update={"scoring": scoring})

    parent = with_signals(paper.scoring.signals[0], dense)
    child = with_signals(dense.model_copy(update={"m": 4}))
    text = summarize(
        history_of(
            trial("1.0", BASE + 1, parent), trial("2.0", BASE + 2, child, parent="1.0")
        )
    )
    assert "removed, signals redundancy_density_penalty m None -> 4\n" in text


def test_base_policies_are_named_where_a_model_chooses_them(history: History) -> None:
    settings = SETTINGS.model_copy(update={"other_bases": ("dart", "trim")})
    dart = base_state(Settings(budgets=(8,), base_policy="dart")).base_policy
    other = history.trials[0].require_state().model_copy(update={"base_policy": dart})
    history.trials.append(trial("3.0", [0.0] * 16, other, parent="1.0"))
    history.names_bases = True
    messages = proposal_prompt(settings, summarize(history), other, "")
    for name in settings.bases:
        assert f"- {name}: {BASE_POLICIES[name].doc}" in messages[0]["content"]
    assert "1.0 with base_policy name visionzip -> dart\n" in messages[1]["content"]
    assert '"base_policy":{"name":"dart"}' in messages[1]["content"]
    plain = proposal_prompt(SETTINGS, "", other, "")[0]["content"]
    assert "base_policy" not in plain
    # A selector says what does not act on it.
    (line,) = (
        line for line in plain.splitlines() if line.startswith("- runtime_reference")
    )
    assert "signals act by the pool, the kernel not" in line


def outcomes(*trials: Trial) -> dict[str, str]:
    """What the summary says of each hypothesis of the last round."""
    lines = summarize(history_of(*trials)).splitlines()
    return dict(line[2:].split(" => ", 1) for line in lines if " => " in line)


@parametrize_from_file("change", "expect", "outcome")
def test_a_hypothesis_is_confirmed_by_two_standard_errors(
    change: float, expect: Expectation, outcome: str
) -> None:
    trials = [
        trial("1.0", BASE + 9.0),
        trial("2.0", BASE + change + NOISE, expect=expect),
    ]
    line = f"2.0 (ablate of base, expected {expect}): Why 2.0."
    assert outcomes(*trials) == {line: outcome}
    trials = [
        trial("1.0", BASE),
        trial("2.0", BASE + change + NOISE, None, "evaluated", "1.0", expect=expect),
    ]
    assert [*outcomes(*trials).values()] == [outcome], (
        "its parent's values are the base policy's"
    )


def test_what_hypotheses_are_compared_on() -> None:
    lines = outcomes(
        trial("1.0", [-1.0] * 4 + [-9.0] * 12, expect="higher"),
        trial("2.0", -2.0 + NOISE[:4], None, "dropped", "1.0", expect="lower"),
        trial("2.1", None, None, "same", "1.0", reason="1.0", expect="same"),
        trial("2.2", None, None, "same", reason="base", expect="higher"),
        trial(
            "2.3",
            None,
            None,
            "unsafe",
            reason="preserve_budget failed",
            expect="higher",
        ),
        trial("2.4", None, None, "invalid", reason="x" * 500, expect="higher"),
        trial("2.5", [-2.0], None, "dropped", expect="same"),
        trial("2.6", BASE),
    )
    assert [line[:3] for line in lines] == [f"2.{n}" for n in range(6)], (
        "last round only"
    )
    assert list(lines.values()) == [
        "-4000, -1000 ± 115, worse on 4 questions: confirmed",
        "-7000, +0 ± 0, undecided: confirmed",
        "-3000, +0 ± 0, undecided: refuted",
        "not measured, unsafe: preserve_budget failed",
        f"not measured, invalid: {'x' * 100}",
        "-4000, +1000 ± inf, undecided on 1 questions: undecided",
    ]


SAID: dict[str, tuple[int, str]] = {
    "unit": (1, "in thousandths of nats; higher is better"),
    "tokens and grid": (
        1,
        r"Images have 16 to 16 tokens; tiles x rows x columns are 1 x 4 x 4",
    ),
    "whole pool": (1, r"from a pool_ratio of 1\.0 on the pool is all other tokens"),
    "[CLS]": (1, r"There is a \[CLS\] token"),
    "sign and cosines": (
        1,
        r'The sign "auto" is "\+", with cosines of -0\.\d+ to 0\.\d+',
    ),
    "normalised signals": (1, "signals are min-max normalised in each image before"),
    "what reads the kernel": (
        1,
        "The kernel acts in reference_residual_exchange_selector where",
    ),
    "default partition": (1, "spatial_grid_partition unless another is written"),
    "group": (1, "The group of a kept token are the discarded tokens"),
    "orders": (1, "The orders score and pick act at strength 0 too"),
    "text and schema": (1, "q_e is 0 to 8, and r_min is K - q_e: leave it out"),
    "round": (1, r"Round 1 of 6\. "),
    "last round": (6, r"Round 6 of 6\. It is the last one: only refinements"),
    "purposes": (6, "Purposes that are proposed for them, in order: exploit"),
    "questions": (6, r"- \d\.\d: -\d+ on \d+ \("),
    "categories": (
        6,
        r"colour -\d+( ± \d+)?; digit -\d+|digit -\d+( ± \d+)?; colour -\d+",
    ),
    "exchanges": (6, r"\d\.\d tokens exchanged an image"),
    "no-op": (6, "reassembly changes no row"),
    "verdict": (6, r"± \d+, (better|worse|undecided)"),
}
"""What prompts of a round say, by what a proposer asked for."""


async def test_prompts_say_what_proposers_asked_for(search: Searches) -> None:
    replies = [list_reply(3 * number, 3) for number in range(10)]
    await search(replies, rounds=6, proposals_per_reply=3)
    prompts = {
        number: "\n".join(
            message["content"] for message in search.proposer.requests[number - 1]
        )
        for number in (1, 6)
    }
    print(*prompts.values(), sep="\n\n")
    silent = [
        point
        for point, (number, text) in SAID.items()
        if not re.search(text, prompts[number])
    ]
    assert silent == []
    assert not any(ADVICE.findall(prompt) for prompt in prompts.values())
