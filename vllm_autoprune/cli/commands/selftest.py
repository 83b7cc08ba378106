"""`selftest`: serve tiny random models of the backbones here, and check the results."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import print_result
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.selftest.backbones import NEEDED_PACKAGES, TINY_MODELS
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.device import (
    KERNEL,
    check_kernel,
    check_selections,
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

_BOTH = "both"

GPU_BACKBONES = ("llava_next", "qwen3_vl")
"""One backbone with tiles and a text tower's attention, one with M-RoPE and deepstack."""

GPU_SECONDS = 420
"""Seconds that ``--gpu`` may take: machines with a GPU are often lent for minutes."""

_LEAST_SECONDS = 60.0
"""Seconds within which no backbone is started any more."""

_NO_V2 = "V2 needs Triton, and vLLM finds no Triton that it can use"


@command(
    "selftest",
    argument(
        "backbones",
        nargs="*",
        metavar="BACKBONE",
        help=f"of: {', '.join(TINY_MODELS)} (default: all)",
    ),
    argument(
        "--runner",
        choices=(*RUNNERS, _BOTH),
        help="vLLM's model runner (default: both, or v1 where vLLM cannot run v2)",
    ),
    argument(
        "--gpu",
        action="store_true",
        help="check selections on this machine's GPU, which needs no vLLM; then serve "
        f"{' and '.join(GPU_BACKBONES)} on one runner, as far as {GPU_SECONDS // 60} minutes allow",
    ),
)
def _run_selftest(options: argparse.Namespace) -> int:  # noqa: C901, PLR0915
    """Serve tiny models of all backbones but LLaVA-1.5 here, and check the results."""
    names: Sequence[str] = options.backbones or (
        GPU_BACKBONES if options.gpu else [*TINY_MODELS]
    )
    if unknown := [name for name in names if name not in TINY_MODELS]:
        raise _refusal(
            ", ".join(unknown), "no such backbone", f"use: {', '.join(TINY_MODELS)}"
        )
    device = find_gpu() if options.gpu else None
    deadline = math.inf
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
        if (
            not options.backbones
            and name in names
            and importlib.util.find_spec(package) is None
        ):
            left_out[name] = (
                f"its processor needs the package {package}: pip install {package}"
            )

    # Selections on the GPU, then the backbones in what is left of the time.
    record: dict[str, object] = {}
    lines = list[str]()
    problems = list[str]()
    if device is not None:
        deadline = time.monotonic() + GPU_SECONDS
        kernel = check_kernel(device)
        selections = list(check_selections(device))
        gpu = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        )
        record = {
            "device": f"{gpu}, torch {torch.__version__}",
            "kernel": kernel,
            "selections": [asdict(selection) for selection in selections],
        }
        lines += [str(record["device"]), _format_line(KERNEL, kernel)]
        for each in selections:
            text = f"{each.name}: {each.share:.0%} as on the host, {1000 * each.seconds:.2f} ms"
            lines.append(_format_line(text, each.wrong))
        problems += [kernel, *(each.wrong for each in selections)]
    verdicts: dict[str, dict[str, dict[str, str]]] = {}
    for name in names:
        seconds = deadline - time.monotonic()
        if name not in left_out and seconds < _LEAST_SECONDS * len(runners):
            left_out[name] = "no time left"
        if name in left_out:
            lines.append(f"     {name}: not served, {left_out[name]}")
            continue
        timeout = min(TIMEOUT, seconds / len(runners))
        # What is wrong by check, under each runner and between the two.
        verdicts[name], reports = {}, list[Report]()
        for runner in runners:
            start = time.monotonic()
            try:
                report = run_backbone(name, RUNNERS[runner], timeout)
            except SelftestError as error:
                verdicts[name][runner] = {"served": str(error)}
            else:
                other = (
                    ""
                    if report.runner == runner
                    else f"vLLM used {report.runner} instead"
                )
                checks = {check: holds(report) for check, holds in CHECKS.items()}
                verdicts[name][runner] = {"served": other, **checks}
                reports.append(report)
            if not options.json:
                print(
                    f"{name}, {runner}: {time.monotonic() - start:.0f} s",
                    file=sys.stderr,
                )
        if len(reports) == len(RUNNERS):
            verdicts[name][_BOTH] = {runners_agree.__name__: runners_agree(*reports)}
        for runner, checks in verdicts[name].items():
            broken = {check: wrong for check, wrong in checks.items() if wrong}
            text = f"{name}, {runner}: {len(checks) - len(broken)} of {len(checks)} checks hold"
            lines.append(
                _format_line(text, "; ".join(f"{c}: {w}" for c, w in broken.items()))
            )
            problems += broken.values()

    holds = not any(problems)
    if verdicts and device is None and "v2" not in available:
        lines.append(_NO_V2)
    passed = (
        "All checks that were run passed."
        if record or left_out
        else "All checks passed."
    )
    lines.append(passed if holds else "Some checks failed: see above.")
    served = {"runners": runners, "found": verdicts, "left_out": left_out}
    print_result(options, {"holds": holds, **record, **served}, "\n".join(lines))
    return 0 if holds else 1


def _format_line(text: str, wrong: str) -> str:
    return f"FAIL {text}: {wrong}" if wrong else f"ok   {text}"


def _refusal(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("selftest", [Problem(where, what, fix)])
