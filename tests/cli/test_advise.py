"""`advise`: what flags, states and a probe say is used; pictures and videos."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig

from benchmarks.yardsticks.examples import LLAVA
from tests.cli.commands import Captured, run, run_json
from tests.fake_server import Answer, FakeServer, fake_server
from tests.pruned_server import N, pruned_server
from tests.tables import parametrize_from_file
from tests.videos import write_video
from vllm_autoprune import positions
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.tower import VisionTower
from vllm_autoprune.tpdsl.loading import load_state


@pytest.fixture
def pruned() -> Iterator[FakeServer]:
    with pruned_server() as server:
        yield server


@pytest.fixture
def split(tmp_path: Path) -> str:
    """A state of N / 8 tokens, half of them core."""
    state = load_state("miniqwen").model_dump(mode="json", by_alias=True)
    path = tmp_path / "split.json"
    path.write_text(json.dumps({**state, "core": {"share": 0.5}}))
    return str(path)


ENOUGH = "advise --tokens 576 --tower-ms 1 --prefill-ms-per-token 1 --questions"


def test_what_flags_and_states_say_is_used_and_the_rest_is_assumed(
    split: str, capsys: Captured
) -> None:
    """The verdict in words is that of docs/choosing.md, which ``tests/docs`` compares."""
    for flags, budget, core in (
        ("", 72, 36),
        ("--budget 64", 64, 32),
        ("--budget 64 --core 8", 64, 8),
        ("--budget 1/3", 192, 96),
        ("--budget 1%:16-64", 16, 8),
    ):
        traffic = run_json(capsys, f"{ENOUGH} 2 {flags} --state", split)["traffic"]
        assert (traffic["budget"], traffic["core"]) == (budget, core)
    traffic = run_json(
        capsys, f"{ENOUGH} 2 --tokens 40 --state", "autoprune-llava-1.5-7b-k64"
    )["traffic"]
    assert traffic["budget"] == 40, "K of an image is at most N"
    call = "advise --questions 2 --tokens 640 --tower-ms 1 --prefill-ms-per-token 0.2"
    record = run_json(capsys, f"{call} --block-size 0")
    assert record["seconds"]["prefill"] == pytest.approx(0.0002)
    traffic = record["traffic"]
    notes = "\n".join(record["notes"])
    assert (traffic["block"], traffic["budget"], traffic["core"]) == (0, 71, 53)
    for words in (
        "K = 71",
        "K_c = 53",
        "decode image, processor, selection, request, decode",
    ):
        assert words in notes
    assert "prefill 0.2" in run(capsys, call)


def test_it_is_said_where_kept_tokens_stand(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_state("divprune").model_dump(mode="json", by_alias=True)
    (tmp_path / "true.json").write_text(json.dumps({**data, "positions": "true"}))
    state = ["--state", str(tmp_path / "true.json")]
    qwen = ["--checkpoint", str(build("qwen3_vl", tmp_path / "qwen3_vl"))]
    llava = ["--checkpoint", str(LLAVA)]

    def note(*words: str) -> str:
        notes: list[str] = run_json(capsys, f"{ENOUGH} 2", *words)["notes"]
        return next((note for note in notes if note.startswith("Kept tokens")), "")

    sentence = (
        "Kept tokens stand where they stood in the whole image, as the state says"
    )
    assert note() == "" and note(*state, *llava) == f"{sentence}."
    assert (
        note(*state) == f"{sentence}; with M-RoPE they keep their places in the image."
    )
    assert note(*llava) == f"{sentence}."  # of the state to start with
    packed = note("--state", "autoprune", *llava)
    assert packed.startswith("Kept tokens stand one after the other, as if the image")
    for words in (qwen, [*qwen, *state], [*qwen, "--state", "divprune"]):
        assert note(*words).endswith(
            "keep their places in the image, because the model has M-RoPE."
        )
    monkeypatch.setattr(
        positions, "find_packed_reason", lambda *_: "has windows that slide"
    )
    assert note(*state, *llava).endswith(
        "as if the image had been small: the model has windows that slide."
    )


@parametrize_from_file("call", "texts")
def test_unanswerable_questions(call: str, texts: list[str], capsys: Captured) -> None:
    assert main(call.split()) == 1
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error


def test_a_probe_says_what_flags_do_not(
    pruned: FakeServer, split: str, capsys: Captured
) -> None:
    # A state has its budget from the tokens that were found.
    call = f"advise --server {pruned.url} --questions 3 --probe 64x48 --state"
    record = run_json(capsys, call, split)
    traffic = record["traffic"]
    verdict = record["verdict"]
    assert (traffic["tokens"], traffic["budget"], traffic["core"]) == (
        N,
        N // 8,
        N // 16,
    )
    low, high = verdict["intervals"]["gain"]
    assert f"another probe finds {low:.2f}x to {high:.2f}x." in "\n".join(
        verdict["lines"]
    )
    times = r"[\d.]+ ms \([\d.]+ to [\d.]+\)"
    pattern = (
        r"Measured with images of 64 x 48 "
        rf".* first question {times}, another question {times}"
    )
    assert any(re.match(pattern, note) for note in record["notes"])


def test_a_picture_costs_less_without_its_blank_cells(
    tmp_path: Path, capsys: Captured
) -> None:
    """64 cells, of which the lower half is noise: 33 stay, and the others are drawn in grey."""
    noise = Image.effect_noise((256, 128), 64).convert("RGB")
    picture = Image.new("RGB", (256, 256), "white")
    picture.paste(noise, (0, 128))
    picture.save(tmp_path / "page.png")
    call = f"advise --image {tmp_path / 'page.png'} -o {tmp_path / 'cells.png'} --budget 40"
    rows = run_json(capsys, call)["cells"]
    page: Answer = (200, (tmp_path / "page.png").read_bytes(), {})
    with fake_server(pages={"/page.png": page}) as server:
        url = f"{server.url}/page.png"
        assert run_json(capsys, "advise --budget 40 --image", url)["cells"] == rows
    assert [(row["rule"], row["cells"], row["K"]) for row in rows] == [
        ("none", 64, 40),
        ("predicted", 33, 33),
        ("flat", 33, 33),
    ]
    tower = [float(row["tower, TFLOPs"]) for row in rows]
    assert 0.45 < tower[1] / tower[0] < 0.52
    drawn = Image.open(tmp_path / "cells.png")
    corners = [drawn.getpixel(place) for place in ((0, 0), (40, 0), (255, 127))]
    assert corners == [(255, 255, 255), (178, 178, 178), (178, 178, 178)]
    assert drawn.crop((0, 128, 256, 256)).tobytes() == noise.tobytes()


Advise = Callable[..., Any]


@pytest.fixture
def advise(tmp_path: Path, capsys: Captured) -> Advise:
    """The record of `advise` about a video of eight frames of 112 x 84."""
    frames = tmp_path / "frames"
    frames.mkdir()
    for number in range(8):
        Image.new("RGB", (112, 84), (9 * number, 0, 0)).save(frames / f"{number}.png")

    def ask(*more: str, video: Path = frames, status: int = 0) -> Any:
        return run_json(capsys, "advise --video", str(video), *more, status=status)

    return ask


def test_a_video_is_decoded_and_encoded_whole_whatever_is_pruned(
    advise: Advise,
) -> None:
    record = advise("--budget", "tokens_per_frame:3")
    assert record["positions"].endswith("because the model has M-RoPE.")
    rows = record["rows"]
    ways = [(row["way"], row["temporal groups"], row["tokens"]) for row in rows]
    assert ways == [("whole", 4, 48), ("pruned", 4, 12), ("fewer frames", 1, 12)]
    vision = {"hidden_size": 1280, "out_hidden_size": 3584}
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=vision)
    tower = VisionTower.of_config(config).count_flops(12) / 1e12
    towers = [row["tower, TFLOPs"] for row in rows]
    assert towers == pytest.approx([4 * tower, 4 * tower, tower])
    assert record["decoding_seconds"] > 0 and "outweighs" in record["verdict"][-1]


def test_the_advice_on_a_video_names_what_pruning_does_not_shorten(
    advise: Advise, tmp_path: Path
) -> None:
    fast = advise("--budget", "1/4", "--prefill-ms-per-token", "1e-6")
    longest = "Most is decoding, which pruning does not shorten."
    assert fast["verdict"][-1] == longest
    slow = ("--prefill-ms-per-token", "1000", "--tower-ms", "2000")
    times = advise("--budget", "1/4", *slow)["verdict"][-1]
    assert "prefill 48000, tower 2000; pruning saves" in times
    assert "K keeps every token" in advise("--budget", "100%")["verdict"][0]
    compass = build("cohere_compass", tmp_path / "compass")
    advice = advise("--checkpoint", str(compass))["verdict"][0]
    reason = "videos of this model are served whole"
    assert advice == f"Pruning will not help here: {reason}."


def test_files_of_videos_are_sampled_and_others_refused(
    advise: Advise, tmp_path: Path
) -> None:
    rows = advise(video=write_video(tmp_path / "a.mp4", 40))["rows"]
    assert rows[0]["temporal groups"] == 5, "two frames a second, in pairs"
    wrong = advise(video=tmp_path / "frames/0.png", status=1)
    assert wrong["problems"][0]["fix"] == "give one, or a folder of frames"
