"""Questions and pictures of one's own files: what is read, and what is said of every mistake."""

from __future__ import annotations

import base64
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO

from offline_search.dataset import SPLITS, read_dataset
from tests.evaluation.question_files import (
    INLINE,
    assert_told,
    draw,
    refuse_questions,
    save,
    write_file,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation import pictures
from vllm_autoprune.evaluation.journal import MME, PAIRS
from vllm_autoprune.evaluation.pictures import find_picture, read_picture
from vllm_autoprune.evaluation.questions import read_questions

LINE = {"image": "a.png", "question": "?", "answer": "x"}

# ---- pictures ----


FRAMES: dict[str, Any] = {
    "save_all": True,
    "append_images": [draw().rotate(90), draw().rotate(180)],
}
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
PICTURES = {
    **{
        f"{mode} PNG": save(mode=mode)
        for mode in ("RGB", "L", "P", "RGBA", "LA", "I;16")
    },
    **{f"{mode} JPEG": save("JPEG", mode) for mode in ("RGB", "CMYK")},
    **{f"{mode} TIFF": save("TIFF", mode) for mode in ("LAB", "F", "1")},
    **{kind: save(kind) for kind in ("GIF", "WEBP", "AVIF")},
    "a transparent colour of a palette": save(mode="P", transparency=7),
    "alpha of a palette": save(mode="P", transparency=bytes(range(256))),
    "a transparent colour": save(transparency=draw().getpixel((3, 3))),
    "a rotated JPEG": save("JPEG", exif=ROTATED),
    "a broken EXIF": save("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01"),
    "bytes behind it": save("JPEG") + b"\0" * 300 + b"<html>",
    **{f"an animated {kind}": save(kind, **FRAMES) for kind in ("GIF", "TIFF")},
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_vllm_makes_of_it(tmp_path: Path, name: str) -> None:

    def vllm_reads(content: bytes) -> Image.Image:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = ImageMediaIO().load_bytes(content).media
        return image

    content = PICTURES[name]
    (tmp_path / "any-name").write_bytes(content)
    picture = read_picture(find_picture("", "any-name", tmp_path))
    image = picture.image()
    assert image.mode == "RGB" and image.size == vllm_reads(content).size
    assert image.tobytes() == vllm_reads(content).tobytes()
    url: Any = picture.part()["image_url"]
    kind, _, data = url["url"].partition(";base64,")
    assert kind.startswith("data:image/") and base64.b64decode(data) == content


NO_PICTURES = {
    "empty": (b"", "is not a picture"),
    "HTML": (b"<!doctype html><title>404</title>", "is not a picture"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "-> git lfs pull",
    ),
    "HEIC": (
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64,
        "is a HEIC picture that cannot be decoded -> ",
    ),
    "PostScript": (save("EPS"), "is not a picture that vLLM reads"),
    "a cut JPEG": (save("JPEG")[:-150], "cannot be decoded (image file is truncated"),
    "a cut PNG": (save()[:-60], "cannot be decoded"),
    "a wrong checksum": (save().replace(b"IDAT", b"IDAT\1"), "cannot be decoded"),
}


def refuse_picture(text: str, folder: Path) -> str:
    """What is said of a picture that cannot be read."""
    with pytest.raises(ConfigError) as caught:
        read_picture(find_picture("WHERE", text, folder))
    (text,) = assert_told(caught.value)
    assert text.startswith("WHERE: ")
    return text


@pytest.mark.parametrize("name", NO_PICTURES)
def test_what_is_no_picture_is_refused(tmp_path: Path, name: str) -> None:
    content, said = NO_PICTURES[name]
    (tmp_path / "a.png").write_bytes(content)
    assert said in refuse_picture("a.png", tmp_path)


def test_heic_is_sent_as_png_where_its_library_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pillow_heif

    pillow_heif.from_pillow(draw()).save(tmp_path / "1.heic")
    (tmp_path / "questions.txt").write_text("?\tyes\n")
    (question,) = read_questions(tmp_path)
    (picture,) = question.pictures
    assert (picture.name, picture.kind) == ("1.heic", "image/png")
    served = ImageMediaIO().load_bytes(picture.read()).media
    assert served.size == draw().size
    monkeypatch.setattr(pictures, "picture_endings", lambda: frozenset((".png",)))
    monkeypatch.setattr(pictures, "_register_formats", lambda: None)
    monkeypatch.setitem(Image.OPEN, "HEIF", Image.OPEN["PNG"])
    said = refuse_picture("1.heic", tmp_path)
    assert "-> pip install 'vllm-autoprune[data]', or convert it" in said


def test_a_picture_has_at_most_twice_the_pixels_of_pillows_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 16 - 1)
    assert read_picture(find_picture("", "a.png", folder)).image().size == (24, 16)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 8 - 1)
    assert re.search(
        "exceeds limit of 382 pixels.* or make it", refuse_picture("a.png", folder)
    )


FORMS = {
    "a data URL": f"data:image/png;base64,{INLINE}",
    "base64 in lines": "\n".join(re.findall(".{1,76}", INLINE)),
    "base64 without padding": base64.b64encode(save("JPEG")).decode().rstrip("="),
    "base64 for URLs": base64.urlsafe_b64encode(save("WEBP")).decode(),
    "an absolute path": "FOLDER/a.png",
    "spaces and other scripts": "naïve 图像 (1).png",
    "a link": "link.png",
    "a path of Windows": r".\a.png",
    "a path of another machine's Windows": r"C:\data\a.png",
    "a URL of a file": "file://FOLDER/copy%20of%20a.png",
}
NO_FORMS = {
    "a missing file": (
        "b.png",
        "cannot be read (No such file or directory) -> give the path",
    ),
    "no address": ("http://[/y.png", "-> give it as http://HOST:PORT"),
    "a folder whose pictures are no frames": (".", ": cut.jpg: cannot be decoded"),
    "a pipe": ("pipe", "cannot be read (not a file)"),
    "a long path": ("x." * 2500, "cannot be read (File name too long)"),
    "base64 of nothing": ("iVBORw0KGgo=" * 10, "is neither a file nor base64"),
    "base64 that is cut": (INLINE[:120], "cannot be decoded"),
    "a data URL of text": (
        "data:image/svg+xml,%3Csvg/%3E",
        "is neither a file nor base64",
    ),
    "a data URL of nothing": ("data:image/png;base64,", "cannot be read"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and with what only looks like one."""
    folder = tmp_path_factory.mktemp("x") / "data"
    folder.mkdir()
    for name in ("a.png", "copy of a.png", "3f2a" * 16, "naïve 图像 (1).png"):
        (folder / name).write_bytes(save())
    (folder / "b.jpg").write_bytes(save("JPEG"))
    (folder / "cut.jpg").write_bytes(save("JPEG")[:-150])
    (folder / "link.png").symlink_to("a.png")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_an_image_is_a_path_or_the_picture_itself(folder: Path, name: str) -> None:
    text = FORMS[name].replace("FOLDER", str(folder))
    picture = read_picture(find_picture("", text, folder))
    assert picture.image().size == (24, 16)
    named_by_digest = picture.name.startswith("sha256:") and len(picture.name) <= 64
    assert picture.name == text or named_by_digest


@pytest.mark.parametrize("name", NO_FORMS)
def test_what_names_no_picture_is_refused(folder: Path, name: str) -> None:
    text, said = NO_FORMS[name]
    refusal = refuse_picture(text, folder)
    assert said in refusal and len(refusal) < 400


# ---- lines ----


def lines(*changes: Mapping[str, object], **options: Any) -> str:
    return "".join(
        json.dumps({**LINE, **change}, **options) + "\n" for change in changes
    )


PAIR = (
    {"question": "1?", "answer": "Yes", "pair": 1},
    {"question": "2?", "answer": " NO", "pair": 1},
)
READ: Mapping[str, tuple[str | bytes, list[str]]] = {
    "a byte order mark": ("\ufeff" + lines({}), ["?"]),
    "ends of lines of Windows": (
        lines({}, {"question": "2?"}).replace("\n", "\r\n"),
        ["?", "2?"],
    ),
    "empty lines, no end of the last": (
        "\n\n" + lines({}) + "\n \t\n" + lines({})[:-1],
        ["?", "?"],
    ),
    **{
        f"U+{ord(char):04X} in a question": (
            lines({"question": f"a{char}b"}, ensure_ascii=False),
            [f"a{char}b"],
        )
        for char in "\u2028\x85\ufeff"
    },
    **{
        f"{char!r} in a question": (lines({"question": f"a{char}b"}), [f"a{char}b"])
        for char in "\f\r\n\0"
    },
    "other scripts": (
        lines({"question": "数字 ما هو؟ 👩‍👩‍👧"}),
        ["数字 ما هو؟ 👩‍👩‍👧"],
    ),
    "a long line": (lines({"question": "x" * 300_000}), ["x" * 300_000]),
    "a pair": (lines(*PAIR), ["1?", "2?"]),
    "a pair as text, of two names of an image": (
        lines(PAIR[0], {**PAIR[1], "pair": "1", "image": "copy of a.png"}),
        ["1?", "2?"],
    ),
    "base64": (lines({"image": INLINE}), ["?"]),
    "an array": (json.dumps([LINE, LINE]), ["?", "?"]),
    "an object in lines": (json.dumps(LINE, indent=1), ["?"]),
    "questions of ours in an object": (json.dumps({"questions": [LINE]}), ["?"]),
    "NaN and null": (
        json.dumps({**LINE, "pair": float("nan"), "category": None}),
        ["?"],
    ),
}
REFUSED: Mapping[str, tuple[str | bytes, str]] = {
    "UTF-16": (
        lines({}).encode("utf-16"),
        ":1: is not UTF-8 (a NUL byte): UTF-16? -> iconv",
    ),
    "Latin-1": (
        lines({}, {"answer": "café"}, ensure_ascii=False).encode("latin-1"),
        ":2: is not UTF-8 (invalid continuation byte): LATIN1? -> ",
    ),
    "half a surrogate, escaped": (
        lines({"question": "a\ud83d?"}),
        "is not JSON (unexpected end",
    ),
    "HTML": ("\n<!doctype html>\n", "is an HTML page, not questions -> download"),
    "gzip": (b"\x1f\x8b\b", "is gzip, not questions -> gunzip "),
    "a zip archive": (b"PK\x03\x04", "is an archive or a spreadsheet, not questions"),
    "a picture": (save("JPEG"), "is a picture, not questions -> put it into a folder"),
    "a PDF": (
        b"%PDF-1.7\n%\xe2\xe3",
        "is a PDF file, not questions -> export its pages",
    ),
    "a video": (b"\0\0\0\x20ftypisom", "is a video, not questions"),
    "Git LFS": ("version https://git-lfs.github.com/spec/v1\n", "-> git lfs pull"),
    "CSV": (
        "image,question,answer\na.png,?,4\nb.png,?,4\n",
        ":3: image 'b.png': cannot",
    ),
    "an array": (
        json.dumps([LINE, {**LINE, "answer": 4, "pair": "x"}]),
        "record 2: 'pair' Inp",
    ),
    "an array that is cut": (
        json.dumps([LINE, LINE], indent=1)[:-9],
        ": is not JSON (EOF while",
    ),
    "nothing": (" \n\t\n", "contains no question about a picture"),
    "a comma in a line": (
        '{"image": "a.png",}',
        "is not JSON (trailing comma at column 19)",
    ),
    "a deep value": (
        '{"pair": ' + "[" * 5000 + "]" * 5000 + "}",
        "recursion limit exceeded",
    ),
    "a large number": (lines({"pair": 10**400}), 'is not one "yes" and one "no"'),
    "a list": (
        '[["a.png", "?", "x"]]\n',
        ": record 1: is not an object -> write one object",
    ),
    "no text as answer": (lines({"answer": True}), "'answer' is not text -> "),
    "no answer": (
        lines({}, {"answer": None}, {"answer": []}),
        ":2: 2 of 3 questions have no answer -> add --reference unpruned",
    ),
    **{
        f"{field} is blank": (lines({field: " \u2003"}), f"'{field}' is blank -> ")
        for field in ("image", "question", "answer", "category")
    },
    "a broken image": (
        lines({}, {"image": "cut.jpg"}, {"image": "cut.jpg"}),
        ":2: image 'cut.jpg': cannot be decoded",
    ),
    "a pair of one": (
        lines(PAIR[0]),
        '"pair": 1 about \'a.png\' is not one "yes" and one "no"',
    ),
    "a pair of three": (lines(*PAIR, {**PAIR[0], "question": "3?"}), "(lines 1, 2, 3)"),
    "a pair of two images": (lines(PAIR[0], {**PAIR[1], "image": "b.jpg"}), ""),
    "two answers, two names": (
        lines({}, {"question": "2?"}, {"image": "./copy of a.png", "answer": "y"}),
        ":1 to the same question about one image -> ",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_only_a_line_feed_ends_a_line(folder: Path, name: str) -> None:
    content, asked = READ[name]
    path = write_file(folder / "q.jsonl", content)
    questions = read_questions(path)
    assert [question.text for question in questions] == asked
    assert all(
        picture.kind == "image/png" for each in questions for picture in each.pictures
    )
    assert {question.record.image for question in questions} <= {
        "a.png"
    } or name == "base64"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_question_is_refused(folder: Path, name: str) -> None:
    content, said = REFUSED[name]
    path = write_file(folder / "q.jsonl", content)
    texts = refuse_questions(path)
    assert (
        len(texts) == (2 if name == "a pair of two images" else 1) and said in texts[0]
    )
    assert texts[0].startswith(str(path))


def test_questions_are_ordered_by_image_and_pairs_are_scored_as_mme(
    folder: Path,
) -> None:
    pair = {"image": "b.jpg", "category": "colour", "pair": 7}
    content = lines(
        {"question": "1?"},
        {**pair, "question": "2?", "answer": "yes"},
        {"question": "3?", "category": "shape", "image": "./copy of a.png"},
        {**pair, "question": "4?", "answer": "No "},
    )
    path = write_file(folder / "q.jsonl", content)
    questions = read_questions(path)
    assert [question.text for question in questions] == ["1?", "3?", "2?", "4?"]
    assert [question.record.benchmark for question in questions] == [
        "all",
        "shape",
        PAIRS,
        PAIRS,
    ]
    assert [question.record.image for question in questions] == [
        "a.png",
        "a.png",
        "b.jpg",
        "b.jpg",
    ]
    assert {question.record.pair for question in questions} == {"", "b.jpg/7"}
    assert [picture.kind for picture in questions[2].pictures] == ["image/jpeg"]
    named = {"category": PAIRS, "question": "named so?"}
    write_file(folder / "mme.jsonl", lines({"category": MME}, named, *PAIR))
    kinds = [
        question.record.benchmark for question in read_questions(folder / "mme.jsonl")
    ]
    assert kinds == ["MME without pairs", "yes/no pairs without pairs", PAIRS, PAIRS]
    # A limit leaves no half of a pair.
    assert [len(read_questions(path, limit)) for limit in (1, 2, 3, 4)] == [1, 1, 2, 4]


def test_many_problems_are_counted_and_a_missing_file_is_said_to_be_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    for missing in (path, Path("a\0b")):
        (said,) = refuse_questions(missing)
        assert re.search("cannot be read .* -> give the path of questions", said)
    texts = refuse_questions(
        write_file(path, lines(*({"answer": ""} for _ in range(30))))
    )
    assert len(texts) == 21 and "10 more problems" in texts[20]


# ---- nothing that a file holds ends in another exception ----

SEEDS = [
    content.encode() if isinstance(content, str) else content
    for content in [
        *(c for c, _ in (*READ.values(), *REFUSED.values())),
        *PICTURES.values(),
    ]
    if len(content) < 2000
]


@st.composite
def mutants(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the seeds, parts of which are replaced, cut or repeated."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start, stop = sorted(draw(st.integers(0, len(content))) for _ in range(2))
        middle = draw(st.binary(max_size=6) | st.just(content[start:stop] * 2))
        content = (
            content[:start] + middle + content[stop if draw(st.booleans()) else start :]
        )
    return content


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | mutants(SEEDS))
def test_any_bytes_are_read_or_refused_in_words(folder: Path, content: bytes) -> None:
    path = write_file(folder / "1.txt", content)
    for read in (
        lambda: read_questions(path),
        lambda: read_picture(find_picture("", "1.txt", folder)),
    ):
        try:
            read()
        except ConfigError as error:
            assert_told(error)


def test_a_search_finds_one_image_in_two_splits_under_any_name(folder: Path) -> None:
    for split, image in zip(SPLITS, ("a.png", "b.jpg", INLINE), strict=True):
        write_file(folder / f"{split}.jsonl", lines({"image": image}))
    with pytest.raises(ConfigError) as caught:
        read_dataset(folder)
    (problem,) = caught.value.problems
    assert problem.what == "the same image is in search and in test"
