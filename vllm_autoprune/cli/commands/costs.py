"""`cost` and `advise`: what a prompt costs, and which kind of state is fastest on a traffic."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_autoprune.advise import (
    ASSUMPTIONS,
    Inputs,
    Timings,
    Traffic,
    estimate_ways,
    judge,
)
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    BackboneShape,
    add_tower,
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
    format_milliseconds,
    format_paragraphs,
    format_table,
    print_result,
)
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.flags import add_flags, flag_problems
from vllm_autoprune.http_client import ServerClient
from vllm_autoprune.positions import describe_positions
from vllm_autoprune.probe import probe_server
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm_autoprune.serving.api.placeholders import TokenCount

_M = TypeVar("_M", bound=BaseModel)

_NAMES = {"block": "--block-size", "prefill": "--prefill-ms-per-token"} | {
    name: f"--{name.replace('_', '-')}-ms"
    for name in Timings.model_fields
    if name != "prefill"
}
"""Flags of `advise` that are not named like their field."""

_READERS = {
    **{name: field.annotation for name, field in Traffic.model_fields.items()},
    **dict.fromkeys(Timings.model_fields, float),
    "budget": partial(read_budget, video=True),
}
"""Parser of the value of a flag, by field."""


def _parse_size(text: str) -> tuple[int, int]:
    if size := re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text, re.ASCII):
        return int(size[1]), int(size[2])
    form = "WIDTHxHEIGHT in pixels, such as 1024x768"
    raise ArgumentTypeError(f"{text!r} is not {form}")


def _parse_image(text: str) -> tuple[int, int] | str:
    """A size in pixels, or the path or URL of an image."""
    is_picture = "://" in text or Path(text).is_file()
    return text if is_picture else _parse_size(text)


def _parse_count(text: str) -> int:
    if re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        return int(text)
    raise ArgumentTypeError(f"{text!r} is not a number of tokens")


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
        type=_parse_image,
        metavar="WIDTHxHEIGHT|FILE|URL",
        help="an image or its pixels; N is counted by the backbone's published settings of the "
        "processor, or by the processor of a folder or id",
    ),
    argument(
        "--tokens",
        type=read_budget,
        nargs="+",
        metavar="K",
        help="visual tokens of one image, or a share of them such as 1/8; each is compared with "
        "all tokens (default: a ninth of them)",
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
def _print_cost(options: Namespace) -> int:
    """Print FLOPs of vision tower and prefill, and bytes of KV cache."""
    shape = add_tower(find_backbone(options.backbone, require_served))
    tokens = shape.tokens
    tiles = shape.tiles
    if options.image:
        count = _count_tokens(shape, options.image)
        tokens = count.tokens
        tiles = count.tiles
    budgets = [max(1, tokens // 9)]
    if options.tokens:
        budgets = [budget.tokens_kept(tokens, tiles) for budget in options.tokens]
    # Every row is compared with the first one, of all tokens.
    budgets = [*dict.fromkeys([tokens, *budgets])]
    # The tower encodes the whole image, before all but K tokens are dropped.
    tower = shape.tower.count_flops(tokens, tiles) / 10**12 if shape.tower else None
    costs = [shape.estimate_cost(k, text=options.text) for k in budgets]
    totals = [cost.teraflops + (tower or 0.0) for cost in costs]
    record = {
        "backbone": shape.name,
        "tower_teraflops": tower,
        "rows": [
            {
                **asdict(cost),
                "teraflops": cost.teraflops,
                "total_teraflops": total,
                "kv_mib": cost.kv_mib,
            }
            for cost, total in zip(costs, totals, strict=True)
        ],
        "assumptions": shape.assumptions,
    }
    head = [
        "visual tokens",
        "TFLOPs",
        "tower",
        "prefill",
        "fewer FLOPs",
        "KV MiB",
        "less KV",
    ]
    rows = [
        [
            cost.tokens,
            f"{total:#.4g}",
            "-" if tower is None else f"{tower:#.4g}",
            f"{cost.teraflops:#.4g}",
            f"{totals[0] / total:.2f}x",
            f"{cost.kv_mib:.7g}",
            f"{costs[0].kv_bytes / cost.kv_bytes:.2f}x",
        ]
        for cost, total in zip(costs, totals, strict=True)
    ]
    text = "text not counted"
    if options.text:
        text = f"{options.text} text tokens counted too"
    print_result(
        options,
        record,
        f"{shape.name}: L = {shape.layers}, d = {shape.width}, m = {shape.feed_forward}, "
        f"k = {shape.kv_width}; N = {tokens} visual tokens an image; {text}",
        format_table(head, rows, ">>>>>>>"),
        format_paragraphs(shape.assumptions, "- "),
    )
    return 0


def _count_tokens(shape: BackboneShape, size: tuple[int, int] | str) -> TokenCount:
    """Count the tokens of an image of a size in pixels, or of an image by path or URL."""
    from vllm_autoprune.checkpoint import count_published, count_tokens
    from vllm_autoprune.evaluation.pictures import find_picture, read_picture

    if isinstance(size, str):
        size = read_picture(find_picture("--image", size, Path())).image().size
    if shape.name in BACKBONE_SHAPES:
        return count_published(shape, *size)
    return count_tokens(shape.name, *size)


def _add_advise(parser: ArgumentParser) -> None:
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
    group.add_argument("--image", metavar="FILE|URL", help=text)
    text = "what decoding, tower and prefill of a video cost with --budget or --state; in seconds "
    text += "too if --prefill-ms-per-token is given"
    group.add_argument("--video", metavar="FILE|URL|FOLDER", help=text)
    text = "model of the picture or video: a folder, or an id on the Hub (default: Qwen3-VL-8B; "
    text += "for a video, Qwen2.5-VL-7B). Without either, the model whose positions are described"
    group.add_argument("--checkpoint", metavar="DIR|HF_ID", help=text)
    text = "draw it with the cells that `flat` drops in grey, as a .png"
    group.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)


@command(
    "advise",
    _add_advise,
    epilog="Example: vllm-autoprune advise --questions 4 --server http://localhost:8000 "
    "--probe 1024x768. Formulas and what to do: docs/choosing.md.",
)
def _advise(options: Namespace) -> int:
    """Say which kind of state is fastest on your traffic, and whether pruning helps at all.

    With ``--image`` or ``--video``, print the costs of that picture or video instead.
    """
    # Imported here, because only pictures and videos need PIL.
    if options.image is not None:
        from vllm_autoprune.cli.commands.advise_media import advise_image

        return advise_image(options)
    if options.video is not None:
        from vllm_autoprune.cli.commands.advise_media import advise_video

        return advise_video(options)
    traffic, timings, inputs = _read_inputs(options)
    if options.checkpoint is not None or options.state is not None:
        config = None if options.checkpoint is None else read_config(options.checkpoint)
        state = options.state
        if state is None:
            state = require_served(config).state
        _, note = describe_positions(load_state(state), config)
        inputs.notes.append(note)
    estimates = estimate_ways(traffic, timings)
    # A resample of the probe's rounds may have a time of 0 s, but Timings must be above 0.
    repeats = [
        timings.model_copy(
            update={name: max(seconds, 1e-9) for name, seconds in repeat.items()}
        )
        for repeat in inputs.repeats
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
    core = f"K_c = {traffic.core}"
    if traffic.served_core != traffic.core:
        core += f" (served as {traffic.served_core}, on the edge of a KV block)"
    sizes = (
        f"questions an image: {traffic.questions:g}; N = {traffic.tokens}, K = {traffic.budget}, "
        f"{core}; {traffic.template} text tokens before the image and {traffic.prompt} behind it, "
        f"{traffic.answer} of the answer; {cache}"
    )
    time_texts = []
    for name, seconds in timings:
        text = f"{name.replace('_', ' ')} {format_milliseconds(seconds)}"
        if name in verdict.intervals:
            low, high = map(format_milliseconds, verdict.intervals[name])
            text += f" ({low} to {high})"
        time_texts.append(text)
    costs = [
        [
            way,
            format_milliseconds(estimate.first.ttft),
            format_milliseconds(estimate.another.ttft),
            f"{estimate.another_of_first:.2f}",
            f"{estimate.total_seconds:.4g}",
            f"{estimate.gain:.2f}x",
            "" if way == "stock" else estimate.advantage,
        ]
        for way, estimate in estimates.items()
    ]
    head = ("", "first, ms", "another, ms", "another/first", "total, s", "gain")
    print_result(
        options,
        record,
        format_paragraphs([sizes, f"ms: {', '.join(time_texts)}"]),
        format_paragraphs(verdict.lines),
        "Time to first token of two questions on an image, and the time of all questions:",
        format_table((*head, "cheaper than stock"), costs, "<>>>>><"),
        format_paragraphs([*inputs.notes, *ASSUMPTIONS], "- "),
    )
    return 0


def _read_inputs(options: Namespace) -> tuple[Traffic, Timings, Inputs]:
    """Read the inputs of `advise` from flags, then from a probe, and assume the others.

    The :class:`Inputs` have the notes on what was measured and assumed. Raises
    :class:`ConfigError` for values that are missing or not valid.
    """
    # Loaded before the probe, so that a mistake in the state's name is reported at once.
    state = None if options.state is None else load_state(options.state)
    flags = vars(options)
    values = {name: flags[name] for name in Traffic.model_fields if name in flags}
    for name in Timings.model_fields:
        if name in flags:
            values[name] = flags[name] / 1000
    inputs = Inputs(values)
    _probe(options, inputs)
    if "budget" in flags:
        values["budget"] = flags["budget"].tokens_kept(values.get("tokens", 1))
    elif state is not None and "tokens" in values:
        # Replaces the server's K. It may depend on N, which may be known only by the probe.
        budget = state.budget.tokens_kept(values["tokens"])
        values["budget"] = min(budget, values["tokens"])
    if state is not None and state.core is not None and "budget" in values:
        inputs.fill(core=state.core.tokens(values["budget"]))
    inputs.assume()
    problems: list[Problem] = []
    traffic = _validate(Traffic, values, problems)
    timings = _validate(Timings, values, problems)
    if traffic is None or timings is None:
        measured = (
            "inputs (times and --tokens: also by --server URL --probe WIDTHxHEIGHT)"
        )
        raise ConfigError(measured, problems)
    return traffic, timings, inputs


def _probe(options: Namespace, inputs: Inputs) -> None:
    """Measure the inputs that no flag gives, if there are ``--server`` and ``--probe``."""
    if options.server is None and options.probe is None:
        return
    if options.probe is None:
        fix = "give the size of your images"
        raise ConfigError.of("--server", "needs --probe", fix, subject="inputs")
    if options.server is None:
        fix = "give the address of a running server"
        raise ConfigError.of("--probe", "needs --server", fix, subject="inputs")
    with ServerClient(options.server, read_connection(options)) as client:
        report = partial(print, "probe:", file=sys.stderr, flush=True)
        probe_server(client, options.probe, inputs, options.model, report)


def _validate(
    model: type[_M], values: Mapping[str, Any], problems: list[Problem]
) -> _M | None:
    """Validate those of ``values`` that are fields of ``model``.

    Returns None for values that are not valid, and adds to ``problems`` what is wrong with them.
    """
    fields = {
        name: value for name, value in values.items() if name in model.model_fields
    }
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems += flag_problems(error, _NAMES)
        return None
