"""`doctor`: whether this installation can serve, and if not, how to fix it."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from packaging.version import Version

from vllm_autoprune import __version__
from vllm_autoprune.backbones import read_config
from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import format_table, print_result
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.ops.dtype import SERVE_FLOAT32, SLOW_BFLOAT16, choose_dtype
from vllm_autoprune.serving.compat import (
    collect_hooks,
    require_vllm,
    reuses_memory_plan,
    uses_rust_frontend,
    vllm_version,
)
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.serving.plugin import DISABLE, disabled
from vllm_autoprune.text_tower import read_text_tower
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize

_IMAGE = (1024, 1024)
"""Pixels of an image whose tokens are counted."""

_GROUP = "vllm.general_plugins"
_ENTRY = "autoprune"
_LOWEST = {"torch": "2", "transformers": "5.16", "pydantic": "2.12"}


@dataclass(frozen=True)
class _Finding:
    """Result of a check; ``status`` is ``ok``, ``warn`` or ``fail``."""

    what: str
    status: str
    detail: str
    fix: str


_Check = Callable[[], Iterator[_Finding]]


def _judge(what: str, detail: str, fix: str = "", severity: str = "fail") -> _Finding:
    """A finding of this severity where there is something to fix, otherwise ``ok``."""
    return _Finding(what, severity if fix else "ok", detail, fix)


def _run_check(what: str, check: _Check, severity: str = "fail") -> Iterator[_Finding]:
    """The findings of a check, and one for each problem that it raises."""
    try:
        yield from check()
    except ConfigError as error:
        for problem in error.problems:
            yield _judge(what, problem.what, problem.fix, severity)
    except ImportError as error:
        detail = f"cannot be read: {error}"
        yield _judge(what, detail, f"install {error.name}", severity)


def _check_versions() -> Iterator[_Finding]:
    yield _judge("vllm-autoprune", __version__)
    is_old = sys.version_info < (3, 11)
    yield _judge(
        "python", platform.python_version(), "use 3.11 or newer" if is_old else ""
    )


def _check_vllm() -> Iterator[_Finding]:
    require_vllm()
    yield _judge("vllm", str(vllm_version()))


def _check_dependencies() -> Iterator[_Finding]:
    for name, lowest in _LOWEST.items():
        fix = f"pip install '{name}>={lowest}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield _judge(name, "not installed", fix)
        else:
            is_old = Version(version) < Version(lowest)
            yield _judge(name, version, fix if is_old else "")


def _check_device() -> Iterator[_Finding]:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        yield _judge("device", name, "untested on GPUs so far", "warn")
        return
    yield _judge("device", f"CPU, {torch.get_num_threads()} threads; no GPU is seen")
    if choose_dtype() == "float32":
        yield _judge("dtype", SLOW_BFLOAT16, SERVE_FLOAT32, "warn")


def _check_entry_point() -> Iterator[_Finding]:
    for entry in importlib.metadata.entry_points(group=_GROUP, name=_ENTRY):
        yield _judge("entry point", f"{_GROUP}: {_ENTRY} = {entry.value}")
        return
    fix = "from a checkout, install the package into this environment: pip install --no-deps ."
    yield _judge("entry point", f"{_GROUP} has no {_ENTRY!r}", fix)


def _check_environment() -> Iterator[_Finding]:
    """Variables that keep vLLM from pruning; nothing where there is none."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _ENTRY not in plugins.split(","):
        detail = f"VLLM_PLUGINS={plugins} leaves the plugin out"
        yield _judge("environment", detail, f"add {_ENTRY} to it, or unset it")
    for is_set, detail in (
        (disabled(), f"{DISABLE} turns the plugin off"),
        (
            uses_rust_frontend(),
            "VLLM_USE_RUST_FRONTEND bypasses the plugin's image processors",
        ),
        (
            reuses_memory_plan(),
            "VLLM_ENABLE_STARTUP_PLAN reuses the memory of other states",
        ),
    ):
        if is_set:
            yield _judge("environment", detail, "unset it")


def _check_hooks() -> Iterator[_Finding]:
    """Whether vLLM has the names that the plugin uses."""
    # What vLLM logs during its import would push the report off the screen.
    logging.disable(logging.ERROR)
    try:
        vllm_version()
        hooks, problems = collect_hooks()
        missing = [(hook, hook.find_missing()) for hook in hooks]
    except ConfigError:
        yield _judge("hooks", "not checked: vLLM is not installed", "install vLLM")
        return
    finally:
        logging.disable(logging.NOTSET)
    for problem in problems:
        yield _judge("hooks", f"{problem.where} {problem.what}", problem.fix)
    for hook, names in missing:
        if names:
            detail = f"{hook.used_by}: vLLM has no {', '.join(names)}"
            yield _judge("hooks", detail, "install a supported version of vLLM")
    if not problems and not any(names for _, names in missing):
        total = sum(len(hook.names) for hook in hooks)
        yield _judge("hooks", f"all {total} names that the plugin uses exist")


def _check_model(model: str) -> Iterator[_Finding]:
    """Whether a model is served pruned, its first state, and N of an image."""
    backbone = require_served(read_config(model))
    yield _judge("model", f"{backbone.stock}: served as {backbone.name}")
    flags = f"--autoprune-state {backbone.state} --autoprune-budget {backbone.budget}"
    yield _judge("state", f"start with {flags}, and measure: vllm-autoprune eval")
    yield from _run_check("tokens", partial(_check_tokens, model), "warn")


def _check_tokens(model: str) -> Iterator[_Finding]:
    from vllm_autoprune.checkpoint import count_tokens  # not for other commands

    width, height = _IMAGE
    count = count_tokens(model, width, height)
    yield _judge("tokens", f"N = {count.tokens} of {width} x {height} pixels")


def _check_text_tower(path: str | None) -> Iterator[_Finding]:
    if path is None:
        detail = "none: relevance uses the language model's input embeddings"
        yield _judge("text tower", detail)
        return
    tower = read_text_tower(path)
    sizes = f"{tower.width} wide, {tower.segment} tokens a segment"
    yield _judge("text tower", f"{sizes}, sign {tower.sign:+.0f}: {tower.reason}")


def _check_shipped_states() -> Iterator[_Finding]:
    """Whether they load; their safety checks, of half a minute, are left to `validate`."""
    names = sorted(shipped_states())
    invalid = list[str]()
    for name in names:
        try:
            materialize(load_state(name))
        except AutopruneError:
            invalid.append(name)
    fix = ""
    if not names:
        fix = "install the package anew: its states lie in vllm_autoprune/policies"
    elif invalid:
        fix = f"see: vllm-autoprune validate {' '.join(invalid)}"
    detail = f"{len(names) - len(invalid)} of {len(names)} load"
    yield _judge("shipped states", detail, fix)


@command(
    "doctor",
    argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a checkpoint, or its id on the Hub",
    ),
    argument(
        "--text-tower",
        metavar="PATH|HF_ID",
        help="CLIP checkpoint given to `vllm serve --autoprune-text-tower`",
    ),
)
def _check_installation(options: argparse.Namespace) -> int:
    """Check whether this installation can serve, and whether it can serve a model pruned."""
    # In the order in which a server would fail on them.
    checks: list[tuple[str, _Check]] = [
        ("versions", _check_versions),
        ("vllm", _check_vllm),
        ("dependencies", _check_dependencies),
        ("device", _check_device),
        ("entry point", _check_entry_point),
        ("environment", _check_environment),
        ("hooks", _check_hooks),
    ]
    if options.model is not None:
        checks.append(("model", partial(_check_model, options.model)))
    checks += [
        ("text tower", partial(_check_text_tower, options.text_tower)),
        ("shipped states", _check_shipped_states),
    ]
    findings = [
        finding for what, check in checks for finding in _run_check(what, check)
    ]
    is_able = all(finding.status != "fail" for finding in findings)
    rows = [
        [f.status, f.what, f"{f.detail} -> {f.fix}" if f.fix else f.detail]
        for f in findings
    ]
    verdict = "This installation cannot serve yet."
    if is_able:
        verdict = "This installation can serve."
    print_result(
        options,
        {"can_serve": is_able, "findings": [asdict(finding) for finding in findings]},
        format_table(["", "check", "result"], rows, wrap=True),
        verdict,
    )
    return 0 if is_able else 1
