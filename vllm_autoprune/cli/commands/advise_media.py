"""`advise --image` and `advise --video`: what tower and prefill of one picture or video cost."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vllm_autoprune.advise import WORTHWHILE
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    BackboneShape,
    find_backbone,
    read_config,
)
from vllm_autoprune.cli.output import (
    check_writable,
    format_milliseconds,
    format_paragraphs,
    format_table,
    print_result,
    write_file,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.pictures import (
    fetch,
    find_picture,
    read_picture,
    read_video,
)
from vllm_autoprune.hub import explain_unread
from vllm_autoprune.positions import describe_positions
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tower import VisionTower
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.cells import Cells, kept_cells
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize


@dataclass(frozen=True)
class _Model:
    """Model whose costs are estimated; ``processor`` splits images or videos into patches."""

    shape: BackboneShape
    config: Any
    processor: Any

    @classmethod
    def load(cls, checkpoint: str, processor_class: Any) -> _Model:
        """Load a checkpoint's model; raises :class:`ConfigError` if it has no such processor."""
        shape = find_backbone(checkpoint, require_served)
        config = read_config(checkpoint)
        try:
            processor = processor_class.from_pretrained(checkpoint)
        except (OSError, ValueError) as error:
            what = "has no such processor"
            fix = "name one with a processor of images and videos"
            problem = explain_unread(f"--checkpoint {checkpoint}", error, what, fix)
            raise ConfigError("checkpoint", [problem]) from None
        return cls(shape, config, processor)


# ---- a picture ----


def advise_image(options: Namespace) -> int:
    """Print what a picture costs under each rule for its cells, and draw what `flat` drops."""
    if options.output is not None:
        check_writable(options.output)
    image = read_picture(find_picture(options.image, options.image, Path())).image()
    model = _choose_image_model(options.checkpoint)
    data = model.processor(
        image, do_rescale=False, do_normalize=False, return_tensors="pt"
    )
    if "image_grid_thw" not in data:
        raise ConfigError.of(
            "--checkpoint",
            "has no cells of patches",
            "name a Qwen-VL or GLM-4.xV",
            subject="cells",
        )
    height, width = (data["image_grid_thw"][0, 1:] // 2).tolist()
    tokens = height * width
    cells = data["pixel_values"].numpy().reshape(height, width, 4, 3, -1)
    budget = vars(options).get("budget", BudgetCall.parse("1/8")).tokens_kept(tokens)
    vision = VisionTower.of_config(model.config)
    rows = list[list[object]]()
    for rule in (None, Cells(rule="predicted"), Cells(rule="flat")):
        anchors = rule.find_anchors(cells) if rule else None
        remaining = np.arange(tokens) if anchors is None else kept_cells(anchors)
        count = len(remaining)
        k = min(budget, count)
        tower = vision.count_flops(count) / 10**12
        total = tower + model.shape.estimate_cost(k).teraflops
        share = f"{count / tokens:.3f}"
        rows.append(
            [str(rule or "none"), count, share, f"{tower:#.3g}", k, f"{total:#.3g}"]
        )
    if options.output is not None:  # draws the last rule, `flat`
        dropped = np.isin(np.arange(tokens), remaining, invert=True)
        mask = Image.fromarray(dropped.reshape(height, width))
        grey = Image.blend(image, Image.new("RGB", image.size, "grey"), 0.6)
        image.paste(grey, mask=mask.resize(image.size, Image.Resampling.NEAREST))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        write_file(options.output, buffer.getvalue())
    head = ("rule", "cells", "kept", "tower, TFLOPs", "K", "tower and prefill, TFLOPs")
    record = [dict(zip(head, row, strict=True)) for row in rows]
    print_result(options, {"cells": record}, format_table(head, rows, "<>>>>>"))
    return 0


def _choose_image_model(checkpoint: str | None) -> _Model:
    """The model of a checkpoint, by default Qwen3-VL-8B."""
    from transformers import AutoConfig, AutoImageProcessor, Qwen2VLImageProcessor

    if checkpoint is not None:
        return _Model.load(checkpoint, AutoImageProcessor)
    shape = BACKBONE_SHAPES["qwen3-vl-8b"]
    vision = {"out_hidden_size": shape.width}
    return _Model(
        shape,
        AutoConfig.for_model("qwen3_vl", vision_config=vision),
        Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 2**16, "longest_edge": 2**24}
        ),
    )


# ---- a video ----


class _Way(NamedTuple):
    """Cost of a way to serve a video; ``tower`` and ``prefill`` are in TFLOPs.

    A temporal group is the frames that the tower encodes together.
    """

    groups: int
    tokens: int
    tower: float
    prefill: float


def advise_video(options: Namespace) -> int:
    """Print what decoding, tower and prefill of a video cost, and the advice."""
    model = _choose_video_model(options.checkpoint)
    source = fetch(find_picture(options.video, options.video, Path()))
    video = read_video(Path(source.address), type(model.processor).__name__)
    if video is None:
        raise ConfigError.of(
            f"--video {options.video}",
            "is no video",
            "give one, or a folder of frames",
            subject="video",
        )
    pixels = np.stack([np.asarray(frame) for frame in video.frames])
    data = model.processor(videos=[pixels], do_sample_frames=False, return_tensors="pt")
    if "video_grid_thw" not in data:
        raise ConfigError.of(
            "--checkpoint",
            "has a processor that does not split a video into a grid of patches",
            "name a Qwen2-VL or Qwen2.5-VL",
            subject="video",
        )
    groups, height, width = data["video_grid_thw"][0].tolist()
    group_tokens = height * width // 4  # 2 x 2 patches are a token
    tokens = groups * group_tokens
    flags = vars(options)
    state = load_state("vcast" if options.state is None else options.state)
    policy = materialize(state, flags.get("budget"), video=True)
    can_prune = require_served(model.config).videos
    budget = min(policy.at(tokens, groups).budget, tokens) if can_prune else tokens
    vision = VisionTower.of_config(model.config)
    group_tower = vision.count_flops(group_tokens) / 10**12

    def cost(encoded_groups: int, prompt_tokens: int) -> _Way:
        prefill = model.shape.estimate_cost(prompt_tokens).teraflops
        tower = encoded_groups * group_tower
        return _Way(encoded_groups, prompt_tokens, tower, prefill)

    fewer_groups = max(1, budget // group_tokens)  # whole groups within K tokens
    ways = {
        "whole": cost(groups, tokens),
        "pruned": cost(groups, budget),
        "fewer frames": cost(fewer_groups, fewer_groups * group_tokens),
    }
    verdict = list(_judge_video(ways, can_prune, video.decoding_seconds, flags))
    head = ("temporal groups", "tokens", "tower, TFLOPs", "prefill, TFLOPs")
    _, positions = describe_positions(state, model.config)
    record = {
        "decoding_seconds": video.decoding_seconds,
        "rows": [
            {"way": name, **dict(zip(head, way, strict=True))}
            for name, way in ways.items()
        ],
        "positions": positions,
        "verdict": verdict,
    }
    sizes = (
        f"{len(video.frames)} frames are read, {groups} temporal groups of {group_tokens} "
        f"tokens; K = {budget}, {budget / groups:.3g} of each"
    )
    cells = [
        [name, way.groups, way.tokens, f"{way.tower:#.3g}", f"{way.prefill:#.3g}"]
        for name, way in ways.items()
    ]
    print_result(
        options,
        record,
        format_paragraphs([sizes, positions]),
        format_table(("", *head), cells, "<>>>>"),
        format_paragraphs([*verdict, video.note] if video.note else verdict),
    )
    return 0


def _choose_video_model(checkpoint: str | None) -> _Model:
    """The model of a checkpoint, by default Qwen2.5-VL-7B."""
    from transformers import AutoConfig, AutoVideoProcessor, Qwen2VLVideoProcessor

    if checkpoint is not None:
        return _Model.load(checkpoint, AutoVideoProcessor)
    shape = BACKBONE_SHAPES["qwen2.5-vl-7b"]
    vision = {"hidden_size": 1280, "out_hidden_size": shape.width}
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=vision)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    size = {"shortest_edge": 56**2, "longest_edge": 2**14 * 28**2}
    return _Model(shape, config, Qwen2VLVideoProcessor(size=size))


def _judge_video(
    ways: Mapping[str, _Way], can_prune: bool, decoding: float, flags: Mapping[str, Any]
) -> Iterator[str]:
    """Sentences on whether pruning saves FLOPs, and on whether decoding outweighs what it saves.

    ``decoding`` is in seconds. If ``flags`` has the time of prefill, the times of all parts are
    compared. If not, the last sentence gives the speed of a device on which the FLOPs that pruning
    saves take as long as decoding.
    """
    unpruned = ways["whole"]
    pruned = ways["pruned"]
    total = unpruned.tower + unpruned.prefill
    saved = unpruned.prefill - pruned.prefill
    why = ""
    if not can_prune:
        why = "videos of this model are served whole"
    elif pruned.tokens == unpruned.tokens:
        why = "K keeps every token"
    elif saved < (1 - 1 / WORTHWHILE) * total:
        why = "prefill is little beside the tower"
    if why:
        yield f"Pruning will not help here: {why}."
    yield (
        f"Of {total:.3g} TFLOPs pruning saves {saved:.3g} ({saved / total:.0%}); it leaves those "
        f"of the tower ({unpruned.tower / total:.0%}), which fewer or smaller frames save."
    )
    if "prefill" in flags:
        prefill = unpruned.tokens * flags["prefill"] / 1000
        per_teraflop = prefill / unpruned.prefill
        seconds = {"decoding": decoding, "prefill": prefill}
        if "tower" in flags:
            seconds["tower"] = flags["tower"] / 1000
        else:
            seconds["tower, at the rate of prefill,"] = unpruned.tower * per_teraflop
        parts = ", ".join(
            f"{part} {format_milliseconds(value)}" for part, value in seconds.items()
        )
        saving = format_milliseconds(saved * per_teraflop)
        yield f"Milliseconds of all tokens: {parts}; pruning saves {saving}."
        longest = max(seconds, key=seconds.__getitem__)
        if longest != "prefill":
            name = longest.partition(",")[0]
            yield f"Most is {name}, which pruning does not shorten."
    elif saved:
        yield (
            f"Decoding took {decoding:.3g} s of processor time, for every request. What pruning "
            f"saves takes as long at {saved / max(decoding, 1e-9):.3g} TFLOPs a second: on a "
            "faster device decoding outweighs it."
        )
