"""`doctor`: whether this installation can serve, and if not, how to fix it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Iterator

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
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize

_IMAGE = (1024, 1024)
"""Pixels of an image whose tokens are counted."""

_GROUP = "vllm.general_plugins"
_ENTRY = "autoprune"
_LOWEST = {"torch": "2", "transformers": "5.16", "pydantic": "2.12"}


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
def _check_installation(options: argparse.Namespace) -> int:  # noqa: C901, PLR0915
    """Check whether this installation can serve, and whether it can serve a model pruned."""
    import torch

    findings = list[dict[str, str]]()

    def judge(what: str, detail: str, fix: str = "", status: str = "fail") -> None:
        """Add a finding, of this status where there is something to fix."""
        status = status if fix else "ok"
        findings.append({"what": what, "status": status, "detail": detail, "fix": fix})

    @contextlib.contextmanager
    def judging(what: str, status: str = "fail") -> Iterator[None]:
        """Add a finding for each problem that is raised."""
        try:
            yield
        except ConfigError as error:
            for problem in error.problems:
                judge(what, problem.what, problem.fix, status)
        except ImportError as error:
            judge(what, f"cannot be read: {error}", f"install {error.name}", status)

    # In the order in which a server would fail on them: versions.
    judge("vllm-autoprune", __version__)
    old = sys.version_info < (3, 11)
    judge("python", platform.python_version(), "use 3.11 or newer" if old else "")
    with judging("vllm"):
        require_vllm()
        judge("vllm", str(vllm_version()))
    for name, lowest in _LOWEST.items():
        fix = f"pip install '{name}>={lowest}'"
        try:
            version = importlib.metadata.version(name)
            judge(name, version, fix if Version(version) < Version(lowest) else "")
        except importlib.metadata.PackageNotFoundError:
            judge(name, "not installed", fix)

    # Device, entry point and environment.
    if torch.cuda.is_available():
        judge(
            "device", torch.cuda.get_device_name(0), "untested on GPUs so far", "warn"
        )
    else:
        judge("device", f"CPU, {torch.get_num_threads()} threads; no GPU is seen")
        if choose_dtype() == "float32":
            judge("dtype", SLOW_BFLOAT16, SERVE_FLOAT32, "warn")
    if entry_points := importlib.metadata.entry_points(group=_GROUP, name=_ENTRY):
        value = next(iter(entry_points)).value
        judge("entry point", f"{_GROUP}: {_ENTRY} = {value}")
    else:
        fix = "from a checkout, install the package into this environment: pip install --no-deps ."
        judge("entry point", f"{_GROUP} has no {_ENTRY!r}", fix)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _ENTRY not in plugins.split(","):
        what = f"VLLM_PLUGINS={plugins} leaves the plugin out"
        judge("environment", what, f"add {_ENTRY} to it, or unset it")
    for is_set, what in (
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
            judge("environment", what, "unset it")

    # Names of vLLM; what it logs during its import would push the report off the screen.
    logging.disable(logging.ERROR)
    try:
        vllm_version()
        hooks, problems = collect_hooks()
        wrong = [
            (f"{problem.where} {problem.what}", problem.fix) for problem in problems
        ]
        for hook in hooks:
            if names := hook.find_missing():
                what = f"{hook.used_by}: vLLM has no {', '.join(names)}"
                wrong.append((what, "install a supported version of vLLM"))
        total = sum(len(hook.names) for hook in hooks)
        for what, fix in wrong or [
            (f"all {total} names that the plugin uses exist", "")
        ]:
            judge("hooks", what, fix)
    except ConfigError:
        judge("hooks", "not checked: vLLM is not installed", "install vLLM")
    finally:
        logging.disable(logging.NOTSET)

    # The model, its first state, and N where vLLM can read its processor.
    if options.model is not None:
        from vllm_autoprune.checkpoint import count_tokens  # not for other commands

        with judging("model"):
            backbone = require_served(read_config(options.model))
            judge("model", f"{backbone.stock}: served as {backbone.name}")
            flags = f"--autoprune-state {backbone.state} --autoprune-budget {backbone.budget}"
            judge("state", f"start with {flags}, and measure: vllm-autoprune eval")
            with judging("tokens", "warn"):
                count = count_tokens(options.model, *_IMAGE)
                judge(
                    "tokens", f"N = {count.tokens} of {_IMAGE[0]} x {_IMAGE[1]} pixels"
                )

    # The text tower.
    if options.text_tower is None:
        judge(
            "text tower", "none: relevance uses the language model's input embeddings"
        )
    else:
        with judging("text tower"):
            tower = read_text_tower(options.text_tower)
            sign = f"sign {tower.sign:+.0f}: {tower.reason}"
            judge(
                "text tower",
                f"{tower.width} wide, {tower.segment} tokens a segment, {sign}",
            )

    # The shipped states; safety checks are left to `validate`, because they take half a minute.
    shipped = sorted(shipped_states())
    invalid = list[str]()
    for name in shipped:
        try:
            materialize(load_state(name))
        except AutopruneError:
            invalid.append(name)
    fix = f"see: vllm-autoprune validate {' '.join(invalid)}" if invalid else ""
    fix = (
        fix
        if shipped
        else "install the package anew: its states lie in vllm_autoprune/policies"
    )
    judge(
        "shipped states", f"{len(shipped) - len(invalid)} of {len(shipped)} load", fix
    )

    able = all(finding["status"] != "fail" for finding in findings)
    rows = [
        [f["status"], f["what"], " -> ".join(filter(None, (f["detail"], f["fix"])))]
        for f in findings
    ]
    print_result(
        options,
        {"can_serve": able, "findings": findings},
        format_table(["", "check", "result"], rows, wrap=True),
        "This installation can serve."
        if able
        else "This installation cannot serve yet.",
    )
    return 0 if able else 1
