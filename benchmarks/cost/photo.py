"""`python -m benchmarks.cost photo`: a photo of twelve megapixels on a small share of memory.

Stock and pruned on one server, one request at a time, each with a new photo. Shown are N and K, the
time to first token, and the peak memory of tower, selection and prefill. A fallback, or a server
that does not live through it, is a failure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageEnhance

from benchmarks.common.client import Client
from benchmarks.common.memory import (
    MEMORY_ENVIRONMENT,
    MEMORY_FLAGS,
    begin_peak_memory,
    read_peak_memory,
)
from benchmarks.common.report import MIB, environment, format_environment, format_spread
from benchmarks.common.requests import (
    build_body,
    build_content,
    draw_picture,
    encode_picture,
)
from benchmarks.common.shapes import write_shape
from benchmarks.cost.curve import ARMS
from benchmarks.cost.turns import as_fields
from benchmarks.server import Server, default_flags, serve
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.report import Table
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.statistics import Spread

_TINY = "tiny"
_SHAPE = "qwen2.5-vl-7b"
_SERVED = "served"
_LARGEST = 16_777_216
"""Pixels up to which the image processor does not resize."""
_SMALLEST = 3_136
_ENLARGED = 4
"""A photo is drawn at a quarter of its sides, since drawing takes a second a megapixel."""
_COLUMNS = ("arm", "prompt tokens", "TTFT, ms", "peak memory, MiB", "fallbacks")


def _open_model(options: argparse.Namespace) -> tuple[Path, tuple[str, ...]]:
    """Folder of the model, and flags of its server."""
    if options.model == _TINY:
        return build("qwen2_5_vl", options.out / _TINY), ()
    folder = write_shape(_SHAPE, options.out / "model", options.layers)
    return folder, ("--load-format", "dummy")


def _draw_photo(seed: int, width: int, height: int) -> Image.Image:
    """A photo of this size; other seeds have other brightness."""
    small = draw_picture(0, max(width // _ENLARGED, 1), max(height // _ENLARGED, 1))
    photo = small.resize((width, height), Image.Resampling.BICUBIC)
    return ImageEnhance.Brightness(photo).enhance(1 - seed / 100)


def _measure(
    server: Server, arm: str, photos: list[str], warm_up: str
) -> dict[str, object]:
    """Send photos of one arm; returns its figures. Raises if a request is not answered."""
    client = Client(server.url, timeout=600)
    # The only allowed token is a word: others may have no text, so have no time either.
    fields = {**as_fields(ARMS[arm]), "ignore_eos": True, "allowed_token_ids": [4]}

    def build_question(url: str) -> bytes:
        content = build_content("what is in the photo", [url])
        return build_body(_SERVED, content, tokens=4, fields=fields)

    client.send_all([build_question(warm_up)])
    before = Metrics(server.get("/metrics"))
    begin_peak_memory(server)
    records = client.send_all([build_question(url) for url in photos])
    peak = read_peak_memory(server)
    gained = Metrics(server.get("/metrics")).since(before)
    return {
        "arm": arm,
        "prompt_tokens": records[0].prompt_tokens,
        "ttft": [record.ttft for record in records],
        "peak_memory": peak,
        "fallbacks": gained.total("autoprune_fallbacks_total") or 0.0,
    }


def _format_row(row: Mapping[str, Any]) -> list[str]:
    peak = row["peak_memory"]
    return [
        row["arm"],
        f"{row['prompt_tokens']:,}",
        format_spread(Spread.of(row["ttft"])),
        "no GPU" if peak is None else f"{peak / MIB:,.0f}",
        f"{row['fallbacks']:.0f}",
    ]


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--model": {"choices": (_SHAPE, _TINY), "default": _SHAPE, "help": "dummy weights"},
    "--layers": {
        "type": int,
        "default": 8,
        "help": "language layers of the true shape",
    },
    "--size": {"default": "4000x3000", "help": "width x height of the photo in pixels"},
    "--requests": {"type": int, "default": 3, "help": "photos of an arm"},
    "--max-model-len": {"default": "16384", "help": "as of `vllm serve`"},
    "--gpu-memory-utilization": {"default": "0.3", "help": "as of `vllm serve`"},
    "--out": {"type": Path, "default": Path("out/photo"), "help": "folder of files"},
}


def run(options: argparse.Namespace) -> int:
    """Serve, ask, print and write; returns 0 if no selection fell back, else 1."""
    folder, flags = _open_model(options)
    width, height = map(int, options.size.split("x"))
    pixels = {"size": {"shortest_edge": _SMALLEST, "longest_edge": _LARGEST}}
    flags += ("--served-model-name", _SERVED, *default_flags(), *MEMORY_FLAGS)
    flags += ("--mm-processor-kwargs", json.dumps(pixels))
    flags += ("--max-model-len", options.max_model_len)
    flags += ("--gpu-memory-utilization", options.gpu_memory_utilization)
    flags += ("--autoprune-state", "cen_divprune", "--autoprune-budget", "1/8")
    flags += ("--autoprune-requests", "budget")
    drawn = [_draw_photo(seed, width, height) for seed in range(options.requests + 1)]
    warm_up, *photos = (encode_picture(photo, "jpeg") for photo in drawn)
    log = options.out / "server.log"
    with serve(folder, *flags, env=MEMORY_ENVIRONMENT, log=log) as server:
        rows = [_measure(server, arm, photos, warm_up) for arm in ("stock", "default")]
    record = {"size": options.size, "environment": environment(), "rows": rows}
    (options.out / "photo.json").write_text(json.dumps(record, indent=1))
    print(f"A photo of {options.size} pixels, {options.max_model_len} tokens at most, ")
    print(f"{options.gpu_memory_utilization} of the GPU's memory.\n")
    print(Table("", _COLUMNS, [_format_row(row) for row in rows]).markdown())
    print(f"\n{format_environment()}")
    return int(any(row["fallbacks"] for row in rows))
