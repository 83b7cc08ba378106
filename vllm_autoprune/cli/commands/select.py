"""`select`: run one policy on arrays from a file."""

from __future__ import annotations

import argparse
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_table, write_file
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.outcome import RefinedTokens
from vllm_autoprune.tpdsl.states.load import load_state

if TYPE_CHECKING:
    from vllm_autoprune.report.trace import Trace


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help="file, or name of a shipped state")
    parser.add_argument("arrays", type=Path, help=".npz file")
    parser.add_argument("--budget", type=int, metavar="K", help="tokens kept")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write indices, rows and scores (.npz)"
    )


def _run(options: argparse.Namespace) -> int:
    from vllm_autoprune.report.arrays import read_tokens
    from vllm_autoprune.report.trace import trace_images

    policy = materialize(load_state(options.state), options.budget)
    tokens = read_tokens(options.arrays, policy)
    refined = refine(policy, tokens)
    if options.output is not None:
        write_file(options.output, _pack_arrays(refined))
    traces = trace_images(policy, tokens, refined)
    if options.json:
        print(as_json([dataclasses.asdict(image) for image in traces]))
    else:
        print("\n\n".join(_format_trace(number, image) for number, image in enumerate(traces)))
    return 0


def _pack_arrays(refined: RefinedTokens) -> bytes:
    """A .npz file of the batch: ``B`` images of ``K`` rows."""
    import numpy as np

    scores = {} if refined.quality is None else {"quality": refined.quality.numpy()}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        allow_pickle=False,
        indices=refined.indices.numpy(),
        reference=refined.reference.numpy(),
        exchanged=refined.exchanged.numpy(),
        fallback=refined.fallback.numpy(),
        features=refined.features.numpy(),
        **scores,
    )
    return buffer.getvalue()


def _format_trace(number: int, image: Trace) -> str:
    rows = [
        ["kept", str(len(image.kept) + image.extra), _format_indices(image.kept)],
        ["reference", str(len(image.reference)), _format_indices(image.reference)],
        ["swapped out", str(len(image.left)), _format_indices(image.left)],
        ["swapped in", str(len(image.entered)), _format_indices(image.entered)],
    ]
    if image.extra:
        rows.append(
            ["merged rows", str(image.extra), "rows of the base policy that are no single token"]
        )
    for token in (*image.left, *image.entered):
        rows.append([f"token {token}", "", _format_scores(image, token)])
    grid = f"{image.grid.height} x {image.grid.width} x {image.grid.tiles}"
    return f"image {number}, grid {grid}, fallback {image.fallback}\n\n" + format_table(
        ["", "tokens", ""], rows, "<><", wrap=100
    )


def _format_indices(indices: tuple[int, ...]) -> str:
    return " ".join(map(str, indices)) or "-"


def _format_scores(image: Trace, token: int) -> str:
    scores = [f"{signal.atom} {signal.values[token]:.3f}" for signal in image.signals]
    if image.quality is not None:
        scores.insert(0, f"g {image.quality[token]:.4f}")
    return ", ".join(scores)


COMMAND = Command("run one policy on arrays from a file", _arguments, _run)
