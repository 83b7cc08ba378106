"""The verdict on a soak, as JSON and in a few lines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.common.report import MIB
from benchmarks.cost.soak.counts import CountPair, Tally
from benchmarks.cost.soak.memory import ALLOWED, PARTS, SLACK, Flatness, Samples


@dataclass(frozen=True)
class Verdict:
    """Counts, metrics and memory of one soak."""

    minutes: float
    users: int
    tally: Tally
    counts: list[CountPair]
    samples: Samples
    command: str

    @property
    def memory(self) -> list[Flatness]:
        """Memory by process, and of all together."""
        return self.samples.judge()

    @property
    def problems(self) -> list[str]:
        """Every broken promise; none where the soak is passed."""
        problems = [] if self.tally.answered else ["nothing was answered"]
        if self.tally.errors:
            problems.append(f"{self.tally.errors} of {self.tally.sent} requests failed")
        problems += [
            f"{one.name}: {one.server:,.0f} by the server, {one.client:,.0f} by its client"
            for one in self.counts
            if not one.equal
        ]
        problems += [f"memory of {one.process}: {one.why}" for one in self.memory if not one.flat]
        return problems

    def to_json(self) -> dict[str, object]:
        """All data, with every memory sample."""
        memory = [{**dataclasses.asdict(one), "growth": one.growth} for one in self.memory]
        return {
            "holds": not self.problems,
            "wrong": self.problems,
            "command": self.command,
            "minutes": self.minutes,
            "users": self.users,
            "client": dict(vars(self.tally)),
            "metrics": [
                {"what": one.name, "client": one.client, "server": one.server, "equal": one.equal}
                for one in self.counts
            ],
            "memory": memory,
            "samples": dataclasses.asdict(self.samples),
        }

    def format(self) -> str:
        """A few lines of text."""
        tally, seconds = self.tally, self.minutes * 60
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(tally.kinds.items()))
        equal = sum(one.equal for one in self.counts)
        lines = [
            f"{tally.sent:,} requests of {self.users} users in {self.minutes:g} min "
            f"({tally.sent / seconds:.1f} a second): {tally.answered:,} answered, "
            f"{tally.refused:,} refused as expected, {tally.errors:,} errors",
            f"kinds: {kinds}",
            f"visual tokens: {tally.before:,} before, {tally.after:,} after",
            f"metrics: {equal} of {len(self.counts)} figures equal to what the client counted",
            f"memory, median of part {PARTS} against part 2 of {PARTS} "
            f"(at most {ALLOWED:.0%} more, or {SLACK // MIB} MiB):",
            *(_format_memory(one) for one in self.memory),
            *(f"fault: {fault}" for fault in tally.faults),
            *(f"does not hold: {problem}" for problem in self.problems),
            "The soak is not passed." if self.problems else "The soak is passed.",
        ]
        return "\n".join(lines)


def _format_memory(one: Flatness) -> str:
    sizes = f"{one.early / MIB:,.1f} -> {one.late / MIB:,.1f} MiB, most {one.most / MIB:,.1f}"
    return f"  {one.process}: {sizes} ({one.growth:+.2%})" + (f": {one.why}" if one.why else "")
