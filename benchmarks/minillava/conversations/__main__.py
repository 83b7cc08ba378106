"""``python -m benchmarks.minillava.conversations``: accuracy of turns 1 to 4 on mini-LLaVA.

With transformers, or with ``--server-url`` through a running server.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.metrics import list_models
from benchmarks.common.progress import Progress, create_progress
from benchmarks.common.report import Section, write_section
from benchmarks.minillava.conversations.arms import Arm, build_arms, list_arms
from benchmarks.minillava.conversations.checkpoint import write_checkpoint
from benchmarks.minillava.conversations.draw import Conversation, draw_conversations
from benchmarks.minillava.conversations.report import build_section
from benchmarks.minillava.conversations.scoring import choose_rows, encode_turns, score_turns
from benchmarks.minillava.conversations.served import ServedTurns, ask_arm
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.split import weights_digest
from vllm_autoprune.cli.output import CommandParser

TITLE = "Conversations about one image"
_BATCH = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 for a report, 1 if it cannot be made."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    conversations = draw_conversations(options.split, options.conversations)
    unsplit, split = options.states
    tables = build_arms(unsplit, split, options.budgets, options.recalls)
    try:
        if options.server_url:
            section = ask_server(options, conversations, tables, create_progress())
        else:
            section = score(options, conversations, tables, create_progress())
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    write_section(section, options.out, [section.name], TITLE)
    print(json.dumps(dataclasses.asdict(section)) if options.json else section.markdown())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = CommandParser(
        prog="python -m benchmarks.minillava.conversations",
        description="Accuracy of turns 1 to 4 of conversations about one image.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/conversations"), metavar="FOLDER")
    add("--json", action="store_true", help="print JSON instead of Markdown")
    add("--split", choices=("search", "validation", "test"), default="test")
    add("--conversations", type=int, default=1000, metavar="N", help="one about each scene")
    add("--budgets", type=int, nargs="+", default=[8, 16], metavar="K")
    add(
        "--recalls", type=int, nargs="*", default=[4, 8], metavar="K_R",
        help="tokens that a later turn recalls",
    )  # fmt: skip
    add(
        "--states", nargs=2, default=["minillava", "minillava-split"], metavar="STATE",
        help="shipped states without and with a core",
    )  # fmt: skip
    add(
        "--checkpoint", type=Path, metavar="FOLDER",
        help="llava/ and clip/ (default: the committed one for conversations)",
    )  # fmt: skip
    add("--server-url", metavar="URL", help="a server with --autoprune-requests shipped-states")
    add("--served-name", help="name of the served model (default: the first one)")
    add("--concurrency", type=int, default=8, help="conversations at once, of a server")
    add("--threads", type=int, default=1, help="threads of torch")
    return parser


def score(
    options: argparse.Namespace,
    conversations: Sequence[Conversation],
    tables: Mapping[int, Sequence[Arm]],
    progress: Progress,
) -> Section:
    """Score all arms with transformers."""
    arms = list_arms(tables)
    right: dict[str, list[list[bool]]] = {arm.name: [] for arm in arms}
    logprob: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder)
            write_checkpoint(checkpoint)
        reader, digest = Reader(checkpoint), weights_digest(checkpoint)
    starts = range(0, len(conversations), _BATCH)
    batches = [conversations[start : start + _BATCH] for start in starts]
    with progress.stage("conversations", len(batches)) as advance:
        for batch in batches:
            turns = encode_turns(reader, batch)
            for arm in arms:
                scores = score_turns(reader, batch, choose_rows(arm, batch, turns))
                right[arm.name] += scores.right.tolist()
                logprob[arm.name] += scores.logprob.tolist()
            advance()
    setup = [
        f"mini-LLaVA {digest} with transformers, pruned in front of the language model",
        *_describe(options, conversations),
    ]
    rounded = {name: [[round(x, 4) for x in one] for one in own] for name, own in logprob.items()}
    return build_section(conversations, tables, right, setup, data={"log-probability": rounded})


def ask_server(
    options: argparse.Namespace,
    conversations: Sequence[Conversation],
    tables: Mapping[int, Sequence[Arm]],
    progress: Progress,
) -> Section:
    """Ask a server in all arms that it can serve."""
    url = options.server_url.rstrip("/").removesuffix("/v1")
    client, names = Client(url), list_models(url)
    model = options.served_name or names[0]
    if model not in names:
        raise BenchmarkError(f"server {url}: does not serve {model!r}, only {', '.join(names)}")
    served = [arm for arm in list_arms(tables) if arm.served]
    answers: dict[str, list[ServedTurns]] = {}
    with progress.stage("conversations", len(served) * len(conversations)) as advance:
        for arm in served:
            answers[arm.name] = ask_arm(
                client, model, conversations, arm, options.concurrency, advance
            )
    right = {name: [list(one.right) for one in own] for name, own in answers.items()}
    setup = [f"{model} through vLLM, greedy", *_describe(options, conversations)]
    prompts = {name: [one.prompt_tokens for one in own] for name, own in answers.items()}
    cached = {name: [one.cached_tokens for one in own] for name, own in answers.items()}
    lengths = {
        name: f"{sum(counts) / len(counts):.1f}"
        for name, own in prompts.items()
        if (counts := [one[-1] for one in own if one[-1] is not None])
    }
    data = {"prompt tokens": prompts, "cached tokens": cached}
    return build_section(conversations, tables, right, setup, lengths, data)


def _describe(options: argparse.Namespace, conversations: Sequence[Conversation]) -> list[str]:
    unsplit, split = options.states
    return [
        f"{len(conversations)} conversations about as many scenes of the {options.split} split, "
        "four turns each, all about other objects; reference answers as history",
        f"`{unsplit}` keeps what the question of turn 1 chooses, `{split}` a core without it; "
        "a later turn recalls K_r tokens by its own question",
        "95 % intervals by bootstrap over scenes, differences paired",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
