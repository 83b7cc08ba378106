"""`selftest`: serve tiny random models of the backbones here, and check the results."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import print_result
from vllm_autoprune.errors import ConfigError
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
    SelftestError,
    available_runners,
    run_backbone,
)

_BOTH = "both"

GPU_BACKBONES = ("llava_next", "qwen3_vl")
"""One backbone with tiles and a text tower's attention, one with M-RoPE and deepstack."""

GPU_SECONDS = 420
"""Seconds that ``--gpu`` may take: machines with a GPU are often lent for minutes."""

_MINIMUM_SECONDS = 60.0
"""Remaining seconds below which no further backbone is started."""

_NO_V2 = "V2 needs Triton, and vLLM finds no Triton that it can use"

_Verdicts = Mapping[str, str]
"""Name of a check -> what is wrong; an empty text if the check passes."""


def _format_line(text: str, wrong: str) -> str:
    return f"FAIL {text}: {wrong}" if wrong else f"ok   {text}"


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
def _run_selftest(options: Namespace) -> int:
    """Serve tiny models of all backbones but LLaVA-1.5 here, and check the results."""
    unknown = [name for name in options.backbones if name not in TINY_MODELS]
    if unknown:
        raise ConfigError.of(
            ", ".join(unknown),
            "no such backbone",
            f"use: {', '.join(TINY_MODELS)}",
            subject="selftest",
        )
    names = options.backbones or (GPU_BACKBONES if options.gpu else [*TINY_MODELS])
    device = find_gpu() if options.gpu else None
    if options.gpu and device is None:
        fix = "run the selftest without it"
        raise ConfigError.of("--gpu", "no CUDA device here", fix, subject="selftest")
    available: Sequence[str] = ()
    runners: Sequence[str] = ()
    if options.gpu and importlib.util.find_spec("vllm") is None:
        left_out = dict.fromkeys(names, "vLLM is not installed")
    else:
        available = available_runners()
        runners = _choose_runners(options, available)
        left_out = {
            name: f"its processor needs the package {package}: pip install {package}"
            for name, package in NEEDED_PACKAGES.items()
            if name in names
            and not options.backbones
            and importlib.util.find_spec(package) is None
        }

    # Selections on the GPU come first, then backbones until the time is over.
    lines = list[str]()
    problems = list[str]()
    record: dict[str, object] = {}
    deadline = math.inf
    if device is not None:
        deadline = time.monotonic() + GPU_SECONDS
        record, results = _check_gpu(device)
        lines += [str(record["device"]), *(_format_line(*result) for result in results)]
        problems += [wrong for _, wrong in results if wrong]
    verdicts: dict[str, dict[str, _Verdicts]] = {}
    for name in names:
        seconds = deadline - time.monotonic()
        if name not in left_out and seconds < _MINIMUM_SECONDS * len(runners):
            left_out[name] = "no time left"
        if name in left_out:
            lines.append(f"     {name}: not served, {left_out[name]}")
            continue
        timeout = min(TIMEOUT, seconds / len(runners))
        verdicts[name] = _check_backbone(name, runners, timeout, quiet=options.json)
        for runner, checks in verdicts[name].items():
            failed = [f"{check}: {wrong}" for check, wrong in checks.items() if wrong]
            problems += failed
            passed = len(checks) - len(failed)
            text = f"{name}, {runner}: {passed} of {len(checks)} checks hold"
            lines.append(_format_line(text, "; ".join(failed)))

    holds = not problems
    if verdicts and device is None and "v2" not in available:
        lines.append(_NO_V2)
    which = " that were run" if record or left_out else ""
    verdict = f"All checks{which} passed."
    lines.append(verdict if holds else "Some checks failed: see above.")
    record |= {"runners": runners, "found": verdicts, "left_out": left_out}
    print_result(options, {"holds": holds, **record}, "\n".join(lines))
    return 0 if holds else 1


def _choose_runners(options: Namespace, available: Sequence[str]) -> Sequence[str]:
    """The model runners to use; raises :class:`ConfigError` for one that vLLM lacks here."""
    if options.runner is None:
        return available[-1:] if options.gpu else available
    runners = [*RUNNERS] if options.runner == _BOTH else [options.runner]
    absent = [runner for runner in runners if runner not in available]
    if absent:
        what = f"no model runner {', '.join(absent)} here"
        raise ConfigError.of("--runner", what, _NO_V2, subject="selftest")
    return runners


def _check_gpu(
    device: torch.device,
) -> tuple[dict[str, object], list[tuple[str, str]]]:
    """Check the kernel and selections on a device.

    Returns a record for JSON, and for each check what it did and what is wrong.
    """
    kernel = check_kernel(device)
    selections = list(check_selections(device))
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    results = [(KERNEL, kernel)]
    for result in selections:
        milliseconds = 1000 * result.seconds
        text = (
            f"{result.name}: {result.share:.0%} as on the host, {milliseconds:.2f} ms"
        )
        results.append((text, result.wrong))
    record: dict[str, object] = {
        "device": f"{name}, torch {torch.__version__}",
        "kernel": kernel,
        "selections": [asdict(result) for result in selections],
    }
    return record, results


def _check_backbone(
    name: str, runners: Sequence[str], timeout: float, quiet: bool
) -> dict[str, _Verdicts]:
    """Verdicts by model runner, and, if all runners served, on whether their results agree."""
    verdicts: dict[str, _Verdicts] = {}
    reports = []
    for runner in runners:
        start = time.monotonic()
        try:
            report = run_backbone(name, RUNNERS[runner], timeout)
        except SelftestError as error:
            (problem,) = error.problems
            # The message of the error would join the lines of the process's output.
            verdicts[runner] = {"served": f"{problem.where} {problem.what}"}
        else:
            served = ""
            if report.runner != runner:
                served = f"vLLM used {report.runner} instead"
            checks = {title: check(report) for title, check in CHECKS.items()}
            verdicts[runner] = {"served": served, **checks}
            reports.append(report)
        if not quiet:
            seconds = time.monotonic() - start
            print(f"{name}, {runner}: {seconds:.0f} s", file=sys.stderr)
    if len(reports) == len(RUNNERS):
        verdicts[_BOTH] = {runners_agree.__name__: runners_agree(*reports)}
    return verdicts
