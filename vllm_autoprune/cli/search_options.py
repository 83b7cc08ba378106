"""Options of `search`, and what they put together: settings, data, evaluator, proposer.

Knows nothing about what is done with them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from offline_search.evaluators.served import ServedEvaluator
    from offline_search.examples import Dataset
    from offline_search.proposers.protocol import Proposer
    from offline_search.settings import Settings
    from vllm_autoprune.tpdsl.tokens import VisualTokens


def search_arguments(group: argparse._ArgumentGroup) -> None:
    """What is searched for, and how long."""
    group.add_argument(
        "--strategy",
        default="autoprune+",
        help="autoprune+ (default), autoprune, evoprompting, openevolve, random or tpe",
    )
    group.add_argument("--rounds", type=int, default=10)
    group.add_argument("--per-round", type=int, default=5, help="candidates a round")
    group.add_argument("--base-policy", default="cdpruner")
    group.add_argument("--budget", type=int, nargs="+", default=[32], metavar="K")
    group.add_argument(
        "--across", choices=("mean", "worst"), default="mean", help="of several budgets"
    )
    group.add_argument(
        "--objective",
        nargs="+",
        default=["quality"],
        choices=("quality", "budgets", "tasks", "latency"),
        help="with several, or with each budget's or category's, a Pareto front is found",
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=("anchoring", "fusion", "diversity"),
        help="ablation: no candidate has these",
    )
    group.add_argument("--quota", type=int, metavar="Q", help="ablation: q_e of every candidate")


def measuring_arguments(group: argparse._ArgumentGroup) -> None:
    """What candidates are measured on."""
    group.add_argument(
        "--data", type=Path, metavar="FOLDER", help="search.jsonl, validation.jsonl, test.jsonl"
    )
    group.add_argument("--images", type=int, help="use only so many images of each split")
    group.add_argument(
        "--server-url",
        action="append",
        metavar="URL",
        help="vllm serve with --autoprune-requests states; several share the work",
    )
    group.add_argument("--server-model", metavar="NAME", help="where a server has several")
    group.add_argument("--at-once", type=int, default=128, help="requests in flight a server")
    group.add_argument(
        "--checkpoint",
        type=Path,
        help="the served model's folder: candidates that keep the same tokens count as one",
    )
    group.add_argument("--text-tower", type=Path, help="as the server has it, with --checkpoint")


def proposer_arguments(group: argparse._ArgumentGroup) -> None:
    """Who proposes, and what that may cost."""
    group.add_argument(
        "--proposer-url", metavar="URL", help="OpenAI-compatible, ends in /v1; none: a small local"
    )
    group.add_argument("--proposer-model", metavar="NAME")
    group.add_argument(
        "--no-proposer", action="store_true", help="ablation: autoprune+ without a language model"
    )
    group.add_argument(
        "--proposer-key-env", default="OPENAI_API_KEY", help="variable that holds the key"
    )
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument(
        "--menu", type=int, metavar="N",
        help="atoms offered for what a proposal changes, drawn anew for each; 0: all, which is the "
        "default with --proposer-url, while the small local model is offered a few",
    )  # fmt: skip
    group.add_argument(
        "--price", type=float, nargs=2, default=[0.0, 0.0], metavar=("IN", "OUT"),
        help="money for a million tokens, read and written",
    )  # fmt: skip
    group.add_argument("--most-tokens", type=int, help="stop asking after so many")
    group.add_argument("--most-money", type=float, help="stop asking after so much")
    group.add_argument(
        "--no-seeds", action="store_true", help="for endpoints that do not bear a seed"
    )


def settings_and_data(options: argparse.Namespace) -> tuple[Settings, Dataset]:
    """The search that is asked for; raises :class:`ConfigError` with every problem."""
    from pydantic import ValidationError

    from offline_search.examples import read_dataset
    from offline_search.settings import Settings
    from offline_search.strategies import STRATEGIES
    from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

    problems = []
    for flag, value, known in (
        ("--strategy", options.strategy, STRATEGIES),
        ("--base-policy", options.base_policy, BASE_POLICIES),
    ):
        if value not in known:
            problems.append(Problem(flag, f"{value!r} is not known", f"give {', '.join(known)}"))
    if problems:
        raise ConfigError("search", problems)
    named = "" if options.no_proposer else _proposer_name(options)
    asks = STRATEGIES[options.strategy](Settings(proposer=named)).asks
    if options.no_proposer and asks:
        fix = "give autoprune+, tpe or random, which can do without"
        raise ConfigError("search", [Problem("--no-proposer", f"{options.strategy} asks", fix)])
    try:
        settings = Settings(
            strategy=options.strategy,
            rounds=options.rounds,
            per_round=options.per_round,
            base_policy=options.base_policy,
            budgets=tuple(options.budget),
            across=options.across,
            objectives=tuple(options.objective),
            seed=options.seed,
            without=tuple(options.without),
            quota=options.quota,
            proposer=named if asks else "",
            menu=_menu(options, asks),
            temperature=options.temperature,
        )
    except ValidationError as error:
        found = [
            Problem("--" + "/".join(map(str, detail["loc"])), detail["msg"], "give another value")
            for detail in error.errors(include_url=False)
        ]
        raise ConfigError("search", found) from None
    return settings, read_dataset(options.data, options.seed, options.images)


def _menu(options: argparse.Namespace, asks: bool) -> int:
    from offline_search.settings import SMALL_MENU, UNLISTED

    if options.menu is not None:
        return int(options.menu)
    small = asks and options.proposer_url is None and options.strategy not in UNLISTED
    return SMALL_MENU if small else 0


def _proposer_name(options: argparse.Namespace) -> str:
    from offline_search.proposers.embedded.convert import NAME

    if options.proposer_url is None:
        return NAME
    if not options.proposer_model:
        fix = "name the model to ask at --proposer-url"
        raise ConfigError("search", [Problem("--proposer-model", "is missing", fix)])
    return str(options.proposer_model)


def evaluator(options: argparse.Namespace, dataset: Dataset) -> ServedEvaluator:
    """The servers that measure."""
    from offline_search.evaluators.served import ServedEvaluator

    probes: Sequence[VisualTokens] = ()
    if options.checkpoint is not None:
        from offline_search.evaluators.probing import local_probes

        probes = local_probes(options.checkpoint, options.text_tower, dataset)
    return ServedEvaluator(
        options.server_url,
        dataset,
        model=options.server_model,
        at_once=options.at_once,
        probes=probes,
    )


@contextlib.asynccontextmanager
async def proposer(
    options: argparse.Namespace, settings: Settings, dataset: Dataset
) -> AsyncIterator[Proposer]:
    """Who proposes: an endpoint, the embedded model started for it, or nobody."""
    from offline_search.proposers.endpoint import Endpoint, EndpointProposer, Price
    from offline_search.replay import Absent

    if not settings.proposer:
        yield Absent(settings.evaluator, dataset)
        return
    with _address(options) as url:
        endpoint = Endpoint(
            url,
            settings.proposer,
            os.environ.get(options.proposer_key_env) or "none",
            settings.temperature,
            settings.reply_tokens,
            Price(*options.price),
            # The embedded model runs on vLLM, which on a CPU does not bear a request's seed.
            seeded=options.proposer_url is not None and not options.no_seeds,
        )
        found = EndpointProposer(endpoint)
        try:
            await found.prepare()
            yield found
        finally:
            await found.close()


@contextlib.contextmanager
def _address(options: argparse.Namespace) -> Iterator[str]:
    """Where the proposer is asked."""
    if options.proposer_url is not None:
        yield options.proposer_url
        return
    from offline_search.proposers.embedded.convert import model_folder
    from offline_search.proposers.embedded.serve import served

    print("starting the embedded proposer ...", file=sys.stderr, flush=True)
    with served(model_folder()) as url:
        yield url
