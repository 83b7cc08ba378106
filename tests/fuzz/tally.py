"""Counts over many findings, which can be merged and written to a journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.judge import Finding

SLOWEST = 5


@dataclass
class Tally:
    """Counts over a set of texts; ``faults`` and ``slowest`` name them by index."""

    texts: int = 0
    accepted: int = 0
    fully: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    atoms: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    broken: dict[str, tuple[int, int]] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)
    slowest: list[tuple[float, int]] = field(default_factory=list)

    def add(self, index: int, finding: Finding, fully: bool) -> None:
        """Count one text."""
        self.texts += 1
        self.accepted += finding.accepted
        self.fully += fully and finding.accepted
        self.refused.update(finding.kinds)
        self.atoms.update(finding.atoms)
        if finding.valid is not None:
            self.records["valid" if finding.valid else "invalid"] += 1
        broken = dict.fromkeys(finding.broken, (1, index))
        faults = [(index, fault) for fault in finding.faults]
        self._join(broken, faults, [(finding.seconds, index)])

    def merge(self, other: Tally) -> None:
        """Add the counts of another set."""
        self.texts += other.texts
        self.accepted += other.accepted
        self.fully += other.fully
        self.refused += other.refused
        self.atoms += other.atoms
        self.records += other.records
        self._join(other.broken, other.faults, other.slowest)

    def _join(
        self,
        broken: dict[str, tuple[int, int]],
        faults: list[tuple[int, str]],
        slowest: list[tuple[float, int]],
    ) -> None:
        for reason, (count, first) in broken.items():
            before, example = self.broken.get(reason, (0, first))
            self.broken[reason] = (before + count, min(example, first))
        self.faults += faults
        self.slowest = sorted([*self.slowest, *slowest], reverse=True)[:SLOWEST]

    def as_json(self) -> dict[str, Any]:
        """Record for the journal."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tally:
        """Inverse of :meth:`as_json`."""
        counters = {name: Counter(data[name]) for name in ("refused", "atoms", "records")}
        return cls(
            texts=data["texts"],
            accepted=data["accepted"],
            fully=data["fully"],
            broken={reason: (count, first) for reason, (count, first) in data["broken"].items()},
            faults=[(index, fault) for index, fault in data["faults"]],
            slowest=[(seconds, index) for seconds, index in data["slowest"]],
            **counters,
        )
