"""`python -m benchmarks.cost clips`: what pruning a clip saves, beside stock vLLM and EVS.

Qwen3-VL-8B and frames of 640 x 360 are scaled alike; every request has a new clip. EVS is measured
as the state `evs`, which keeps the same tokens as `--video-pruning-rate`, because stock vLLM ends
with that flag on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.common.requests import draw_picture, encode_picture
from benchmarks.cost import turns
from benchmarks.cost.turns import SERVED, USERS, Table, Turns, as_fields, build_model
from benchmarks.server import serve

_FRAMES = 32
_WIDTH = 320
_HEIGHT = 180
_SHARES = ("1/4", "1/8")
_STATES = ("vcast", "evs")

OPTIONS = turns.OPTIONS | {
    "--out": {"type": Path, "default": Path("out/clips"), "help": "folder of files"},
}


def draw_clip(seed: int) -> Sequence[Mapping[str, object]]:
    """A question about a clip in which the camera pans over a picture."""
    picture = draw_picture(seed, 2 * _WIDTH, _HEIGHT)
    steps = [_WIDTH * frame // _FRAMES for frame in range(_FRAMES)]
    crops = [picture.crop((step, 0, step + _WIDTH, _HEIGHT)) for step in steps]
    frames = ",".join(encode_picture(crop, "jpeg").partition(",")[2] for crop in crops)
    url = {"url": f"data:video/jpeg;base64,{frames}"}
    text = {"type": "text", "text": "what is the colour"}
    return [{"type": "video_url", "video_url": url}, text]


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows of ``docs/data``."""
    folder = build_model(options.out)
    flags = f"{SERVED} --autoprune-state vcast --autoprune-requests states".split()
    arms = {"stock": as_fields({"enabled": False})}
    pairs = list[tuple[str, str]]()
    for state, share in product(_STATES, _SHARES):
        name = f"{state} {share}"
        arms[name] = as_fields({"state": state, "video_budget": share})
        pairs.append(("stock", name))
    pairs += [(f"evs {share}", f"vcast {share}") for share in _SHARES]
    table = Table()
    with serve(folder, *flags, log=options.out / "server.log") as server:
        for users in USERS:
            taken = Turns(f"{_FRAMES} frames, {users} at once")
            served = {name: (server, fields) for name, fields in arms.items()}
            taken.take(served, users, options.rounds, draw_clip)
            taken.write(table, dict.fromkeys(pairs))
    return 0
