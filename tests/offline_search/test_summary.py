"""Summaries H_t: what a language model is told of what was measured, on one scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import JsonValue

from offline_search.candidates import (
    MAX_HYPOTHESIS,
    base_state,
    minimal_state,
    nearest_state,
    paper_state,
)
from offline_search.components import JsonObject
from offline_search.history import History, Trial
from offline_search.ledger import Exchange, Status
from offline_search.summary import MAX_SUMMARY, summarize
from tests.offline_search.histories import BASE, NOISE, SETTINGS, history_of
from tests.offline_search.synthetic import trial
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, default_call
from vllm_autoprune.tpdsl.safety import synthetic_probes
from vllm_autoprune.tpdsl.state import PruningState


@pytest.fixture
def history() -> History:
    paper = paper_state(SETTINGS)
    changed = paper_state(SETTINGS, quota=4)
    merge = paper.reassembly.model_copy(update={"strength": 1.0})
    other = paper.model_copy(update={"reassembly": merge})
    return history_of(
        trial("1.0", [-1.0] * 4 + [-2.0] * 12, paper),
        trial("2.0", [-1.1] * 4 + [-1.9] * 12, changed, parent="1.0"),
        trial(
            "2.1",
            [-2.5] * 2,
            minimal_state(SETTINGS),
            "dropped",
            reason="behind after 2 of 16 questions",
        ),
        trial("2.2", None, other, "same", parent="1.0", reason="1.0"),
        trial("2.3", [0.0] * 4 + [-1.0] * 12, other, parent="1.0"),
        *(
            trial(f"2.{n}", None, None, "invalid", reason="no such atom")
            for n in (4, 5, 6)
        ),
    )


def line_of(name: str, text: str) -> str:
    """The only line of a candidate."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"- {name}: "))
    return line


def test_each_category_has_its_questions_means_share_and_worst_question(
    history: History,
) -> None:
    lines = summarize(history).splitlines()
    assert lines[0].startswith(
        "Questions asked so far, all of them of base: 16. Resolution: "
    )
    assert "of candidates that were asked all questions of their round: 0." in lines[0]
    assert lines[1] == "Base policy alone (base): -3.00."
    assert lines[2].startswith("Category: questions, score of base, score of 2.3, ")
    # Where nothing is lost, a question is an example.
    assert lines[3:5] == [
        '- relation: 12, -3.00, -1.00, 100%; "Q4?" -1.00',
        '- text: 4, -3.00, +0.00, 0%; such as "Q0?"',
    ]
    # A category that gains has no share of the loss.
    history.trials.append(trial("3.0", [1.0] * 4 + [-1.0] * 12, paper_state(SETTINGS)))
    text = summarize(history)
    assert '- text: 4, -3.00, +1.00, 0%; such as "Q0?"' in text
    assert '- relation: 12, -3.00, -1.00, 100%; "Q4?" -1.00' in text


def test_candidates_are_changes_of_parents_or_the_leader(history: History) -> None:
    text = summarize(history)
    line = line_of("2.3", text)
    assert line.startswith(
        "- 2.3: -0.75 on 16 questions; to base +2.25 ± 0.11, higher (of 16, 16 up, 0 down); "
        'relation +2.00, text +3.00; {"scoring":'
    )
    assert re.search(
        r"- 2\.0: -1\.70 on 16 questions; to 2\.3 -0\.95 ± 0\.02, lower \(of 16, 0 up",
        text,
    )
    assert line_of("1.0", text).endswith("; 2.3 with reassembly strength 1 -> 0.0005")
    # 1.0 is printed after its child, which is a change of the leader.
    assert line_of("2.0", text).endswith(
        "; 2.3 with selector q_e 2 -> 4, reassembly strength 1 -> 0.0005"
    )
    assert text.index("More of the last round:") < text.index("- 2.0: ")


def test_dropped_ones_are_printed_as_all_others(history: History) -> None:
    text = summarize(history)
    dropped = line_of("2.1", text)
    reason = "-3.02 on 2 questions, dropped: behind after 2 of 16 questions; to 2.3 "
    assert reason in dropped and "± unknown, undecided (of 2, 0 up, 2 down)" in dropped
    assert dropped.endswith("}") and '{"scoring":' in dropped
    assert "- no such atom (3 times)" in text
    assert "- 2.2: " not in text, "a duplicate that tests nothing tells nothing"
    unlisted = (
        "Not listed: 0 that were measured, 0 of them in the last round, and 1 with tokens and "
        "rows of measured ones."
    )
    assert unlisted in text.splitlines()
    history.trials.append(trial("3.0", BASE))
    title, later = summarize(history).split("More of earlier rounds:\n")
    again = line_of("2.1", later)
    assert again.partition("; ")[2] == dropped.partition("; ")[2] and again not in title


def test_a_duplicate_is_printed_as_what_it_duplicates(history: History) -> None:
    """Not as a whole policy once more, whatever its parent is."""
    state = minimal_state(SETTINGS, "local_detail_energy")
    moved = state.model_copy(update={"reassembly": paper_state(SETTINGS).reassembly})
    history.trials += [
        trial("3.0", BASE + 0.5 + NOISE, state),
        trial("3.1", None, state, "same", "2.3", reason="3.0", expect="same"),
        trial("3.2", None, moved, "same", "2.3", reason="3.0", expect="same"),
    ]
    text = summarize(history)
    ending = "of 3.0, whose tokens and rows it has; "
    assert line_of("3.1", text).endswith(f"{ending}the policy of 3.0")
    assert f"{ending}3.0 with reassembly" in line_of("3.2", text)


@pytest.mark.parametrize("is_printed", [True, False])
def test_a_rival_that_is_not_printed_is_not_named(
    is_printed: bool, history: History
) -> None:
    name = "1.0" if is_printed else "9.9"
    reason = f"outranked, at place 3 of 9, by {name} at place 2, the last to go on"
    dropped = trial("3.0", BASE[:2] - 1.0, paper_state(SETTINGS), "dropped")
    result = dropped.result.model_copy(update={"rival": name, "reason": reason})
    history.trials.append(replace(dropped, result=result))
    line = line_of("3.0", summarize(history))
    said = "1.0" if is_printed else "another"
    assert (
        f"dropped: outranked, at place 3 of 9, by {said} at place 2, the last" in line
    )


def test_a_category_is_compared_with_base_where_four_questions_of_it_were_asked(
    history: History,
) -> None:
    """Fewer count as others; those that were not asked are not mentioned."""
    few = np.full(16, np.nan)
    few[[0, 4, 5, 6, 7]] = [0.0, -2.0, -2.0, -2.5, -2.5]
    history.trials.append(trial("3.0", few, paper_state(SETTINGS), "dropped"))
    line = line_of("3.0", summarize(history))
    assert "; relation +0.75 (of 4), others +3.00 (of 1); " in line
    assert "text" not in line and "not asked" not in line


def test_what_a_hypothesis_names_is_printed() -> None:
    """1.0 is the parent of what is tested, and 1.1 its duplicate."""
    paper = paper_state(SETTINGS)
    changed = paper_state(SETTINGS, quota=4)
    text = summarize(
        history_of(
            trial("1.0", BASE + 0.5, paper),
            trial("1.1", BASE + 1.0, paper_state(SETTINGS, quota=5)),
            trial("2.0", BASE + 2.0, changed, parent="1.0", expect="higher"),
            trial("2.1", None, paper, "same", "1.0", reason="1.1", expect="same"),
            trial("2.2", [-2.9] * 2, minimal_state(SETTINGS), "dropped"),
        )
    )
    assert "- 2.0 (ablate of 1.0, expected higher): Why 2.0. => +1.50 ± 0.00" in text
    assert "- 2.1: -2.00 of 1.1, whose tokens and rows it has; " in text
    named = text.split("Others that these name, of any round:\n")[1].splitlines()[:2]
    assert [line[:7] for line in named] == ["- 1.1: ", "- 1.0: "]
    assert named[1].endswith("2.0 with selector q_e 4 -> 2")


def test_rounds_are_compared_on_the_scale_of_all_scores(history: History) -> None:
    best = "Best score of the candidates that each round asked all its questions, and median "
    text = (
        f"{best}score of all that it measured, of rounds that measured any, as "
        "estimated now: "
    )
    assert f"{text}1: -1.75, -1.75; 2: -0.75, -1.70." in summarize(history)
    # A candidate that was dropped after two questions is not the best of its round.
    lucky = [9.0] * 2 + [math.nan] * 14
    history.trials.append(trial("3.0", lucky, paper_state(SETTINGS), "dropped"))
    assert "; 3: none, +" in summarize(history)


def test_a_dropped_candidate_names_questions_not_answers_at_several_budgets(
    history: History,
) -> None:
    dropped = history.trials[2]
    twice = dropped.result.model_copy(update={"examples": 4})
    history.trials[2] = dataclasses.replace(dropped, result=twice)
    assert " on 2 questions, dropped: " in line_of("2.1", summarize(history))


def test_a_change_names_its_atom_and_has_what_was_added() -> None:
    """A number that the parent leaves open, of a signal that the child has at another place."""
    paper = paper_state(SETTINGS)
    call = default_call(AtomCall, "redundancy_density_penalty")
    dense = call.model_copy(update={"m": None})
    centre = default_call(AtomCall, "spatial_centrality_prior")

    def with_signals(*signals: AtomCall) -> PruningState:
        scoring = paper.scoring.model_copy(update={"signals": signals})
        return paper.model_copy(update={"scoring": scoring})

    contrast = default_call(AtomCall, "local_contrast_saliency")
    parent = with_signals(paper.scoring.signals[0], dense, contrast)
    child = with_signals(
        contrast.model_copy(update={"neighbours": "four_wrapped"}),
        dense.model_copy(update={"m": 4}),
        centre.model_copy(update={"sigma": 0.7}),
    )
    text = summarize(
        history_of(
            trial("1.0", BASE + 2, parent), trial("2.0", BASE + 1, child, parent="1.0")
        )
    )
    line = line_of("2.0", text)
    assert "removed, signals redundancy_density_penalty m null -> 4" in line
    assert 'signals local_contrast_saliency neighbours added: "four_wrapped"' in line
    added = '{"atom":"spatial_centrality_prior","sigma":0.7}'
    assert f"signals spatial_centrality_prior added: {added}" in line


def test_what_does_not_act_is_not_printed() -> None:
    """A candidate that exchanges nothing has its reassembly alone, unless quality orders rows."""
    idle = base_state(SETTINGS)
    merge = idle.reassembly.model_copy(update={"strength": 0.5})
    merging = idle.model_copy(update={"reassembly": merge})
    ordering = default_call(AtomCall, "reassemble/soft.mean.residual.score")
    ordered = idle.model_copy(update={"reassembly": ordering})
    child = paper_state(SETTINGS)
    text = summarize(
        history_of(
            trial("1.0", BASE + 1, merging),
            trial("1.1", BASE + 2, ordered),
            trial("2.0", BASE + 3, child, parent="1.0"),
            trial("2.1", BASE + 1, minimal_state(SETTINGS)),
        )
    )
    line = line_of("1.0", text)
    assert 'exchanges nothing, with {"reassembly":{"atom":"mean_residual"' in line
    assert '"scoring":' not in line
    assert "; 2.0 with " in line_of("1.1", text), "its quality orders rows"
    # Without lam the selector reads no kernel.
    assert '"kernel":' in line_of("2.0", text)
    assert '"scoring":' in line_of("2.1", text)
    assert '"kernel":' not in line_of("2.1", text)
    # The changes of a scoring that is not printed would tell nothing.
    assert '"scoring":' in line_of("2.0", text)


POOLS: list[list[JsonValue]] = [
    [{"atom": "quality_pool_builder", "pool_ratio": 1.0}],
    [{"atom": "quality_pool_builder", "pool_ratio": None}],
    [{"atom": "spatial_coverage_pool_builder", "cells": 4}],
    [{"atom": "diversity_pool_builder"}],
    [
        {"atom": "quality_pool_builder", "pool_ratio": 2.0},
        {"atom": "diversity_pool_builder"},
    ],
    [{"atom": "multi_source_pool_builder", "pool_ratio": 1.0}],
    [
        {
            "atom": "multi_source_pool_builder",
            "sources": [{"atom": "diversity_pool_builder"}],
        }
    ],
]


@pytest.mark.parametrize("selector", ATOMS.names("selection_constraints"))
def test_signals_that_change_no_pick_are_marked(selector: str) -> None:
    """With every kernel and pool, whatever is scored; those of a DPP are marked exactly then."""
    probe = synthetic_probes(40)[0]
    call: JsonObject = {"atom": selector}
    if "q_e" in ATOMS[selector].call.parameters():
        call["q_e"] = 6
    kernels: list[JsonValue] = [
        {"atom": name} for name in ATOMS.names("similarity_kernel")
    ]
    kernels.append({"atom": "centred_cosine_kernel", "weighted": True})
    marks = set[bool]()
    for kernel, pool in itertools.product(kernels, POOLS):
        picks: list[torch.Tensor] = []
        for signal in ("visual_token_norm_saliency", "spatial_centrality_prior"):
            document: JsonObject = {
                "scoring": {
                    "signals": [{"atom": signal}],
                    "kernel": kernel,
                    "fusion": {"atom": "weighted_sum_fusion"},
                },
                "constraints": {"pool": pool, "selector": call},
                "reassembly": {"atom": "mean_residual"},
            }
            state = nearest_state(document, SETTINGS)
            policy = materialize(state, BudgetCall.parse(8))
            picks.append(refine(policy, probe).indices)
        is_same = torch.equal(*picks)
        text = line_of("1.0", summarize(history_of(trial("1.0", BASE + 1, state))))
        is_marked = "; signals and fusion act on nothing: neither pool" in text
        assert is_same or not is_marked, (kernel, pool)
        assert "dpp" not in selector or is_same == is_marked, (kernel, pool)
        marks.add(is_marked)
    assert marks == ({True, False} if "dpp" in selector else {False})


def test_exchanges_and_what_they_can_gain_are_told(history: History) -> None:
    exchange = Exchange(tokens=1.5, quality=(0.25, 0.75))
    other = Exchange(tokens=0.2, quality=(1.25, 1.5))

    def describe(**exchanges: Exchange) -> str:
        trial = dataclasses.replace(history.trials[0], exchanges=exchanges)
        history.trials[0] = trial
        return line_of("1.0", summarize(history))

    assert "; exchanges 1.5 tokens; quality 0.25 and 0.75; " in describe(
        **{"": exchange}
    )
    of_models = "exchanges 1.5 tokens on a, 0.2 on b; quality 0.25 and 0.75 on a, "
    assert f"; {of_models}1.25 and 1.50 on b; " in describe(a=exchange, b=other)


# ---- one scale ----


@pytest.fixture
def fresh() -> History:
    """Candidates that were asked different halves, in different shares of the categories."""
    rng = np.random.default_rng(0)
    names = ["text"] * 30 + ["relation"] * 10 + ["text"] * 10 + ["relation"] * 30
    examples = [
        Example(image=f"{n}.png", question=f"Q{n}?", answer="a", category=name)
        for n, name in enumerate(names)
    ]
    difficulty = np.repeat([-1.0, -4.0], 40)
    asked = {"1.0": slice(80), "1.1": slice(40), "2.0": slice(40, 80)}
    trials: list[Trial] = []
    for name, rows in asked.items():
        values = np.full(80, np.nan)
        gain = np.where(np.array(names) == "text", 1.0, 0.2)
        values[rows] = (difficulty + gain + 0.1 * rng.normal(size=80))[rows]
        parent = "" if name[0] == "1" else "1.1"
        state = paper_state(SETTINGS, quota=1 + len(trials))
        trials.append(trial(name, values, state, parent=parent, expect="higher"))
    base = difficulty + 0.1 * rng.normal(size=80)
    return History(trial("0.0", base), trials, examples)


def read_scores(text: str) -> dict[str, float]:
    """Printed scores of all candidates, and of the base policy."""
    found = re.findall(r"^- (\d+\.\d+): ([+-][\d.]+) on", text, re.MULTILINE)
    (base,) = re.findall(r"\(base\): ([+-][\d.]+)\.", text)
    return {name: float(score) for name, score in found} | {"base": float(base)}


def read_differences(text: str) -> Iterator[tuple[str, str, float]]:
    """Printed differences to leaders and parents: of which candidate, to which, how large."""
    for line in text.splitlines():
        for reference, gap in re.findall(r"; to (\S+) ([+-][\d.]+) ± ", line):
            yield line.split(":")[0][2:], reference, float(gap)
    tests = r"^- (\d+\.\d+) \(.* of (\S+), expected .* => ([+-][\d.]+) ± "
    for name, parent, gap in re.findall(tests, text, re.MULTILINE):
        yield name, parent, float(gap)


def test_every_difference_is_the_mean_over_the_questions_that_both_were_asked(
    fresh: History,
) -> None:
    """Whatever their estimated scores: of two that share no question, none is known."""
    text = summarize(fresh)
    values = {trial.name: fresh.values(trial) for trial in (fresh.base, *fresh.trials)}
    differences = list(read_differences(text))
    assert len(differences) >= 5
    for name, reference, gap in differences:
        changes = values[name] - values[reference]  # type: ignore[operator]
        assert gap == pytest.approx(np.nanmean(changes), abs=0.00051), name
    assert "=> unknown, as no question was asked of both" in text


def test_a_category_moves_only_with_answers_to_its_questions(history: History) -> None:
    """It is a plain difference to base over the same questions, not an estimate."""
    perfect = np.full(16, np.nan)
    perfect[[0, 1, 2, 3, 4, 5]] = 0.0
    history.trials.append(trial("3.0", perfect, paper_state(SETTINGS), "dropped"))
    assert "; text +3.00, others +3.00 (of 2); " in line_of("3.0", summarize(history))
    later = np.tile([-0.5, -4.0], 8)
    history.trials.append(trial("3.1", later, base_state(SETTINGS)))
    assert "; text +3.00, others +3.00 (of 2); " in line_of("3.0", summarize(history))


@pytest.mark.parametrize("leader", ["1.0", "1.1"])
def test_every_score_is_the_mean_of_its_categories_weighted_by_their_questions(
    leader: str, fresh: History
) -> None:
    """Also where the leader was asked the easy half alone."""
    (position,) = (n for n, trial in enumerate(fresh.trials) if trial.name == leader)
    values = fresh.trials[position].values
    assert values is not None
    fresh.trials[position] = dataclasses.replace(
        fresh.trials[position], values=values + 0.2
    )
    text = summarize(fresh)
    assert f"score of {leader}, share" in text
    rows = re.findall(
        r"^- (\w+): (\d+), ([+-][\d.]+), ([+-][\d.]+), ", text, re.MULTILINE
    )
    shares = {name: int(count) / 80 for name, count, *_ in rows}
    assert (
        "Questions asked so far, all of them of base: 80" in text
        and sum(shares.values()) == 1
    )
    of_base = sum(shares[name] * float(score) for name, _, score, _ in rows)
    of_leader = sum(shares[name] * float(score) for name, _, _, score in rows)
    scores = read_scores(text)
    of_all = scores.pop("base")
    assert of_leader == pytest.approx(max(scores.values()), abs=0.001)
    assert of_base == pytest.approx(of_all, abs=0.001)
    complete = [name for name in scores if "on 80 questions" in line_of(name, text)]
    assert complete
    for name in complete:
        score = scores[name]
        parts = dict(re.findall(r"(text|relation) ([+-][\d.]+)", line_of(name, text)))
        gain = sum(share * float(parts[part]) for part, share in shares.items())
        assert gain == pytest.approx(score - of_all, abs=0.002), name


def test_gains_by_category_add_up_to_the_difference_to_base() -> None:
    """Of each question: also of categories without a line, and of those that were asked less."""
    source = np.random.default_rng(0)
    examples = [
        Example(
            image=f"{n}.png", question=f"Q{n}?", answer="a", category=f"kind{n % 16}"
        )
        for n in range(160)
    ]
    values = source.normal(-1.0, 0.5, size=(3, 160))
    values[2, 40:] = np.nan
    complete = trial("1.0", values[1], paper_state(SETTINGS))
    part = trial("1.1", values[2], paper_state(SETTINGS, quota=4), "dropped")
    text = summarize(History(trial("0.0", values[0]), [complete, part], examples))
    for name, asked in (("1.0", 160), ("1.1", 40)):
        line = line_of(name, text)
        (gap,) = re.findall(r"to base ([+-][\d.]+)", line)
        gains = re.findall(r"(?:kind\d+|others) ([+-][\d.]+)(?: \(of (\d+)\))?", line)
        counts = [int(count or 10) for _, count in gains]
        assert sum(counts) == asked
        total = sum(
            float(gain) * count for (gain, _), count in zip(gains, counts, strict=True)
        )
        assert total / asked == pytest.approx(float(gap), abs=0.001)
    assert "others" in line_of("1.0", text) and "kind" not in line_of("1.1", text)


def test_the_level_of_the_questions_does_not_tell_candidates_apart(
    fresh: History,
) -> None:
    """1.1 was asked the easy half, 2.0 the hard one; both gain alike in each category."""
    scores = read_scores(summarize(fresh))
    assert scores["1.1"] == pytest.approx(scores["2.0"], abs=0.05)
    assert min(scores.values()) == scores["base"]


@pytest.mark.parametrize("count", [3, 30, 300])
def test_a_summary_has_a_largest_length(count: int) -> None:
    """However many candidates, categories and hypotheses, and however long the questions."""
    examples = [
        Example(
            image=f"{n}.png",
            question="Why? " * 400,
            answer="a",
            category=f"category {n % 40}",
        )
        for n in range(160)
    ]
    rng = np.random.default_rng(0)
    trials = []
    for number in range(count):
        values = np.full(160, np.nan)
        asked = 160 if number % 5 == 0 else 20
        values[:asked] = -rng.random(asked)
        state = paper_state(SETTINGS, quota=number % 8)
        if number % 2:
            state = minimal_state(SETTINGS, ATOMS.names("scoring")[number % 10])
        name = f"{1 + number // 15}.{number % 15}"
        status: Status = "evaluated" if asked == 160 else "dropped"
        tested = trial(name, values, state, status, expect="higher")
        hypothesis = tested.proposal.hypothesis
        assert hypothesis is not None
        hypothesis = hypothesis.model_copy(update={"text": "x" * MAX_HYPOTHESIS})
        proposal = tested.proposal.model_copy(update={"hypothesis": hypothesis})
        trials.append(dataclasses.replace(tested, proposal=proposal))
    history = History(trial("0.0", -np.ones(160)), trials, examples)
    text = summarize(history)
    assert len(text) <= MAX_SUMMARY
    assert f"- {history.leader().name}: " in text
    assert "- 28 others: 112 questions, " in text
    unlisted = re.findall(r"Not listed: (\d+) that were measured", text)
    listed = len(re.findall(r"^- \d+\.\d+: ", text, re.MULTILINE))
    assert listed + sum(map(int, unlisted)) == count
    # No room is kept for hypotheses that are left out.
    assert not unlisted or len(text) > MAX_SUMMARY - 1000


def test_the_best_structures_are_printed_before_what_was_tested_last() -> None:
    """However much was tested, of which no candidate is among the best."""
    best = [
        trial(
            f"1.{n}",
            BASE + 2 - n / 4,
            minimal_state(SETTINGS, ATOMS.names("scoring")[n]),
        )
        for n in range(3)
    ]
    tested = [
        trial(f"2.{n}", BASE - 1, paper_state(SETTINGS, n % 8), expect="higher")
        for n in range(150)
    ]
    text = summarize(history_of(*best, *tested))
    assert "Not listed: " in text
    title = "candidates that were asked all questions of their round:\n"
    listed = text.split(title)[1].splitlines()[:3]
    assert [line[:7] for line in listed] == ["- 1.0: ", "- 1.1: ", "- 1.2: "]


def test_what_a_named_duplicate_repeats_is_printed() -> None:
    """1.1 is the parent of what is tested, and repeats 1.0, which is the worst of many."""
    repeated = paper_state(SETTINGS)
    others = [
        trial(f"2.{n}", BASE + 1, paper_state(SETTINGS, n % 8)) for n in range(150)
    ]
    text = summarize(
        history_of(
            trial("1.0", BASE - 1, repeated),
            trial("1.1", None, repeated, "same", reason="1.0"),
            *others,
            trial("3.0", BASE, minimal_state(SETTINGS), parent="1.1", expect="same"),
        )
    )
    assert "Not listed: " in text
    assert line_of("1.1", text).startswith("- 1.1: -4.00 of 1.0, whose tokens")
    assert line_of("1.0", text).startswith("- 1.0: -4.00 on 16 questions")


def test_a_rival_that_is_worse_on_the_same_questions_is_not_told_as_tied() -> None:
    """Its score, of few questions, may be as good as the leader's."""
    noise = 3 * np.tile([-1.0, 1.0, -1.0, 1.0], 4)
    few = np.full(16, np.nan)
    few[:8] = (BASE + 2 + noise)[:8] - 0.5
    history = history_of(
        trial("1.0", BASE + 2 + noise, paper_state(SETTINGS)),
        trial("1.1", few, minimal_state(SETTINGS)),
    )
    history.resolution = 0.1
    assert [rival.name for rival in history.tied()] == ["1.1"]
    text = summarize(history)
    assert "to 1.0 -0.50 ± 0.00, lower (of 8" in text
    assert "*same* or *undecided* to 1.0" not in text


def test_a_reassembly_that_only_sorts_rows_is_said_to() -> None:
    state = minimal_state(SETTINGS)
    words = {"raster": "changes no row", "score": "changes the order of rows alone"}
    for order, expected in words.items():
        call = default_call(AtomCall, f"reassemble/local.mean.exchange.{order}")
        sorted_state = state.model_copy(update={"reassembly": call})
        text = summarize(history_of(trial("1.0", BASE + 1, sorted_state)))
        assert f"reassembly {expected}; " in line_of("1.0", text)


def test_figures_have_the_digits_that_errors_support(history: History) -> None:
    """Two digits of the usual standard error; a small one shows more decimals."""
    assert "- 2.0: -1.70 on 16 questions; to 2.3 -0.95 ± 0.02, " in summarize(history)
    close = history_of(trial("1.0", BASE + 0.05 + NOISE / 20, paper_state(SETTINGS)))
    assert "to base +0.0500 ± 0.0026, higher" in summarize(close)
