"""Whether a soak held what is promised, as data and in a few lines.

Knows nothing about how it was run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.soak.accounts import Line
from benchmarks.soak.client import Tally
from benchmarks.soak.memory import ALLOWED, PARTS, SLACK, Flatness, Samples

MIB = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """Everything that was seen."""

    minutes: float
    users: int
    tally: Tally
    lines: list[Line]
    samples: Samples
    command: str

    @property
    def memory(self) -> list[Flatness]:
        """By process, and all together."""
        return self.samples.judged()

    @property
    def wrong(self) -> list[str]:
        """Every promise that is broken; none where the soak is passed."""
        found = [] if self.tally.answered else ["nothing was answered"]
        if self.tally.errors:
            found.append(f"{self.tally.errors} of {self.tally.sent} requests went wrong")
        found += [
            f"{one.what}: {one.server:,.0f} by the server, {one.client:,.0f} by its client"
            for one in self.lines
            if not one.equal
        ]
        found += [f"memory of {one.process}: {one.why}" for one in self.memory if not one.flat]
        return found

    def plain(self) -> dict[str, object]:
        """As JSON, every look at memory included."""
        memory = [{**dataclasses.asdict(one), "growth": one.growth} for one in self.memory]
        return {
            "holds": not self.wrong,
            "wrong": self.wrong,
            "command": self.command,
            "minutes": self.minutes,
            "users": self.users,
            "client": dict(vars(self.tally)),
            "metrics": [{**dataclasses.asdict(one), "equal": one.equal} for one in self.lines],
            "memory": memory,
            "samples": dataclasses.asdict(self.samples),
        }

    def told(self) -> str:
        """For people."""
        tally, seconds = self.tally, self.minutes * 60
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(tally.kinds.items()))
        equal = sum(line.equal for line in self.lines)
        lines = [
            f"{tally.sent:,} requests of {self.users} users in {self.minutes:g} min "
            f"({tally.sent / seconds:.1f} a second): {tally.answered:,} answered, "
            f"{tally.refused:,} refused as they should be, {tally.errors:,} errors",
            f"kinds: {kinds}",
            f"visual tokens: {tally.before:,} before, {tally.after:,} after",
            f"metrics: {equal} of {len(self.lines)} figures equal to what the client counted",
            f"memory, median of part {PARTS} against part 2 of {PARTS} "
            f"(at most {ALLOWED:.0%} more, or {SLACK // MIB} MiB):",
            *(_told(one) for one in self.memory),
            *(f"fault: {fault}" for fault in tally.faults),
            *(f"does not hold: {wrong}" for wrong in self.wrong),
            "The soak is not passed." if self.wrong else "The soak is passed.",
        ]
        return "\n".join(lines)


def _told(one: Flatness) -> str:
    sizes = f"{one.early / MIB:,.1f} -> {one.late / MIB:,.1f} MiB, most {one.most / MIB:,.1f}"
    return f"  {one.process}: {sizes} ({one.growth:+.2%})" + (f": {one.why}" if one.why else "")
