"""`selftest`: serve tiny random models of the backbones here, and check the results."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from vllm_autoprune.cli.flags import command
from vllm_autoprune.cli.output import format_table, print_result
from vllm_autoprune.errors import ConfigError, Problem
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

_Verdicts = Mapping[str, Mapping[str, str]]
"""Runner -> check -> the empty string if it passes, else what is wrong; "both" has the comparison
of the two runners."""

_BOTH = "both"
_SERVED, _AGREE = "served", runners_agree.__name__

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
        choices=(*RUNNERS, _BOTH),
        help="vLLM's model runner (default: both, or v1 where vLLM cannot run v2)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check selections on this machine's GPU, which needs no vLLM; then serve "
        f"{' and '.join(GPU_BACKBONES)} on one runner, as far as {GPU_SECONDS // 60} minutes allow",
    )


@command(_arguments)
def selftest(options: argparse.Namespace) -> int:
    """Serve tiny models of all backbones but LLaVA-1.5 here, and check the results."""
    names: Sequence[str] = options.backbones or (GPU_BACKBONES if options.gpu else [*TINY_MODELS])
    if unknown := [name for name in names if name not in TINY_MODELS]:
        raise _refusal(", ".join(unknown), "no such backbone", f"use: {', '.join(TINY_MODELS)}")
    device, deadline = find_gpu() if options.gpu else None, math.inf
    if options.gpu and device is None:
        raise _refusal("--gpu", "no CUDA device here", "run the selftest without it")
    left_out: dict[str, str] = {}
    runners = available = tuple[str, ...]()
    if options.gpu and importlib.util.find_spec("vllm") is None:
        left_out = dict.fromkeys(names, "vLLM is not installed")
    else:
        available = available_runners()
        runners = available[-1:] if options.gpu else available
        if options.runner is not None:
            runners = tuple(RUNNERS) if options.runner == _BOTH else (options.runner,)
    if absent := [runner for runner in runners if runner not in available]:
        raise _refusal("--runner", f"no model runner {', '.join(absent)} here", _NO_V2)
    for name, package in NEEDED_PACKAGES.items():
        if not options.backbones and name in names and importlib.util.find_spec(package) is None:
            left_out[name] = f"its processor needs the package {package}: pip install {package}"

    # Selections on the GPU, then the backbones in what is left of the time.
    record: dict[str, object] = {}
    blocks, problems = list[str](), list[str]()
    if device is not None:
        deadline = time.monotonic() + GPU_SECONDS
        kernel, selections = check_kernel(device), list(check_selections(device))
        record = {
            "device": describe_device(device),
            "kernel": kernel,
            "selections": [asdict(selection) for selection in selections],
        }
        blocks += [str(record["device"]), _format_selections(kernel, selections)]
        problems += [kernel, *(selection.wrong for selection in selections)]
    results: dict[str, _Verdicts] = {}
    for name in names:
        seconds = deadline - time.monotonic()
        if name not in left_out and seconds < _LEAST_SECONDS * len(runners):
            left_out[name] = "no time left"
        if name in left_out:
            continue
        timeout = min(TIMEOUT, seconds / len(runners))
        results[name] = _check_backbone(name, runners, not options.json, timeout)
        problems += (wrong for checks in results[name].values() for wrong in checks.values())

    holds = not any(problems)
    if results:
        missing = "" if device is not None or "v2" in available else f" ({_NO_V2})"
        blocks.append(f"vLLM's model runner {' and '.join(runners)}{missing}")
        blocks.append(_format_results(results, runners))
    blocks += (f"{name}: not served, {reason}" for name, reason in left_out.items())
    passed = "All checks that were run passed." if record or left_out else "All checks passed."
    blocks.append(passed if holds else "Some checks failed: see above.")
    served = {"runners": runners, "found": results, "left_out": left_out}
    print_result(options, {"holds": holds, **record, **served}, *blocks)
    return 0 if holds else 1


def _refusal(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("selftest", [Problem(where, what, fix)])


def _check_backbone(
    name: str, runners: Sequence[str], progress: bool, timeout: float
) -> dict[str, Mapping[str, str]]:
    """Verdicts on one backbone under each runner, and on both together."""
    reports: list[Report] = []
    verdicts: dict[str, Mapping[str, str]] = {}
    for runner in runners:
        start = time.monotonic()
        try:
            report = run_backbone(name, RUNNERS[runner], timeout)
        except SelftestError as error:
            verdicts[runner] = {_SERVED: str(error)}
        else:
            other = "" if report.runner == runner else f"vLLM used {report.runner} instead"
            checks = {check: holds(report) for check, holds in CHECKS.items()}
            verdicts[runner] = {_SERVED: other, **checks}
            reports.append(report)
        if progress:
            print(f"{name}, {runner}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if len(reports) == len(RUNNERS):
        verdicts[_BOTH] = {_AGREE: runners_agree(*reports)}
    return verdicts


def _format_selections(kernel: str, selections: Sequence[SelectionResult]) -> str:
    """A table with a line for each state, and one line for each that failed."""
    rows: list[list[object]] = [[KERNEL, "-", "-", not kernel]]
    for result in selections:
        share, milliseconds = f"{result.share:.0%}", f"{1000 * result.seconds:.2f}"
        rows.append([result.name, share, milliseconds, not result.wrong])
    wrong = {KERNEL: kernel, **{result.name: result.wrong for result in selections}}
    lines = [format_table(("selection", "as on the host", "ms", "holds"), rows)]
    return "\n".join(lines + [f"{name}: {problem}" for name, problem in wrong.items() if problem])


def _format_results(results: Mapping[str, _Verdicts], runners: Sequence[str]) -> str:
    """A table with a column for each backbone, and one line for each failed check."""
    rows, failures = [], list[str]()
    for check in (_SERVED, *CHECKS, *((_AGREE,) if len(runners) > 1 else ())):
        label = check.replace("_s_", "'s ").replace("_", " ")
        cells = [label]
        for name, verdicts in results.items():
            by = {runner: checks[check] for runner, checks in verdicts.items() if check in checks}
            broken = [runner for runner, wrong in by.items() if wrong]
            # With the runners that fail, or "-" if it was not checked.
            failed = f"no ({', '.join(broken)})" if len(verdicts) > 1 else "no"
            cells.append(failed if broken else "yes" if by else "-")
            failures += (f"{name}, {runner}, {label}: {by[runner]}" for runner in broken)
        rows.append(cells)
    return "\n".join([format_table(["check", *results], rows), *failures])
