"""Servers of one backbone, and one attack on them between two equal normal questions."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from benchmarks.server import Server, serve
from tests.hostile.attack import SAME, Attack, Client, Picture, Profile, Reply, Site, distance
from tests.serving.engine import CLIP, LLAVA
from tests.serving.scenarios import ENVIRONMENTS
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


_SANE = Picture(0, 448, 448)
_EXCEPTION = re.compile(r"(^|[\] ])\w+(Error|Exception): .")
_GRACE = 10.0
"""Seconds in which a server whose engine has died ends."""


@dataclass(frozen=True)
class Outcome:
    """Result of one attack; it passes without problems. ``requests`` of it were answered."""

    attack: str
    backbone: str
    runner: str
    seconds: float
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    requests: int = 0


def run_attack(
    attack: Attack, backbone: str, runner: str, get: Callable[[Profile], Server]
) -> Outcome:
    """Run an attack on the server of its profile, then check the server."""
    begun = time.monotonic()
    site = Site(backbone, lambda: Client(get(attack.profile)), lambda: Client(get("stock")))
    before = _ask_sane_question(site.client)
    problems: list[str] = []
    try:
        problems += attack.run(site)
    except (AssertionError, httpx.HTTPError, OSError, KeyError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    problems += _problems_since(site.client, before)
    return Outcome(
        attack.name,
        backbone,
        runner,
        time.monotonic() - begun,
        problems,
        site.notes,
        sum(status > 0 for status in site.client.statuses),
    )


def _ask_sane_question(client: Client) -> Reply:
    reply = client.chat("what colour is the cat", _SANE)
    assert reply.status == 200, f"a normal request is refused before the attack: {reply}"
    return reply


def _problems_since(client: Client, before: Reply) -> list[str]:
    after = client.chat("what colour is the cat", _SANE)
    if after.status != 200:
        return [f"a normal request afterwards: {after}; {_last_words(client.server)}"]
    gap = distance(before.logprobs, after.logprobs)
    if gap > SAME:
        return [f"a normal request is answered otherwise than before, by {gap:.2f}"]
    return []


def _last_words(server: Server) -> str:
    """The last exception in the log of a dead engine."""
    deadline = time.monotonic() + _GRACE
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = "the server has ended" if server.process.poll() is not None else "the server is up"
    causes = [
        line.rpartition("] ")[2].strip()
        for line in server.logged().splitlines()
        if _EXCEPTION.search(line) and "EngineCore encountered" not in line
    ]
    return f"{ended}: {(causes or ['no exception in its log'])[-1][-300:]}"
