"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.policies import QUOTAS
from benchmarks.search.evaluator import YardstickEvaluator, write_data
from benchmarks.search.results import read_results, results_of
from benchmarks.search.study import (
    ABLATIONS,
    ARMS,
    BASE_POLICIES,
    RELEASED,
    WITHOUT_PROPOSER,
    asks_model,
    run_comparison,
    run_study,
)
from benchmarks.search.tables import format_tables
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from offline_search.dataset import Split
from offline_search.proposer import EndpointProposer, EndpointSettings
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, SearchError


def _write_data(options: argparse.Namespace) -> None:
    write_data(options.out, _scenes(options), each=options.each)


def _compare(options: argparse.Namespace) -> None:
    settings = _settings(
        options,
        per_round=options.per_round,
        base_policy=options.base_policy,
        budgets=tuple(options.budget),
    )
    connect = _connect(options, options.strategies, settings)
    yardstick = open_yardstick(options.yardstick)
    evaluator = YardstickEvaluator(
        yardstick, _scenes(options), each=options.each, base_policy=options.base_policy
    )
    run_comparison(
        options.out, options.strategies, range(options.seeds), settings, evaluator, connect,
        options.concurrency,
    )  # fmt: skip
    _print_tables(options)


def _print_tables(options: argparse.Namespace) -> None:
    print(format_tables(options.out, options.strategies, range(options.seeds)), end="")


def _run_study(options: argparse.Namespace) -> None:
    for name in options.yardsticks:
        for budget in options.budgets:
            folder, seeds, arms = options.out / f"{name}-k{budget}", range(options.seeds), []
            base = options.base_policy or BASE_POLICIES[name]
            settings = _settings(options, base_policy=base, budgets=(budget,))
            known = read_results(folder)
            for arm in options.strategies:
                if len(results_of(known, arm, seeds)) < len(seeds):
                    arms.append(arm)
            connect = _connect(options, arms, settings)
            tables = run_study(
                folder, name, options.strategies, seeds, settings, connect, options.concurrency
            )
            print(tables, flush=True)


def _run_ablations(options: argparse.Namespace) -> None:
    name = options.yardstick
    base, budget = RELEASED[name]
    settings = Settings(rounds=options.rounds, base_policy=base, budgets=(budget,))
    folder = options.out / f"{name}-k{budget}"
    print(run_study(folder, name, ABLATIONS, range(options.seeds), settings, None, quotas=QUOTAS))


def _scenes(options: argparse.Namespace) -> dict[Split, int]:
    search, validation, test = options.scenes
    return {"search": search, "validation": validation, "test": test}


def _settings(options: argparse.Namespace, **choices: Any) -> Settings:
    """Settings of all searches; raises :class:`SearchError` for contradictions."""
    length = options.proposals_per_reply
    if options.proposer_url and not options.proposer_model:
        raise SearchError("--proposer-url: which model? -> give --proposer-model")
    if length is not None and not options.proposer_url:
        raise SearchError("--proposals-per-reply: no language model writes -> give --proposer-url")
    return Settings(
        rounds=options.rounds,
        proposer=options.proposer_model or "",
        proposals_per_reply=length or (DEFAULT_LIST if options.proposer_url else 1),
        **choices,
    )


def _connect(
    options: argparse.Namespace, arms: Sequence[str], settings: Settings
) -> Callable[[], EndpointProposer] | None:
    """Opens the language model, asked for the rounds of all concurrent searches at once."""
    if not any(asks_model(arm, settings) for arm in arms):
        return None
    if not options.proposer_url:
        raise SearchError(
            f"--strategies {' '.join(arms)}: some ask a language model -> give "
            "--proposer-url, or leave them out"
        )
    endpoint = EndpointSettings(
        options.proposer_url,
        settings.proposer,
        reply_tokens=settings.reply_tokens * settings.proposals_per_reply,
        max_in_flight=settings.per_round * options.concurrency,
        seeded=not options.no_seeds,
    )
    return partial(EndpointProposer, endpoint)


Keywords = Mapping[str, Any]
_COUNT: Keywords = {"type": int}

_FLAGS: Mapping[str, Keywords] = {
    "--out": {"type": Path, "required": True, "help": "folder of the ledgers"},
    "--seeds": {**_COUNT, "default": 5, "help": "number of seeds"},
    "--strategies": {
        "nargs": "+",
        "default": list(WITHOUT_PROPOSER),
        "help": f"strategies, of {', '.join(ARMS)}; with @none without a language model; then "
        "with @numbers or another space in that; default: those that ask no language model",
    },
    "--rounds": {**_COUNT, "default": 10, "help": "rounds of proposals"},
    "--per-round": {**_COUNT, "default": 5, "help": "candidates of a round"},
    "--yardstick": {"choices": YARDSTICKS, "default": "minillava", "help": "model to measure on"},
    "--yardsticks": {
        "nargs": "+", "choices": YARDSTICKS, "default": list(YARDSTICKS),
        "help": "models to measure on",
    },
    "--scenes": {
        **_COUNT, "nargs": 3, "default": [20, 20, 40],
        "metavar": ("SEARCH", "VALIDATION", "TEST"), "help": "scenes of each split",
    },
    "--each": {**_COUNT, "metavar": "N", "help": "maximum number of questions about a scene"},
    "--base-policy": {"default": "visionzip", "help": "base policy that candidates start from"},
    "--budget": {**_COUNT, "nargs": "+", "default": [8], "help": "each K"},
    "--budgets": {**_COUNT, "nargs": "+", "default": [8, 16], "help": "K, one by one"},
    "--proposer-url": {"help": "endpoint of a language model; default: none"},
    "--proposer-model": {"help": "its name there"},
    "--no-seeds": {
        "action": "store_true", "help": "send no seed, for endpoints that fail on one",
    },
    "--proposals-per-reply": {
        **_COUNT, "metavar": "N",
        "help": "proposals that a model writes at once; default with --proposer-url: "
        f"{DEFAULT_LIST}, else 1",
    },
    "--at-once": {
        **_COUNT, "default": 1, "dest": "concurrency", "metavar": "N",
        "help": "searches that run concurrently",
    },
}  # fmt: skip

_PROPOSER = "--proposer-url --proposer-model --no-seeds --proposals-per-reply --at-once"
_COMMANDS: Mapping[str, tuple[Callable[[argparse.Namespace], None], str, str]] = {
    "data": (_write_data, "write held-out scenes as a data folder", "--out --scenes --each"),
    "compare": (
        _compare, "run, or resume, strategies over several seeds",
        f"--out --seeds --strategies --rounds --yardstick {_PROPOSER} --scenes --each "
        "--base-policy --budget --per-round",
    ),
    "table": (
        _print_tables, "print the tables of a comparison again", "--out --seeds --strategies",
    ),
    "study": (
        _run_study, "run, or resume, the published comparison on both yardsticks, and print it",
        f"--out --seeds --strategies --rounds --base-policy --yardsticks --budgets {_PROPOSER}",
    ),
    "ablations": (
        _run_ablations,
        "run, or resume, the released policy's ablations and quotas, and print both tables",
        "--out --seeds --rounds --yardstick",
    ),
}  # fmt: skip
"""Commands: what they run, their help, and their flags."""

_CHANGES: Mapping[tuple[str, str], Keywords] = {
    ("data", "--out"): {"help": "data folder"},
    ("study", "--seeds"): {"default": 8},
    ("study", "--base-policy"): {
        "default": "", "help": "base policy; default: the yardstick's in this study",
    },
    ("ablations", "--seeds"): {"default": 8},
    ("ablations", "--yardstick"): {"default": None, "required": True},
}  # fmt: skip
"""What differs from :data:`_FLAGS` in a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    parser = CommandParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, text, flags) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        for flag in flags.split():
            command.add_argument(flag, **{**_FLAGS[flag], **_CHANGES.get((name, flag), {})})
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
