"""``python -m tests.fuzz``: fuzz the state loader and count the outcomes.

Exit status 0 without faults: no crash, no exception but StateError, no disagreement between loader
and JSON Schema.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import Campaign, Run
from tests.fuzz.judge import SLOW, SMALL, Judge
from tests.fuzz.tally import Tally
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.tpdsl.registry import ATOMS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume a campaign; exit status 1 if there are faults."""
    options = _parser().parse_args(arguments)
    campaign = Campaign(options.seed, options.count, options.full_every)
    if options.only is not None:
        return _only(campaign, options.only)
    journal = options.journal or Path(f"out/fuzz/seed-{options.seed}.jsonl")
    if options.fresh:
        journal.unlink(missing_ok=True)
    run = Run(campaign, journal, jobs=options.jobs)
    begun, before = time.monotonic(), run.tally.texts
    if before:
        print(f"{before} texts are in {journal} already")

    def progress(tally: Tally) -> None:
        rate = (tally.texts - before) / (time.monotonic() - begun)
        left = (options.count - tally.texts) / rate / 60
        print(
            f"{tally.texts:7} of {options.count}  accepted {tally.accepted}  "
            f"faults {len(tally.faults)}  {rate:.0f}/s  {left:.0f} min left",
            flush=True,
        )

    tally = run.run(progress)
    print(report(tally, options.full_every))
    return 1 if tally.faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="texts in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--full-every", type=int, default=500, help="every how many texts the checks run in full"
    )
    parser.add_argument("--journal", type=Path, help="default: out/fuzz/seed-SEED.jsonl")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the journal")
    parser.add_argument("--only", type=int, metavar="INDEX", help="show and judge one text")
    return parser


def _only(campaign: Campaign, index: int) -> int:
    content, done = campaign.text(index)
    print(ascii(content) if len(content) < 20_000 else f"{len(content)} characters")
    print(f"made by: {', '.join(done) or 'generation alone'}")
    with tempfile.TemporaryDirectory() as folder:
        finding = Judge(Path(folder)).look(content, fully=True)
    print(finding)
    return 1 if finding.faults else 0


def report(tally: Tally, full_every: int) -> str:
    """The counts as text."""
    crashes = sum(fault.startswith("crash") for _, fault in tally.faults)
    unknown = sum("raised" in fault or "after loading" in fault for _, fault in tally.faults)
    missing = [name for name in ATOMS.names() if name not in tally.atoms]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    lines = [
        "",
        f"{tally.texts} texts: {tally.accepted} accepted, {tally.texts - tally.accepted} refused",
        *(f"  {count:7} refused with kind {kind}" for kind, count in tally.refused.most_common()),
        f"{crashes} crashes or hangs, {unknown} unknown exceptions, "
        f"{len(tally.faults) - crashes - unknown} other faults",
        *(f"  text {index}: {fault}" for index, fault in tally.faults[:50]),
        f"safety checks: {tally.records['valid']} valid, {tally.records['invalid']} invalid, each "
        "with a record",
        f"  of these {tally.fully} (1 text in {full_every}) at the state's own K on all probes, "
        f"the others at K = {SMALL} or r_min on one small image",
        *(
            f"  {count:7} {reason} (first: text {first})"
            for reason, (count, first) in sorted(tally.broken.items(), key=lambda item: -item[1][0])
        ),
        f"atoms in accepted states: {len(ATOMS) - len(missing)} of {len(ATOMS)}"
        + (f", without {', '.join(missing)}" if missing else ""),
        f"slowest to load (processor seconds, at most {SLOW} allowed): "
        + ", ".join(f"{seconds:.3f} (text {index})" for seconds, index in tally.slowest),
        f"largest process of this run: {peak:.0f} MiB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
