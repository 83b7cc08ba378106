"""``python -m tests.hostile``: run attacks on pruned servers and report problems.

Each attack runs on a server with its flags. After it, a normal request must be answered as before.
Exit status 0 if all attacks were run and none finds a problem. With ``--json FILE --resume`` those
that FILE says were withstood are not run again, so that a campaign can be run in pieces
(``--seconds``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import tests.hostile.attacks  # noqa: F401  (registers them)
from tests.hostile.attack import ATTACKS, BACKBONES, PRUNED, Attack
from tests.hostile.campaign import Outcome, run_attack
from tests.hostile.fleet import Fleet
from tests.serving.runners import ENVIRONMENTS
from vllm_autoprune.cli.output import CommandParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, run attacks, print outcomes."""
    parser = CommandParser(
        prog="python -m tests.hostile", description=(__doc__ or "").partition("\n")[0]
    )
    several = {"action": "append", "default": None}
    parser.add_argument("--backbone", choices=BACKBONES, **several)  # type: ignore[arg-type]
    parser.add_argument("--runner", choices=[*ENVIRONMENTS], **several)  # type: ignore[arg-type]
    parser.add_argument("--attack", choices=[*ATTACKS], **several)  # type: ignore[arg-type]
    parser.add_argument("--quick", action="store_true", help="only those that run in pytest")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--resume", action="store_true", help="leave out those withstood there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after that")
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    options = parser.parse_args(arguments)
    chosen = [ATTACKS[name] for name in options.attack or ATTACKS]
    chosen = [attack for attack in chosen if attack.quick or not options.quick]
    if options.list:
        for attack in chosen:
            print(f"{attack.name:34} {attack.profile:9} {attack.summary}")
        return 0
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    earlier = read_outcomes(options.json) if options.resume else []
    outcomes = [outcome for outcome in earlier if not outcome.problems]
    done = {(outcome.backbone, outcome.runner, outcome.attack) for outcome in outcomes}
    runs = [
        Run(backbone, runner, attack)
        for runner in options.runner or ENVIRONMENTS
        for backbone in options.backbone or BACKBONES
        for attack in sorted(chosen, key=lambda attack: attack.profile)
        if backbone in attack.backbones and (backbone, runner, attack.name) not in done
    ]
    left = _attack_all(runs, outcomes, options.json, time.monotonic() + options.seconds)
    broken = [outcome for outcome in outcomes if outcome.problems]
    requests = sum(outcome.requests for outcome in outcomes)
    print(
        f"{len(outcomes)} attacks with {requests} requests, "
        f"{len(broken)} not withstood, {left} not run"
    )
    return 1 if broken or left else 0


@dataclass(frozen=True, slots=True)
class Run:
    """One attack on one backbone with one model runner."""

    backbone: str
    runner: str
    attack: Attack


def read_outcomes(file: Path) -> list[Outcome]:
    """Outcomes that ``--json`` has written to a file; none if it does not exist."""
    if not file.exists():
        return []
    return [Outcome(**fields) for fields in json.loads(file.read_text(encoding="utf-8"))]


def write_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Write all outcomes so far."""
    data = [dataclasses.asdict(outcome) for outcome in outcomes]
    file.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _attack_all(
    runs: Sequence[Run], outcomes: list[Outcome], file: Path | None, deadline: float
) -> int:
    """Run the attacks in order and append their outcomes; the number of those not begun in time."""
    begun, ended = time.monotonic(), 0
    for (backbone, runner), of_server in groupby(runs, key=lambda run: (run.backbone, run.runner)):
        with Fleet(backbone, runner) as fleet:
            for run in of_server:
                if time.monotonic() > deadline:
                    return len(runs) - ended
                for profile in PRUNED:
                    if profile != run.attack.profile:
                        fleet.end(profile)  # one pruned server at a time
                outcomes.append(run_attack(run.attack, backbone, runner, fleet.get))
                ended += 1
                _print(outcomes[-1], begun, ended, len(runs))
                if file is not None:
                    write_outcomes(file, outcomes)
    return 0


def _print(outcome: Outcome, begun: float, done: int, total: int) -> None:
    left = (time.monotonic() - begun) / done * (total - done)
    where = f"{outcome.backbone}, {outcome.runner}"
    print(
        f"[{done}/{total}, {left:.0f} s left] {outcome.verdict:9} {outcome.attack} ({where})",
        flush=True,
    )
    for line in outcome.problems:
        print(f"    problem: {line}", flush=True)
    for line in outcome.notes:
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
