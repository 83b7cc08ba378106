"""The shipped states as one table, with the evidence that each file carries.

Knows nothing about how evidence is measured. ``python -m benchmarks.zoo table`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.zoo.evidence import Evidence, known
from benchmarks.zoo.states import FOUND, SOURCE, zoo
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy


def as_markdown() -> str:
    """One row a state that behaves differently; carried-over states share their source's row."""
    entries = zoo(load_state(SOURCE), [load_state(name) for name in FOUND])
    found = {e.state.name: known(load_state(e.state.name)) for e in entries}
    budgets = sorted({row.budget for e in found.values() if e for row in e.rows}, reverse=True)
    head = ["state", "what it is", *(f"K = {k}" for k in budgets)]
    lines = [_row(head), _row(["---", "---", *("--:" for _ in budgets)])]
    for entry in entries:
        if entry.family == "transfer":
            continue
        policy = materialize(entry.state)
        cells = [f"`{entry.state.name}`", _what(entry.family, policy)]
        lines.append(_row([*cells, *_figures(found[entry.state.name], budgets)]))
    carried = [f"`{e.state.name}`" for e in entries if e.family == "transfer"]
    asked = {(e.model, e.questions) for e in found.values() if e}
    told = "; ".join(f"{model}, {questions} questions" for model, questions in sorted(asked))
    return "\n".join([
        *lines, "",
        f"Per cent right, {told}. `{SOURCE}` for the budgets and backbones of the paper: "
        f"{', '.join(carried)}.",
    ]) + "\n"  # fmt: skip


def _what(family: str, policy: PruningPolicy) -> str:
    if family == "base policy":
        return "base policy alone" + ("" if policy.reads_instruction else ", no instruction")
    if family == "instruction-free":
        return f"`{SOURCE}` for traffic that repeats images: {policy.base.name} and no relevance"
    if family == "source":
        return f"the paper's state: {policy.base.name}, at most {policy.quota} exchanges"
    if family == "found":
        return f"found by a search on this model, upon {policy.base.name}"
    return policy.state.provenance.notes.rstrip(".")


def _figures(evidence: Evidence | None, budgets: Iterable[int]) -> list[str]:
    rows = {} if evidence is None else {row.budget: row.accuracy for row in evidence.rows}
    return [f"{rows[k]:.1f}" if k in rows else "not measured" for k in budgets]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
