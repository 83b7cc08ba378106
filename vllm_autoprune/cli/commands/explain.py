"""`explain`: draw which tokens of an image or a video a state keeps for a question."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from vllm_autoprune.backbones import read_config
from vllm_autoprune.cli.flags import argument, command, read_budget
from vllm_autoprune.cli.output import check_writable, print_result, write_file
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState


@command(
    "explain",
    argument("image", help="image or video, a file or URL, or a folder of frames"),
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
        help="file, or name of a shipped state (default: that of `doctor`, at its K, for this "
        "model; for a video, vcast)",
    ),
    argument(
        "--budget",
        type=partial(read_budget, video=True),
        metavar="K",
        help="tokens kept: 64, or 1/8 of them; of a video also tokens_per_frame:16",
    ),
    argument(
        "-o", "--output", type=Path, metavar="FILE", help="picture to write, a .png"
    ),
)
def _explain_image(options: Namespace) -> int:
    """Draw which tokens of an image or a video a state keeps for a question, and why."""
    output: Path | None = options.output
    if output is not None and output.suffix.lower() != ".png":
        raise ConfigError.of(
            f"-o {output}", "not a known format", "end it in .png", subject="explain"
        )
    if output is not None:
        check_writable(output)
    _check_question(options.question)
    from vllm_autoprune.evaluation.pictures import (
        fetch,
        find_picture,
        read_picture,
        read_video,
    )

    checkpoint = str(options.checkpoint)
    source = fetch(find_picture(options.image, options.image, Path()))
    path = Path(source.address)
    video = read_video(path, _find_video_processor(path, checkpoint))
    state, budget, choice = _choose_state(options, checkpoint, video is not None)
    policy = materialize(state, budget, video=video is not None)
    if video is not None and video.note:
        print(f"{options.image}: {video.note}", file=sys.stderr)

    from vllm_autoprune.explain import explain_image
    from vllm_autoprune.picture import encode_picture, list_undrawn
    from vllm_autoprune.positions import describe_positions

    visual = video or read_picture(source).image()
    explanations = explain_image(
        options.checkpoint, options.text_tower, policy, visual, options.question
    )
    wrote = "no -o FILE: nothing written"
    if output is not None:
        write_file(output, encode_picture(explanations))
        wrote = f"wrote {output}"
        if undrawn := list_undrawn(options.question):
            fix = "install one that has, such as a Noto font, and draw it again"
            warning = f"{output}: no font on this machine has {undrawn!r} -> {fix}"
            print(warning, file=sys.stderr)
    summary = "\n".join(explanation.summary for explanation in explanations)
    regions = []
    for explanation in explanations:
        region = dataclasses.asdict(explanation.trace)
        # `anchors` is bytes, which JSON cannot hold. It is empty: the engine of explain drops no
        # cells before the tower.
        del region["grid"]["anchors"]
        if explanation.frames:
            region["kept_by_frame"] = explanation.trace.kept_by_frame
        regions.append(region)
    positions, sentence = describe_positions(state, read_config(checkpoint))
    record = {
        "state": state.name,
        "summary": summary,
        "positions": positions,
        "regions": regions,
    }
    lines = [*choice, summary, f"positions: {positions}. {sentence}", wrote]
    print_result(options, record, "\n".join(lines))
    return 0


def _check_question(question: str) -> None:
    """Raise :class:`ConfigError` for a question that tokenizers refuse."""
    # Python reads bytes that are not UTF-8 as lone surrogates.
    surrogate = re.search(r"[\ud800-\udfff]", question)
    if surrogate:
        code = f"U+{ord(surrogate[0]):04X}"
        raise ConfigError.of(
            "question",
            f"character {surrogate.start() + 1} ({code}) is half of a character",
            "write the whole character, in UTF-8",
            subject="explain",
        )


def _choose_state(
    options: Namespace, checkpoint: str, is_video: bool
) -> tuple[PruningState, BudgetCall | None, list[str]]:
    """The state and budget of the flags, or those to begin with on a model and a line that says so.

    These are of images; of a video it is vcast.
    """
    budget: BudgetCall | None = options.budget
    if not is_video and budget is not None and budget.atom == "per_frame_budget":
        raise ConfigError.of(
            f"--budget {budget.rule()}",
            "is the budget of a video",
            "give a number of tokens or a share",
            subject="explain",
        )
    if options.state is not None:
        return load_state(options.state), budget, []
    if is_video:
        return load_state("vcast"), budget, ["state: vcast, the default for videos"]
    backbone = require_served(read_config(checkpoint))
    budget = budget or BudgetCall.parse(backbone.budget)
    line = f"state: {backbone.state} at K = {budget.rule()}, the default for {backbone.name}"
    return load_state(backbone.state), budget, [line]


def _find_video_processor(path: Path, checkpoint: str) -> str | None:
    """Class name of the model's video processor; None if it has none or the file is no video."""
    from vllm_autoprune.evaluation.pictures import VIDEOS

    if path.suffix.lower() not in VIDEOS:
        return None
    read_config(checkpoint)  # raises ConfigError if there is no model
    from vllm.transformers_utils.processor import (
        get_video_processor_cls_name_from_config,
    )

    name: str | None = None
    with contextlib.suppress(OSError, ValueError):  # the model has none
        name = get_video_processor_cls_name_from_config(checkpoint)
    return name
