"""The demo from questions to table, against fake servers."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.common.shapes import KvLayout
from benchmarks.demo.configurations import (
    BUDGETS,
    FULL,
    KEEPS,
    PRUNED,
    Configuration,
    everything_kept,
)
from benchmarks.demo.example import choose_example
from benchmarks.demo.measure import Measured, Questions, draw_questions, send_questions
from benchmarks.demo.output import COLUMNS, details
from benchmarks.demo.results import Results, build_control, build_row, half_width
from benchmarks.demo.speed import Speed, SpeedRow
from benchmarks.demo.summary import HEAD, summary, terminal
from benchmarks.minillava.wordings import KINDS
from tests.benchmarks.demo.sample_replies import image_of, prompt_tokens, pruning, question_of
from vllm_autoprune.statistics import Spread


def speed_row(ttft: float, rate: float, *questions: float) -> SpeedRow:
    one, *three = [Spread(value, value - 10, value + 10, 6) for value in (ttft, *questions)]
    return SpeedRow(600, 600 * 32768, one, one, rate, tuple(three))


SPEED = Speed(
    speed_row(1600, 0.7, 1600, 90, 80),
    speed_row(400, 2.6, 400, 90, 80),
    speed_row(410, 2.5, 410, 200, 210),
)
LAYOUT = KvLayout(layers=4, kv_heads=6, head_dim=32, dtype_bytes=2)
KEPT = everything_kept(144)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return draw_questions(scenes=2)


@pytest.fixture(scope="module")
def measured(questions: Questions) -> Measured:
    """Answers are right, except with a random keep of at most 8 tokens."""
    right = {
        (item.identity, example.question): example.answer
        for item, example in zip(questions.queries, questions.examples, strict=True)
    }

    def reply(body: Body) -> Reply:
        fields = pruning(body)
        blind = fields.get("keep") == "random" and int(str(fields["budget"])) <= 8
        text = "none" if blind else right[image_of(body), question_of(body)]
        return Reply(tuple(text), usage={"prompt_tokens": prompt_tokens(body)})

    with fake_server(reply, model=None) as server:
        stock = send_questions(server.url, "stock", questions, (FULL,))
        pruned = send_questions(server.url, "pruned", questions, (*PRUNED, KEPT))
    assert len(server.seen) == 10 * len(questions.queries)
    # The same questions in every configuration, whichever finished first.
    by_configuration: dict[str, list[str]] = {}
    for body in server.seen:
        by_configuration.setdefault(json.dumps(pruning(body)), []).append(question_of(body))
    assert len({tuple(sorted(texts)) for texts in by_configuration.values()}) == 1
    return Measured(stock.answers | pruned.answers)


@pytest.fixture(scope="module")
def results(questions: Questions, measured: Measured) -> Results:
    rows = [build_row(c, questions.examples, measured.answers[c], LAYOUT) for c in (FULL, *PRUNED)]
    # The kept answers differ in their count of tokens only.
    kept = [dataclasses.replace(a, prompt_tokens=164) for a in measured.answers[KEPT]]
    return Results(
        rows=tuple(rows),
        control=build_control(measured.answers[FULL], kept),
        questions=len(questions.examples),
        scenes=2,
        visual_tokens=144,
        kv_formula=LAYOUT.formula,
        dtype="float32",
        environment={
            "vllm": "0",
            "cores": "2",
            "load average": "0.50",
            "dtype of local servers": "float32",
        },
        speed=SPEED,
    )


def test_questions_are_of_every_kind(questions: Questions) -> None:
    assert {example.kind for example in questions.examples} == set(KINDS)
    assert len(questions.queries) == len(questions.examples) == 35
    sent = json.loads(json.dumps([item.content for item in questions.queries]))
    assert len({content[0]["image_url"]["url"] for content in sent}) == 2


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


def test_the_control_compares_answers_with_the_stock_server(results: Results) -> None:
    assert (results.control.same_answers, results.control.asked) == (35, 35)


def test_the_verdict_names_the_three_shares(results: Results) -> None:
    assert results.verdict() == (
        "At K = 8 of 144 visual tokens: base policy 100.0 %, shipped state 100.0 %, "
        "resize control 100.0 %, random keep 0.0 % (full: 100.0 %), with 5.9 times fewer prompt "
        "tokens and KV bytes."
    )


def test_the_details_have_a_line_for_every_row(results: Results) -> None:
    lines = details(results).splitlines()

    assert lines[0] == "| " + " | ".join(COLUMNS) + " |"
    assert lines[2].startswith("| 144 | full | 100.0 ± 4.9 | 100.0 | 164.0 | 503,808 |")
    assert lines[7].startswith("| 8 | random keep | 0.0 ± 4.9 | 0.0 | 28.0 | 86,016 |")
    assert lines[12] == results.verdict()
    assert any("35 of 35 answers exactly as the stock one" in line for line in lines)


def test_the_last_screen_has_stock_resized_and_pruned_side_by_side(results: Results) -> None:
    lines = summary(results).splitlines()

    assert lines[0] == "|  | stock | resized | pruned |"
    assert "| **large, random weights** | **N = 576** | **K = 64** | **K = 64** |" in lines
    assert "| first token, alone, ms | 1,600 | 400 | 410 |" in lines
    assert "| requests/s, 8 at once | 0.70 | 2.60 | 2.50 |" in lines
    assert "| first token, question 1/2/3, ms | 1,600/90/80 |" in " ".join(lines)
    assert "| right answers, % | 100.0 ± 4.9 | 100.0 ± 4.9 | 100.0 ± 4.9 |" in lines


def test_the_terminal_table_is_not_truncated(results: Results) -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(terminal(results))

    text = console.export_text()
    assert "…" not in text
    assert all(name in text for name in (*HEAD, "requests/s, 8 at once", "100.0 ± 4.9"))


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
