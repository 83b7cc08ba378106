"""`advise`: which kind of state pays for a traffic, from given or measured times."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_autoprune.advice.model import estimate_ways, fit_layers
from vllm_autoprune.advice.observation import Observation, complete
from vllm_autoprune.advice.verdict import judge
from vllm_autoprune.cli.advice_output import Advice, advice_record, format_advice
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.ops.dtype import SERVE_FLOAT32, SLOW_BFLOAT16, choose_dtype

if TYPE_CHECKING:
    from vllm_autoprune.tpdsl.states.state import PruningState


def _arguments(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--questions", type=float, metavar="Q", help="mean number of questions on one image"
    )
    traffic.add_argument("--tokens", type=int, metavar="N", help="visual tokens of an image")
    traffic.add_argument("--budget", type=int, metavar="K", help="kept tokens (default: N / 9)")
    traffic.add_argument(
        "--core", type=int, metavar="K_c", help="core tokens of a split (default: 3/4 of K)"
    )
    traffic.add_argument(
        "--state", metavar="STATE", help="read --budget and --core from a state, by file or name"
    )
    traffic.add_argument(
        "--template", type=int, metavar="T", help="text tokens before the image (default 0)"
    )
    traffic.add_argument(
        "--prompt", type=int, metavar="U", help="text tokens behind the image (default 32)"
    )
    traffic.add_argument("--answer", type=int, metavar="A", help="answer tokens (default 64)")
    traffic.add_argument(
        "--block-size", type=int, metavar="b", help="tokens of a KV block (default 16)"
    )
    traffic.add_argument(
        "--no-prefix-caching", action="store_true", help="the server keeps no prefix cache"
    )
    times = parser.add_argument_group("measured times, milliseconds")
    for flag, text in (
        ("--decode-image-ms", "fetching and decoding one image"),
        ("--processor-ms", "the image processor, one image"),
        ("--tower-ms", "vision tower and projector, one image"),
        ("--selection-ms", "one selection"),
        ("--request-ms", "what a request takes however long its prompt is"),
        ("--prefill-ms-per-token", "prefill of one token, all layers"),
        ("--decode-ms", "one decoded token"),
    ):
        times.add_argument(flag, type=float, metavar="MS", help=text)
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
    server.add_argument(
        "--server", metavar="URL", help="read what is not given from its /metrics; with an API "
        "key in VLLM_API_KEY"
    )  # fmt: skip
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
        point = int(tokens), float(milliseconds) / 1000
        if point[0] >= 1 and 0 < point[1] < math.inf:
            return point
    raise argparse.ArgumentTypeError(f"{text!r} is not TOKENS=MS, such as 341=805.5")


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    with contextlib.suppress(ValueError):
        size = int(width), int(height)
        if min(size) >= 1:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 1024x768")


def _run(options: argparse.Namespace) -> int:
    # Before a probe, so that a mistake in its name is answered at once.
    state = None if options.state is None else _load_state(options.state)
    known = _read_flags(options)
    if options.server is not None:
        known = _ask_server(options, known)
    elif options.probe is not None:
        fix = "give the address of a running server"
        raise ConfigError("inputs", [Problem("--probe", "needs --server", fix)])
    if state is not None:
        known = _apply_state(state, options, known)
    traffic, timings, notes = complete(known)
    if _is_local(options.server) and choose_dtype() == "float32":
        notes += (f"If the server runs in bfloat16 here: {SLOW_BFLOAT16} -> {SERVE_FLOAT32}.",)
    estimates = estimate_ways(traffic, timings)
    advice = Advice(traffic, timings, estimates, judge(traffic, estimates), notes)
    print(as_json(advice_record(advice)) if options.json else format_advice(advice))
    return 0


def _is_local(url: str | None) -> bool:
    here = (None, "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
    return url is None or urlsplit(url).hostname in here


def _read_flags(options: argparse.Namespace) -> Observation:
    prefill, layers_request = _seconds(options.prefill_ms_per_token), 0.0
    if options.layer_ms is not None:
        if options.layers is None or options.layers < 1:
            fix = "give the number of layers of the language model"
            raise ConfigError("inputs", [Problem("--layer-ms", "needs --layers", fix)])
        prefill, layers_request = fit_layers(options.layers, options.layer_ms)
    request = _seconds(options.request_ms)
    if layers_request:
        request = layers_request + (request or 0.0)
    return Observation(
        questions=options.questions,
        tokens=options.tokens,
        budget=options.budget,
        core=options.core,
        template=options.template,
        prompt=options.prompt,
        answer=options.answer,
        block=0 if options.no_prefix_caching else options.block_size,
        tower=_seconds(options.tower_ms),
        prefill=prefill,
        decode_image=_seconds(options.decode_image_ms),
        processor=_seconds(options.processor_ms),
        selection=_seconds(options.selection_ms),
        request=request,
        decode=_seconds(options.decode_ms),
    )


def _load_state(reference: str) -> PruningState:
    from vllm_autoprune.tpdsl.states.load import load_state

    return load_state(reference)


def _apply_state(
    state: PruningState, options: argparse.Namespace, known: Observation
) -> Observation:
    """K and K_c by a state instead of the server's, where the flags do not say them.

    K may depend on N, which a probe or ``/metrics`` may have found.
    """
    from vllm_autoprune.tpdsl.atoms.budget import run_budget

    budget, core = known.budget, known.core
    if options.budget is None and known.tokens is not None:
        budget = min(run_budget(state.budget, known.tokens), known.tokens)
    if core is None and budget is not None and state.core is not None:
        core = state.core.tokens(budget)
    return known.model_copy(update={"budget": budget, "core": core})


def _ask_server(options: argparse.Namespace, known: Observation) -> Observation:
    from vllm_autoprune.advice.probe import probe_server
    from vllm_autoprune.advice.server_client import ServerClient
    from vllm_autoprune.advice.server_metrics import read_times, read_traffic

    key = os.environ.get("VLLM_API_KEY")
    with ServerClient(options.server, options.model, key) as client:
        metrics = client.read_metrics()
        if options.probe is not None:
            known = known.filled_from(probe_server(client, options.probe, report=_report))
    if metrics is not None:
        known = known.filled_from(read_traffic(metrics))
        if options.probe is None:
            known = known.filled_from(read_times(metrics, known))
    return known


def _report(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


COMMAND = Command(
    "say which kind of state pays for your traffic, and whether pruning helps at all",
    _arguments,
    _run,
    epilog="Example: vllm-autoprune advise --questions 4 --server http://localhost:8000 "
    "--probe 1024x768. Formulas and what to do: docs/choosing.md.",
)
