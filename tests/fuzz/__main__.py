"""Draw texts of states from a seed, judge each, and count the outcomes: ``python -m tests.fuzz``.

Exit status 0 without faults: no exception but StateError, no disagreement between loader and JSON
Schema, no text that takes long.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.generator import make_text
from tests.fuzz.judge import Judge
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.tpdsl.registry import ATOMS

STEP = 250
"""Texts between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge texts; exit status 1 if there are faults."""
    parser = CommandParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="texts in all")
    parser.add_argument("--first", type=int, default=0, help="index to begin with")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument(
        "--full-every", type=int, default=500, help="every how many texts the checks run in full"
    )
    options = parser.parse_args(arguments)
    outcomes, atoms, faults = Counter[str](), Counter[str](), list[str]()
    slowest, begun = (0.0, 0), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for index in range(options.first, options.count):
            if (done := index - options.first) % STEP == 0:
                rate = done / (time.monotonic() - begun)
                print(f"{index} of {options.count}, {len(faults)} faults, {rate:.0f}/s", flush=True)
            content, mutations = make_text(options.seed, index)
            finding = judge.look(content, fully=index % options.full_every == 0)
            outcomes.update(["accepted" if finding.accepted else "refused"])
            outcomes.update(f"refused with kind {kind}" for kind in finding.kinds)
            outcomes.update(f"safety check: {reason}" for reason in finding.broken)
            atoms.update(finding.atoms)
            faults += (f"text {index} ({', '.join(mutations)}): {f}" for f in finding.faults)
            slowest = max(slowest, (finding.seconds, index))
    missing = [name for name in ATOMS.names() if name not in atoms]
    print(*(f"{count:7} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    print(f"atoms in accepted states: {len(ATOMS) - len(missing)} of {len(ATOMS)}")
    print(f"slowest to load: text {slowest[1]}, {slowest[0]:.3f} s of processor time")
    print(f"{len(faults)} faults", *faults[:50], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
