"""`doctor`: whether this installation can serve.

Every check also works where the packages it looks for are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from vllm_autoprune import __version__
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_table
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.ops.dtype import SERVE_FLOAT32, SLOW_BFLOAT16, choose_dtype
from vllm_autoprune.serving.compat import require_vllm, uses_rust_frontend, vllm_version
from vllm_autoprune.serving.hooks import HOOKS, find_missing_names
from vllm_autoprune.serving.plugin import DISABLE, disabled
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize

Status = Literal["ok", "warn", "fail"]

GROUP, ENTRY = "vllm.general_plugins", "autoprune"
_LEVEL = "VLLM_LOGGING_LEVEL"
_SHOWN = 6
_LOWEST = {"transformers": Version("5.16"), "pydantic": Version("2.12")}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; ``fix`` is empty if nothing needs fixing."""

    what: str
    status: Status
    detail: str
    fix: str = ""


def examine(text_tower: str | None = None) -> tuple[Finding, ...]:
    """All findings, in the order in which a server would fail on them."""
    return tuple(
        finding
        for part in (
            _versions(),
            _device(),
            _plugin(),
            _hooks(),
            _tower(text_tower),
            _states(),
        )
        for finding in part
    )


def _versions() -> Iterator[Finding]:
    yield Finding("vllm-autoprune", "ok", __version__)
    old = sys.version_info < (3, 11)
    python = platform.python_version()
    yield Finding("python", "fail" if old else "ok", python, "use 3.11 or newer" if old else "")
    try:
        require_vllm()
        yield Finding("vllm", "ok", str(vllm_version()))
    except ConfigError as error:
        (problem,) = error.problems
        yield Finding("vllm", "fail", problem.what, problem.fix)
    for name in ("torch", *_LOWEST):
        yield _package_version(name)


def _package_version(name: str) -> Finding:
    lowest = _LOWEST.get(name)
    requirement = name if lowest is None else f"'{name}>={lowest}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", f"pip install {requirement}")
    if lowest is not None and Version(version) < lowest:
        return Finding(name, "fail", f"{version} is too old", f"pip install {requirement}")
    return Finding(name, "ok", version)


def _device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        yield Finding("device", "warn", torch.cuda.get_device_name(0), "untested on GPUs so far")
    else:
        threads = torch.get_num_threads()
        yield Finding("device", "ok", f"CPU, {threads} threads; no GPU is seen")
        if choose_dtype() == "float32":
            yield Finding("dtype", "warn", SLOW_BFLOAT16, SERVE_FLOAT32)


def _plugin() -> Iterator[Finding]:
    entry_points = importlib.metadata.entry_points(group=GROUP, name=ENTRY)
    if entry_points:
        yield Finding("entry point", "ok", f"{GROUP}: {ENTRY} = {next(iter(entry_points)).value}")
    else:
        fix = "from a checkout, install the package into this environment: pip install --no-deps ."
        yield Finding("entry point", "fail", f"{GROUP} has no {ENTRY!r}", fix)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY not in allowed.split(","):
        what = f"VLLM_PLUGINS={allowed} leaves the plugin out"
        yield Finding("environment", "fail", what, f"add {ENTRY} to it, or unset it")
    if disabled():
        yield Finding("environment", "fail", f"{DISABLE} turns the plugin off", "unset it")
    if uses_rust_frontend():
        what = "VLLM_USE_RUST_FRONTEND bypasses the plugin's image processors"
        yield Finding("environment", "fail", what, "unset it")


def _hooks() -> Iterator[Finding]:
    try:
        vllm_version()
    except ConfigError:
        yield Finding("hooks", "fail", "not checked: vLLM is not installed", "install vLLM")
        return
    with _quiet_vllm():
        lost = [(hook, names) for hook in HOOKS if (names := find_missing_names(hook))]
    for hook, names in lost:
        what = f"{hook.used_by}: vLLM has no {', '.join(names)}"
        yield Finding("hooks", "fail", what, "install a supported version of vLLM")
    total = sum(len(hook.names) for hook in HOOKS)
    if not lost:
        yield Finding("hooks", "ok", f"all {total} names that the plugin uses exist")


@contextmanager
def _quiet_vllm() -> Iterator[None]:
    """Hide vLLM's log messages during its import, so that the report stays on one screen."""
    level = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = level or "ERROR"
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
        if level is None:
            del os.environ[_LEVEL]


def _tower(path: str | None) -> Iterator[Finding]:
    if path is None:
        what = "none: relevance uses the language model's input embeddings"
        yield Finding("text tower", "ok", what)
        return
    try:
        tower = read_text_tower(path)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding("text tower", "fail", problem.what, problem.fix)
    except ImportError as error:
        yield Finding("text tower", "fail", f"cannot be read: {error}", "install transformers")
    else:
        sign = "+1" if tower.sign > 0 else "-1"
        what = f"{tower.width} wide, {tower.segment} tokens a segment, sign {sign}: {tower.reason}"
        yield Finding("text tower", "ok", what)


def _states() -> Iterator[Finding]:
    names = sorted(shipped_states())
    if not names:
        fix = "install the package anew: its states lie in vllm_autoprune/policies"
        yield Finding("shipped states", "fail", "none found", fix)
        return
    invalid = []
    for name in names:
        try:
            materialize(load_state(name))
        except AutopruneError:
            invalid.append(name)
    if invalid:
        fix = f"see: vllm-autoprune validate {' '.join(invalid)}"
        yield Finding("shipped states", "fail", f"{len(invalid)} of {len(names)} not valid", fix)
        return
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    # Safety checks are left to `validate`, because they take half a minute.
    yield Finding("shipped states", "ok", f"{len(names)} load and materialize: {shown}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-tower",
        metavar="PATH|HF_ID",
        help="CLIP checkpoint given to `vllm serve --autoprune-text-tower`",
    )


def _run(options: argparse.Namespace) -> int:
    findings = examine(options.text_tower)
    able = all(finding.status != "fail" for finding in findings)
    if options.json:
        records = [dataclasses.asdict(finding) for finding in findings]
        print(as_json({"can_serve": able, "findings": records}))
    else:
        print(_format_findings(findings))
        print("\nThis installation can serve." if able else "\nThis installation cannot serve yet.")
    return 0 if able else 1


def _format_findings(findings: tuple[Finding, ...]) -> str:
    rows = [[f.status, f.what, f"{f.detail} -> {f.fix}" if f.fix else f.detail] for f in findings]
    return format_table(["", "check", "result"], rows, wrap=WIDTH)


COMMAND = Command("check whether this installation can serve", _arguments, _run)
