"""Rows of the accuracy table: one case on one slice of the questions, as lines of a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm_autoprune.statistics import Estimate

_ESTIMATES = ("accuracy", "less_resized", "less_base", "less_search_result")
_SIDES = ("low", "high")


@dataclass(frozen=True)
class Row:
    """Per cent of right answers of one case, on all questions or on those of a category or kind.

    ``less_resized`` is the case minus the resize control at the same K, ``less_base`` minus its
    ``base``, ``less_search_result`` the case minus the state that a search found on the
    yardstick. All are paired by question, with intervals over images. ``command`` measured the row,
    at ``commit``, the last one that changed the command.
    """

    yardstick: str
    budget: str
    name: str
    reads_question: bool | None
    digest: str
    category: str | None
    kind: str | None
    questions: int
    images: int
    tokens: float
    accuracy: Estimate
    logprob: float
    less_resized: Estimate | None
    less_base: Estimate | None
    less_search_result: Estimate | None
    command: str
    commit: str

    @property
    def key(self) -> tuple[str | None, ...]:
        """What the row is about; no two rows of a table are about the same."""
        return (self.yardstick, self.budget, self.name, self.category, self.kind)

    @classmethod
    def parse(cls, record: Mapping[str, str]) -> Row:
        """Read a line of :func:`write_rows`."""
        values: dict[str, Any] = {
            field.name: record[field.name] for field in fields(cls)
        }
        for name in _ESTIMATES:
            figures = [record[name], *(record[f"{name}_{side}"] for side in _SIDES)]
            values[name] = Estimate(*map(float, figures)) if record[name] else None
        values |= {name: int(record[name]) for name in ("questions", "images")}
        values |= {name: float(record[name]) for name in ("tokens", "logprob")}
        values |= {name: record[name] or None for name in ("category", "kind")}
        reads = record["reads_question"]
        return cls(**values | {"reads_question": reads == "True" if reads else None})


def read_rows(text: str) -> list[Row]:
    """Read what :func:`write_rows` has written."""
    return [Row.parse(record) for record in csv.DictReader(text.splitlines())]


def write_rows(rows: Sequence[Row]) -> str:
    """One row a line; an estimate has three columns, with its 95 % interval ``low`` to ``high``."""
    records = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in asdict(row).items():
            record[name] = value
            if name in _ESTIMATES:
                figures = value or dict.fromkeys(("value", *_SIDES))
                record[name] = figures["value"]
                record |= {f"{name}_{side}": figures[side] for side in _SIDES}
        records.append(record)
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def merge_rows(
    old: Sequence[Row], new: Sequence[Row], order: Sequence[str]
) -> list[Row]:
    """Rows of both, new ones in the place of old ones about the same; yardsticks in ``order``."""
    merged = {row.key: row for row in (*old, *new)}
    return sorted(merged.values(), key=lambda row: order.index(row.yardstick))
