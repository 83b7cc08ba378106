"""`explain`: draw which tokens of an image or a clip a state keeps for a question."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from functools import partial
from pathlib import Path

from vllm_autoprune.backbones import read_config
from vllm_autoprune.cli.flags import argument, command, read_budget
from vllm_autoprune.cli.output import print_result, write_file
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize


@command(
    "explain",
    argument("image", type=Path, help="image or video file, or a folder of frames"),
    argument("question", help="instruction about the image"),
    argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR|HF_ID",
        help="checkpoint of a served backbone: a folder, or its id on the Hugging Face Hub",
    ),
    argument(
        "--text-tower",
        type=Path,
        metavar="DIR|HF_ID",
        help="CLIP checkpoint that measures relevance, as for `vllm serve`",
    ),
    argument(
        "--state",
        help="file, or name of a shipped state (default: autoprune, of a video vcast)",
    ),
    argument(
        "--budget",
        type=partial(read_budget, clip=True),
        metavar="K",
        help="tokens kept: 64, or 1/8 of them; of a video also tokens_per_frame:16",
    ),
    argument(
        "-o", "--output", type=Path, metavar="FILE", help="picture to write, a .png"
    ),
)
def _explain_image(options: argparse.Namespace) -> int:  # noqa: C901, PLR0915
    """Draw which tokens of an image or a video a state keeps for a question, and why."""
    output: Path | None = options.output
    if output is not None and output.suffix.lower() != ".png":
        problem = Problem(f"-o {output}", "not a known format", "end it in .png")
        raise ConfigError("explain", [problem])
    question: str = options.question
    half = next((c for c in question if "\ud800" <= c <= "\udfff"), None)
    if half is not None:
        what = f"character {question.index(half) + 1} (U+{ord(half):04X}) is half of a character"
        problem = Problem("question", what, "write the whole character, in UTF-8")
        raise ConfigError("explain", [problem])
    from vllm_autoprune.evaluation.pictures import (
        VIDEOS,
        find_picture,
        read_clip,
        read_picture,
    )

    processor = None
    checkpoint = str(options.checkpoint)
    if options.image.suffix.lower() in VIDEOS:
        read_config(checkpoint)  # raises in words where there is no model
        from vllm.transformers_utils.processor import (
            get_video_processor_cls_name_from_config,
        )

        with contextlib.suppress(OSError, ValueError):
            processor = get_video_processor_cls_name_from_config(checkpoint)
    clip = read_clip(options.image, processor)
    state = load_state(options.state or ("autoprune" if clip is None else "vcast"))
    budget: BudgetCall | None = options.budget
    if clip is not None:
        policy = materialize(state, budget, video=True)
        if clip.note:
            print(f"{options.image}: {clip.note}", file=sys.stderr)
    elif budget is not None and budget.atom == "per_frame_budget":
        what = "is the budget of a video"
        fix = "give a number of tokens or a share"
        raise ConfigError("explain", [Problem(f"--budget {budget.rule()}", what, fix)])
    else:
        policy = materialize(state, budget)

    from vllm_autoprune.explain import explain_image
    from vllm_autoprune.picture import encode_picture, list_undrawn
    from vllm_autoprune.positions import describe_positions

    address = str(options.image)
    image = clip or read_picture(find_picture(address, address, Path())).image()
    explanations = explain_image(
        options.checkpoint, options.text_tower, policy, image, question
    )
    if output is not None:
        write_file(output, encode_picture(explanations))
        if undrawn := list_undrawn(question):
            fix = "install one that has, such as a Noto font, and draw it again"
            print(
                f"{output}: no font on this machine has {undrawn!r} -> {fix}",
                file=sys.stderr,
            )
    summary = "\n".join(explanation.summary for explanation in explanations)
    regions = [dataclasses.asdict(explanation.trace) for explanation in explanations]
    for region, explanation in zip(regions, explanations, strict=True):
        del region["grid"]["anchors"]  # every cell is a token
        if explanation.frames:
            region["kept_by_frame"] = explanation.trace.kept_by_frame
    positions, sentence = describe_positions(state, read_config(checkpoint))
    record = {"summary": summary, "positions": positions, "regions": regions}
    wrote = "no -o FILE: nothing written" if output is None else f"wrote {output}"
    print_result(
        options, record, f"{summary}\npositions: {positions}. {sentence}\n{wrote}"
    )
    return 0
