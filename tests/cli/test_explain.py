"""explain: its output and its refusals; ``tests/test_explain_engine.py`` starts engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples, png
from vllm_autoprune import explain
from vllm_autoprune.checkpoint import find_checkpoint, open_vision
from vllm_autoprune.cli.commands.explain import read_image
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.refine import refine

Captured = pytest.CaptureFixture[str]

MODEL = ["--checkpoint", str(LLAVA), "--text-tower", str(CLIP)]


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    path = tmp_path / "scene.png"
    path.write_bytes(png(draw_examples("test", 1)[0].image))
    return path


def test_a_picture_and_json(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def select(
        checkpoint: Path, tower: Path, policy: PruningPolicy, image: Image.Image, question: str
    ) -> list[explain.Explanation]:
        tokens = open_vision(checkpoint, tower).encode(image, question)
        (trace,) = explain.trace_images(policy, tokens, refine(policy, tokens))
        return [explain.Explanation(image, question, policy, trace)]

    monkeypatch.setattr(explain, "explain_image", select)
    picture = tmp_path / "out.png"
    call = ["explain", str(scene), "What?", *MODEL, "--budget", "8", "-o", str(picture)]
    assert main(call) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {picture}\n")
    with Image.open(picture) as image:
        assert image.width > 1000
    assert main([*call, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "keeps 8 of 144" in record["summary"]
    assert len(record["trace"]["kept"]) == 8 and record["regions"] == [record["trace"]]


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "I;16"])
def test_any_mode_of_image_and_transparent_pixels_become_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "wide.png"
    source = Image.new("L", (400, 120), 90)
    (source if mode == "I;16" else source.convert(mode)).save(path)
    image = read_image(path)
    assert (image.mode, image.size) == ("RGB", (400, 120))
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(path)
    assert read_image(path).getpixel((0, 0)) == (255, 255, 255)


def test_files_that_cannot_be_read_or_written(
    scene: Path, tmp_path: Path, capsys: Captured
) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    for image, options, message in (
        (text, MODEL, "cannot be read"),
        (tmp_path / "lost.png", MODEL, "No such file"),
        (tmp_path, MODEL, "cannot be read"),
        (scene, [*MODEL, "-o", str(tmp_path / "out.gif")], "end it in .png"),
        (scene, ["--checkpoint", str(tmp_path)], "config.json cannot be read"),
        (scene, ["--checkpoint", str(CLIP)], "is not supported here"),
    ):
        assert main(["explain", str(image), "?", *options]) == 1, message
        assert message in capsys.readouterr().err


def test_a_checkpoint_may_be_an_id_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, **options: object) -> str:
        if name != "org/llava":
            raise FileNotFoundError(name)
        return str(LLAVA)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("org/llava") == LLAVA
    with pytest.raises(ConfigError, match="is no folder, and not to be had from the Hub"):
        find_checkpoint("org/other")
