"""Prompts of the proposer: the language of atoms, the task, and a summary of the history.

The constant part comes first, so that a server's prefix cache computes it once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from typing_extensions import TypedDict

from offline_search.candidates.components import compact_json, searched_components
from offline_search.candidates.menu import Menu
from offline_search.evaluation.history import History, Trial
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.states.catalogue import render_proposer_text
from vllm_autoprune.tpdsl.states.state import PruningState


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = tuple[Message, ...]


@cache
def describe_language(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, from which atoms, how it is scored."""
    policy = BASE_POLICIES[settings.base_policy]
    budget = settings.source_budget
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. The base policy {policy.name} picks {budget} of them: {policy.doc} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for better candidates. Higher scores are better; a small q_e is safe, \
diverse signals help. Use only these atoms:

{render_proposer_text(searched_components(settings.core, settings.rank_at)).strip()}

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...\
{', "core": {"share": ..., ...} or null' if settings.core else ""}\
{', "rank_at": ...' if settings.rank_at else ""}}}"""


def _system_prompt(settings: Settings) -> str:
    return f"{describe_language(settings)}\n\nAnswer with one such object and nothing else."


def proposal_prompt(
    settings: Settings,
    summary: str,
    example: PruningState,
    number: int,
    count: int,
    menu: Menu | None = None,
) -> Messages:
    """Prompt for one of ``count`` candidates, given the summary H_(t-1) and an example."""
    request = (
        f"{summary}\n\nA valid candidate looks like this:\n{_components(example)}\n\n"
        f"Propose candidate {number + 1} of {count}: change atoms, weights or q_e where the "
        f"history says that it pays. {_menu_sentence(menu)}JSON only."
    )
    return _conversation(settings, request)


def crossover_prompt(
    settings: Settings, parents: Sequence[Trial], menu: Menu | None = None
) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = [
        f"Score {_score(parent.score)}:\n{_components(parent.require_state())}"
        for parent in parents
    ]
    best = max(parent.score for parent in parents)
    request = (
        "Parents:\n" + "\n".join(described) + "\n\nCombine the parents and change one thing, to "
        f"score above {_score(best)}. {_menu_sentence(menu)}JSON only."
    )
    return _conversation(settings, request)


def repair_prompt(request: Messages, reply: str, problems: Sequence[str]) -> Messages:
    """The conversation so far with the problems of its reply, asking for a corrected one."""
    listed = "\n".join(f"- {problem[:300]}" for problem in problems[:8])
    correction: Message = {
        "role": "user",
        "content": f"That is not valid:\n{listed}\nWrite the corrected JSON object, nothing else.",
    }
    return (*request, {"role": "assistant", "content": reply[:4000]}, correction)


def _conversation(settings: Settings, request: str) -> Messages:
    system: Message = {"role": "system", "content": _system_prompt(settings)}
    return (system, {"role": "user", "content": request})


def _components(state: PruningState) -> str:
    return json.dumps(compact_json(state), separators=(",", ":"))


def _menu_sentence(menu: Menu | None) -> str:
    return "" if menu is None else f"{menu.describe()} "


MAX_LISTED = 3
"""Best candidates, atoms and failures of each kind that a summary lists."""


def summarize(history: History) -> str:
    """Summary H_t of Algorithm 2: best candidates, trend, effects of atoms, recurrent failures.

    Scores are log-probabilities relative to the unpruned model, in thousandths.
    """
    lines = [f"Base policy alone: {_score(history.base.objective or 0.0)}."]
    if ranked := history.ranked():
        lines.append("Best candidates so far, best first:")
        lines += [_describe(trial, history.base.by_category) for trial in ranked[:MAX_LISTED]]
        recent = ", ".join(_score(best) for best in history.best_by_round()[-5:])
        lines.append(f"Best of each round: {recent}.")
    lines += _describe_effects(history)
    if failures := history.count_failures().most_common(MAX_LISTED):
        lines.append("Mistakes not to repeat:")
        lines += [f"- {reason[:160]} ({count} times)" for reason, count in failures]
    same = sum(trial.result.status == "same" for trial in history.trials)
    if same:
        lines.append(f"{same} proposals behaved exactly as earlier ones: propose something else.")
    return "\n".join(lines)


def _describe(trial: Trial, base: Mapping[str, float]) -> str:
    """Score, category differences, latency and components of a candidate on one line."""
    differences = _category_differences(trial.result.by_category, base)
    latency = trial.result.axes.get("latency")
    slow = "" if latency is None else f" in {-latency:.2g} ms"
    return f"- {_score(trial.score)}{differences}{slow}: {_components(trial.require_state())}"


def _category_differences(means: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Categories with the largest gain and the largest loss against the base policy."""
    gaps = sorted((means[name] - base[name], name) for name in means if name in base)
    if len(gaps) < 2:
        return ""
    (worst, low), (best, high) = gaps[0], gaps[-1]
    return f" ({high} {_score(best)}, {low} {_score(worst)})"


def _describe_effects(history: History) -> list[str]:
    effects = history.feature_effects()
    if len(effects) < 2:
        return []
    best = [f"{name} {_score(gap)}" for name, gap in effects[:MAX_LISTED] if gap > 0]
    worst = [f"{name} {_score(gap)}" for name, gap in effects[::-1][:MAX_LISTED] if gap < 0]
    lines = [f"Atoms in better candidates: {', '.join(best)}."] if best else []
    return lines + ([f"Atoms in worse candidates: {', '.join(worst)}."] if worst else [])


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"
