"""The table of shipped states and their evidence in README.md."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.zoo.evidence import Evidence, read_evidence
from benchmarks.zoo.states import SEARCH_RESULTS, SOURCE, build_states
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy


def as_markdown() -> str:
    """One row per state; the transferred states behave as their source and share its row."""
    entries = build_states(load_state(SOURCE), [load_state(name) for name in SEARCH_RESULTS])
    evidence = {e.state.name: read_evidence(load_state(e.state.name)) for e in entries}
    budgets = sorted({row.budget for e in evidence.values() if e for row in e.rows}, reverse=True)
    head = ["state", "what it is", *(f"K = {k}" for k in budgets)]
    lines = [_row(head), _row(["---", "---", *("--:" for _ in budgets)])]
    for entry in entries:
        if entry.family == "transfer":
            continue
        policy = materialize(entry.state)
        cells = [f"`{entry.state.name}`", _describe(entry.family, policy)]
        lines.append(_row([*cells, *_figures(evidence[entry.state.name], budgets)]))
    transferred = [f"`{e.state.name}`" for e in entries if e.family == "transfer"]
    setups = {(e.model, e.questions) for e in evidence.values() if e}
    setup = "; ".join(f"{model}, {questions} questions" for model, questions in sorted(setups))
    return "\n".join([
        *lines, "",
        f"Per cent right, {setup}. `{SOURCE}` for the budgets and backbones of the paper: "
        f"{', '.join(transferred)}.",
    ]) + "\n"  # fmt: skip


def _describe(family: str, policy: PruningPolicy) -> str:
    if family == "base policy":
        return "base policy alone" + ("" if policy.reads_instruction else ", no instruction")
    if family == "instruction-free":
        return f"`{SOURCE}` for traffic that repeats images: {policy.base.name} and no relevance"
    if family == "source":
        return f"the paper's state: {policy.base.name}, at most {policy.quota} exchanges"
    if family == "search result":
        return f"found by a search on this model, upon {policy.base.name}"
    return policy.state.provenance.notes.rstrip(".")


def _figures(evidence: Evidence | None, budgets: Iterable[int]) -> list[str]:
    rows = {} if evidence is None else {row.budget: row.accuracy for row in evidence.rows}
    return [f"{rows[k]:.1f}" if k in rows else "not measured" for k in budgets]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
