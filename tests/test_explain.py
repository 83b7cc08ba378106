"""`explain`: traces agree with the selection, pictures with the traces; what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import CHECKPOINTS, CLIP, LLAVA
from tests.fake_server import fake_server
from tests.serving.unit.samples import image as region_image
from tests.tpdsl.samples import images, state
from tests.videos import write_frames, write_video
from vllm_autoprune import Grid, materialize, picture, refine
from vllm_autoprune.cli.main import main
from vllm_autoprune.evaluation.pictures import read_video
from vllm_autoprune.explain import (
    Explanation,
    Trace,
    _find_tiles_of_regions,
    _SignalTrace,
    explain_image,
)
from vllm_autoprune.picture import (
    CORE,
    DARK,
    ENTERED,
    KEPT,
    LEFT,
    LIGHT,
    _choose_font,
    _draw_heat_map,
    _draw_panel,
    _list_panels,
    encode_picture,
    list_undrawn,
)
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE, load_state
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import MergerInput, VisualTokens

Changes = dict[str, object]
ALONE: Changes = {"/constraints/selector/q_e": 0}
SPLIT: Changes = {"/core": {"share": 0.5}}


def trace_sample(tokens: VisualTokens, changes: Changes | None = None) -> Trace:
    policy = materialize(state(changes), 12)
    return Trace.of(policy, tokens, refine(policy, tokens))


@pytest.mark.parametrize("changes", [{}, SPLIT], ids=["whole", "core"])
def test_a_trace_agrees_with_the_selection(changes: Changes) -> None:
    tokens = images(seed=1, batch=1)
    policy = materialize(state(changes), 12)
    refined = refine(policy, tokens)
    trace = Trace.of(policy, tokens, refined)
    indices = refined.indices[0].tolist()
    assert trace.kept == tuple(sorted(indices)) and trace.fallback == "none"
    assert trace.reference == tuple(refined.reference[0].tolist())
    assert len(trace.left) == len(trace.entered) == int(refined.exchanged[0]) > 0
    assert set(trace.kept) == set(trace.reference) - set(trace.left) | set(
        trace.entered
    )
    assert trace.core == (tuple(sorted(indices[:6])) if changes else ())


def test_the_scores_of_a_trace_are_of_every_token_and_favour_what_entered() -> None:
    trace = trace_sample(images(seed=1, batch=1))
    assert [len(signal.values) for signal in trace.signals] == [36] * 5
    assert all(min(s.values) >= 0 and max(s.values) == 1 for s in trace.signals)
    quality = trace.quality or ()
    assert len(quality) == 36
    assert min(quality[t] for t in trace.entered) > min(quality[t] for t in trace.left)


def test_signals_are_those_of_the_tokens_that_were_ranked() -> None:
    after = images(seed=3, batch=1)
    rows = torch.randn(1, after.count, 9, generator=torch.Generator().manual_seed(1))
    norms = MergerInput(torch.ones(1, after.count, 2))
    tokens = dataclasses.replace(after, encoder=rows, merger_input=norms)
    before = trace_sample(tokens, {"/rank_at": "merger_in"})
    assert (
        before.signals
        == trace_sample(dataclasses.replace(after, features=rows)).signals
    )
    assert before.signals != trace_sample(after).signals


def test_what_a_policy_does_not_do_is_not_traced() -> None:
    tokens = images(batch=1)
    alone = trace_sample(tokens, ALONE)
    assert (
        alone.signals == ()
        and alone.quality is None
        and set(alone.kept) == {*alone.reference}
    )
    by_score = {**ALONE, "/reassembly": {"atom": "reassemble/local.mean.average.score"}}
    assert trace_sample(tokens, by_score).quality is None, (
        "orders rows, and keeps none of them"
    )
    assert tokens.cls_attention is not None
    lost = torch.full_like(tokens.cls_attention, torch.nan)
    fallback = trace_sample(dataclasses.replace(tokens, cls_attention=lost))
    assert fallback.fallback == "reference" and fallback.entered == ()
    assert fallback.quality is None and fallback.signals == ()
    rule = materialize(load_state("miniqwen"))
    eighth = Trace.of(rule, tokens, refine(rule, tokens))
    assert (rule.budget, len(eighth.kept)) == (640, 36 // 8), "the rule on N decides"


def test_what_decides_is_named_with_the_layers_that_it_reads() -> None:
    merge: Changes = {
        "/reassembly": {"atom": "anchor_weighted_residual", "strength": 0.5}
    }

    def decided_by(name: str, changes: Changes) -> str:
        policy = materialize(state({"/base_policy": {"name": name}, **changes}), 12)
        text = torch.ones(1, 3, dtype=torch.bool)
        tokens = dataclasses.replace(
            images(batch=1), language=RecordedPrefix(1, text, layers=8)
        )
        return Trace.of(
            policy, tokens, refine(materialize(state(changes), 12), tokens)
        ).decided_by

    for name, changes, words in (
        ("cdpruner", ALONE, "cdpruner alone"),
        ("cdpruner", ALONE | merge, "cdpruner, then merging"),
        (
            "pyramiddrop",
            {},
            "pyramiddrop (reads the first 2 of 8 language model layers), then",
        ),
        (
            "prumerge_plus",
            ALONE,
            "(reads the vision tower's layer before the projector and the",
        ),
    ):
        assert words in decided_by(name, changes)


def test_regions_are_the_tiles_that_keep_tokens() -> None:
    tiles = tuple(region_image(seed).regions[0] for seed in range(3))
    ordered = [dataclasses.replace(tile, order=torch.arange(36)) for tile in tiles]
    for features, count, budget, numbers in (
        (ImageFeatures(tiles), 3, 5, [0, 1, 2]),
        (ImageFeatures(tiles), 3, 2, [0, 1]),
        # A base view and stitched crops, one grid, several tiles in one region.
        (ImageFeatures((ordered[0], ordered[1])), 2, 5, []),
        (ImageFeatures(tiles[:1]), 1, 5, []),
        (ImageFeatures(tiles[:1]), 4, 5, []),
    ):
        assert _find_tiles_of_regions(features, count, budget) == numbers


GRID = Grid(4, 6)
TRACE = Trace(
    grid=GRID,
    reference=(7, 3, 20),
    kept=(7, 8, 20),
    left=(3,),
    entered=(8,),
    extra=0,
    signals=(
        _SignalTrace(
            "local_contrast_saliency",
            "contrast with four neighbours",
            3.99961,
            tuple(i / 23 for i in range(24)),
        ),
    ),
    quality=tuple(1 - i / 23 for i in range(24)),
    fallback="none",
    core=(20,),
    decided_by="cdpruner, then quality g",
)


def test_panels_show_image_selection_and_every_signal() -> None:
    image, reference, exchange, quality, signal = _list_panels(TRACE, "cdpruner")
    assert not image.marks and not image.heat
    assert (
        reference.marks == {7: KEPT, 3: KEPT, 20: CORE}
        and "cdpruner" in reference.detail
    )
    assert exchange.marks == {7: KEPT, 8: ENTERED, 20: CORE, 3: LEFT}
    assert (quality.heat, signal.heat) == (TRACE.quality, TRACE.signals[0].values)
    assert signal.title == "contrast with four neighbours"
    assert signal.detail == "weight 4"
    alone = dataclasses.replace(TRACE, quality=None, signals=())
    assert [panel.title for panel in _list_panels(alone, "cdpruner")] == [
        "image",
        "kept tokens",
    ]
    flat = dataclasses.replace(
        TRACE, signals=(_SignalTrace("relevance", "relevance", 1.0, (0.5,) * 24),)
    )
    assert [panel.title for panel in _list_panels(flat, "cdpruner")][3:] == [
        "quality g"
    ]


def test_marks_are_drawn_on_their_tokens() -> None:
    """Found by the colours of their frames."""
    side = 40
    base = Image.new("RGB", (6 * side, 4 * side), (200, 40, 40))
    exchange = _list_panels(TRACE, "cdpruner")[2]
    drawn = _draw_panel(base, exchange, GRID, side)
    for token, mark in exchange.marks.items():
        row, column = divmod(token, GRID.width)
        corners = [
            (column * side, row * side),
            ((column + 1) * side - 1, (row + 1) * side - 1),
        ]
        assert [drawn.getpixel(corner) for corner in corners] == [mark.colour] * 2
        inside = drawn.getpixel((corners[0][0] + 8, corners[0][1] + 8))
        assert (inside == base.getpixel((0, 0))) == (mark is not LEFT)


def test_a_heat_map_is_scaled_to_the_ramp_and_has_one_pixel_a_token() -> None:
    nan = float("nan")
    inf = float("inf")
    for values, colours in (
        ((1.0, 3.0), [DARK, LIGHT]),
        ((2.0, 2.0), [DARK, DARK]),
        ((nan, 0.0, 1.0, inf), [DARK, DARK, LIGHT, DARK]),
    ):
        drawn = _draw_heat_map(values, Grid(1, len(values))).tobytes().hex()
        assert [f"#{drawn[x : x + 6]}" for x in range(0, len(drawn), 6)] == colours
    light = np.asarray(_draw_heat_map(range(21), Grid(1, 21))).sum(axis=2)[0]
    assert (np.diff(light.astype(int)) > 0).all(), "can be read in grey"
    tiles = _draw_heat_map(
        [float(token == 6) for token in range(12)], Grid(2, 3, tiles=2)
    )
    assert tiles.size == (6, 2) and tiles.getpixel((3, 0)) != tiles.getpixel((0, 0))


@pytest.mark.parametrize(
    "question", ["", "x" * 5000, "many words " * 800, "面白い? \x07", "و" * 900]
)
def test_any_question_can_be_drawn_and_summarised(question: str) -> None:
    scene = Image.new("RGB", (120, 80), (200, 40, 40))
    explanation = Explanation(scene, question, materialize(state(), 12), TRACE)
    sheet, sheets = (
        Image.open(io.BytesIO(encode_picture([explanation] * count)))
        for count in (1, 2)
    )
    assert sheet.format == "PNG" and sheet.height < 2000
    assert sheets.size == (sheet.width, 2 * sheet.height)
    parts = (
        "sample (",
        "keeps 3 of 24",
        "1 exchanged",
        "decided by cdpruner, then quality g",
    )
    assert [part for part in parts if part not in explanation.summary] == []
    split = dataclasses.replace(explanation, policy=materialize(state(SPLIT), 12))
    assert "1 of them are the core, by " in split.summary
    fallback = dataclasses.replace(
        explanation, trace=dataclasses.replace(TRACE, fallback="even")
    )
    assert "not finite, even selection instead" in fallback.summary


def test_a_question_is_written_in_the_font_that_has_most_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_DATA_DIRS", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    texts = {
        "What is it? \ufe0f\u200d\n": "",
        "étude «цвет» ω → 5 × 6 ½ €": "",
        "ما لون الدائرة؟": "",
        "面白い and مطار": "面白い",
        "x\U000f0000": "\U000f0000",
    }
    _choose_font.cache_clear()
    assert {text: list_undrawn(text) for text in texts} == texts
    dejavu = Path(str(_choose_font("цвет")[0].path))  # matplotlib's
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    _choose_font.cache_clear()
    assert set("цвет") & set(list_undrawn("цвет"))
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "damaged.otf").write_bytes(b"no font")
    shutil.copy(dejavu, tmp_path / "fonts")
    _choose_font.cache_clear()
    assert list_undrawn("цвет") == ""
    _choose_font.cache_clear()


Captured = pytest.CaptureFixture[str]


def test_what_cannot_be_explained_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "scene.png")
    for name, question, checkpoint, message in (
        ("text.png", "?", LLAVA, "text.png: is not a picture that vLLM reads -> "),
        (
            "scene.png",
            "?",
            "org/llava",
            "give a folder",
        ),
        ("scene.png", "?", CLIP, "has no pruned form"),
        ("scene.png", "Wh\ud83d?", LLAVA, "question: character 3 (U+D83D)"),
        ("caf\udce9.png", "?", LLAVA, "caf\\udce9.png: cannot be read"),
    ):
        words = [
            "explain",
            str(tmp_path / name),
            question,
            "--checkpoint",
            str(checkpoint),
        ]
        assert main(words) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoint", "flags", "line"),
    [
        (LLAVA, [], f"state: {DEFAULT_STATE} at K = 1/8, the default for llava"),
        (
            CHECKPOINTS["miniqwen"],
            [],
            f"state: {DEFAULT_STATE} at K = 1/2, the default for qwen3_vl",
        ),
        (LLAVA, ["--budget", "5"], f"state: {DEFAULT_STATE} at K = 5, the default"),
        (LLAVA, ["--state", "norm"], ""),
    ],
)
def test_without_a_state_the_default_of_the_model_is_drawn_and_named(
    checkpoint: Path,
    flags: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """The one that doctor names; one that was asked for is not called a default."""
    policies: list[PruningPolicy] = []

    def draw(checkpoint: Path, tower: object, policy: PruningPolicy, *_: object) -> Any:
        policies.append(policy)
        return []

    monkeypatch.setattr("vllm_autoprune.explain.explain_image", draw)
    Image.new("RGB", (8, 8)).save(tmp_path / "scene.png")
    call = ["explain", str(tmp_path / "scene.png"), "?", "--checkpoint"]
    assert main([*call, str(checkpoint), *flags, "--json"]) == 0
    name = json.loads(capsys.readouterr().out)["state"]
    assert name == (DEFAULT_STATE if line else "norm")
    assert main([*call, str(checkpoint), *flags]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert policies[0].state.name == name


# ---- clips ----


def test_clips_are_sampled_as_vllm_samples_them(tmp_path: Path) -> None:
    video = read_video(write_video(tmp_path / "a.mp4", 40))
    assert video is not None and video.frames[0].size == (112, 84)
    assert video.decoding_seconds > 0
    assert (
        len(video.frames) == 32
        and video.note == "32 of 40 frames are read, as vLLM samples"
    )
    video = read_video(tmp_path / "a.mp4", "Qwen2VLVideoProcessor")  # two a second
    assert (
        video is not None
        and len(video.frames) == 10
        and video.note.startswith("10 of 40 frames")
    )
    os.mkfifo(write_frames(tmp_path / "frames", 3) / "pipe.png")
    frames = read_video(tmp_path / "frames")
    assert frames is not None and frames.url.count(",") == 3 and not frames.note
    assert [frame.getpixel((0, 0)) for frame in frames.frames] == [
        (0, 0, 0),
        (5, 0, 0),
        (10, 0, 0),
    ]
    many = read_video(write_frames(tmp_path / "many", 40))
    assert many is not None and len(many.frames) == 32 and "of 40 frames" in many.note
    assert many.frames[-1].getpixel((0, 0)) == (195, 0, 0), (
        "the last frame is one of them"
    )
    assert read_video(tmp_path / "many" / "000.png") is None, "a picture"


@pytest.mark.parametrize("frames", [5, 40])
def test_a_filmstrip_shows_what_each_frame_keeps(frames: int) -> None:
    grid = Grid(3, 4, tiles=frames, video=True)
    policy = materialize(
        load_state("vcast"),
        BudgetCall.parse("tokens_per_frame:5", video=True),
        video=True,
    )
    tokens = images(grid=grid, batch=1)
    trace = Trace.of(policy, tokens, refine(policy.at(tokens.count, frames), tokens))
    counts = trace.kept_by_frame
    assert sum(counts) == len(trace.kept) == 5 * frames and len(counts) == frames
    colours = [
        Image.new("RGB", (64, 48), (9, 9, 90 + number)) for number in range(frames)
    ]
    explanation = Explanation(colours[0], "What moves?", policy, trace, frames=colours)
    assert (
        f"in {frames} frames, {min(counts)} to {max(counts)} of each"
        in explanation.summary
    )
    with Image.open(io.BytesIO(encode_picture([explanation]))) as strip:
        pixels = np.asarray(strip)
    # Kept tokens have the colour of their frame inside of what frames them.
    drawn = [
        number
        for number in range(frames)
        if (pixels == (9, 9, 90 + number)).all(axis=2).any()
    ]
    evenly = (
        [number * (frames - 1) // 31 for number in range(32)]
        if frames > 32
        else range(frames)
    )
    assert drawn == [number for number in evenly if counts[number]]


def test_a_clip_is_sent_as_a_server_gets_it_and_its_groups_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A stand-in for the engine, which keeps what it is given."""
    started = dict[str, Any]()
    asked = list[Any]()
    grid = Grid(2, 2, tiles=3, video=True)
    tokens = images(grid=grid, batch=1)
    policy = materialize(
        load_state("vcast"),
        BudgetCall.parse("tokens_per_frame:2", video=True),
        video=True,
    )

    class Engine:
        def __init__(self, checkpoint: str, **options: object) -> None:
            started.update(options)

        def chat(self, messages: list[Any], *more: object, **options: object) -> None:
            asked.extend(messages)

    @contextlib.contextmanager
    def record(llm: object) -> Iterator[tuple[list[Any], list[Any]]]:
        at = policy.at(tokens.count, 3)
        yield [(at, tokens, refine(at, tokens))], []

    monkeypatch.setattr("vllm.LLM", Engine)
    monkeypatch.setattr("vllm_autoprune.explain._record", record)
    checkpoint = build("qwen2_5_vl", tmp_path / "tiny")
    video = read_video(write_frames(tmp_path / "frames", 6))
    assert video is not None
    (explanation,) = explain_image(checkpoint, None, policy, video, "What moves?")
    assert (
        started["additional_config"]["autoprune"]["video_budget"]
        == "tokens_per_frame:2"
    )
    assert started["limit_mm_per_prompt"]["video"] == 1
    assert asked[0]["content"][0] == {
        "type": "video_url",
        "video_url": {"url": video.url},
    }
    assert list(explanation.frames) == [video.frames[at] for at in (0, 2, 4)]
    call = [
        "explain",
        str(tmp_path / "frames"),
        "What moves?",
        "--checkpoint",
        str(checkpoint),
    ]
    assert (
        main(call) == 0
        and "state: vcast, the default for videos\n" in (out := capsys.readouterr().out)
        and "\npositions: true. Kept tokens keep" in out
    )
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["positions"] == "true", (
        "M-RoPE, not the state's"
    )


def test_what_an_engine_would_fail_on_is_refused_before_it_starts(
    tmp_path: Path, capsys: Captured
) -> None:
    """Of a video at a URL, whose model has a chat template without a place for it."""
    content = write_video(tmp_path / "a.mp4", 4).read_bytes()
    with fake_server(pages={"/a.mp4?key=1": (200, content, {})}) as server:
        call = ["explain", f"{server.url}/a.mp4?key=1", "?"]
        call += ["--checkpoint", str(CHECKPOINTS["miniqwen"])]
        assert main(call) == 1
        message = "has a chat template that leaves out videos -> give a checkpoint"
        assert message in capsys.readouterr().err
        assert main([*call, "-o", str(tmp_path / "no/why.png")]) == 1
        message = f"cannot be written: there is no folder {tmp_path / 'no'} -> make it"
        assert message in capsys.readouterr().err


def test_what_is_no_clip_is_refused(tmp_path: Path, capsys: Captured) -> None:
    mixed = write_frames(tmp_path / "mixed", 3)
    Image.new("RGB", (28, 28)).save(mixed / "9.png")
    unread = write_frames(tmp_path / "unread", 40)  # of which 32 are decoded
    Image.new("RGB", (28, 28)).save(unread / "004.png")
    (tmp_path / "broken.mp4").write_bytes(b"no video" * 50)
    video = write_video(tmp_path / "a.mp4", 4)
    picture = mixed / "9.png"
    for words, message in (
        (
            (write_frames(tmp_path / "single", 1),),
            "has fewer than 2 frames -> name a folder with one picture",
        ),
        ((mixed,), "has frames of 2 sizes -> give all frames one size"),
        ((unread,), "has frames of 2 sizes -> give all frames one size"),
        (
            (tmp_path / "broken.mp4",),
            "cannot be decoded as a video (Could not open video stream)",
        ),
        ((tmp_path / "none.mp4",), "cannot be read (No such file or directory)"),
        (
            (video, "--state", "autoprune"),
            "state 'autoprune' leaves videos whole -> add",
        ),
        ((video, "--checkpoint", "/no/such"), "has no config.json of a model"),
        (
            (video,),
            "is a llava, whose videos are served whole -> give one of qwen2_vl, qwen2_5_vl",
        ),
        (
            (picture, "--budget", "tokens_per_frame:4"),
            "is the budget of a video -> give a number",
        ),
    ):
        path, *more = map(str, words)
        assert main(["explain", path, "?", "--checkpoint", str(LLAVA), *more]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
