"""explain, on the committed mini-LLaVA: pictures and pages of any image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.minillava.split import CLIP, LLAVA, draw_examples, png
from vllm_autoprune.cli.main import main

Captured = pytest.CaptureFixture[str]

MODEL = ["--checkpoint", str(LLAVA), "--text-tower", str(CLIP)]


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    path = tmp_path / "scene.png"
    path.write_bytes(png(draw_examples("test", 1)[0].image))
    return path


def test_a_picture_and_a_page(scene: Path, tmp_path: Path, capsys: Captured) -> None:
    question = draw_examples("test", 1)[0].question
    picture, page = tmp_path / "out.png", tmp_path / "out.html"
    call = ["explain", str(scene), question, *MODEL, "--budget", "8"]
    assert main([*call, "-o", str(picture), "-o", str(page), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "keeps 8 of 144" in record["summary"]
    assert len(record["trace"]["kept"]) == 8
    with Image.open(picture) as image:
        assert image.width > 1000
    assert question in page.read_text()


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "I;16"])
def test_any_mode_and_shape_of_image(tmp_path: Path, mode: str, capsys: Captured) -> None:
    path = tmp_path / "wide.png"
    source = Image.new("L", (400, 120), 90)
    (source if mode == "I;16" else source.convert(mode)).save(path)
    assert main(["explain", str(path), "?", *MODEL, "--budget", "4"]) == 0
    assert "keeps 4 of 144" in capsys.readouterr().out


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    from vllm_autoprune.cli.commands.explain import read_image

    path = tmp_path / "clear.png"
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
        (scene, [*MODEL, "-o", str(tmp_path / "out.gif")], ".png or .html"),
        (scene, ["--checkpoint", str(tmp_path)], "config.json cannot be read"),
        (scene, ["--checkpoint", str(CLIP)], "is not supported here"),
    ):
        assert main(["explain", str(image), "?", *options]) == 1, message
        assert message in capsys.readouterr().err


def test_a_checkpoint_may_be_an_id_on_the_hub(
    scene: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, **options: object) -> str:
        asked.append(name)
        if name != "org/llava":
            raise FileNotFoundError(name)
        return str(LLAVA)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    call = ["explain", str(scene), "What?", "--budget", "8", "--checkpoint"]
    assert main([*call, "org/llava"]) == 0
    assert main([*call, "org/other"]) == 1
    assert asked == ["org/llava", "org/other"]
    error = capsys.readouterr().err
    assert "org/other: is no folder, and not to be had from the Hub" in error
    assert error.count("\n") == 1
