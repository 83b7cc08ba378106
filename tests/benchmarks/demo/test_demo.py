"""The demo from questions to table and picture, against fake servers; its one-line failures."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.demo import measure, output, picture
from benchmarks.demo.__main__ import SIGNALS, main
from benchmarks.yardsticks.engine import MAX_ANSWER_TOKENS
from benchmarks.yardsticks.examples import CLIP, LLAVA, Example, as_picture, draw_examples
from benchmarks.yardsticks.minillava import MiniLlava
from vllm_autoprune.checkpoint import open_vision
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import Grid


def pruning(body: Body) -> dict[str, object]:
    """The pruning fields of a request."""
    return dict(body.get("mm_processor_kwargs", {}).get("autoprune", {}))


def parts(body: Body) -> tuple[dict[str, Any], str]:
    """Image and question of a request."""
    image, question = body["messages"][0]["content"]
    return image, question["text"]


@pytest.fixture(scope="module")
def examples() -> Sequence[Example]:
    return draw_examples("test", 2)


Demo = tuple[Path, dict[str, list[Body]]]
"""Folder of the files, and what each server was sent, by the name of its log."""


@pytest.fixture(scope="module")
def demo(examples: Sequence[Example], tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A whole demo; answers are right, except with a random keep of at most 8 tokens."""
    right = {(f"asked-{e.image_id}", e.question): e.answer for e in examples}
    seen: dict[str, list[Body]] = {}

    def reply(body: Body) -> Reply:
        fields, (image, question) = pruning(body), parts(body)
        blind = fields.get("keep") == "random" and int(str(fields["budget"])) <= 8
        text = "none" if blind else right.get((str(image.get("uuid")), question), "w1")
        # Later requests may be answered earlier.
        tokens = 20 + int(str(fields.get("budget", 144)))
        return Reply(tuple(text), ttft=0.01 * (len(question) % 3), usage={"prompt_tokens": tokens})

    @contextlib.contextmanager
    def serve(model: Path, *flags: str, log: Path) -> Iterator[SimpleNamespace]:
        with fake_server(reply, model=None) as server:
            yield SimpleNamespace(url=server.url)
        seen[log.stem] = server.requests

    plan, out = measure.Plan(alone=2, together=8, images=2), tmp_path_factory.mktemp("demo")
    options = {"model": None, "text_tower": None, "state": "autoprune", "scenes": 2, "out": out}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "serve", serve)
        patch.setattr(measure, "Plan", lambda: plan)
        output.run_demo(argparse.Namespace(json=True, **options), contextlib.nullcontext)
    return out, seen


def test_mini_llava_is_asked_the_same_questions_in_every_configuration(demo: Demo) -> None:
    stock, pruned = demo[1]["stock"], demo[1]["pruned"]
    asked: dict[str, list[str]] = {}
    for body in (*stock, *pruned):
        asked.setdefault(json.dumps(pruning(body)), []).append(parts(body)[1])
    assert len(asked) == 10 and len({tuple(sorted(texts)) for texts in asked.values()}) == 1
    assert not any(map(pruning, stock)) and pruning(pruned[-1]) == {"budget": 144, "keep": "state"}
    head, _, data = parts(pruned[-1])[0]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).shape == (168, 168, 3)
    assert (pruned[-1]["temperature"], pruned[-1]["max_tokens"]) == (0, MAX_ANSWER_TOKENS)


def test_every_arm_of_the_large_model_has_the_same_requests_and_shares_no_image(
    demo: Demo,
) -> None:
    stock, others = demo[1]["speed-stock"], demo[1]["speed-pruned"]
    pruned, resized = (
        [body for body in others if pruning(body).get("keep") == keep] for keep in (None, "resized")
    )
    images = [[parts(body)[0]["image_url"]["url"] for body in arm] for arm in (pruned, resized)]
    assert len(stock) == len(pruned) == len(resized) == 2 + 2 + 8 + 2 * measure.QUESTIONS
    assert not set(images[0]) & set(images[1])
    # Only the images of several questions are sent again, with new words each time.
    assert Counter(Counter(images[0]).values()) == {1: 2 + 2 + 8, measure.QUESTIONS: 2}
    texts = {tuple(re.findall(r"w\d+", parts(body)[1])) for body in pruned}
    assert len(texts) == len(pruned)


def test_the_results_have_scores_tokens_bytes_and_the_picture(
    demo: Demo, examples: Sequence[Example]
) -> None:
    results = json.loads((demo[0] / "results.json").read_text())
    assert results.keys() == {
        "rows", "control", "questions", "scenes", "visual_tokens", "kv_formula", "dtype",
        "environment", "speed", "seconds", "verdict", "picture",
    }  # fmt: skip
    rows = {(r["configuration"]["keep"], r["configuration"]["budget"]): r for r in results["rows"]}
    assert rows.keys() == {
        ("full", None), *((keep, budget) for keep in measure.KEEPS for budget in (16, 8)),
    }  # fmt: skip
    for (keep, budget), row in rows.items():
        assert row["accuracy"] == row["accuracy_plus"] == float((keep, budget) != ("random", 8))
        assert row["prompt_tokens"] == 20 + (budget or 144)
        # 2 x 6 layers x 6 heads x 32 x 4 bytes
        assert row["kv_bytes"] == row["prompt_tokens"] * 9216
    assert results["control"] == {"same_answers": len(examples), "asked": len(examples)}
    assert results["verdict"] == (
        "At K = 8 of 144 visual tokens: base policy 100.0 %, shipped state 100.0 %, "
        "resize control 100.0 %, random keep 0.0 % (full: 100.0 %), with 5.9 times fewer prompt "
        "tokens and KV bytes."
    )
    speed = results["speed"]["stock"]
    assert (speed["alone"]["count"], speed["together"]["count"]) == (2, 8)
    assert len(speed["questions"]) == measure.QUESTIONS
    # The picture shows a question that only a random keep fails.
    shown = results["picture"]
    assert shown["served"]["random 8"] == "none" != shown["served"]["state 8"] == shown["expected"]
    assert list(shown["served"]) == ["full", "random 8", "reference 8", "state 8"]
    with Image.open(demo[0] / "kept.png") as sheet:
        assert sheet.width == 28 + 4 * (12 * picture.PATCH_SIDE + 28)
        assert picture.EVIDENCE in {colour for _, colour in sheet.getcolors(1 << 24) or ()}


def test_the_table_has_stock_resized_and_pruned_side_by_side(demo: Demo) -> None:
    lines = (demo[0] / "table.md").read_text().splitlines()
    assert lines[0] == "|  | stock | resized | pruned |"
    assert "| **large, random weights** | **N = 576** | **K = 64** | **K = 64** |" in lines
    assert "| prompt tokens of a request | 164.0 | 36.0 | 36.0 |" in lines
    assert "| right answers, % | 100.0 ± 4.9 | 100.0 ± 4.9 | 100.0 ± 4.9 |" in lines
    names = [line.split(" | ")[0][2:] for line in lines[2:13]]
    assert "first token, question 1/2/3, ms" in names and "requests/s, 8 at once" in names


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
        call = (server.url, "stock", examples[:1], (measure.FULL,))
        if not message:
            assert measure.send_questions(*call)[measure.FULL][0].text == ""
            return
        with pytest.raises(BenchmarkError, match=message) as caught:
            measure.send_questions(*call)
    assert "\n" not in str(caught.value)


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
    monkeypatch.setattr(output, "_measure", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    # 140 s + 1,100 x 0.1 s
    text = " ".join(capsys.readouterr().err.split())
    assert "served in float32" in text and "takes about 5 minutes here" in text


def test_evidence_is_outlined_around_its_patches_and_does_not_wrap() -> None:
    grid, grey, side = Grid(12, 12), (120, 130, 140), 12 * picture.PATCH_SIDE
    image, middle = Image.new("RGB", (side, side), grey), picture.PATCH_SIDE // 2
    scene = picture.outline_patches(image, (26, 27), grid)
    x, y = 2 * picture.PATCH_SIDE, 2 * picture.PATCH_SIDE
    between = x + picture.PATCH_SIDE
    assert scene.getpixel((x, y + middle)) == scene.getpixel((between, y)) == picture.EVIDENCE
    assert scene.getpixel((between, y + middle)) == grey == image.getpixel((between, y))
    border = picture.outline_patches(image, (11,), grid)
    assert border.getpixel((side - picture.PATCH_SIDE, middle)) == picture.EVIDENCE
    assert border.getpixel((1, picture.PATCH_SIDE + middle)) == grey


def test_the_picture_keeps_what_a_server_keeps(examples: Sequence[Example]) -> None:
    questions = [e for e in examples if e.kind in ("digit", "colour")]
    vision, policy = open_vision(LLAVA, CLIP), BASE_POLICIES["cdpruner"]

    def select(example: Example, keep: measure.Keep) -> set[int]:
        image = as_picture(example.image)
        tokens = vision.encode(image, example.question)
        configuration = measure.Configuration(keep, None if keep == "full" else 8)
        panel = picture.select_patches(tokens, image, "autoprune", configuration)
        return set(panel.lit or range(144))

    tokens = MiniLlava().encode(questions).tokens
    picks = policy.select(policy.call(name=policy.name).params, tokens, 8).picks
    chosen = [select(example, "reference") for example in questions]
    # The reader encodes a batch, in bfloat16, which exchanges patches of nearly equal rank.
    overlap = [len(a & set(b)) for a, b in zip(chosen, picks.tolist(), strict=True)]
    assert min(overlap) >= 6 and sum(overlap) >= 7 * len(questions)
    for example, reference in zip(questions, chosen, strict=True):
        exchanged = select(example, "state")
        assert len(exchanged) == 8 and len(reference & exchanged) >= 6
    assert select(questions[0], "full") == set(range(144))
    # A random keep depends on the image alone.
    other = next(e for e in questions if e.image_id != questions[0].image_id)
    assert questions[0].image_id == questions[1].image_id
    patches = [select(example, "random") for example in (*questions[:2], other)]
    assert patches[0] == patches[1] != patches[2]
