"""Models of the efficiency table: mini-LLaVA with weights, and true shapes without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.qwen_shape import write_qwen
from benchmarks.common.shapes import write_clip, write_llava, write_llava_next
from benchmarks.minillava.split import CLIP, LLAVA
from vllm_autoprune.backbones import LLAVA_7B, LLAVA_NEXT_7B, QWEN_7B, BackboneShape

MINI = "mini-llava"


@dataclass(frozen=True)
class Model:
    """What is served, and the image size that gives the published number of tokens."""

    name: str
    folder: Path
    geometry: BackboneShape
    """With the depth that is served."""
    depth: int
    """Language layers of the published model."""
    side: int
    """Of the square images, pixels."""
    flags: tuple[str, ...]
    scored: bool
    """Whether its weights are real, so that its answers can be scored."""

    @property
    def label(self) -> str:
        """Name of its files, with the depth where it is not the published one."""
        layers = self.geometry.layers
        return self.name if layers == self.depth else f"{self.name}-{layers}-layers"

    @property
    def at_full_depth(self) -> BackboneShape:
        """The geometry with its published depth."""
        return replace(self.geometry, layers=self.depth)


Write = Callable[[Path, int], Path]

SHAPES: Mapping[str, tuple[BackboneShape, int, Write]] = {
    LLAVA_7B.name: (LLAVA_7B, 336, write_llava),
    LLAVA_NEXT_7B.name: (LLAVA_NEXT_7B, 672, write_llava_next),
    QWEN_7B.name: (QWEN_7B, 1008, write_qwen),
}
NAMES = (MINI, *SHAPES)


def load_model(name: str, layers: int, out: Path) -> Model:
    """The model of that name; the folder of a shape is written below ``out``."""
    if name == MINI:
        geometry = read_geometry(LLAVA)
        return Model(
            name=MINI,
            folder=LLAVA,
            geometry=geometry,
            depth=geometry.layers,
            side=168,
            flags=("--max-model-len", "1024"),
            scored=True,
        )
    geometry, side, write = SHAPES[name]
    folder = write(out / f"{name}-{layers}-layers", layers)
    return Model(
        name=name,
        folder=folder,
        geometry=replace(geometry, layers=layers),
        depth=geometry.layers,
        side=side,
        flags=("--load-format", "dummy", "--max-model-len", "4096"),
        scored=False,
    )


def find_text_tower(model: Model, out: Path) -> Path | None:
    """The CLIP that measures relevance; for shapes, one with random weights is written once."""
    if model.name == MINI:
        return CLIP
    return write_clip(out / "clip") if model.geometry.relevance == "clip" else None


def read_geometry(folder: Path) -> BackboneShape:
    """The geometry of a LLaVA-1.5 checkpoint, from its config.json."""
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    side = int(vision["image_size"]) // int(vision["patch_size"])
    return BackboneShape(
        name=folder.name,
        family="llava",
        layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        feed_forward=int(text["intermediate_size"]),
        kv_width=int(text["num_key_value_heads"]) * int(text["head_dim"]),
        grid_height=side,
        grid_width=side,
        tiles=1,
        relevance="clip",
        has_cls=True,
        tower_rows=True,
        merger=False,
        source=str(folder),
    )
