"""``python -m tests.hostile``: run attacks on pruned servers and report problems.

Each attack runs on a server with its flags. After it, a normal request must be answered as before.
Exit status 0 if none finds a problem.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product

import tests.hostile.attacks  # noqa: F401  (registers them)
from tests.hostile.attack import ATTACKS, BACKBONES, PRUNED
from tests.hostile.campaign import Fleet, Outcome, run_attack
from tests.serving.scenarios import ENVIRONMENTS
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
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    options = parser.parse_args(arguments)
    chosen = [ATTACKS[name] for name in options.attack or ATTACKS]
    chosen = [attack for attack in chosen if attack.quick or not options.quick]
    if options.list:
        for attack in chosen:
            print(f"{attack.name:34} {attack.profile:9} {attack.summary}")
        return 0
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    for runner, backbone in product(options.runner or ENVIRONMENTS, options.backbone or BACKBONES):
        with Fleet(backbone, runner) as fleet:
            for attack in sorted(chosen, key=lambda attack: attack.profile):
                if backbone not in attack.backbones:
                    continue
                for profile in PRUNED:
                    if profile != attack.profile:
                        fleet.end(profile)  # one pruned server at a time
                outcome = run_attack(attack, backbone, runner, fleet.get)
                outcomes.append(outcome)
                verdict = "BROKEN" if outcome.problems else "withstood"
                place = f"{len(outcomes)}, {time.monotonic() - begun:.0f} s"
                print(f"[{place}] {verdict:9} {attack.name} ({outcome.where})", flush=True)
                for problem in outcome.problems:
                    print(f"    problem: {problem}", flush=True)
                print(*(f"    {note}" for note in outcome.notes), sep="\n", flush=True)
    broken = [outcome for outcome in outcomes if outcome.problems]
    requests = sum(outcome.requests for outcome in outcomes)
    print(f"{len(outcomes)} attacks with {requests} requests, {len(broken)} not withstood")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
