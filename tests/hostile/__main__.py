"""``python -m tests.hostile``: run attacks on pruned servers and report problems.

Each attack runs on a server with its flags. After it, a normal request must be answered as before.
Exit status 0 if none finds a problem.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import httpx

import tests.hostile.forgeries  # noqa: F401  (registers its attacks)
from benchmarks.server import Server, serve
from tests.hostile.site import (
    ATTACKS,
    BACKBONES,
    SAME,
    Attack,
    Picture,
    Profile,
    Reply,
    Site,
    distance,
)
from tests.serving.engine import CLIP, LLAVA, built
from tests.serving.runners import ENVIRONMENTS
from tests.tpdsl.samples import sample
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.serving.api.endpoint import NAME as AUTOPRUNE_ENDPOINT

BUDGETS: Mapping[str, int] = {"qwen2_5_vl": 32, "llava_next": 64, "llava": 32}
"""K of each backbone: above N of a small picture where N varies, and below that of a large one."""


def _flags(backbone: str, profile: Profile, split_state: str) -> Sequence[str]:
    """Flags of a server of a profile; ``split_state`` is the file of a state with a core."""
    common = (
        *("--enforce-eager", "--block-size", "32", "--enable-prompt-tokens-details"),
        *("--limit-mm-per-prompt", '{"image": 128}'),
        *("--max-model-len", "2048" if backbone == "llava" else "8192"),
    )
    if profile == "stock":
        return (*common, "--trust-request-mm-kwargs", "--enable-scale-out")
    budget = BUDGETS[backbone]
    states, detail = ("--autoprune-requests", "states"), f"low={budget // 4},high={budget * 2}"
    rules: Mapping[Profile, Sequence[str]] = {
        "default": states,
        "uncached": (
            *("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching", "--enable-scale-out"),
            *("--autoprune-requests", "none"),
        ),
        "trusting": (*states, "--trust-request-mm-kwargs"),
        "split": (*states, "--autoprune-detail", detail, "--enable-scale-out"),
    }
    state = split_state if profile == "split" else "autoprune"
    tower = ("--autoprune-text-tower", str(CLIP)) if backbone == "llava" else ()
    pruning = ("--autoprune-state", state, "--autoprune-budget", str(budget))
    return (*common, *pruning, *tower, *rules[profile])


class Fleet(ExitStack):
    """Starts servers on demand, and stops them at exit."""

    def __init__(self, backbone: str, runner: str) -> None:
        super().__init__()
        self._backbone = backbone
        plugins = {"VLLM_PLUGINS": f"autoprune,{AUTOPRUNE_ENDPOINT}"}
        self._environment = {**ENVIRONMENTS[runner], **plugins}
        self._servers: dict[Profile, tuple[ExitStack, Server]] = {}
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        self._split_state = Path(folder, "core.json")
        self._split_state.write_text(json.dumps({**sample(), "core": {"share": 0.5}}))

    def get(self, profile: Profile) -> Server:
        """The running server of a profile, restarted if it has crashed.

        A stock server stays beside one pruned server: that of another profile is ended.
        """
        for other in list(self._servers):
            crashed = False
            if other == profile:
                try:  # the server itself ends some seconds after its engine
                    self._servers[other][1].get("/health")
                except httpx.HTTPError:
                    crashed = True
            if crashed or (other != profile and "stock" not in (other, profile)):
                self._servers.pop(other)[0].close()
        if profile not in self._servers:
            stack = self.enter_context(ExitStack())
            model = LLAVA if self._backbone == "llava" else built(self._backbone)
            flags = _flags(self._backbone, profile, str(self._split_state))
            server = stack.enter_context(serve(model, *flags, env=self._environment))
            self._servers[profile] = stack, server
        return self._servers[profile][1]


def run_attack(attack: Attack, get: Callable[[Profile], Server]) -> Site:
    """Run an attack on the server of its profile, then check the server.

    The attack's site has its problems, its notes, and the statuses of its requests.
    """
    site = Site(get(attack.profile), get=get, profile=attack.profile)
    before = _ask_sane_question(site)
    assert before.status == 200, f"a normal request is refused before the attack: {before}"
    try:
        site.problems += attack.run(site)
    except (AssertionError, httpx.HTTPError, OSError, KeyError) as error:
        site.problems.append(f"{type(error).__name__}: {error}")
    after = _ask_sane_question(site)
    if after.status != 200:
        site.problems.append(f"a normal request afterwards: {after}; {_last_words(site.server)}")
    elif (gap := distance(before.logprobs, after.logprobs)) > SAME:
        site.problems.append(f"a normal request is answered otherwise than before, by {gap:.2f}")
    return site


def _ask_sane_question(site: Site) -> Reply:
    return site.ask(Picture(0, 448, 448), text="what colour is the cat")


def _last_words(server: Server) -> str:
    """The last exception in the log of a dead engine, after which a server ends in seconds."""
    deadline = time.monotonic() + 10.0
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = "the server is up" if server.process.poll() is None else "the server has ended"
    causes = [
        line.rpartition("] ")[2].strip()
        for line in server.logged().splitlines()
        if re.search(r"(^|[\] ])\w+(Error|Exception): .", line)
        and "EngineCore encountered" not in line
    ]
    return f"{ended}: {(causes or ['no exception in its log'])[-1][-300:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, run attacks, print outcomes."""
    parser = CommandParser(
        prog="python -m tests.hostile", description=(__doc__ or "").partition("\n")[0]
    )
    for option, choices in (
        ("--backbone", BACKBONES),
        ("--runner", ENVIRONMENTS),
        ("--attack", ATTACKS),
    ):
        parser.add_argument(option, choices=[*choices], action="append", default=None)
    parser.add_argument("--quick", action="store_true", help="only those that run in pytest")
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    options = parser.parse_args(arguments)
    chosen = [ATTACKS[name] for name in options.attack or ATTACKS]
    chosen = [attack for attack in chosen if attack.quick or not options.quick]
    if options.list:
        for attack in chosen:
            print(f"{attack.name:34} {attack.profile:9} {attack.summary}")
        return 0
    sites: list[Site] = []
    begun = time.monotonic()
    for runner, backbone in product(options.runner or ENVIRONMENTS, options.backbone or BACKBONES):
        with Fleet(backbone, runner) as fleet:
            for attack in sorted(chosen, key=lambda attack: attack.profile):
                if backbone not in attack.backbones:
                    continue
                site = run_attack(attack, fleet.get)
                sites.append(site)
                verdict = "BROKEN" if site.problems else "withstood"
                place = f"{len(sites)}, {time.monotonic() - begun:.0f} s"
                print(f"[{place}] {verdict:9} {attack.name} ({backbone}, {runner})", flush=True)
                print(*(f"    problem: {problem}" for problem in site.problems), sep="\n")
                print(*(f"    {note}" for note in site.notes), sep="\n", flush=True)
    broken = sum(bool(site.problems) for site in sites)
    requests = sum(status > 0 for site in sites for status in site.statuses)
    print(f"{len(sites)} attacks with {requests} requests, {broken} not withstood")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
