"""The demo from questions to table, against fake servers."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.common.progress import LineProgress
from benchmarks.demo.configurations import (
    BUDGETS,
    FULL,
    KEEPS,
    PRUNED,
    Configuration,
    everything_kept,
)
from benchmarks.demo.example import choose_example
from benchmarks.demo.kv_cache import KvLayout
from benchmarks.demo.measure import Measured, Questions, draw_questions, send_questions
from benchmarks.demo.output import COLUMNS, markdown, terminal
from benchmarks.demo.results import Results, build_control, build_row, half_width
from benchmarks.minillava.wordings import KINDS
from tests.benchmarks.demo.sample_replies import image_of, prompt_tokens, pruning, question_of

LAYOUT = KvLayout(layers=4, kv_heads=6, head_dim=32, dtype_bytes=2)
KEPT = everything_kept(144)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return draw_questions(scenes=2, rounds=2)


@pytest.fixture(scope="module")
def measured(questions: Questions) -> Measured:
    """Answers are right, except with a random keep of at most 8 tokens."""
    right = {
        (item.identity, example.question): example.answer
        for item, example in zip(questions.scored, questions.examples, strict=True)
    }

    def reply(body: Body) -> Reply:
        fields = pruning(body)
        blind = fields.get("keep") == "random" and int(str(fields["budget"])) <= 8
        text = "none" if blind else right.get((image_of(body), question_of(body)), "1 2")
        usage = {"prompt_tokens": prompt_tokens(body)}
        return Reply(tuple(text), first=0.01, gaps=(0.005,), usage=usage)

    def both(url: str) -> Measured:
        progress = LineProgress(Console(file=io.StringIO()))
        stock = send_questions(url, "stock", questions, (FULL,), (FULL,), progress)
        some = (*PRUNED, KEPT)
        pruned = send_questions(url, "pruned", questions, PRUNED, some, progress)
        return Measured(stock.answers | pruned.answers, stock.timings | pruned.timings)

    with fake_server(reply, model=None) as server:
        answers = both(server.url)
    timed = [body for body in server.seen if body.get("ignore_eos")]
    assert len(timed) == 2 * 18
    assert len(server.seen) - len(timed) == 17 * len(questions.scored)
    # The same questions in every configuration, whichever finished first.
    by_configuration: dict[str, list[str]] = {}
    for body in server.seen:
        if not body.get("ignore_eos"):
            by_configuration.setdefault(json.dumps(pruning(body)), []).append(question_of(body))
    assert len({tuple(sorted(texts)) for texts in by_configuration.values()}) == 1
    return answers


@pytest.fixture(scope="module")
def results(questions: Questions, measured: Measured) -> Results:
    rows = [
        build_row(c, questions.examples, measured.answers[c], measured.timings[c], LAYOUT)
        for c in (FULL, *PRUNED)
    ]
    return Results(
        rows=tuple(rows),
        control=build_control(measured.timings[FULL], measured.timings[KEPT]),
        questions=len(questions.examples),
        scenes=2,
        visual_tokens=144,
        kv_formula=LAYOUT.formula,
        environment={"vllm": "0"},
    )


def test_scored_and_timed_questions_share_no_image(questions: Questions) -> None:
    assert {example.kind for example in questions.examples} == set(KINDS)
    assert len(questions.scored) == len(questions.examples) == 35
    assert [item.identity for item in questions.timed] == ["timed-0", "timed-1"]
    sent = json.loads(json.dumps([item.content for item in (*questions.scored, *questions.timed)]))
    assert len({content[0]["image_url"]["url"] for content in sent}) == 2 + 2


def test_rows_hold_scores_tokens_and_bytes(results: Results) -> None:
    assert results.full.accuracy == results.full.accuracy_plus == 1.0
    assert results.full.prompt_tokens == 164 and results.full.kv_bytes == 164 * 3072
    for budget in BUDGETS:
        for keep in KEEPS:
            row = results.row(keep, budget)
            blind = keep == "random" and budget <= 8
            assert row.accuracy == row.accuracy_plus == (0.0 if blind else 1.0)
            assert row.prompt_tokens == 20 + budget
            assert row.kv_bytes == (20 + budget) * 3072
            assert row.ttft.low <= row.ttft.median <= row.ttft.high
            assert row.ttft.median < row.total.median
            assert row.ttft.count == 2


def test_the_control_compares_answers_with_the_stock_server(results: Results) -> None:
    assert (results.control.same_answers, results.control.asked) == (2, 2)


def test_the_verdict_names_the_three_shares(results: Results) -> None:
    assert results.verdict() == (
        "At K = 8 of 144 visual tokens: base policy 100.0 %, shipped state 100.0 %, "
        "resize control 100.0 %, random keep 0.0 % (full: 100.0 %), with 5.9 times fewer prompt "
        "tokens and KV bytes."
    )


def test_markdown_has_a_line_for_every_row(results: Results) -> None:
    lines = markdown(results).splitlines()

    assert lines[0] == "| " + " | ".join(COLUMNS) + " |"
    assert lines[1] == "| --: | :-- | --: | --: | --: | --: | --: | --: |"
    assert lines[2].startswith("| 144 | full | 100.0 ± 4.9 | 100.0 | 164.0 | 503,808 | ")
    assert lines[11].startswith("| 8 | random keep | 0.0 ± 4.9 | 0.0 | 28.0 | 86,016 | ")
    assert lines[18].startswith("| 4 | shipped state | ") and lines[19] == ""
    assert lines[20] == results.verdict()
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines[:19])
    assert any("35 questions on 2 scenes" in line for line in lines)


@pytest.mark.parametrize("width", [80, 116])
def test_the_terminal_table_is_not_truncated(results: Results, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, record=True)
    table = terminal(results, width)
    console.print(table)

    text = console.export_text()
    assert table.row_count == 17 and "…" not in text
    assert all(word in text for name in COLUMNS for word in name.split())
    assert "shipped state" in text and "100.0 ± 4.9" in text
    assert ("–" in text) == (width == 116)  # quartiles only where there is room


def test_results_can_be_written_as_json(results: Results) -> None:
    content = json.loads(json.dumps(results.to_json()))

    assert content["rows"][0]["configuration"] == {"keep": "full", "budget": None}
    assert content["verdict"] == results.verdict()


def test_the_picture_shows_a_question_that_only_a_random_keep_fails(
    questions: Questions, measured: Measured
) -> None:
    number = choose_example(questions.examples, measured)

    assert questions.examples[number].kind in ("digit", "colour", "shape")
    assert measured.answer(Configuration("random", 8), number) == "none"
    assert measured.answer(Configuration("state", 8), number) == questions.examples[number].answer


def test_correlated_scenes_widen_the_interval(questions: Questions) -> None:
    examples = questions.examples
    spread_out = [e.answer if i % 2 else "none" for i, e in enumerate(examples)]
    by_scene = [e.answer if e.image_id else "none" for e in examples]

    # Wilson for p = 17/35: 1.96 sqrt(p (1 - p) / 35 + 1.96^2 / (4 * 35^2)) / (1 + 1.96^2 / 35)
    assert half_width(examples, spread_out) == pytest.approx(0.1572, abs=1e-4)
    # Scenes of 0 and 1: 1.96 x sqrt(0.5) / sqrt(2)
    assert half_width(examples, by_scene) == pytest.approx(0.98)
