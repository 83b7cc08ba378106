"""Servers of one backbone, and one attack on them between two equal normal questions."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from benchmarks.server import Server, serve
from tests.hostile.attack import SAME, Attack, Client, Picture, Profile, Reply, Site, distance
from tests.serving.engine import CLIP, LLAVA, built
from tests.serving.scenarios import ENVIRONMENTS
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.api.endpoint import NAME as AUTOPRUNE_ENDPOINT

BUDGETS: Mapping[str, int] = {"qwen2_5_vl": 32, "llava_next": 64, "llava": 32}
"""K of each backbone: above N of a small picture where N varies, and below that of a large one."""


def flags(backbone: str, profile: Profile, split_state: Path) -> Sequence[str]:
    """Flags of a server of a profile; ``split_state`` is the file of a state with a core."""
    common = (
        *("--enforce-eager", "--block-size", "32", "--enable-prompt-tokens-details"),
        *("--limit-mm-per-prompt", '{"image": 128}'),
        *("--max-model-len", "2048" if backbone == "llava" else "8192"),
    )
    budget = BUDGETS[backbone]
    detail = f"low={budget // 4},high={budget * 2}"
    states, trust = ("--autoprune-requests", "states"), "--trust-request-mm-kwargs"
    uncached = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")
    rules: Mapping[Profile, Sequence[str]] = {
        "default": states,
        "uncached": (*uncached, "--enable-scale-out", "--autoprune-requests", "none"),
        "trusting": (*states, trust),
        "split": (*states, "--autoprune-detail", detail, "--enable-scale-out"),
    }
    if profile == "stock":
        return (*common, trust, "--enable-scale-out")
    state = str(split_state) if profile == "split" else "autoprune"
    tower = ("--autoprune-text-tower", str(CLIP)) if backbone == "llava" else ()
    pruning = ("--autoprune-state", state, "--autoprune-budget", str(budget))
    return (*common, *pruning, *tower, *rules[profile])


class Fleet:
    """Context manager that starts servers on demand and stops them at exit."""

    def __init__(self, backbone: str, runner: str) -> None:
        self.backbone = backbone
        plugins = {"VLLM_PLUGINS": f"autoprune,{AUTOPRUNE_ENDPOINT}"}
        self._environment = {**ENVIRONMENTS[runner], **plugins}
        self._servers: dict[Profile, tuple[ExitStack, Server]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-")

    def __enter__(self) -> Self:
        self._split_state = Path(self._folder.name, "core.json")
        self._split_state.write_text(json.dumps({**sample(), "core": {"share": 0.5}}))
        return self

    def __exit__(self, *error: object) -> None:
        for profile in list(self._servers):
            self.end(profile)
        self._folder.cleanup()

    def get(self, profile: Profile) -> Server:
        """The running server of a profile, restarted if it has crashed."""
        if profile in self._servers:
            try:  # the server itself ends some seconds after its engine
                self._servers[profile][1].get("/health")
            except httpx.HTTPError:
                self.end(profile)
        if profile not in self._servers:
            stack = ExitStack()
            model = LLAVA if self.backbone == "llava" else built(self.backbone)
            command_line = flags(self.backbone, profile, self._split_state)
            server = stack.enter_context(serve(model, *command_line, env=self._environment))
            self._servers[profile] = stack, server
        return self._servers[profile][1]

    def end(self, profile: Profile) -> None:
        """End the server of a profile, if it runs."""
        if profile in self._servers:
            self._servers.pop(profile)[0].close()


@dataclass(frozen=True)
class Outcome:
    """Result of one attack; it passes without problems. ``requests`` of it were answered."""

    attack: str
    where: str
    problems: list[str]
    notes: list[str]
    requests: int


def run_attack(
    attack: Attack, backbone: str, runner: str, get: Callable[[Profile], Server]
) -> Outcome:
    """Run an attack on the server of its profile, then check the server."""
    site = Site(backbone, lambda: Client(get(attack.profile)), lambda: Client(get("stock")))
    before = _ask_sane_question(site)
    assert before.status == 200, f"a normal request is refused before the attack: {before}"
    problems: list[str] = []
    try:
        problems += attack.run(site)
    except (AssertionError, httpx.HTTPError, OSError, KeyError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    after = _ask_sane_question(site)
    if after.status != 200:
        problems.append(f"a normal request afterwards: {after}; {_last_words(site.client.server)}")
    elif (gap := distance(before.logprobs, after.logprobs)) > SAME:
        problems.append(f"a normal request is answered otherwise than before, by {gap:.2f}")
    answered = sum(status > 0 for status in site.client.statuses)
    return Outcome(attack.name, f"{backbone}, {runner}", problems, site.notes, answered)


def _ask_sane_question(site: Site) -> Reply:
    return site.client.chat("what colour is the cat", Picture(0, 448, 448))


_EXCEPTION = re.compile(r"(^|[\] ])\w+(Error|Exception): .")
_GRACE = 10.0
"""Seconds in which a server whose engine has died ends."""


def _last_words(server: Server) -> str:
    """The last exception in the log of a dead engine."""
    deadline = time.monotonic() + _GRACE
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = "the server is up" if server.process.poll() is None else "the server has ended"
    causes = [
        line.rpartition("] ")[2].strip()
        for line in server.logged().splitlines()
        if _EXCEPTION.search(line) and "EngineCore encountered" not in line
    ]
    return f"{ended}: {(causes or ['no exception in its log'])[-1][-300:]}"
