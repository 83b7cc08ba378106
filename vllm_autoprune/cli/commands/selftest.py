"""`selftest`: serve tiny random models of the backbones here, and check the results."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from vllm_autoprune.cli.flags import Command
from vllm_autoprune.cli.output import as_json, format_table
from vllm_autoprune.selftest.backbones import NEEDED_PACKAGES, TINY_MODELS
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.device import (
    KERNEL,
    SelectionResult,
    check_kernel,
    check_selections,
    describe_device,
    find_gpu,
)
from vllm_autoprune.selftest.run import (
    RUNNERS,
    TIMEOUT,
    Report,
    SelftestError,
    available_runners,
    run_backbone,
)

Verdicts = Mapping[str, str]
"""Check -> the empty string if it passes, else what is wrong."""

Results = Mapping[str, Mapping[str, Verdicts]]
"""Backbone -> runner -> verdicts; "both" has the comparison of the two runners."""

BOTH = "both"
SERVED, AGREE = "served", runners_agree.__name__

GPU_BACKBONES = ("llava_next", "qwen3_vl")
"""One backbone with tiles and a text tower's attention, one with M-RoPE and deepstack."""

GPU_SECONDS = 420
"""Seconds that ``--gpu`` may take: machines with a GPU are often lent for minutes."""

_LEAST_SECONDS = 60.0
"""Seconds within which no backbone is started any more."""

_NO_V2 = "V2 needs Triton, and vLLM finds no Triton that it can use"


def _arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(TINY_MODELS)
    parser.add_argument(
        "backbones", nargs="*", metavar="BACKBONE", help=f"of: {known} (default: all)"
    )
    parser.add_argument(
        "--runner",
        choices=(*RUNNERS, BOTH),
        help="vLLM's model runner (default: both, or v1 where vLLM cannot run v2)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check selections on this machine's GPU, which needs no vLLM; then serve "
        f"{' and '.join(GPU_BACKBONES)} on one runner, as far as {GPU_SECONDS // 60} minutes allow",
    )


def _run(options: argparse.Namespace) -> int:
    names: Sequence[str] = options.backbones or (GPU_BACKBONES if options.gpu else [*TINY_MODELS])
    if unknown := [name for name in names if name not in TINY_MODELS]:
        return _refuse(f"no such backbone: {', '.join(unknown)}; use: {', '.join(TINY_MODELS)}")
    device, deadline = find_gpu() if options.gpu else None, math.inf
    if options.gpu and device is None:
        return _refuse("no CUDA device here; `selftest` without --gpu needs none")
    available = tuple[str, ...]()
    left_out: dict[str, str] = {}
    if options.gpu and importlib.util.find_spec("vllm") is None:
        left_out = dict.fromkeys(names, "vLLM is not installed")
    else:
        available = available_runners()
    runners = available[-1:] if options.gpu else available
    if available and options.runner is not None:
        runners = tuple(RUNNERS) if options.runner == BOTH else (options.runner,)
    if absent := [runner for runner in runners if runner not in available]:
        return _refuse(f"no model runner {', '.join(absent)} here: {_NO_V2}")
    for name, package in NEEDED_PACKAGES.items():
        if not options.backbones and name in names and importlib.util.find_spec(package) is None:
            left_out[name] = f"its processor needs the package {package}: pip install {package}"

    # Selections on the GPU, then the backbones in what is left of the time.
    record: dict[str, object] = {}
    table, problems = "", list[str]()
    if device is not None:
        deadline = time.monotonic() + GPU_SECONDS
        kernel, selections = check_kernel(device), list(check_selections(device))
        record = {
            "device": describe_device(device),
            "kernel": kernel,
            "selections": [asdict(selection) for selection in selections],
        }
        table = f"{record['device']}\n\n{_format_selections(kernel, selections)}\n"
        problems += [kernel, *(selection.wrong for selection in selections)]
    results: dict[str, Mapping[str, Verdicts]] = {}
    for name in names:
        seconds = deadline - time.monotonic()
        if name in left_out:
            continue
        if seconds < _LEAST_SECONDS * len(runners):
            left_out[name] = "no time left"
            continue
        timeout = min(TIMEOUT, seconds / len(runners))
        results[name] = _check_backbone(name, runners, not options.json, timeout)
        problems += (p for verdicts in results[name].values() for p in verdicts.values())

    holds = not any(problems)
    if options.json:
        served = {"runners": runners, "found": results, "left_out": left_out}
        print(as_json({"holds": holds, **record, **served}))
        return 0 if holds else 1
    if table:
        print(table)
    if results:
        missing = "" if device is not None or "v2" in available else f" ({_NO_V2})"
        print(f"vLLM's model runner {' and '.join(runners)}{missing}\n")
        print(_format_results(results, runners) + "\n")
    for name, reason in left_out.items():
        print(f"{name}: not served, {reason}")
    passed = "All checks that were run passed." if table or left_out else "All checks passed."
    print(passed if holds else "Some checks failed: see above.")
    return 0 if holds else 1


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _check_backbone(
    name: str, runners: Sequence[str], progress: bool, timeout: float
) -> dict[str, Verdicts]:
    """Verdicts on one backbone under each runner, and on both together."""
    reports: list[Report] = []
    verdicts: dict[str, Verdicts] = {}
    for runner in runners:
        start = time.monotonic()
        try:
            report = run_backbone(name, RUNNERS[runner], timeout)
        except SelftestError as error:
            verdicts[runner] = {SERVED: str(error)}
        else:
            other = "" if report.runner == runner else f"vLLM used {report.runner} instead"
            checks = {check: holds(report) for check, holds in CHECKS.items()}
            verdicts[runner] = {SERVED: other, **checks}
            reports.append(report)
        if progress:
            print(f"{name}, {runner}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if len(reports) == len(RUNNERS):
        verdicts[BOTH] = {AGREE: runners_agree(*reports)}
    return verdicts


def _format_selections(kernel: str, selections: Sequence[SelectionResult]) -> str:
    """A table with a line for each state, and one line for each that failed."""
    rows = [[KERNEL, "-", "-", "no" if kernel else "yes"]]
    for result in selections:
        verdict = "no" if result.wrong else "yes"
        rows.append([result.name, f"{result.share:.0%}", f"{1000 * result.seconds:.2f}", verdict])
    wrong = {KERNEL: kernel, **{result.name: result.wrong for result in selections}}
    lines = [format_table(("selection", "as on the host", "ms", "holds"), rows)]
    lines += [f"{name}: {problem}" for name, problem in wrong.items() if problem]
    return "\n".join(lines)


def _format_results(results: Results, runners: Sequence[str]) -> str:
    """A table with a column for each backbone, and one line for each failed check."""

    def cell(by: Mapping[str, Verdicts], check: str) -> str:
        """``yes``, ``no`` with the runners that fail, or ``-`` if it was not checked."""
        checked = {runner: verdicts[check] for runner, verdicts in by.items() if check in verdicts}
        broken = [runner for runner, wrong in checked.items() if wrong]
        if not broken:
            return "yes" if checked else "-"
        return f"no ({', '.join(broken)})" if len(by) > 1 else "no"

    def label(check: str) -> str:
        return check.replace("_s_", "'s ").replace("_", " ")

    checks = (SERVED, *CHECKS, *((AGREE,) if len(runners) > 1 else ()))
    rows = [[label(check), *(cell(by, check) for by in results.values())] for check in checks]
    lines = [format_table(["check", *results], rows)]
    lines += [
        f"{name}, {runner}, {label(check)}: {wrong}"
        for name, by in results.items()
        for runner, verdicts in by.items()
        for check, wrong in verdicts.items()
        if wrong
    ]
    return "\n".join(lines)


COMMAND = Command(
    "serve tiny models of all backbones but LLaVA-1.5 here, and check the results", _arguments, _run
)
