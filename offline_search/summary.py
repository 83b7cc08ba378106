"""Summarize: the search history as the few lines that a proposer reads (H_t of Algorithm 2).

Knows nothing about proposers. It tells the best component combinations, the trend of scores, what
the examples were lost on, and recurrent failures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from offline_search.history import History, Trial
from offline_search.proposal import alpha

SHOWN = 3
"""Best candidates that are shown whole, atoms and failures of each kind that are told."""


def summarize(history: History) -> str:
    """H_t as text; scores are log-probability relative to all tokens, in thousandths."""
    base = history.base.objective or 0.0
    lines = [f"Base policy alone: {_score(base)}."]
    ranked = history.ranked()
    if ranked:
        lines.append("Best candidates so far, best first:")
        lines += [_candidate(trial, history.base.by_category) for trial in ranked[:SHOWN]]
        lines.append(_trend(history))
    lines += _effects(history)
    if failures := history.failures().most_common(SHOWN):
        lines.append("Mistakes not to repeat:")
        lines += [f"- {reason[:160]} ({count} times)" for reason, count in failures]
    same = sum(trial.tried.status == "same" for trial in history.trials)
    if same:
        lines.append(f"{same} proposals behaved exactly as earlier ones: propose something else.")
    return "\n".join(line for line in lines if line)


def _candidate(trial: Trial, base: Mapping[str, float]) -> str:
    assert trial.state is not None and trial.objective is not None
    shown = json.dumps(alpha(trial.state), separators=(",", ":"))
    deltas = _deltas(trial.tried.by_category, base)
    return f"- {_score(trial.objective)}{deltas}{_slow(trial)}: {shown}"


def _slow(trial: Trial) -> str:
    """How long its selection takes, where that counts."""
    latency = trial.tried.axes.get("latency")
    return "" if latency is None else f" in {-latency:.2g} ms"


def _deltas(found: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Categories with the largest gain and the largest loss against the base policy."""
    gaps = sorted((found[name] - base[name], name) for name in found if name in base)
    if len(gaps) < 2:
        return ""
    (worst, low), (best, high) = gaps[0], gaps[-1]
    return f" ({high} {_score(best)}, {low} {_score(worst)})"


def _trend(history: History) -> str:
    told = [f"{_score(best)}" for _, _, best in history.trend()]
    return f"Best of each round: {', '.join(told[-5:])}."


def _effects(history: History) -> list[str]:
    effects = history.effects()
    if len(effects) < 2:
        return []
    best = [f"{name} {_score(gap)}" for name, gap, _ in effects[:SHOWN] if gap > 0]
    worst = [f"{name} {_score(gap)}" for name, gap, _ in effects[::-1][:SHOWN] if gap < 0]
    lines = [f"Atoms in better candidates: {', '.join(best)}."] if best else []
    return lines + ([f"Atoms in worse candidates: {', '.join(worst)}."] if worst else [])


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"
