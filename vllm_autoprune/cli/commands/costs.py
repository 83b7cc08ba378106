"""`cost` and `advise`: what a prompt costs, and which kind of state pays for a traffic."""

from __future__ import annotations

import argparse
import io
import re
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vllm_autoprune.advise import (
    ASSUMPTIONS,
    WORTHWHILE,
    Inputs,
    Timings,
    Traffic,
    estimate_ways,
    judge,
)
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    count_tower_flops,
    find_backbone,
    read_config,
)
from vllm_autoprune.cli.flags import (
    add_connection_flags,
    argument,
    command,
    read_budget,
    read_connection,
)
from vllm_autoprune.cli.output import (
    format_paragraphs,
    format_table,
    print_result,
    write_file,
)
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.flags import add_flags, flag_problems
from vllm_autoprune.http_client import ServerClient
from vllm_autoprune.positions import describe_positions
from vllm_autoprune.probe import probe_server
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.cells import Cells, kept_cells
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize

_NAMES = {"block": "--block-size", "prefill": "--prefill-ms-per-token"} | {
    name: f"--{name.replace('_', '-')}-ms"
    for name in Timings.model_fields
    if name != "prefill"
}
"""Flags of `advise` that are not named like their field."""

_READERS = {
    **{name: field.annotation for name, field in Traffic.model_fields.items()},
    **dict.fromkeys(Timings.model_fields, float),
    "budget": partial(read_budget, clip=True),
}
"""What reads the value of each."""


def _parse_size(text: str) -> tuple[int, int]:
    if size := re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text, re.ASCII):
        return int(size[1]), int(size[2])
    form = "WIDTHxHEIGHT in pixels, such as 1024x768"
    raise argparse.ArgumentTypeError(f"{text!r} is not {form}")


def _parse_count(text: str) -> int:
    if re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")


@command(
    "cost",
    argument(
        "--backbone",
        required=True,
        metavar="NAME",
        help=f"a folder, an id on the Hub, or {', '.join(BACKBONE_SHAPES)}",
    ),
    argument(
        "--image",
        type=_parse_size,
        metavar="WIDTHxHEIGHT",
        help="pixels of an image, whose N the processor of the checkpoint counts",
    ),
    argument(
        "--tokens",
        type=read_budget,
        nargs="+",
        metavar="K",
        help="visual tokens of one image, or a share of them such as 1/8; the others are compared "
        "with the first (default: all tokens, and a ninth of them)",
    ),
    argument(
        "--text",
        type=_parse_count,
        default=0,
        metavar="T",
        help="text tokens counted too",
    ),
    epilog="Example: vllm-autoprune cost --backbone llava-next-7b --tokens 2880 320",
)
def _print_cost(options: argparse.Namespace) -> int:
    """Print FLOPs of prefill and bytes of KV cache."""
    shape = find_backbone(options.backbone, require_served)
    tokens = shape.tokens
    tiles = shape.tiles
    if options.image:
        from vllm_autoprune.checkpoint import count_tokens  # imports vLLM

        known = BACKBONE_SHAPES.get(options.backbone)
        checkpoint = known.checkpoint if known else options.backbone
        count = count_tokens(checkpoint, *options.image)
        tokens = count.tokens
        tiles = count.tiles
    budgets = [tokens, max(1, tokens // 9)]
    if options.tokens:
        budgets = [budget.tokens_kept(tokens, tiles) for budget in options.tokens]
    costs = [shape.estimate_cost(k, text=options.text) for k in budgets]
    record = {
        "backbone": shape.name,
        "rows": [
            {**asdict(each), "teraflops": each.teraflops, "kv_mib": each.kv_mib}
            for each in costs
        ],
        "assumptions": shape.assumptions,
    }
    head = ["visual tokens", "TFLOPs", "KV MiB", "fewer FLOPs", "less KV"]
    rows = [
        [
            each.tokens,
            f"{each.teraflops:#.4g}",
            f"{each.kv_mib:.7g}",
            f"{costs[0].flops / each.flops:.2f}x",
            f"{costs[0].kv_bytes / each.kv_bytes:.2f}x",
        ]
        for each in costs
    ]
    counted = (
        f"{options.text} text tokens counted too"
        if options.text
        else "text not counted"
    )
    print_result(
        options,
        record,
        f"{shape.name}: L = {shape.layers}, d = {shape.width}, m = {shape.feed_forward}, "
        f"k = {shape.kv_width}; N = {tokens} visual tokens an image; {counted}",
        format_table(head, rows, ">>>>>"),
        format_paragraphs(shape.assumptions, "- "),
    )
    return 0


def _add_advise(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    add_flags(group, Traffic, _NAMES, readers=_READERS)
    text = "read --budget and --core from a state, by file or name"
    group.add_argument("--state", metavar="STATE", help=text)
    group = parser.add_argument_group("measured times, milliseconds")
    add_flags(group, Timings, _NAMES, readers=_READERS)
    group = parser.add_argument_group("a running server")
    group.add_argument("--server", metavar="URL", help="its address, for --probe")
    text = "measure what is not given with 44 requests, 22 of them with images of that size"
    group.add_argument("--probe", type=_parse_size, metavar="WIDTHxHEIGHT", help=text)
    group.add_argument("--model", metavar="NAME", help="the model's name on the server")
    add_connection_flags(parser)
    group = parser.add_argument_group(
        "a picture's blank cells or a video, instead of the above"
    )
    text = "what its tower and prefill cost with and without its blank cells (--autoprune-cells)"
    group.add_argument("--image", type=Path, metavar="FILE", help=text)
    text = "what decoding, tower and prefill of a video cost; of --budget, --state, and in seconds "
    text += "where --prefill-ms-per-token is given"
    group.add_argument("--video", type=Path, metavar="FILE|FOLDER", help=text)
    text = "a folder, or an id on the Hub, whose processor splits it (default: as Qwen3-VL-8B's, "
    text += "of a video Qwen2.5-VL-7B's); without either, the model whose positions are told"
    group.add_argument("--checkpoint", metavar="DIR|HF_ID", help=text)
    text = "draw it with the cells that `flat` drops in grey, as a .png"
    group.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)


@command(
    "advise",
    _add_advise,
    epilog="Example: vllm-autoprune advise --questions 4 --server http://localhost:8000 "
    "--probe 1024x768. Formulas and what to do: docs/choosing.md.",
)
def _advise(options: argparse.Namespace) -> int:
    """Say which kind of state pays for your traffic, and whether pruning helps at all."""
    if options.image is not None:
        return _advise_cells(options)
    if options.video is not None:
        return _advise_clip(options)
    traffic, timings, inputs = _read_inputs(options)
    if options.checkpoint is not None or options.state is not None:
        config = None if options.checkpoint is None else read_config(options.checkpoint)
        state = options.state or require_served(config).state
        inputs.fill(describe_positions(load_state(state), config)[1])
    estimates = estimate_ways(traffic, timings)
    # Above 0, where a resample shows nothing of a part.
    repeats = [
        timings.model_copy(
            update={name: max(seconds, 1e-9) for name, seconds in r.items()}
        )
        for r in inputs.repeats
    ]
    verdict = judge(traffic, estimates, repeats)
    record = {
        "traffic": traffic.model_dump(),
        "seconds": timings.model_dump(),
        "ways": {way: asdict(estimate) for way, estimate in estimates.items()},
        "verdict": asdict(verdict),
        "notes": inputs.notes,
        "assumptions": ASSUMPTIONS,
    }
    cache = f"KV blocks of {traffic.block}" if traffic.block else "no prefix cache"
    sizes = (
        f"questions an image: {traffic.questions:g}; N = {traffic.tokens}, K = {traffic.budget}, "
        f"K_c = {traffic.served_core} as it is served; {traffic.template} text tokens before the "
        f"image and {traffic.prompt} behind it, {traffic.answer} of the answer; {cache}"
    )
    times = ", ".join(
        f"{name.replace('_', ' ')} {_ms(seconds)}"
        + (" ({} to {})".format(*map(_ms, interval)) if interval else "")
        for name, seconds in timings
        for interval in [verdict.intervals.get(name)]
    )
    costs = [
        [
            way,
            _ms(each.first.ttft),
            _ms(each.another.ttft),
            f"{each.another_of_first:.2f}",
            f"{each.total_seconds:.4g}",
            f"{each.gain:.2f}x",
            "" if way == "stock" else each.advantage,
        ]
        for way, each in estimates.items()
    ]
    head = ("", "first, ms", "another, ms", "another/first", "total, s", "gain")
    print_result(
        options,
        record,
        format_paragraphs([sizes, f"ms: {times}"]),
        format_paragraphs(verdict.lines),
        "Time to first token of two questions on an image, and the time of all questions:",
        format_table((*head, "cheaper than stock"), costs, "<>>>>><"),
        format_paragraphs([*inputs.notes, *ASSUMPTIONS], "- "),
    )
    return 0


def _advise_cells(options: argparse.Namespace) -> int:
    """Print what a picture costs by the rule that drops its cells, and draw what `flat` drops."""
    from PIL import Image
    from transformers import AutoConfig, AutoImageProcessor, Qwen2VLImageProcessor

    from vllm_autoprune.evaluation.pictures import find_picture, read_picture

    image = read_picture(
        find_picture(str(options.image), str(options.image), Path())
    ).image()
    shape = BACKBONE_SHAPES["qwen3-vl-8b"]
    config = AutoConfig.for_model(
        "qwen3_vl", vision_config={"out_hidden_size": shape.width}
    )
    processor = Qwen2VLImageProcessor(
        patch_size=16, size={"shortest_edge": 2**16, "longest_edge": 2**24}
    )
    if options.checkpoint is not None:
        shape = find_backbone(options.checkpoint, require_served)
        config = read_config(options.checkpoint)
        processor = _load_processor(AutoImageProcessor, options.checkpoint)
    data = processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    if "image_grid_thw" not in data:
        problem = Problem(
            "--checkpoint", "has no cells of patches", "name a Qwen-VL or GLM-4.xV"
        )
        raise ConfigError("cells", [problem])
    height, width = (data["image_grid_thw"][0, 1:] // 2).tolist()
    cells = data["pixel_values"].numpy().reshape(height, width, 4, 3, -1)
    tokens = height * width
    budget = vars(options).get("budget", BudgetCall.parse("1/8")).tokens_kept(tokens)
    rows = list[list[object]]()
    for rule in (None, Cells(rule="predicted"), Cells(rule="flat")):
        anchors = rule.find_anchors(cells) if rule else None
        kept = np.arange(tokens) if anchors is None else kept_cells(anchors)
        tower = count_tower_flops(config, len(kept)) / 10**12
        k = min(budget, len(kept))
        both = tower + shape.estimate_cost(k).teraflops
        rows.append(
            [
                str(rule or "none"),
                len(kept),
                f"{len(kept) / tokens:.3f}",
                f"{tower:#.3g}",
                k,
                f"{both:#.3g}",
            ]
        )
    if options.output is not None:
        dropped = np.isin(np.arange(tokens), kept, invert=True).reshape(height, width)
        mask = Image.fromarray(dropped).resize(image.size, Image.Resampling.NEAREST)
        image.paste(
            Image.blend(image, Image.new("RGB", image.size, "grey"), 0.6), mask=mask
        )
        image.save(buffer := io.BytesIO(), "PNG")
        write_file(options.output, buffer.getvalue())
    head = ("rule", "cells", "kept", "tower, TFLOPs", "K", "tower and prefill, TFLOPs")
    record = [dict(zip(head, row, strict=True)) for row in rows]
    print_result(options, {"cells": record}, format_table(head, rows, "<>>>>>"))
    return 0


def _load_processor(kind: Any, checkpoint: str) -> Any:
    try:
        return kind.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0]
        fix = "name one with a processor of images and videos"
        raise ConfigError("checkpoint", [Problem("--checkpoint", what, fix)]) from None


def _advise_clip(options: argparse.Namespace) -> int:  # noqa: PLR0915
    """Print what decoding, tower and prefill of a video cost, whole and pruned, and the advice."""
    from transformers import AutoConfig, AutoVideoProcessor, Qwen2VLVideoProcessor

    from vllm_autoprune.evaluation.pictures import read_clip

    shape = BACKBONE_SHAPES["qwen2.5-vl-7b"]
    prunes = True
    vision = {"hidden_size": 1280, "out_hidden_size": shape.width}
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=vision)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    processor = Qwen2VLVideoProcessor(
        size={"shortest_edge": 56**2, "longest_edge": 2**14 * 28**2}
    )
    if options.checkpoint is not None:
        shape = find_backbone(options.checkpoint, require_served)
        config = read_config(options.checkpoint)
        prunes = require_served(config).clips
        processor = _load_processor(AutoVideoProcessor, options.checkpoint)
    clip = read_clip(options.video, type(processor).__name__)
    if clip is None:
        problem = Problem(
            f"--video {options.video}", "is no video", "give one, or a folder of frames"
        )
        raise ConfigError("video", [problem])
    pixels = np.stack([np.asarray(frame) for frame in clip.frames])
    data = processor(videos=[pixels], do_sample_frames=False, return_tensors="pt")
    if "video_grid_thw" not in data:
        problem = Problem(
            "--checkpoint", "has no frames of patches", "name a Qwen2-VL or Qwen2.5-VL"
        )
        raise ConfigError("video", [problem])
    frames, height, width = data["video_grid_thw"][0].tolist()
    per_frame = height * width // 4
    tokens = frames * per_frame
    state = load_state(options.state or "vcast")
    policy = materialize(state, vars(options).get("budget"), video=True)
    kept = min(policy.at(tokens, frames).budget, tokens) if prunes else tokens

    # In TFLOPs, and in seconds by the rate that prefill is measured at.
    tower = count_tower_flops(config, per_frame) / 10**12
    whole_prefill, prefill = (
        shape.estimate_cost(count).teraflops for count in (tokens, kept)
    )
    fewer = max(1, kept // per_frame)
    rows = [
        ["whole", frames, tokens, frames * tower, whole_prefill],
        ["pruned", frames, kept, frames * tower, prefill],
        [
            "fewer frames",
            fewer,
            fewer * per_frame,
            fewer * tower,
            shape.estimate_cost(fewer * per_frame).teraflops,
        ],
    ]
    saved = whole_prefill - prefill
    total = frames * tower + whole_prefill
    lines = list[str]()
    per_token = vars(options).get("prefill")
    if not prunes or saved < (1 - 1 / WORTHWHILE) * total:
        why = (
            "prefill is little beside the tower"
            if kept < tokens
            else "K keeps every token"
        )
        why = why if prunes else "videos of this model are served whole"
        lines.append(f"Pruning will not help here: {why}.")
    lines.append(
        f"Of {total:.3g} TFLOPs pruning saves {saved:.3g} ({saved / total:.0%}); it leaves those "
        f"of the tower ({frames * tower / total:.0%}), which fewer or smaller frames save."
    )
    if per_token is None and saved:
        lines.append(
            f"Decoding took {clip.seconds:.3g} s of processor time, for every request. What "
            f"pruning saves takes as long at {saved / max(clip.seconds, 1e-9):.3g} TFLOPs a "
            "second: on a faster device decoding outweighs it."
        )
    elif per_token is not None:
        rate = whole_prefill / (tokens * per_token / 1000)
        seconds = {"decoding": clip.seconds, "prefill": whole_prefill / rate}
        if "tower" in vars(options):
            seconds["tower"] = options.tower / 1000
        else:
            seconds["tower, at the rate of prefill,"] = frames * tower / rate
        spent = ", ".join(f"{part} {_ms(value)}" for part, value in seconds.items())
        lines.append(
            f"Milliseconds of all tokens: {spent}; pruning saves {_ms(saved / rate)}."
        )
        if (most := max(seconds, key=lambda part: seconds[part])) != "prefill":
            lines.append(
                f"Most is {most.partition(',')[0]}, which pruning does not shorten."
            )
    head = ("", "frames", "tokens", "tower, TFLOPs", "prefill, TFLOPs")
    record = {
        "decoding_seconds": clip.seconds,
        "rows": [dict(zip(("way", *head[1:]), row, strict=True)) for row in rows],
        "positions": describe_positions(state, config)[1],
        "verdict": lines,
    }
    cells = [[*row[:3], *(f"{value:#.3g}" for value in row[3:])] for row in rows]
    sizes = f"{len(clip.frames)} frames are read, {frames} temporal groups of {per_frame} tokens"
    print_result(
        options,
        record,
        format_paragraphs(
            [
                f"{sizes}; K = {kept}, {kept / frames:.3g} of each",
                str(record["positions"]),
            ]
        ),
        format_table(head, cells, "<>>>>"),
        format_paragraphs([*lines, *[clip.note] * bool(clip.note)]),
    )
    return 0


def _read_inputs(options: argparse.Namespace) -> tuple[Traffic, Timings, Inputs]:  # noqa: C901
    """Flags, then a probe, then what is assumed; with notes on these."""
    # Before a probe, so that a mistake in its name is answered at once.
    state = None if options.state is None else load_state(options.state)
    flags = vars(options)
    values = {name: flags[name] for name in Traffic.model_fields if name in flags}
    values |= {
        name: flags[name] / 1000 for name in Timings.model_fields if name in flags
    }
    inputs = Inputs(values)
    if (options.server is None) != (options.probe is None):
        problem = Problem("--server", "needs --probe", "give the size of your images")
        if options.server is None:
            problem = Problem(
                "--probe", "needs --server", "give the address of a running server"
            )
        raise ConfigError("inputs", [problem])
    if options.server is not None:
        with ServerClient(options.server, read_connection(options)) as client:
            report = partial(print, "probe:", file=sys.stderr, flush=True)
            probe_server(client, options.probe, inputs, options.model, report)
    if "budget" in flags:
        values["budget"] = flags["budget"].tokens_kept(values.get("tokens", 1))
    if state is not None:
        # Instead of the server's, but not of the flags'; K may depend on N, which was found now.
        if "budget" not in flags and "tokens" in values:
            values["budget"] = min(
                state.budget.tokens_kept(values["tokens"]), values["tokens"]
            )
        if state.core is not None and "budget" in values:
            inputs.fill(core=state.core.tokens(values["budget"]))
    inputs.assume()
    problems: list[Problem] = []
    models: list[Any] = []
    for model in (Traffic, Timings):
        fields = {
            name: v for name, v in inputs.values.items() if name in model.model_fields
        }
        try:
            models.append(model.model_validate(fields))
        except ValidationError as error:
            problems += flag_problems(error, _NAMES)
    if problems:
        measured = (
            "inputs (times and --tokens: also by --server URL --probe WIDTHxHEIGHT)"
        )
        raise ConfigError(measured, problems)
    return models[0], models[1], inputs


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}" if seconds < 10 else f"{1000 * seconds:.0f}"
