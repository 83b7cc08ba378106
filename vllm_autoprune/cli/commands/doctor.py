"""`doctor`: whether this installation can serve, and if not, how to fix it."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from packaging.version import Version

from vllm_autoprune import __version__
from vllm_autoprune.backbones import BACKBONE_SHAPES, read_config
from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import format_table, print_result
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.hub import HUB_MISSING
from vllm_autoprune.ops.dtype import SERVE_FLOAT32, SLOW_BFLOAT16, choose_dtype
from vllm_autoprune.serving.compat import (
    collect_hooks,
    require_vllm,
    reuses_memory_plan,
    uses_rust_frontend,
    vllm_version,
)
from vllm_autoprune.serving.models import (
    BACKBONES,
    find_architecture,
    refuse,
    require_served,
)
from vllm_autoprune.serving.plugin import DISABLE, disabled
from vllm_autoprune.text_tower import read_text_tower
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize

_IMAGE = (1024, 1024)
"""Pixels of an image whose tokens are counted."""

_GROUP = "vllm.general_plugins"
_ENTRY = "autoprune"
_LOWEST = {"torch": "2", "transformers": "5.16", "pydantic": "2.12"}


class _Finding(NamedTuple):
    """Result of a check; ``status`` is ``ok``, ``warn``, ``fail``, or ``open``: Hub not reached."""

    what: str
    status: str
    detail: str
    fix: str


_Results = Iterator[tuple[str, str, str]]
"""What was checked, what was found, and how to fix it; an empty fix means nothing is wrong."""


def _run_check(
    what: str,
    check: Callable[..., _Results],
    *arguments: object,
    severity: str = "fail",
) -> Iterator[_Finding]:
    """A finding for each result of a check, and for each problem that it raises."""
    try:
        for name, detail, fix in check(*arguments):
            yield _Finding(name, severity if fix else "ok", detail, fix)
    except ConfigError as error:
        for problem in error.problems:
            status = "open" if problem.kind == HUB_MISSING else severity
            yield _Finding(what, status, problem.what, problem.fix)
    except ImportError as error:
        fix = f"install {error.name}"
        yield _Finding(what, severity, f"cannot be read: {error}", fix)


def _check_versions() -> _Results:
    yield "vllm-autoprune", __version__, ""
    fix = "use 3.11 or newer" if sys.version_info < (3, 11) else ""
    yield "python", platform.python_version(), fix
    require_vllm()
    yield "vllm", str(vllm_version()), ""


def _check_packages() -> _Results:
    for name, lowest in _LOWEST.items():
        fix = f"pip install '{name}>={lowest}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed", fix
        else:
            yield name, version, fix if Version(version) < Version(lowest) else ""


def _check_device() -> _Results:
    if torch.cuda.is_available():
        yield "device", torch.cuda.get_device_name(0), "untested on GPUs so far"
        return
    yield "device", f"CPU, {torch.get_num_threads()} threads; no GPU is seen", ""
    if choose_dtype() == "float32":
        yield "dtype", SLOW_BFLOAT16, SERVE_FLOAT32


def _check_loading() -> _Results:
    """Whether vLLM finds the plugin, and which environment variables keep it from pruning."""
    entries = list(importlib.metadata.entry_points(group=_GROUP, name=_ENTRY))
    if entries:
        yield "entry point", f"{_GROUP}: {_ENTRY} = {entries[0].value}", ""
    else:
        fix = "from a checkout, install the package into this environment: pip install --no-deps ."
        yield "entry point", f"{_GROUP} has no {_ENTRY!r}", fix
    what = "environment"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _ENTRY not in plugins.split(","):
        detail = f"VLLM_PLUGINS={plugins} leaves the plugin out"
        yield what, detail, f"add {_ENTRY} to it, or unset it"
    if disabled():
        yield what, f"{DISABLE} turns the plugin off", "unset it"
    if uses_rust_frontend():
        detail = "VLLM_USE_RUST_FRONTEND bypasses the plugin's image processors"
        yield what, detail, "unset it"
    if reuses_memory_plan():
        detail = "VLLM_ENABLE_STARTUP_PLAN reuses the memory of other states"
        yield what, detail, "unset it"


def _check_hooks() -> _Results:
    """Whether vLLM has the names that the plugin uses."""
    # What vLLM logs during its import would push the report off the screen.
    logging.disable(logging.ERROR)
    try:
        vllm_version()
        hooks, problems = collect_hooks()
        missing = [(hook.used_by, hook.find_missing()) for hook in hooks]
    except ConfigError:
        yield "hooks", "not checked: vLLM is not installed", "install vLLM"
        return
    finally:
        logging.disable(logging.NOTSET)
    for problem in problems:
        yield "hooks", f"{problem.where} {problem.what}", problem.fix
    for used_by, names in missing:
        if names:
            detail = f"{used_by}: vLLM has no {', '.join(names)}"
            yield "hooks", detail, "install a supported version of vLLM"
    if not problems and not any(names for _, names in missing):
        total = sum(len(hook.names) for hook in hooks)
        yield "hooks", f"all {total} names that the plugin uses exist", ""


def _find_published(model: str) -> str | None:
    """Architecture of a published checkpoint whose files are not here and the Hub does not give.

    None if its config.json can be read; raises :class:`ConfigError` if nothing is known of it.
    """
    try:
        read_config(model)
    except ConfigError as error:
        architecture = find_architecture(model)
        if architecture is None or error.problems[0].kind != HUB_MISSING:
            raise
        return architecture
    return None


def _check_model(model: str) -> _Results:
    """Whether a model is served pruned, and with which state to begin."""
    architecture = _find_published(model)
    how = ""
    if architecture is None:
        backbone = require_served(read_config(model))
    elif architecture in BACKBONES:
        backbone = BACKBONES[architecture]
        how = ", by its id: the Hub was not asked for its config.json"
    else:
        raise ConfigError("cannot serve pruned", [refuse(architecture)])
    yield "model", f"{backbone.stock}: served as {backbone.name}{how}", ""
    flags = f"--autoprune-state {backbone.state} --autoprune-budget {backbone.budget}"
    yield "state", f"start with {flags}, and measure: vllm-autoprune eval", ""


def _check_tokens(model: str) -> _Results:
    # Both import vLLM.
    from vllm_autoprune.checkpoint import count_published, count_tokens

    width, height = _IMAGE
    how = ""
    if architecture := _find_published(model):
        family = BACKBONES[architecture].name
        shapes = [row for row in BACKBONE_SHAPES.values() if row.family == family]
        shape = next((row for row in shapes if row.checkpoint == model), shapes[0])
        count = count_published(shape, width, height)
        how = f", by the settings of {shape.checkpoint}"
    else:
        count = count_tokens(model, width, height)
    yield "tokens", f"N = {count.tokens} of {width} x {height} pixels{how}", ""


def _check_text_tower(path: str | None) -> _Results:
    if path is None:
        detail = "none: relevance uses the language model's input embeddings"
        yield "text tower", detail, ""
        return
    tower = read_text_tower(path)
    sizes = f"{tower.width} wide, {tower.segment} tokens a segment"
    yield "text tower", f"{sizes}, sign {tower.sign:+.0f}: {tower.reason}", ""


def _check_shipped_states() -> _Results:
    """Whether shipped states load; `validate` runs their safety checks, in half a minute."""
    names = sorted(shipped_states())
    invalid = []
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
    yield "shipped states", detail, fix


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
def _check_installation(options: Namespace) -> int:
    """Check whether this installation can serve, and whether it can serve a model pruned."""
    # Checks are in the order in which a server would fail them.
    findings = [
        *_run_check("vllm", _check_versions),
        *_run_check("packages", _check_packages),
        *_run_check("device", _check_device, severity="warn"),
        *_run_check("entry point", _check_loading),
        *_run_check("hooks", _check_hooks),
    ]
    model = options.model
    if model is not None:
        findings += _run_check("model", _check_model, model)
        if findings[-1].status == "ok":
            findings += _run_check("tokens", _check_tokens, model, severity="warn")
    findings += _run_check("text tower", _check_text_tower, options.text_tower)
    findings += _run_check("shipped states", _check_shipped_states)
    can_serve = all(finding.status != "fail" for finding in findings)
    unchecked = [finding.what for finding in findings if finding.status == "open"]
    rows = [
        [status, what, f"{detail} -> {fix}" if fix else detail]
        for what, status, detail, fix in findings
    ]
    verdict = "can serve" if can_serve else "cannot serve yet"
    if unchecked:
        verdict += f"; not checked without the Hugging Face Hub: {', '.join(unchecked)}"
    print_result(
        options,
        {
            "can_serve": can_serve,
            "unchecked": unchecked,
            "findings": [finding._asdict() for finding in findings],
        },
        format_table(["", "check", "result"], rows, wrap=True),
        f"This installation {verdict}.",
    )
    return 0 if can_serve and not unchecked else 1
