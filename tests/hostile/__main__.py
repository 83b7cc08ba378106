"""``python -m tests.hostile``: run attacks on pruned servers and report problems.

Each attack runs on a server with its flags. After it, a normal request must be answered as before.
Exit status 0 if no attack finds a problem.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tests.hostile.attacks  # noqa: F401  (registers them)
from tests.hostile.attack import ATTACKS, BACKBONES, Attack, Profile
from tests.hostile.campaign import Outcome, run_attack
from tests.hostile.fleet import Fleet
from tests.serving.runners import ENVIRONMENTS

_PRUNED: Sequence[Profile] = ("default", "uncached", "trusting")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, run attacks, print outcomes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile", description=(__doc__ or "").partition("\n")[0]
    )
    several = {"action": "append", "default": None}
    parser.add_argument("--backbone", choices=BACKBONES, **several)  # type: ignore[arg-type]
    parser.add_argument("--runner", choices=[*ENVIRONMENTS], **several)  # type: ignore[arg-type]
    parser.add_argument("--attack", choices=[*ATTACKS], **several)  # type: ignore[arg-type]
    parser.add_argument("--quick", action="store_true", help="only those that run in pytest")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    options = parser.parse_args(arguments)
    chosen = [ATTACKS[name] for name in options.attack or ATTACKS]
    chosen = [attack for attack in chosen if attack.quick or not options.quick]
    if options.list:
        for attack in chosen:
            print(f"{attack.name:34} {attack.profile:9} {attack.summary}")
        return 0
    runs = [
        (backbone, runner, sorted(_of(backbone, chosen), key=lambda a: a.profile))
        for runner in options.runner or ENVIRONMENTS
        for backbone in options.backbone or BACKBONES
    ]
    outcomes = _attack_all(runs, options.json)
    broken = [outcome for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes)} attacks, {len(broken)} not withstood")
    return 1 if broken else 0


def _of(backbone: str, attacks: Sequence[Attack]) -> list[Attack]:
    return [attack for attack in attacks if backbone in attack.backbones]


def _attack_all(
    runs: Sequence[tuple[str, str, Sequence[Attack]]], file: Path | None
) -> list[Outcome]:
    total = sum(len(attacks) for _, _, attacks in runs)
    begun, outcomes = time.monotonic(), list[Outcome]()
    for backbone, runner, attacks in runs:
        with Fleet(backbone, runner) as fleet:
            for attack in attacks:
                for profile in _PRUNED:
                    if profile != attack.profile:
                        fleet.end(profile)  # one pruned server at a time
                outcome = run_attack(attack, backbone, runner, fleet.get)
                outcomes.append(outcome)
                _print(outcome, begun, len(outcomes), total)
                if file is not None:
                    data = [dataclasses.asdict(o) | {"verdict": o.verdict} for o in outcomes]
                    file.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return outcomes


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
