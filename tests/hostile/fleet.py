"""Servers of one backbone and one runner, started at first use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from benchmarks.server import Server, serve
from tests.hostile.attack import Profile
from tests.serving.paths import CLIP, LLAVA
from tests.serving.runners import ENVIRONMENTS
from tests.tpdsl.samples import sample
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving.api.endpoint import NAME as AUTOPRUNE_ENDPOINT

BUDGETS: Mapping[str, int] = {"qwen2_5_vl": 32, "llava_next": 64, "llava": 32}
"""K of each backbone: above N of a small picture where N varies, and below that of a large one."""

_COMMON = (
    *("--enforce-eager", "--block-size", "32"),
    *("--limit-mm-per-prompt", '{"image": 128}', "--enable-prompt-tokens-details"),
)
_LENGTHS: Mapping[str, str] = {"qwen2_5_vl": "8192", "llava_next": "8192", "llava": "2048"}
_TRUST = "--trust-request-mm-kwargs"
_UNCACHED = (
    *("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching", "--enable-scale-out"),
    *("--autoprune-requests", "none"),
)


CORE = {"share": 0.5}
"""Core of the state of the ``split`` profile."""


def flags(backbone: str, profile: Profile, split_state: Path) -> Sequence[str]:
    """Flags of a server of a profile; ``split_state`` is the file of a state with a core."""
    common = (*_COMMON, "--max-model-len", _LENGTHS[backbone])
    if profile == "stock":
        return (*common, _TRUST, "--enable-scale-out")
    tower = ("--autoprune-text-tower", str(CLIP)) if backbone == "llava" else ()
    state = ("--autoprune-state", "autoprune", "--autoprune-budget", str(BUDGETS[backbone]))
    rules: Sequence[str] = ("--autoprune-requests", "states")
    if profile == "split":
        detail = f"low={BUDGETS[backbone] // 4},high={BUDGETS[backbone] * 2}"
        state = ("--autoprune-state", str(split_state), *state[2:])
        rules = (*rules, "--autoprune-detail", detail, "--enable-scale-out")
    if profile == "uncached":
        rules = _UNCACHED
    elif profile == "trusting":
        rules = (*rules, _TRUST)
    return (*common, *state, *tower, *rules)


class Fleet:
    """Context manager that starts servers on demand and stops them at exit."""

    def __init__(self, backbone: str, runner: str) -> None:
        self.backbone = backbone
        self._environment = {
            **ENVIRONMENTS[runner],
            "VLLM_PLUGINS": f"autoprune,{AUTOPRUNE_ENDPOINT}",
        }
        self._stack = ExitStack()
        self._servers: dict[Profile, tuple[ExitStack, Server]] = {}

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        self._split_state = Path(folder, "core.json")
        self._split_state.write_text(json.dumps({**sample(), "core": CORE}), encoding="utf-8")
        self._model = (
            LLAVA if self.backbone == "llava" else build(self.backbone, Path(folder, "model"))
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for profile in list(self._servers):
            self.end(profile)
        self._stack.close()

    def get(self, profile: Profile) -> Server:
        """The running server of a profile, restarted if it has crashed."""
        if profile in self._servers and not _lives(self._servers[profile][1]):
            self.end(profile)
        if profile not in self._servers:
            stack = ExitStack()
            command_line = flags(self.backbone, profile, self._split_state)
            server = stack.enter_context(serve(self._model, *command_line, env=self._environment))
            self._servers[profile] = stack, server
        return self._servers[profile][1]

    def end(self, profile: Profile) -> None:
        """End the server of a profile, if it runs."""
        if profile in self._servers:
            self._servers.pop(profile)[0].close()


def _lives(server: Server) -> bool:
    """Whether a server's engine lives; the server itself ends some seconds after it."""
    try:
        server.get("/health")
    except httpx.HTTPError:
        return False
    return True
