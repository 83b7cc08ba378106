"""`advise`: which kind of state pays for a traffic, from given or measured times."""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from vllm_autoprune.advise import (
    ASSUMPTIONS,
    NEVER,
    Estimate,
    Known,
    Timings,
    Traffic,
    Way,
    complete,
    estimate_ways,
    fit_layers,
    judge,
    shares_of,
    ttft_of,
)
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.flags import add_flags, flag_problems
from vllm_autoprune.cli.output import as_json, format_paragraph, format_table
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.http_client import ServerClient, reporting_failures
from vllm_autoprune.ops.dtype import SERVE_FLOAT32, SLOW_BFLOAT16, choose_dtype
from vllm_autoprune.probe import probe_server, read_times, read_traffic
from vllm_autoprune.tpdsl.atoms.source import run_budget
from vllm_autoprune.tpdsl.loading import load_state

_FLAGS = {"block": "--block-size", "prefill": "--prefill-ms-per-token"} | {
    name: f"--{name.replace('_', '-')}-ms" for name in Timings.model_fields if name != "prefill"
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    sizes = list(Traffic.model_fields)
    add_flags(traffic, Traffic, _FLAGS, sizes[:4], numbers=True)
    text = "read --budget and --core from a state, by file or name"
    traffic.add_argument("--state", metavar="STATE", help=text)
    add_flags(traffic, Traffic, _FLAGS, sizes[4:], numbers=True)
    traffic.add_argument(
        "--no-prefix-caching", action="store_true", help="the server keeps no prefix cache"
    )
    times = parser.add_argument_group("measured times, milliseconds")
    add_flags(times, Timings, _FLAGS, numbers=True)
    times.add_argument("--layers", type=int, metavar="L", help="layers, for --layer-ms")
    times.add_argument(
        "--layer-ms",
        type=_parse_layer,
        nargs="+",
        metavar="TOKENS=MS",
        help="instead of --prefill-ms-per-token: prefill of one layer on so many tokens; "
        "two lengths also give the layers' part of --request-ms",
    )
    server = parser.add_argument_group("a running server")
    text = "read what is not given from its /metrics; with an API key in VLLM_API_KEY"
    server.add_argument("--server", metavar="URL", help=text)
    server.add_argument(
        "--probe",
        type=_parse_size,
        metavar="WIDTHxHEIGHT",
        help="measure times with 24 requests of its own, 12 of them with images of that size",
    )
    server.add_argument("--model", metavar="NAME", help="the model's name on the server")


def _parse_layer(text: str) -> tuple[int, float]:
    tokens, _, milliseconds = text.partition("=")
    with contextlib.suppress(ValueError):
        if int(tokens) >= 1 and 0 < float(milliseconds) < math.inf:
            return int(tokens), float(milliseconds) / 1000
    raise argparse.ArgumentTypeError(f"{text!r} is not TOKENS=MS, such as 341=805.5")


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    with contextlib.suppress(ValueError):
        if int(width) >= 1 and int(height) >= 1:
            return int(width), int(height)
    raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 1024x768")


def _run(options: argparse.Namespace) -> int:
    traffic, timings, notes = _read_inputs(options)
    if _is_local(options.server) and choose_dtype() == "float32":
        notes += (f"If the server runs in bfloat16 here: {SLOW_BFLOAT16} -> {SERVE_FLOAT32}.",)
    estimates = estimate_ways(traffic, timings)
    verdict = judge(traffic, estimates)
    if options.json:
        stock = estimates["stock"]
        ways = {way: _make_record(e, stock, traffic.questions) for way, e in estimates.items()}
        record = {
            "traffic": traffic.model_dump(),
            "seconds": timings.model_dump(),
            "ways": ways,
            "verdict": asdict(verdict),
            "notes": notes,
            "assumptions": ASSUMPTIONS,
        }
        print(as_json(record))
        return 0
    cache = f"KV blocks of {traffic.block}" if traffic.block else "no prefix cache"
    sizes = (
        f"{traffic.questions:g} questions an image; N = {traffic.tokens}, K = {traffic.budget}, "
        f"K_c = {traffic.core}; {traffic.template} text tokens before the image and "
        f"{traffic.prompt} behind it, {traffic.answer} of the answer; {cache}"
    )
    times = ", ".join(f"{name.replace('_', ' ')} {_ms(t)}" for name, t in timings)
    blocks = [
        "\n".join(map(format_paragraph, (sizes, f"ms: {times}"))),
        "\n".join(map(format_paragraph, verdict.lines)),
        *_format_tables(traffic.questions, estimates),
        "\n".join(format_paragraph(f"- {note}") for note in (*notes, *ASSUMPTIONS)),
    ]
    print("\n\n".join(blocks))
    return 0


def _read_inputs(options: argparse.Namespace) -> tuple[Traffic, Timings, tuple[str, ...]]:
    """Flags, then a probe, then ``/metrics``, then what is assumed; with notes on these."""
    # Before a probe, so that a mistake in its name is answered at once.
    state = None if options.state is None else load_state(options.state)
    flags = vars(options)
    sizes = {name: flags[name] for name in Traffic.model_fields if name in flags}
    times = {name: flags[name] / 1000 for name in Timings.model_fields if name in flags}
    if options.no_prefix_caching:
        sizes["block"] = 0
    if options.layer_ms is not None:
        times["prefill"], request = fit_layers(options.layers, options.layer_ms)
        if request:
            times["request"] = times.get("request", 0.0) + request
    known = Known({**sizes, **times})
    if options.server is not None:
        known = _ask_server(options, known)
    elif options.probe is not None:
        fix = "give the address of a running server"
        raise ConfigError("inputs", [Problem("--probe", "needs --server", fix)])
    if state is not None:
        # Instead of the server's, but not of the flags'; K may depend on N, which was found now.
        values = dict(known.values)
        if "budget" not in sizes and "tokens" in values:
            values["budget"] = min(run_budget(state.budget, values["tokens"]), values["tokens"])
        if "core" not in values and "budget" in values and state.core is not None:
            values["core"] = state.core.tokens(values["budget"])
        known = Known(values, known.notes)
    known = complete(known)
    problems: list[Problem] = []
    models: list[Any] = []
    for model in (Traffic, Timings):
        try:
            fields = {name: v for name, v in known.values.items() if name in model.model_fields}
            models.append(model.model_validate(fields))
        except ValidationError as error:
            problems += flag_problems(error, _FLAGS)
    if problems:
        measured = "inputs (times and --tokens: also by --server URL --probe WIDTHxHEIGHT)"
        raise ConfigError(measured, problems)
    traffic, timings = models
    return traffic, timings, known.notes


def _ask_server(options: argparse.Namespace, known: Known) -> Known:
    def report(line: str) -> None:
        print(f"probe: {line}", file=sys.stderr, flush=True)

    with ServerClient(options.server) as client:
        with reporting_failures(client.url):
            metrics = client.read_metrics()
        if options.probe is not None:
            known = known.filled_from(probe_server(client, options.probe, options.model, report))
    if metrics is not None:
        known = known.filled_from(read_traffic(metrics))
        if options.probe is None:
            known = known.filled_from(read_times(metrics, known))
    return known


def _is_local(url: str | None) -> bool:
    here = (None, "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
    return url is None or urlsplit(url).hostname in here


def _format_tables(questions: float, estimates: Mapping[Way, Estimate]) -> list[str]:
    """What each way takes, and where its time to first token goes."""
    stock = estimates["stock"]
    head = ("", "first, ms", "another, ms", "another/first", "total, s", "gain")
    costs = [
        [
            way,
            _ms(ttft_of(estimate.first_question)),
            _ms(ttft_of(estimate.another_question)),
            f"{estimate.ratio:.2f}",
            f"{estimate.total(questions):.4g}",
            f"{stock.total(questions) / estimate.total(questions):.2f}x",
            "" if way == "stock" else str(estimate.advantage(stock)),
        ]
        for way, estimate in estimates.items()
    ]
    shares = [
        [f"{way}, {which}", *(f"{share:.0%}" for share in shares_of(parts).values())]
        for way, estimate in estimates.items()
        for which, parts in (
            ("first", estimate.first_question),
            ("another", estimate.another_question),
        )
    ]
    return [
        "Time to first token of two questions on an image, and the time of all questions:",
        format_table((*head, "cheaper than stock"), costs, "<>>>>><"),
        "Where the time to first token goes:",
        format_table(("", *stock.first_question), shares, "<>>>>>>"),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}" if seconds < 10 else f"{1000 * seconds:.0f}"


def _make_record(estimate: Estimate, stock: Estimate, questions: float) -> dict[str, object]:
    """One way to serve as JSON; times in seconds."""
    advantage = estimate.advantage(stock)
    upper = advantage.upper if math.isfinite(advantage.upper) else None
    parts = {
        name: {"ttft": ttft_of(seconds), "seconds": seconds, "shares": shares_of(seconds)}
        for name, seconds in (
            ("first", estimate.first_question),
            ("another", estimate.another_question),
        )
    }
    return {
        **parts,
        "another_of_first": estimate.ratio,
        "total_seconds": estimate.total(questions),
        "gain": stock.total(questions) / estimate.total(questions),
        # Questions an image; null: no bound, and in place of both: never.
        "cheaper_than_stock": None
        if advantage == NEVER
        else {"from": advantage.lower, "to": upper},
        "mean_question": estimate.mean_parts(questions),
    }


COMMAND = Command(
    "say which kind of state pays for your traffic, and whether pruning helps at all",
    _arguments,
    _run,
    epilog="Example: vllm-autoprune advise --questions 4 --server http://localhost:8000 "
    "--probe 1024x768. Formulas and what to do: docs/choosing.md.",
)
