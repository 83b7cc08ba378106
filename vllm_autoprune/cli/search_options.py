"""Options of `search`, and the evaluator and proposer that they describe."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offline_search.dataset import Dataset
    from offline_search.evaluator import ServedEvaluator
    from offline_search.proposer import Proposer
    from offline_search.settings import Settings
    from vllm_autoprune.tpdsl.tokens import VisualTokens


def _positive_integer(text: str) -> int:
    with contextlib.suppress(ValueError):
        number = int(text)
        if number >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is refused -> give a whole number of 1 or more")


def _amount(text: str) -> float:
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 <= number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is refused -> give a number of 0 or more")


def add_search_arguments(group: argparse._ArgumentGroup) -> None:
    """Options on the search itself: strategy, space, budgets, objective."""
    group.add_argument(
        "--strategy",
        default="autoprune+",
        help="autoprune+ (default), autoprune, evoprompting-states, openevolve-states, random or "
        "tpe",
    )
    group.add_argument("--rounds", type=int, default=10, help="rounds of proposals (default 10)")
    group.add_argument("--per-round", type=int, default=5, help="candidates per round")
    group.add_argument("--base-policy", default="cdpruner", help="base policy of every candidate")
    group.add_argument(
        "--other-bases",
        nargs="+",
        default=[],
        metavar="NAME",
        help="base policies that candidates may have instead",
    )
    group.add_argument(
        "--budget", type=int, nargs="+", default=[32], metavar="K", help="tokens kept of an image"
    )
    group.add_argument(
        "--objective",
        default="quality",
        choices=("quality", "mme"),
        help="quality (default): log-probability of the reference answers; mme: MME's total",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    group.add_argument(
        "--space",
        default="all",
        help="any state (all, the default), or the state autoprune with its six numbers searched "
        "(numbers), its signals and weights too (released), or one of its ablations "
        "(without-diversity, without-fusion, without-anchoring)",
    )
    group.add_argument(
        "--race",
        action="store_true",
        help="propose three times as many candidates and drop most after an eighth of the "
        "questions; autoprune+ always does",
    )
    group.add_argument(
        "--core",
        action="store_true",
        help="candidates may split K into a core without the question and a delta",
    )
    group.add_argument(
        "--library",
        choices=("searched", "paper"),
        default="searched",
        help="atoms that a language model is offered: those that the search varies (default), or "
        "the paper's 131, source, budget, safety and r_min among them, without extensions",
    )
    group.add_argument(
        "--rank-at",
        action="store_true",
        help="candidates may rank tokens before the patch merger; for models that have one",
    )


def add_evaluator_arguments(group: argparse._ArgumentGroup) -> None:
    """Options on data and servers."""
    group.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder with search.jsonl, validation.jsonl and test.jsonl",
    )
    group.add_argument(
        "--images", type=_positive_integer, help="maximum number of images of each split"
    )
    group.add_argument(
        "--server-url",
        action="append",
        metavar="URL",
        help="vllm serve with --autoprune-requests states; repeat it for several servers",
    )
    group.add_argument(
        "--server-model", metavar="NAME", help="model to evaluate, if a server has several"
    )
    group.add_argument(
        "--at-once",
        type=_positive_integer,
        default=128,
        dest="concurrency",
        metavar="N",
        help="concurrent requests per server (default 128)",
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of a served LLaVA-1.5, to detect candidates that keep the same tokens",
    )
    group.add_argument(
        "--text-tower", type=Path, help="with --checkpoint: the text tower that the server uses"
    )


def add_proposer_arguments(group: argparse._ArgumentGroup) -> None:
    """Options on the language model that proposes, and limits on its cost."""
    group.add_argument(
        "--proposer-url",
        metavar="URL",
        help="OpenAI-compatible endpoint, ends in /v1; default: no language model",
    )
    group.add_argument("--proposer-model", metavar="NAME", help="model at --proposer-url")
    group.add_argument(
        "--proposer-key-env",
        default="OPENAI_API_KEY",
        help="environment variable that holds the API key",
    )
    group.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature of the proposer"
    )
    group.add_argument(
        "--proposals-per-reply", type=int, metavar="N",
        help="proposals that the language model writes at once, with different purposes and a "
        "hypothesis each; default with --proposer-url in autoprune and autoprune+: 5, else 1",
    )  # fmt: skip
    group.add_argument(
        "--price", type=_amount, nargs=2, default=[0.0, 0.0], metavar=("IN", "OUT"),
        help="price of a million prompt and completion tokens",
    )  # fmt: skip
    group.add_argument(
        "--most-tokens", type=_positive_integer, metavar="N",
        help="send the proposer no further requests once N tokens are spent; a round in flight may "
        "exceed it",
    )  # fmt: skip
    group.add_argument(
        "--most-money", type=_amount, metavar="M",
        help="send the proposer no further requests once M is spent, at --price; a round in flight "
        "may exceed it",
    )  # fmt: skip
    group.add_argument(
        "--no-seeds", action="store_true", help="send no seed, for endpoints that fail on one"
    )


def build_evaluator(options: argparse.Namespace, dataset: Dataset) -> ServedEvaluator:
    """Evaluator on the given servers."""
    from offline_search.evaluator import ServedEvaluator

    probes: Sequence[VisualTokens] = ()
    if options.checkpoint is not None:
        from offline_search.rounds import probes_from_checkpoint

        probes = probes_from_checkpoint(options.checkpoint, options.text_tower, dataset)
    return ServedEvaluator(
        options.server_url,
        dataset,
        model=options.server_model,
        max_in_flight=options.concurrency,
        probes=probes,
    )


@contextlib.asynccontextmanager
async def open_proposer(
    options: argparse.Namespace, settings: Settings, dataset: Dataset
) -> AsyncIterator[Proposer]:
    """Proposer of the search: the endpoint, or none."""
    from offline_search.proposer import EndpointProposer, EndpointSettings, Price
    from offline_search.replay import UnavailableBackend

    if not settings.proposer:
        yield UnavailableBackend(settings.evaluator, dataset)
        return
    endpoint = EndpointSettings(
        options.proposer_url,
        settings.proposer,
        os.environ.get(options.proposer_key_env) or "none",
        settings.temperature,
        settings.reply_tokens * settings.proposals_per_reply,
        Price(*options.price),
        seeded=not options.no_seeds,
    )
    proposer = EndpointProposer(endpoint)
    try:
        await proposer.prepare()
        yield proposer
    finally:
        await proposer.close()
