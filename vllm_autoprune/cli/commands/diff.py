"""`diff`: two states part by part."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest

from vllm_autoprune.cli.description import Part, list_parts, read_scores
from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import format_table, print_result
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import list_changes


@command(
    "diff",
    argument("first", help="file, or name of a shipped state"),
    argument("second", help="file, or name of a shipped state"),
)
def _compare_states(options: Namespace) -> int:
    """Compare two states part by part, and what was measured of both."""
    old = load_state(options.first)
    new = load_state(options.second)
    # Documents have all default values, so a default that only one state writes is no difference.
    changes = list_changes(old.document(), new.document())
    is_same = old.digest == new.digest
    verdict = f"digests differ: {old.digest[:12]} and {new.digest[:12]}"
    if is_same:
        verdict = f"same digest {old.digest[:12]}: both keep the same tokens"
    record = {
        "digests": (old.digest, new.digest),
        "same_behaviour": is_same,
        "changes": [asdict(change) for change in changes],
    }
    rows = list(_compare_parts(old, new))
    for name, before, after in (
        ("ranks at", old.rank_at, new.rank_at),
        ("cells", old.cells, new.cells),
        ("tower", old.tower, new.tower),
        ("frames", old.frames, new.frames),
    ):
        if before != after:
            rows.append([name, str(before or "none"), str(after or "none")])
    rows += _compare_scores(old, new)
    if rows:
        text = format_table(["", options.first, options.second], rows, wrap=True)
    elif changes:
        text = "no part that decides differs: see --json"
    else:
        text = "no field differs"
    print_result(options, record, verdict, text)
    return 0


_Rows = Iterator[list[str]]
"""Rows of three cells: what differs, its value in the old state, its value in the new one."""


def _compare_parts(old: PruningState, new: PruningState) -> _Rows:
    """A row for each pair of parts that differ; parts without an effect are left out."""
    new_fields = list_parts(materialize(new))
    for field, parts in list_parts(materialize(old)).items():
        pairs = _pair_parts(
            [part for part in parts if part.decides],
            [part for part in new_fields[field] if part.decides],
        )
        for old_part, new_part in pairs:
            if old_part and new_part and old_part.name == new_part.name:
                before = old_part.parameters
                after = new_part.parameters
                names = before.keys() | after.keys()
                changed = {n for n in names if before.get(n) != after.get(n)}
                if changed:
                    yield [field, old_part.format(changed), new_part.format(changed)]
            else:
                cells = (
                    part.format(part.changed) if part else "-"
                    for part in (old_part, new_part)
                )
                yield [field, *cells]


def _pair_parts(
    old: Sequence[Part], new: Sequence[Part]
) -> Iterator[tuple[Part | None, Part | None]]:
    """Pair the parts of two states that have the same name; None stands for a missing partner.

    If both states have a single part, the two are paired whatever their names.
    """
    if len(old) == len(new) == 1:
        yield old[0], new[0]
        return
    for name in dict.fromkeys(part.name for part in (*old, *new)):
        yield from zip_longest(
            (part for part in old if part.name == name),
            (part for part in new if part.name == name),
        )


def _compare_scores(old: PruningState, new: PruningState) -> _Rows:
    """A row for each measurement that was made of both states with different results."""
    old_scores, new_scores = (
        {
            f"{row.model.partition(' ')[0]}, K = {row.budget}": f"{row.accuracy:.1f} % right"
            for row in read_scores(state)
        }
        for state in (old, new)
    )
    for setting, score in old_scores.items():
        if new_scores.get(setting, score) != score:
            yield [setting, score, new_scores[setting]]
