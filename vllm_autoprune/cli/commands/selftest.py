"""`selftest`: serve tiny random models of the backbones here, and check the results."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_table
from vllm_autoprune.selftest.backbones import BUILDERS, NEEDED_PACKAGES
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

_GPU_NAMES = " and ".join(GPU_BACKBONES)

GPU_SECONDS = 420
"""Seconds that ``--gpu`` may take: machines with a GPU are often lent for minutes."""

LEAST_SECONDS = 60.0
"""Seconds within which no backbone is started any more."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "backbones", nargs="*", metavar="BACKBONE", help=f"of: {', '.join(BUILDERS)} (default: all)"
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
        f"{_GPU_NAMES} on one runner, as far as {GPU_SECONDS // 60} minutes allow",
    )


def _run(options: argparse.Namespace) -> int:
    if unknown := [name for name in options.backbones if name not in BUILDERS]:
        known = ", ".join(BUILDERS)
        print(f"no such backbone: {', '.join(unknown)}; use: {known}", file=sys.stderr)
        return 2
    if options.gpu:
        return _run_on_gpu(options)
    available = available_runners()
    runners = _select_runners(options.runner, available)
    if absent := [runner for runner in runners if runner not in available]:
        print(f"no model runner {', '.join(absent)} here: {_NO_V2}", file=sys.stderr)
        return 2
    left_out = {} if options.backbones else _find_missing_packages()
    results = {
        name: _check_backbone(name, runners, not options.json)
        for name in options.backbones or BUILDERS
        if name not in left_out
    }
    missing = "" if "v2" in available else f" ({_NO_V2})"
    return _print_results(options.json, {}, True, "", results, runners, left_out, missing)


def _run_on_gpu(options: argparse.Namespace) -> int:
    device = find_gpu()
    if device is None:
        print("no CUDA device here; `selftest` without --gpu needs none", file=sys.stderr)
        return 2
    deadline = time.monotonic() + GPU_SECONDS
    kernel, selections = check_kernel(device), list(check_selections(device))
    results: dict[str, Mapping[str, Verdicts]] = {}
    left_out: dict[str, str] = {}
    runners: tuple[str, ...] = ()
    names: list[str] = options.backbones or list(GPU_BACKBONES)
    if importlib.util.find_spec("vllm") is None:
        left_out = dict.fromkeys(names, "vLLM is not installed")
    else:
        runners = _select_runners(options.runner, available_runners()[-1:])
    for name in names if runners else ():
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS * len(runners):
            left_out[name] = "no time left"
        else:
            results[name] = _check_backbone(name, runners, not options.json, left / len(runners))
    record = {
        "device": describe_device(device),
        "kernel": kernel,
        "selections": [asdict(one) for one in selections],
    }
    holds = not kernel and not any(one.wrong for one in selections)
    table = f"{record['device']}\n\n{_format_selections(kernel, selections)}\n"
    return _print_results(options.json, record, holds, table, results, runners, left_out)


def _print_results(
    json: bool,
    record: Mapping[str, object],
    holds: bool,
    table: str,
    results: Results,
    runners: Sequence[str],
    left_out: Mapping[str, str],
    missing: str = "",
) -> int:
    """Print what was found, after the ``record`` or ``table`` of selections; the exit status."""
    holds = holds and not any(
        message
        for by_runner in results.values()
        for verdicts in by_runner.values()
        for message in verdicts.values()
    )
    if json:
        found = {"runners": runners, "found": results, "left_out": left_out}
        print(as_json({"holds": holds, **record, **found}))
        return 0 if holds else 1
    if table:
        print(table)
    if results:
        print(f"vLLM's model runner {' and '.join(runners)}{missing}\n")
        print(_format_results(results, runners) + "\n")
    for name, reason in left_out.items():
        print(f"{name}: not served, {reason}")
    passed = "All checks that were run passed." if table or left_out else "All checks passed."
    print(passed if holds else "Some checks failed: see above.")
    return 0 if holds else 1


def _find_missing_packages() -> dict[str, str]:
    """Backbones whose processors need a package that is not installed -> the reason."""
    return {
        name: f"its processor needs the package {package}: pip install {package}"
        for name, package in NEEDED_PACKAGES.items()
        if importlib.util.find_spec(package) is None
    }


def _format_selections(kernel: str, selections: Sequence[SelectionResult]) -> str:
    """A table with a line for each state, and one line for each that failed."""
    rows = [[KERNEL, "-", "-", "no" if kernel else "yes"]]
    rows += [
        [one.name, f"{one.share:.0%}", f"{1000 * one.seconds:.2f}", "no" if one.wrong else "yes"]
        for one in selections
    ]
    lines = [format_table(("selection", "as on the host", "ms", "holds"), rows)]
    lines += [f"{KERNEL}: {kernel}"] if kernel else []
    lines += [f"{one.name}: {one.wrong}" for one in selections if one.wrong]
    return "\n".join(lines)


def _select_runners(runner: str | None, available: tuple[str, ...]) -> tuple[str, ...]:
    if runner is None:
        return available
    return tuple(RUNNERS) if runner == BOTH else (runner,)


_NO_V2 = "V2 needs Triton, and vLLM finds no Triton that it can use"


def _check_backbone(
    name: str, runners: Sequence[str], progress: bool, timeout: float = TIMEOUT
) -> dict[str, Verdicts]:
    """Verdicts on one backbone under each runner, and on both together."""
    reports: dict[str, Report] = {}
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
            reports[runner] = report
        if progress:
            print(f"{name}, {runner}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if len(reports) == len(RUNNERS):
        verdicts[BOTH] = {AGREE: runners_agree(*reports.values())}
    return verdicts


def _format_results(results: Results, runners: Sequence[str]) -> str:
    """A table with a column for each backbone, and one line for each failed check."""
    checks = (SERVED, *CHECKS, *((AGREE,) if len(runners) > 1 else ()))
    rows = [[_label(check), *(_cell(by, check) for by in results.values())] for check in checks]
    lines = [format_table(["check", *results], rows)]
    for name, by in results.items():
        for runner, verdicts in by.items():
            lines += [
                f"{name}, {runner}, {_label(c)}: {wrong}" for c, wrong in verdicts.items() if wrong
            ]
    return "\n".join(lines)


def _cell(by: Mapping[str, Verdicts], check: str) -> str:
    """``yes``, ``no`` with the runners that fail, or ``-`` if it was not checked."""
    seen = {runner: verdicts[check] for runner, verdicts in by.items() if check in verdicts}
    broken = [runner for runner, wrong in seen.items() if wrong]
    if broken:
        return f"no ({', '.join(broken)})" if len(by) > 1 else "no"
    return "yes" if seen else "-"


def _label(check: str) -> str:
    return check.replace("_s_", "'s ").replace("_", " ")


COMMAND = Command(
    "serve tiny models of all backbones but LLaVA-1.5 here, and check the results", _arguments, _run
)
