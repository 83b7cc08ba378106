"""Attacks on servers of their own; ``tests/serving/test_hostile.py`` attacks mini-LLaVA's.

``make test`` runs those on Qwen2.5-VL without caches and on split images, ``--exhaustive`` all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import tests.hostile.forgeries  # noqa: F401  (registers its attacks, and those that it imports)
from benchmarks.server import Server, serve
from tests.hostile.site import ATTACKS, Profile, run_attack
from tests.serving.engine import built
from tests.serving.runners import ENVIRONMENTS
from tests.tpdsl.samples import sample

BUDGETS: Mapping[str, int] = {"qwen2_5_vl": 32, "llava_next": 64}
"""K of each backbone: above N of a small picture where N varies, and below that of a large one."""


def make_flags(backbone: str, profile: Profile, split_state: Path) -> Sequence[str]:
    """Flags of a server of a profile; ``split_state`` is the file of a state with a core."""
    common = (
        "--enforce-eager",
        "--block-size",
        "32",
        "--enable-prompt-tokens-details",
        "--limit-mm-per-prompt",
        '{"image": 128}',
        "--max-model-len",
        "8192",
    )
    if profile == "stock":
        return (*common, "--trust-request-mm-kwargs", "--enable-scale-out")
    budget = BUDGETS[backbone]
    states = ("--autoprune-requests", "states")
    detail = f"low={budget // 4},high={budget * 2}"
    rules: Mapping[Profile, Sequence[str]] = {
        "default": states,
        "uncached": (
            "--mm-processor-cache-gb",
            "0",
            "--no-enable-prefix-caching",
            "--enable-scale-out",
            "--autoprune-requests",
            "none",
        ),
        "split": (*states, "--autoprune-detail", detail, "--enable-scale-out"),
    }
    state = str(split_state) if profile == "split" else "autoprune"
    pruning = ("--autoprune-state", state, "--autoprune-budget", str(budget))
    return (*common, *pruning, *rules[profile])


class Fleet(ExitStack):
    """Starts servers on demand, and stops them at exit."""

    def __init__(self, backbone: str, runner: str) -> None:
        super().__init__()
        self._backbone = backbone
        self._environment = ENVIRONMENTS[runner]
        self._servers: dict[Profile, tuple[ExitStack, Server]] = {}
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        self._split_state = Path(folder, "core.json")
        self._split_state.write_text(json.dumps({**sample(), "core": {"share": 0.5}}))

    def get(self, profile: Profile) -> Server:
        """The running server of a profile.

        A stock server stays beside one pruned server: that of another profile is ended.
        """
        if profile not in self._servers:
            for other in {*self._servers} - {"stock"} if profile != "stock" else ():
                self._servers.pop(other)[0].close()
            stack = self.enter_context(ExitStack())
            flags = make_flags(self._backbone, profile, self._split_state)
            server = stack.enter_context(
                serve(built(self._backbone), *flags, env=self._environment)
            )
            self._servers[profile] = stack, server
        return self._servers[profile][1]


@pytest.fixture(scope="module")
def get_fleet() -> Iterator[Callable[[str, str], Fleet]]:
    """Gives the fleet of a backbone and runner; only the last one asked for is running.

    No parametrized fixture: pytest would start servers anew for every test.
    """
    running: dict[tuple[str, str], Fleet] = {}

    def get(backbone: str, runner: str) -> Fleet:
        if (backbone, runner) not in running:
            close()
            running[backbone, runner] = Fleet(backbone, runner)
        return running[backbone, runner]

    def close() -> None:
        while running:
            running.popitem()[1].close()

    yield get
    close()


FLEETS = (("qwen2_5_vl", "v1"), ("qwen2_5_vl", "v2"), ("llava_next", "v1"))
"""Backbone and model runner."""
QUICK = ("forged_parts", "cache_salt")
"""On split images, without --exhaustive."""


def list_attacks() -> Iterator[object]:
    """Attacks on every fleet, those of one profile after another."""
    for backbone, runner in FLEETS:
        for profile in ("uncached", "split", "default"):
            for name, attack in ATTACKS.items():
                if profile not in attack.profiles or backbone not in attack.backbones:
                    continue
                quick = profile == "uncached" and attack.quick
                quick = quick or (profile == "split" and name in QUICK)
                marks = (
                    ()
                    if quick and (backbone, runner) == FLEETS[0]
                    else pytest.mark.exhaustive
                )
                identity = f"{backbone}-{runner}-{profile}-{name}"
                values = backbone, runner, name, profile
                yield pytest.param(*values, marks=marks, id=identity)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("backbone", "runner_name", "name", "profile"), list(list_attacks())
)
def test_an_attack_is_withstood(
    get_fleet: Callable[[str, str], Fleet],
    backbone: str,
    runner_name: str,
    name: str,
    profile: Profile,
) -> None:
    run_attack(name, profile, get_fleet(backbone, runner_name).get)
