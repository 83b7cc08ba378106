"""`python -m benchmarks.cost clips`: what pruning a clip saves, beside stock vLLM and its own EVS.

Qwen3-VL-8B and frames of 640 x 360 are scaled alike; every request brings a new clip. EVS prunes a
whole server, so that each of its rates has one.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import shapes
from benchmarks.common.requests import draw_picture, encode_picture
from benchmarks.cost.turns import SERVED, USERS, Arm, Table, Turns, as_fields
from benchmarks.server import serve
from vllm_autoprune.selftest.backbones import build

_FRAMES, _WIDTH, _HEIGHT = 32, 320, 180
_SHARES = {"1/4": "0.75", "1/8": "0.875"}
"""What is kept, and EVS's rate of what is dropped."""

OPTIONS = {
    "--rounds": {"type": int, "default": 5, "help": "turns at 8 users; three times as many at 1"},
    "--out": {"type": Path, "default": Path("out/clips"), "help": "folder of files"},
}


def _draw(seed: int) -> Sequence[Mapping[str, object]]:
    """A question about a clip in which the camera pans over a picture."""
    picture = draw_picture(seed, 2 * _WIDTH, _HEIGHT)
    steps = [_WIDTH * frame // _FRAMES for frame in range(_FRAMES)]
    crops = [picture.crop((step, 0, step + _WIDTH, _HEIGHT)) for step in steps]
    frames = ",".join(encode_picture(crop, "jpeg").partition(",")[2] for crop in crops)
    url = {"url": f"data:video/jpeg;base64,{frames}"}
    text = {"type": "text", "text": "what is the colour"}
    return [{"type": "video_url", "video_url": url}, text]


def run(options: argparse.Namespace) -> int:
    """Print rows of ``docs/data``."""
    sizes = tomllib.loads(Path(shapes.__file__).with_suffix(".toml").read_text())
    folder = build("qwen3_vl", options.out / "model", sizes["scaled-qwen3-vl"])
    flags = f"{SERVED} --autoprune-state vcast --autoprune-requests states".split()
    table = Table()
    with ExitStack() as stack:
        server = stack.enter_context(serve(folder, *flags, log=options.out / "vcast.log"))
        arms: dict[str, Arm] = {"stock": (server, as_fields({"enabled": False}))}
        for share, rate in _SHARES.items():
            evs = [*SERVED.split(), "--video-pruning-rate", rate]
            log = options.out / f"evs-{rate}.log"
            arms[f"vcast {share}"] = server, as_fields({"video_budget": share})
            arms[f"EVS {share}"] = stack.enter_context(serve(folder, *evs, log=log)), {}
        pairs = [
            (below, f"vcast {share}") for share in _SHARES for below in ("stock", f"EVS {share}")
        ]
        for users in USERS:
            turns = Turns(f"{_FRAMES} frames, {users} at once")
            turns.take(arms, users, options.rounds, _draw)
            turns.write(table, dict.fromkeys(pairs))
    return 0
