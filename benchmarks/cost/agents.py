"""`python -m benchmarks.cost agents`: tokens that a conversation of screenshots computes, by turn.

Mini-Qwen3-VL, whose weights do not matter here, gets a screenshot of about 1,000 tokens a turn and
answers in 150. Every arm is a conversation of its own about the same session: with whole images on
a stock server, by a client that drops old ones, in history mode, and without unchanged cells.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.common.report import log_progress
from benchmarks.common.requests import encode_picture
from benchmarks.common.screens import draw_screens
from benchmarks.cost.turns import Table
from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import CHECKPOINTS

_FLAGS = (
    *("--served-model-name", "served", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "65536", "--max-num-batched-tokens", "4096"),
    "--enable-prompt-tokens-details",
    '--limit-mm-per-prompt={"image": 64}',
    '--hf-overrides={"text_config": {"max_position_embeddings": 65536}}',
)
_PRUNED = ("--autoprune-state", "cen_divprune", "--autoprune-requests", "budget")

_STOCK: Mapping[str, Mapping[str, object] | int] = {
    "stock, all kept": 64,
    "stock, client keeps the newest 5": 5,
}
_OURS: Mapping[str, Mapping[str, object] | int] = {
    "newest whole, older core 128": {"budget": "100%", "history": "1:128"},
    "newest N/2, older core 128": {"budget": "1/2", "history": "1:128"},
    "changed cells": {"budget": "100%", "cells": "changed"},
    "changed cells, older core 128": {
        "budget": "100%",
        "cells": "changed",
        "history": "1:128",
    },
}
"""Conversations, each with its pruning entry, or the images that its client keeps."""

_TASK = " red" * 1500
_REPLY = 150
_WORD = 395
"""Token of " red", the only one of a reply: its text has to become the same tokens again."""

OPTIONS: dict[str, dict[str, Any]] = {
    "--turns": {"type": int, "default": 20, "help": "of a conversation, at most 20"},
    "--out": {"type": Path, "default": Path("out/agents"), "help": "folder of logs"},
}


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows of ``docs/data``."""
    options.out.mkdir(parents=True, exist_ok=True)
    table = Table()
    pictures = draw_screens(options.turns, 1120, 700)
    screens = [encode_picture(picture) for picture in pictures]
    figures: dict[str, tuple[int, int, int]] = {}
    for flags, arms in (((), _STOCK), (_PRUNED, _OURS)):
        log = options.out / f"{len(flags)}.log"
        with serve(CHECKPOINTS["miniqwen"], *_FLAGS, *flags, log=log) as server:
            for name, arm in arms.items():
                usages = _converse(server, screens, arm)
                computed = [prompt - cached for prompt, cached in usages]
                figures[name] = (usages[-1][0], sum(computed), max(computed[1:]))
                log_progress(f"{name}: {figures[name]}")
    for name, values in figures.items():
        for number, what in enumerate(
            ("prompt of the last turn", "computed in all turns", "worst later turn")
        ):
            table.add(what, name, values[number], "tokens")
            ratio = values[number] / figures["stock, all kept"][number]
            table.add(f"{what}, over stock", name, ratio, "times")
    return 0


def _converse(
    server: Server, screens: list[str], arm: Mapping[str, object] | int
) -> list[tuple[int, int]]:
    """Prompt tokens and cached ones of each turn; an arm that is a number drops older images."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": _TASK}]
    usages = []
    for turn, url in enumerate(screens):
        image = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": "what is the colour of the circle"}
        messages.append({"role": "user", "content": [image, text]})
        if isinstance(arm, int) and turn >= arm:
            messages[1 + 2 * (turn - arm)]["content"] = [text]
        body: dict[str, Any] = {
            "model": "served",
            "messages": messages,
            "max_tokens": _REPLY,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": [_WORD],
            "cache_salt": json.dumps(arm).replace("/", " of "),
        }
        if not isinstance(arm, int):
            body["mm_processor_kwargs"] = {"autoprune": arm}
        status, answer = server.post("/v1/chat/completions", body)
        if status != 200:
            raise BenchmarkError.of(server.url, json.dumps(answer)[:400])
        completion: Any = answer
        details = completion["usage"]["prompt_tokens_details"] or {}
        usages.append(
            (completion["usage"]["prompt_tokens"], details.get("cached_tokens") or 0)
        )
        reply = completion["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": reply})
    return usages
