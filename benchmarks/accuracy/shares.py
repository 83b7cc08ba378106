"""``python -m benchmarks.accuracy.shares``: what equal and free shares of tiles keep of scenes.

A picture is cut as SmolVLM cuts it, into a whole image and four tiles, of which some show a scene
of mini-LLaVA's and the others one grey; the tokens are those of mini-LLaVA's tower.
"""

from __future__ import annotations

import csv
import random
import sys

import torch
from torch.nn import functional

from benchmarks.yardsticks.examples import LLAVA, SEEDS
from benchmarks.yardsticks.scenes import (
    CELL,
    CELLS,
    GRID,
    PATCHES,
    TRAINING_STYLES,
    Scene,
    add_grain,
    normalize_pixels,
    render_scenes,
)
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.statistics import ClusterBootstrap, Estimate
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

PICTURES, TILES, SIDE = 24, 4, CELLS * CELL
BUDGET = (1 + TILES) * PATCHES // 8


def draw_tokens(
    vision: LlavaVision, number: int, shown: int
) -> tuple[VisualTokens, list[list[int]]]:
    """Tokens of a picture, whole image first, and those of its tiles that each thing covers."""
    seed = SEEDS["test"][number]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    scenes = [Scene.draw(rng, rng.choice(TRAINING_STYLES)) for _ in range(shown)]
    images, rendered = render_scenes(scenes, CELLS, seed)
    tiles = add_grain(torch.full((TILES, 3, SIDE, SIDE), 128.0), generator)
    places = rng.sample(range(TILES), shown)
    tiles[places] = images
    canvas = torch.cat([torch.cat([*tiles[:2]], dim=2), torch.cat([*tiles[2:]], dim=2)], dim=1)
    whole = functional.interpolate(canvas[None].float(), (SIDE, SIDE), mode="area")
    pixels = normalize_pixels(torch.cat([whole.round().to(torch.uint8), tiles]))
    apart = vision.encode_pixels(pixels.float())
    features, encoder, attention = (
        part.flatten(0, 1)[None]
        for part in (apart.features, apart.require_encoder(), apart.require_cls_attention())
    )
    tokens = VisualTokens(features, Grid(GRID, GRID, 1 + TILES), attention, encoder=encoder)
    things = [
        [(1 + place) * PATCHES + patch for patch in patches]
        for place, scene in zip(places, rendered, strict=True)
        for patches in scene.patches.values()
    ]
    return tokens, things


def main() -> None:
    """Print a row for each number of tiles that show a scene, base policy and kind of share."""
    vision = LlavaVision(LLAVA, dtype="float32")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["what", "setting", "value", "low", "high", "unit"])
    for shown in (1, 2, 4):
        pictures = [draw_tokens(vision, number, shown) for number in range(PICTURES)]
        for name in ("divprune", "cen_divprune"):
            base = load_state(name)
            parts: dict[str, list[float]] = {}
            for shares in ("equal", "free"):
                policy = materialize(base.model_copy(update={"shares": shares}), BUDGET)
                parts[shares] = []
                for tokens, things in pictures:
                    kept = {*refine(policy, tokens).indices[0].tolist()}
                    parts[shares] += [
                        len(kept.intersection(thing)) / len(thing) for thing in things
                    ]
            owners = [i for i, (_, things) in enumerate(pictures) for _ in things]
            less = [f - e for e, f in zip(parts["equal"], parts["free"], strict=True)]
            for kind, values in (*parts.items(), ("free less equal", less)):
                figure = Estimate.of(100 * ClusterBootstrap(owners).mean(values)).rounded(1)
                setting = (
                    f"K = {BUDGET} of {(1 + TILES) * PATCHES}; {shown} of {TILES} tiles show one; "
                    f"{PICTURES} pictures, {len(owners)} things; {name}, {kind}"
                )
                unit = "points" if kind == "free less equal" else "%"
                estimate = (figure.value, figure.low, figure.high)
                writer.writerow(
                    ["tokens of a thing that are kept, in its tile", setting, *estimate, unit]
                )


if __name__ == "__main__":
    main()
