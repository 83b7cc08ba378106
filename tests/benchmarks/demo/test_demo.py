"""The demo from questions to table and picture, against fake servers; its one-line failures."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.common.shapes import KvLayout
from benchmarks.demo import output
from benchmarks.demo.__main__ import SIGNALS, build_parser, main
from benchmarks.demo.measure import (
    FULL,
    KEEPS,
    PRUNED,
    QUESTIONS,
    Answers,
    Configuration,
    Plan,
    Settings,
    Speed,
    SpeedRow,
    find_root_cause,
    send_questions,
    time_requests,
)
from benchmarks.demo.output import (
    COLUMNS,
    HEAD,
    Results,
    build_row,
    build_terminal_table,
    format_details,
    format_summary,
    half_width,
)
from benchmarks.demo.picture import (
    EVIDENCE,
    KEPT,
    PATCH,
    SCALE,
    SHOWN,
    Explainer,
    choose_example,
    draw_example,
    draw_scene,
    patch_box,
)
from benchmarks.yardsticks.engine import MAX_ANSWER_TOKENS
from benchmarks.yardsticks.examples import CLIP, LLAVA, Example, draw_examples, png
from benchmarks.yardsticks.minillava import MiniLlava
from vllm_autoprune.statistics import Spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

EVERYTHING = Configuration("state", 144)
LAYOUT = KvLayout(layers=4, kv_heads=6, head_dim=32, dtype_bytes=2)


def pruning(body: Body) -> dict[str, object]:
    """The pruning fields of a request."""
    return dict(body.get("mm_processor_kwargs", {}).get("autoprune", {}))


def parts(body: Body) -> tuple[dict[str, object], str]:
    """Image and question of a request."""
    image, question = body["messages"][0]["content"]
    return image, question["text"]


@pytest.fixture(scope="module")
def examples() -> Sequence[Example]:
    return draw_examples("test", 2)


@pytest.fixture(scope="module")
def answers(examples: Sequence[Example]) -> Answers:
    """Answers are right, except with a random keep of at most 8 tokens."""
    right = {(f"asked-{e.image_id}", e.question): e.answer for e in examples}

    def reply(body: Body) -> Reply:
        fields, (image, question) = pruning(body), parts(body)
        blind = fields.get("keep") == "random" and int(str(fields["budget"])) <= 8
        text = "none" if blind else right[str(image["uuid"]), question]
        # Later requests may be answered earlier.
        tokens = 20 + int(str(fields.get("budget", 144)))
        return Reply(tuple(text), ttft=0.01 * (len(question) % 3), usage={"prompt_tokens": tokens})

    with fake_server(reply, model=None) as server:
        stock = send_questions(server.url, "stock", examples, (FULL,))
        pruned = send_questions(server.url, "pruned", examples, (*PRUNED, EVERYTHING))
    # The same questions in every configuration, whichever finished first.
    by_fields: dict[str, list[str]] = {}
    for body in server.seen:
        by_fields.setdefault(json.dumps(pruning(body)), []).append(parts(body)[1])
    assert len(by_fields) == 10
    assert len({tuple(sorted(texts)) for texts in by_fields.values()}) == 1
    body = server.seen[-1]
    head, _, data = str(parts(body)[0]["image_url"]["url"]).partition(",")  # type: ignore[index]
    assert head == "data:image/png;base64"
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).shape == (168, 168, 3)
    assert (body["temperature"], body["max_tokens"]) == (0, MAX_ANSWER_TOKENS)
    assert pruning(body) == {"budget": 144, "keep": "state"} and pruning(server.seen[0]) == {}
    return stock | pruned


def speed_row(ttft: float, rate: float, *questions: float) -> SpeedRow:
    alone, *three = [Spread(value, value - 10, value + 10, 6) for value in (ttft, *questions)]
    return SpeedRow(600, 600 * 32768, alone, alone, rate, tuple(three))


@pytest.fixture(scope="module")
def results(examples: Sequence[Example], answers: Answers) -> Results:
    rows = [build_row(c, examples, answers[c], LAYOUT) for c in (FULL, *PRUNED)]
    machine = {"cores": "2", "load average": "0.50", "dtype of local servers": "float32"}
    return Results(
        rows=tuple(rows),
        control={"same_answers": 35, "asked": 35},
        questions=len(examples),
        scenes=2,
        visual_tokens=144,
        kv_formula=LAYOUT.formula,
        dtype="float32",
        environment=machine,
        speed=Speed(
            speed_row(1600, 0.7, 1600, 90, 80),
            speed_row(400, 2.6, 400, 90, 80),
            speed_row(410, 2.5, 410, 200, 210),
        ),
    )


def test_rows_hold_scores_tokens_and_bytes(results: Results) -> None:
    full = results.row("full")
    assert full.accuracy == full.accuracy_plus == 1.0
    assert (full.prompt_tokens, full.kv_bytes) == (164, 164 * 3072)
    assert {(c.keep, c.budget) for c in PRUNED} == {(k, b) for k in KEEPS for b in (16, 8)}
    for configuration in PRUNED:
        row = results.row(configuration.keep, configuration.budget)
        blind = configuration == Configuration("random", 8)
        assert row.accuracy == row.accuracy_plus == (0.0 if blind else 1.0)
        assert (
            row.kv_bytes
            == row.prompt_tokens * 3072
            == (20 + (row.configuration.budget or 0)) * 3072
        )
    content = json.loads(json.dumps(dataclasses.asdict(results)))
    assert content["rows"][0]["configuration"] == {"keep": "full", "budget": None}


def test_the_details_have_a_line_for_every_row(results: Results) -> None:
    lines = format_details(results).splitlines()
    assert lines[0] == "| " + " | ".join(COLUMNS) + " |"
    assert lines[2].startswith("| 144 | full | 100.0 ± 4.9 | 100.0 | 164.0 | 503,808 |")
    assert lines[7].startswith("| 8 | random keep | 0.0 ± 4.9 | 0.0 | 28.0 | 86,016 |")
    assert lines[12] == (
        "At K = 8 of 144 visual tokens: base policy 100.0 %, shipped state 100.0 %, "
        "resize control 100.0 %, random keep 0.0 % (full: 100.0 %), with 5.9 times fewer prompt "
        "tokens and KV bytes."
    )
    assert any("35 of 35 answers exactly as the stock one" in line for line in lines)


def test_the_table_has_stock_resized_and_pruned_side_by_side(results: Results) -> None:
    lines = format_summary(results).splitlines()
    assert lines[0] == "|  | stock | resized | pruned |"
    assert "| **large, random weights** | **N = 576** | **K = 64** | **K = 64** |" in lines
    assert "| first token, alone, ms | 1,600 | 400 | 410 |" in lines
    assert "| requests/s, 8 at once | 0.70 | 2.60 | 2.50 |" in lines
    assert "| first token, question 1/2/3, ms | 1,600/90/80 |" in " ".join(lines)
    assert "| right answers, % | 100.0 ± 4.9 | 100.0 ± 4.9 | 100.0 ± 4.9 |" in lines
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(build_terminal_table(results))
    text = console.export_text()
    assert "…" not in text
    assert all(name in text for name in (*HEAD, "requests/s, 8 at once", "100.0 ± 4.9"))


def test_correlated_scenes_widen_the_interval(examples: Sequence[Example]) -> None:
    spread_out = [e.answer if i % 2 else "none" for i, e in enumerate(examples)]
    by_scene = [e.answer if e.image_id else "none" for e in examples]
    # Wilson for p = 17/35: 1.96 sqrt(p (1 - p) / 35 + 1.96^2 / (4 * 35^2)) / (1 + 1.96^2 / 35)
    assert half_width(examples, spread_out) == pytest.approx(0.1572, abs=1e-4)
    # Scenes of 0 and 1: 1.96 x sqrt(0.5) / sqrt(2)
    assert half_width(examples, by_scene) == pytest.approx(0.98)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status=400, error="no such budget"), "the server refused a question: .*no such"),
        (Reply(drop=True), "the server stopped answering; its log is in --out: no answer"),
    ],
)
def test_a_failed_question_is_described_in_one_line(
    reply: Reply, message: str, examples: Sequence[Example]
) -> None:
    with (
        fake_server(reply, model=None) as server,
        pytest.raises(BenchmarkError, match=message) as caught,
    ):
        send_questions(server.url, "stock", examples[:1], (FULL,))
    assert "\n" not in str(caught.value)


def test_an_empty_answer_is_an_answer(examples: Sequence[Example]) -> None:
    with fake_server(Reply(("",), ttft=0.0), model=None) as server:
        answers = send_questions(server.url, "stock", examples[:1], (FULL,))
    assert answers[FULL][0].text == ""


def test_every_arm_sends_the_same_requests_and_shares_no_image() -> None:
    plan = Plan(alone=2, together=8, images=2)
    reply = Reply(("w1",), ttft=0.02, usage={"prompt_tokens": 600})
    steps: list[int] = []

    def urls(bodies: Sequence[Body]) -> list[str]:
        return [str(parts(body)[0]["image_url"]) for body in bodies]

    with fake_server(reply, model=None) as server:
        row = time_requests(server.url, {}, plan, 100, 0, lambda: steps.append(1))
        first = list(server.seen)
        time_requests(server.url, {"keep": "resized"}, plan, 100, 1000, lambda: steps.append(1))
        second = server.seen[len(first) :]
    assert len(first) == len(second) == plan.requests == len(steps) // 2
    assert (row.prompt_tokens, row.kv_bytes) == (600, 60_000)
    assert row.alone.count == 2 and row.together.count == 8 and len(row.questions) == QUESTIONS
    assert row.alone.median >= 20
    assert {pruning(body).get("keep") for body in second} == {"resized"}
    assert not set(urls(first)) & set(urls(second))
    # Only the images of several questions are sent again, with new words each time.
    assert Counter(Counter(urls(first)).values()) == {1: 2 + 2 + 8, QUESTIONS: 2}
    texts = {tuple(re.findall(r"w\d+", parts(body)[1])) for body in first}
    assert len(texts) == len(first)


def test_the_root_cause_is_the_plugin_s_refusal_or_the_first_error() -> None:
    refusal = "INFO x\n\nvllm-autoprune: cannot serve: 1 problem(s)\n  - --state: bad -> fix"
    assert find_root_cause(refusal) == "cannot serve: 1 problem(s) - --state: bad -> fix"
    log = (
        "INFO loading\n"
        "(Worker pid=7) ERROR 11-21 11:28:09 [executor.py:953] Traceback (most recent call last):\n"
        "(Worker pid=7) ERROR 11-21 11:28:09 [executor.py:953] NameError: name 'x'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert find_root_cause(log) == "NameError: name 'x'"
    assert find_root_cause("INFO loading\nKilled\n") == "Killed"
    assert find_root_cause("") == "no output"


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Restore the signal handlers that `main` replaces."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("_handlers")
def test_what_cannot_be_served_is_refused_in_one_line_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call = ["--model", str(tmp_path), "--text-tower", str(tmp_path), "--out", str(out)]
    assert main(call) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"demo: {tmp_path} contains no checkpoint (model.safetensors)\n"
    (tmp_path / "model.safetensors").touch()
    assert main([*call, "--state", "nosuch"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("demo: ") and "nosuch" in message and message.count("\n") == 1
    assert not out.exists()


@pytest.mark.usefixtures("_handlers")
def test_the_start_says_dtype_and_duration_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "choose_dtype", lambda **_: "float32")
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [0.9, 0.1, 0.1])
    monkeypatch.setattr(output, "measure", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    # 140 s + 1,100 x 0.1 s
    text = " ".join(capsys.readouterr().err.split())
    assert "served in float32" in text and "takes about 5 minutes here" in text


@pytest.mark.parametrize("wrong", [["--scenes", "0"], ["--scenes", "x"]])
def test_numbers_out_of_range_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(wrong)
    assert caught.value.code == 2
    assert "is not a whole number from" in capsys.readouterr().err


GREY = (120, 130, 140)
SIDE = 168 * SCALE


def middle(patch: int) -> tuple[int, int]:
    left, top, right, bottom = patch_box(patch, 12)
    return (left + right) // 2, (top + bottom) // 2


def test_kept_patches_stay_as_they_are_and_the_rest_is_dimmed() -> None:
    image = Image.new("RGB", (168, 168), GREY)
    scene = draw_scene(image, {5, 70}, evidence=())
    assert scene.size == (SIDE, SIDE)
    assert scene.getpixel(middle(5)) == scene.getpixel(middle(70)) == GREY
    dimmed = scene.getpixel(middle(6))
    assert isinstance(dimmed, tuple) and max(dimmed) < 80
    left, top, right, bottom = patch_box(70, 12)
    for corner in ((left, top), (right - 1, top), (left, bottom - 1), (right - 1, bottom - 1)):
        assert scene.getpixel(corner) == KEPT
    assert draw_scene(image, None, evidence=()).getcolors() == [(SIDE * SIDE, GREY)]


def test_evidence_is_outlined_around_its_patches_and_does_not_wrap() -> None:
    scene = draw_scene(Image.new("RGB", (168, 168), GREY), None, evidence=(26, 27))
    left, top, _, bottom = patch_box(26, 12)
    between, centre = patch_box(27, 12)[0], (top + bottom) // 2
    assert scene.getpixel((left, centre)) == scene.getpixel((between, top)) == EVIDENCE
    assert scene.getpixel((between, centre)) == GREY
    border = draw_scene(Image.new("RGB", (168, 168), GREY), None, evidence=(11, 12))
    assert border.getpixel((SIDE - 1, PATCH * SCALE // 2)) == EVIDENCE
    assert border.getpixel((1, PATCH * SCALE * 3 // 2)) == EVIDENCE


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(Settings(LLAVA, CLIP, "autoprune", 1, Path()))


def kept(explainer: Explainer, example: Example, keep: Configuration) -> tuple[int, ...]:
    return explainer.select(Image.open(io.BytesIO(png(example.image))), example.question, keep)[0]


def test_the_picture_keeps_what_a_server_keeps(
    explainer: Explainer, examples: Sequence[Example]
) -> None:
    shown = [e for e in examples if e.kind in ("digit", "colour")]
    base, state, random = (Configuration(k, 8) for k in ("reference", "state", "random"))
    policy = BASE_POLICIES["cdpruner"]
    tokens = MiniLlava().encode(shown).tokens
    picks = policy.select(policy.call(name=policy.name).params, tokens, 8).picks
    chosen = [kept(explainer, example, base) for example in shown]
    # The reader encodes a batch, in bfloat16, which exchanges patches of nearly equal rank.
    overlap = [len(set(a) & set(b)) for a, b in zip(chosen, picks.tolist(), strict=True)]
    assert min(overlap) >= 6 and sum(overlap) >= 7 * len(shown)
    for example, reference in zip(shown, chosen, strict=True):
        exchanged = kept(explainer, example, state)
        assert len(exchanged) == 8 and len({*reference} & {*exchanged}) >= 6
    assert kept(explainer, shown[0], FULL) == tuple(range(144))
    # A random keep depends on the image alone.
    same, other = shown[1], next(e for e in shown if e.image_id != shown[0].image_id)
    assert shown[0].image_id == same.image_id
    assert kept(explainer, shown[0], random) == kept(explainer, same, random)
    assert kept(explainer, other, random) != kept(explainer, same, random)


def test_the_picture_shows_a_question_that_only_a_random_keep_fails(
    examples: Sequence[Example], answers: Answers, tmp_path: Path
) -> None:
    number = choose_example(examples, answers)
    assert examples[number].kind in ("digit", "colour", "shape")
    settings = Settings(LLAVA, CLIP, "autoprune", 2, tmp_path)
    content = json.loads(json.dumps(draw_example(settings, examples, answers)))
    assert content["question"] == examples[number].question
    assert content["served"]["random 8"] == "none" != content["served"]["state 8"]
    assert list(content["served"]) == [configuration.label for configuration in SHOWN]
    with Image.open(content["path"]) as sheet:
        assert sheet.width == 28 + 4 * (SIDE + 28)
        assert {EVIDENCE, KEPT} <= {colour for _, colour in sheet.getcolors(1 << 24) or ()}
