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

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.common.shapes import KvLayout
from benchmarks.demo import measure, output, picture
from benchmarks.demo.__main__ import SIGNALS, main
from benchmarks.yardsticks.engine import MAX_ANSWER_TOKENS
from benchmarks.yardsticks.examples import CLIP, LLAVA, Example, as_picture, draw_examples
from benchmarks.yardsticks.minillava import MiniLlava
from vllm_autoprune.checkpoint import open_vision
from vllm_autoprune.statistics import Spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import Grid

EVERYTHING = measure.Configuration("state", 144)
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
def answers(examples: Sequence[Example]) -> measure.Answers:
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
        stock = measure.send_questions(server.url, "stock", examples, (measure.FULL,))
        pruned = measure.send_questions(
            server.url, "pruned", examples, (*measure.PRUNED, EVERYTHING)
        )
    # The same questions in every configuration, whichever finished first.
    asked: dict[str, list[str]] = {}
    for body in server.seen:
        asked.setdefault(json.dumps(pruning(body)), []).append(parts(body)[1])
    assert len(asked) == 10 and len({tuple(sorted(texts)) for texts in asked.values()}) == 1
    body = server.seen[-1]
    head, _, data = str(parts(body)[0]["image_url"]["url"]).partition(",")  # type: ignore[index]
    assert head == "data:image/png;base64"
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).shape == (168, 168, 3)
    assert (body["temperature"], body["max_tokens"]) == (0, MAX_ANSWER_TOKENS)
    assert pruning(body) == {"budget": 144, "keep": "state"} and pruning(server.seen[0]) == {}
    return stock | pruned


def speed_row(ttft: float, rate: float, *questions: float) -> measure.SpeedRow:
    alone, *three = [Spread(value, value - 10, value + 10, 6) for value in (ttft, *questions)]
    return measure.SpeedRow(600, 600 * 32768, alone, alone, rate, tuple(three))


@pytest.fixture(scope="module")
def results(examples: Sequence[Example], answers: measure.Answers) -> output.Results:
    rows = [
        output.build_row(c, examples, answers[c], LAYOUT) for c in (measure.FULL, *measure.PRUNED)
    ]
    machine = {"cores": "2", "load average": "0.50", "dtype of local servers": "float32"}
    return output.Results(
        rows=tuple(rows),
        control={"same_answers": 35, "asked": 35},
        questions=len(examples),
        scenes=2,
        visual_tokens=144,
        kv_formula=LAYOUT.formula,
        dtype="float32",
        environment=machine,
        speed=measure.Speed(
            speed_row(1600, 0.7, 1600, 90, 80),
            speed_row(400, 2.6, 400, 90, 80),
            speed_row(410, 2.5, 410, 200, 210),
        ),
    )


def test_rows_hold_scores_tokens_and_bytes(results: output.Results) -> None:
    full = results.row("full")
    assert full.accuracy == full.accuracy_plus == 1.0
    assert (full.prompt_tokens, full.kv_bytes) == (164, 164 * 3072)
    assert {(c.keep, c.budget) for c in measure.PRUNED} == {
        (k, b) for k in measure.KEEPS for b in (16, 8)
    }
    for configuration in measure.PRUNED:
        row = results.row(configuration.keep, configuration.budget)
        blind = configuration == measure.Configuration("random", 8)
        assert row.accuracy == row.accuracy_plus == (0.0 if blind else 1.0)
        assert row.prompt_tokens == 20 + (configuration.budget or 0)
        assert row.kv_bytes == row.prompt_tokens * 3072
    content = json.loads(json.dumps(dataclasses.asdict(results)))
    assert content["rows"][0]["configuration"] == {"keep": "full", "budget": None}
    assert results.verdict() == (
        "At K = 8 of 144 visual tokens: base policy 100.0 %, shipped state 100.0 %, "
        "resize control 100.0 %, random keep 0.0 % (full: 100.0 %), with 5.9 times fewer prompt "
        "tokens and KV bytes."
    )


def test_the_table_has_stock_resized_and_pruned_side_by_side(results: output.Results) -> None:
    lines = output.format_summary(results).splitlines()
    assert lines[0] == "|  | stock | resized | pruned |"
    assert "| **large, random weights** | **N = 576** | **K = 64** | **K = 64** |" in lines
    assert "| first token, alone, ms | 1,600 | 400 | 410 |" in lines
    assert "| requests/s, 8 at once | 0.70 | 2.60 | 2.50 |" in lines
    assert "| first token, question 1/2/3, ms | 1,600/90/80 |" in " ".join(lines)
    assert "| right answers, % | 100.0 ± 4.9 | 100.0 ± 4.9 | 100.0 ± 4.9 |" in lines


def test_correlated_scenes_widen_the_interval(examples: Sequence[Example]) -> None:
    spread_out = [e.answer if i % 2 else "none" for i, e in enumerate(examples)]
    by_scene = [e.answer if e.image_id else "none" for e in examples]
    # Wilson for p = 17/35: 1.96 sqrt(p (1 - p) / 35 + 1.96^2 / (4 * 35^2)) / (1 + 1.96^2 / 35)
    assert output.half_width(examples, spread_out) == pytest.approx(0.1572, abs=1e-4)
    # Scenes of 0 and 1: 1.96 x sqrt(0.5) / sqrt(2)
    assert output.half_width(examples, by_scene) == pytest.approx(0.98)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status=400, error="no such budget"), "the server refused a question: .*no such"),
        (Reply(drop=True), "the server stopped answering; its log is in --out: no answer"),
        (Reply(("",), ttft=0.0), ""),
    ],
)
def test_a_failed_question_ends_the_demo_and_an_empty_answer_does_not(
    reply: Reply, message: str, examples: Sequence[Example]
) -> None:
    with fake_server(reply, model=None) as server:
        if not message:
            assert (
                measure.send_questions(server.url, "stock", examples[:1], (measure.FULL,))[
                    measure.FULL
                ][0].text
                == ""
            )
            return
        with pytest.raises(BenchmarkError, match=message) as caught:
            measure.send_questions(server.url, "stock", examples[:1], (measure.FULL,))
    assert "\n" not in str(caught.value)


def test_every_arm_sends_the_same_requests_and_shares_no_image() -> None:
    plan = measure.Plan(alone=2, together=8, images=2)
    reply = Reply(("w1",), ttft=0.02, usage={"prompt_tokens": 600})

    def urls(bodies: Sequence[Body]) -> list[str]:
        return [str(parts(body)[0]["image_url"]) for body in bodies]

    with fake_server(reply, model=None) as server:
        row = measure.time_requests(server.url, "stock", {}, plan, 100, 0)
        stock = list(server.seen)
        measure.time_requests(server.url, "resized", {"keep": "resized"}, plan, 100, 1000)
        resized = server.seen[len(stock) :]
    assert len(stock) == len(resized) == plan.requests
    assert (row.prompt_tokens, row.kv_bytes) == (600, 60_000)
    assert (
        row.alone.count == 2 and row.together.count == 8 and len(row.questions) == measure.QUESTIONS
    )
    assert row.alone.median >= 20
    assert {pruning(body).get("keep") for body in resized} == {"resized"}
    assert not set(urls(stock)) & set(urls(resized))
    # Only the images of several questions are sent again, with new words each time.
    assert Counter(Counter(urls(stock)).values()) == {1: 2 + 2 + 8, measure.QUESTIONS: 2}
    texts = {tuple(re.findall(r"w\d+", parts(body)[1])) for body in stock}
    assert len(texts) == len(stock)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("INFO x\n\nvllm-autoprune: cannot serve:\n  - bad -> fix", "cannot serve: - bad -> fix"),
        (
            "INFO loading\n(Worker pid=7) ERROR 11-21 [a.py:9] Traceback (most recent call last):\n"
            "(Worker pid=7) ERROR 11-21 [a.py:9] NameError: name 'x'\nRuntimeError: failed.\n",
            "NameError: name 'x'",
        ),
        ("INFO loading\nKilled\n", "Killed"),
        ("", "no output"),
    ],
)
def test_the_root_cause_is_the_plugin_s_refusal_or_the_first_error(log: str, cause: str) -> None:
    assert measure.find_root_cause(log) == cause


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


def test_evidence_is_outlined_around_its_patches_and_does_not_wrap() -> None:
    grid, grey, side = Grid(12, 12), (120, 130, 140), 12 * picture.PATCH_SIDE
    image, middle = Image.new("RGB", (side, side), grey), picture.PATCH_SIDE // 2
    scene = picture.outline_patches(image, (26, 27), grid)
    x, top = 2 * picture.PATCH_SIDE, 2 * picture.PATCH_SIDE
    between = x + picture.PATCH_SIDE
    assert scene.getpixel((x, top + middle)) == scene.getpixel((between, top)) == picture.EVIDENCE
    assert scene.getpixel((between, top + middle)) == grey == image.getpixel((between, top))
    border = picture.outline_patches(image, (11,), grid)
    assert border.getpixel((side - picture.PATCH_SIDE, middle)) == picture.EVIDENCE
    assert border.getpixel((1, picture.PATCH_SIDE + middle)) == grey


def test_the_picture_keeps_what_a_server_keeps(examples: Sequence[Example]) -> None:
    shown = [e for e in examples if e.kind in ("digit", "colour")]
    vision, policy = open_vision(LLAVA, CLIP), BASE_POLICIES["cdpruner"]

    def select(example: Example, configuration: measure.Configuration) -> set[int]:
        image = as_picture(example.image)
        tokens = vision.encode(image, example.question)
        return set(
            picture.select_patches(tokens, image, "autoprune", configuration).lit or range(144)
        )

    base, state, random = (
        measure.Configuration(keep, 8) for keep in ("reference", "state", "random")
    )
    tokens = MiniLlava().encode(shown).tokens
    picks = policy.select(policy.call(name=policy.name).params, tokens, 8).picks
    chosen = [select(example, base) for example in shown]
    # The reader encodes a batch, in bfloat16, which exchanges patches of nearly equal rank.
    overlap = [len(a & set(b)) for a, b in zip(chosen, picks.tolist(), strict=True)]
    assert min(overlap) >= 6 and sum(overlap) >= 7 * len(shown)
    for example, reference in zip(shown, chosen, strict=True):
        exchanged = select(example, state)
        assert len(exchanged) == 8 and len(reference & exchanged) >= 6
    assert select(shown[0], measure.FULL) == set(range(144))
    # A random keep depends on the image alone.
    other = next(e for e in shown if e.image_id != shown[0].image_id)
    assert shown[0].image_id == shown[1].image_id
    assert select(shown[0], random) == select(shown[1], random) != select(other, random)


def test_the_picture_shows_a_question_that_only_a_random_keep_fails(
    examples: Sequence[Example], answers: measure.Answers, tmp_path: Path
) -> None:
    number = picture.choose_example(examples, answers)
    assert examples[number].kind in ("digit", "colour", "shape")
    settings = measure.Settings(LLAVA, CLIP, "autoprune", 2, tmp_path)
    content = json.loads(json.dumps(picture.draw_example(settings, examples, answers)))
    assert content["question"] == examples[number].question
    assert content["served"]["random 8"] == "none" != content["served"]["state 8"]
    assert list(content["served"]) == [configuration.label for configuration in picture.SHOWN]
    with Image.open(content["path"]) as sheet:
        assert sheet.width == 28 + 4 * (12 * picture.PATCH_SIDE + 28)
        assert picture.EVIDENCE in {colour for _, colour in sheet.getcolors(1 << 24) or ()}
