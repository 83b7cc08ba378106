"""Options of `search`, and the settings, data, evaluator and proposer that they describe."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from offline_search.dataset import Dataset
    from offline_search.evaluation.served_evaluator import ServedEvaluator
    from offline_search.proposers.proposal_client import Proposer
    from offline_search.settings import Settings
    from vllm_autoprune.tpdsl.tokens import VisualTokens


_FLAGS = {
    "budgets": "--budget",
    "objectives": "--objective",
    "proposer": "--proposer-model",
}
"""Flags that are not named like their field of the settings."""


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
    """Options on the search itself: strategy, budgets, objectives, ablations."""
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
        "--across",
        choices=("mean", "worst"),
        default="mean",
        help="how the objectives of several budgets are aggregated",
    )
    group.add_argument(
        "--objective",
        nargs="+",
        default=["quality"],
        choices=("quality", "mme", "budgets", "tasks", "latency"),
        help="objectives: quality, or MME's total in its place; with others, a search finds a "
        "Pareto front",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    group.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=("anchoring", "fusion", "diversity"),
        help="ablation: components removed from every candidate",
    )
    group.add_argument(
        "--race",
        action="store_true",
        help="propose three times as many candidates and drop most after an eighth of the "
        "questions; autoprune+ always does",
    )
    group.add_argument("--quota", type=int, metavar="Q", help="ablation: q_e of every candidate")
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
        help="the served model's folder, to detect candidates that keep the same tokens",
    )
    group.add_argument(
        "--text-tower", type=Path, help="with --checkpoint: the text tower that the server uses"
    )


def add_proposer_arguments(group: argparse._ArgumentGroup) -> None:
    """Options on the language model that proposes, and limits on its cost."""
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--proposer-url",
        metavar="URL",
        help="OpenAI-compatible endpoint, ends in /v1; default: no language model",
    )
    where.add_argument(
        "--embedded-proposer",
        action="store_true",
        help="start a language model of 135 M parameters beside the search",
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
        "--menu", type=int, metavar="N",
        help="restrict each proposal to N random atoms per changed part; 0: no restriction, "
        "the default with --proposer-url; default with --embedded-proposer: 1",
    )  # fmt: skip
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


def read_settings_and_data(options: argparse.Namespace) -> tuple[Settings, Dataset]:
    """Settings and data set of the search; raises :class:`ConfigError` with every problem."""
    from offline_search.dataset import read_dataset
    from offline_search.strategies import CODE_STRATEGIES, STRATEGIES
    from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

    problems = []
    served = [name for name in STRATEGIES if name not in CODE_STRATEGIES]
    for flag, value, known in (
        ("--strategy", options.strategy, served),
        ("--base-policy", options.base_policy, BASE_POLICIES),
        *(("--other-bases", name, BASE_POLICIES) for name in options.other_bases),
    ):
        if value not in known:
            problems.append(Problem(flag, f"{value!r} is not known", f"give {', '.join(known)}"))
    if problems:
        raise ConfigError("search", problems)
    proposer_name = _proposer_name(options)
    strategy = STRATEGIES[options.strategy](_build_settings({"proposer": proposer_name}))
    if strategy.uses_proposer and not proposer_name:
        what = f"{options.strategy} needs a language model"
        fix = "give --proposer-url or --embedded-proposer, or one of autoprune+, tpe and random"
        raise ConfigError("search", [Problem("--strategy", what, fix)])
    settings = _build_settings(
        {
            "strategy": options.strategy,
            "rounds": options.rounds,
            "per_round": options.per_round,
            "base_policy": options.base_policy,
            "other_bases": tuple(options.other_bases),
            "budgets": tuple(options.budget),
            "across": options.across,
            "objectives": tuple(options.objective),
            "seed": options.seed,
            "without": tuple(options.without),
            "quota": options.quota,
            "core": options.core,
            "race": options.race,
            "rank_at": options.rank_at,
            "library": options.library,
            "proposer": proposer_name if strategy.uses_proposer else "",
            "menu": _menu_width(options, strategy.uses_proposer),
            "proposals_per_reply": _list_length(options, strategy.uses_proposer),
            "temperature": options.temperature,
        }
    )
    return settings, read_dataset(options.data, options.seed, options.images)


def _build_settings(values: Mapping[str, object]) -> Settings:
    """Settings with these fields; raises :class:`ConfigError` that names their flags."""
    from pydantic import ValidationError

    from offline_search.settings import Settings

    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        # A refused item of a tuple makes the tuple too short as well; options never give none.
        details = [one for one in error.errors(include_url=False) if one["type"] != "too_short"]
    raise ConfigError("search", [_describe_setting(detail, values) for detail in details])


def _describe_setting(detail: ErrorDetails, values: Mapping[str, object]) -> Problem:
    message = detail["msg"].removeprefix("Value error, ")
    # Pydantic locates what a whole model breaks nowhere, and an item of a tuple by its number.
    fields = [str(name) for name in detail["loc"][:1]] or _find_conflict(message, values)
    where = ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in fields)
    demand = message.removeprefix("Input should be ")
    if demand != message:
        return Problem(where, f"{detail['input']!r} is refused", f"give a value that is {demand}")
    what, _, fix = message.partition(": ")
    return Problem(where, what, fix or f"leave {'one of them' if len(fields) > 1 else 'it'} out")


def _find_conflict(message: str, values: Mapping[str, object]) -> list[str]:
    """Fields whose defaults would end a conflict between fields, or else change its message."""
    left = {
        name: _find_message({other: value for other, value in values.items() if other != name})
        for name in values
    }
    ending = [name for name, other in left.items() if not other]
    return ending or [name for name, other in left.items() if other != message]


def _find_message(values: Mapping[str, object]) -> str:
    """First problem of settings with these fields; empty if there is none."""
    from pydantic import ValidationError

    from offline_search.settings import Settings

    try:
        Settings.model_validate(values)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return ""


def _menu_width(options: argparse.Namespace, uses_proposer: bool) -> int:
    from offline_search.settings import DEFAULT_MENU, STRATEGIES_WITHOUT_MENU

    if options.menu is not None:
        return int(options.menu)
    embedded = uses_proposer and options.embedded_proposer
    return DEFAULT_MENU if embedded and options.strategy not in STRATEGIES_WITHOUT_MENU else 0


def _list_length(options: argparse.Namespace, uses_proposer: bool) -> int:
    """Proposals in a reply; one of the embedded model, which only writes what a menu leaves it."""
    from offline_search.settings import DEFAULT_LIST, STRATEGIES_WITH_LISTS

    if options.proposals_per_reply is not None:
        return int(options.proposals_per_reply)
    writes = uses_proposer and options.proposer_url is not None and not options.menu
    return DEFAULT_LIST if writes and options.strategy in STRATEGIES_WITH_LISTS else 1


def _proposer_name(options: argparse.Namespace) -> str:
    """Name of the language model in the ledger; empty without one."""
    from offline_search.proposers.embedded_model import EMBEDDED_MODEL

    if options.proposer_url is None:
        if options.proposer_model:
            fix = "give --proposer-url, or leave it out"
            raise ConfigError("search", [Problem("--proposer-model", "has no endpoint", fix)])
        return EMBEDDED_MODEL if options.embedded_proposer else ""
    if not options.proposer_model:
        fix = "name a model at --proposer-url"
        raise ConfigError("search", [Problem("--proposer-model", "is missing", fix)])
    return str(options.proposer_model)


def build_evaluator(options: argparse.Namespace, dataset: Dataset) -> ServedEvaluator:
    """Evaluator on the given servers."""
    from offline_search.evaluation.served_evaluator import ServedEvaluator

    probes: Sequence[VisualTokens] = ()
    if options.checkpoint is not None:
        from offline_search.evaluation.candidate_check import probes_from_checkpoint

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
    """Proposer of the search: an endpoint, or the embedded model on a server started for it."""
    from offline_search.proposers.endpoint import EndpointProposer, EndpointSettings, Price
    from offline_search.replay import UnavailableBackend

    if not settings.proposer:
        yield UnavailableBackend(settings.evaluator, dataset)
        return
    with _endpoint_url(options) as url:
        endpoint = EndpointSettings(
            url,
            settings.proposer,
            os.environ.get(options.proposer_key_env) or "none",
            settings.temperature,
            settings.reply_tokens * settings.proposals_per_reply,
            Price(*options.price),
            # No seed for the embedded model: vLLM on a CPU crashes on one.
            seeded=options.proposer_url is not None and not options.no_seeds,
        )
        proposer = EndpointProposer(endpoint)
        try:
            await proposer.prepare()
            yield proposer
        finally:
            await proposer.close()


@contextlib.contextmanager
def _endpoint_url(options: argparse.Namespace) -> Iterator[str]:
    """Address of the proposer, which is started if none is given."""
    if options.proposer_url is not None:
        yield options.proposer_url
        return
    from offline_search.proposers.embedded_model import prepare_model
    from offline_search.proposers.embedded_server import serve_model

    print("starting the embedded proposer ...", file=sys.stderr, flush=True)
    with serve_model(prepare_model()) as url:
        yield url
