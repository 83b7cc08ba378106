"""Prompts of the proposer: the task in the language of atoms, and H_t of Algorithm 2.

The constant part comes first, so that a server's prefix cache computes it once. Prompts say what is
asked for, what acts and what was measured, and give no advice on what to propose. Scores are
objectives in thousandths, with their standard error where they are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from statistics import median
from typing import Literal

import numpy as np
import torch
from pydantic import JsonValue
from typing_extensions import TypedDict

from offline_search.candidates import (
    BASE_PARENT,
    MAX_HYPOTHESIS,
    PROPOSALS,
    PURPOSES,
    Expectation,
)
from offline_search.components import (
    BASE,
    compact_json,
    components_json,
    searched_components,
)
from offline_search.history import Difference, History, Trial
from offline_search.search_space import describe_space, excluded_atoms
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens
from vllm_autoprune.tpdsl.transfer import Change, list_changes


class _Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = tuple[_Message, ...]

_MAX_SHOWN_REPLY = 4000
"""Characters of an invalid proposal that are sent back with its problems."""


_HOW_PARTS_ACT = """How parts act: signals are min-max normalised in each image before their \
fusion; no weight is negative, and only instruction_guided_visual_relevance has a sign. Selectors \
read the fused quality, but reference_strict_preservation_selector nothing, and \
runtime_reference_anchor_pool_dpp_selector by the pool alone. The kernel acts in \
reference_residual_exchange_selector where lam is set, anchor_controlled_pool_dpp_selector and \
constrained_pool_dpp_selector; the partition, spatial_grid_partition unless another is written, \
in the last alone. With q_e 0 scoring, pool and selector do nothing. The group of a kept token are \
the discarded tokens that are assigned to it. The orders score and pick act at strength 0 too."""


def describe_images(settings: Settings, probes: Sequence[VisualTokens]) -> str:
    """Facts of the images that probes give; empty without any."""
    if not probes:
        return ""
    counts = sorted({tokens.count for tokens in probes})
    grids = sorted(
        {f"{t.grid.tiles} x {t.grid.height} x {t.grid.width}" for t in probes}
    )
    budget = BudgetCall.parse(settings.budgets[0])
    facts = (
        f"Images have {counts[0]} to {counts[-1]} tokens; tiles x rows x columns are "
    )
    facts += ", ".join(grids[:4])
    ratio = max(count / max(budget.tokens_kept(count), 1) - 1 for count in counts)
    facts += f"; from a pool_ratio of {ratio:.1f} on the pool is all other tokens."
    facts += (
        f" There is {'a' if probes[0].cls_attention is not None else 'no'} [CLS] token."
    )
    if (instruction := probes[0].instruction) is not None:
        facts += f' The sign "auto" is "{"+" if instruction.sign > 0 else "-"}"'
        read = [
            t.instruction.cosines.flatten() for t in probes if t.instruction is not None
        ]
        low, high = np.quantile(torch.cat(read).numpy(), (0.05, 0.95))
        facts += f", with cosines of {low:.2f} to {high:.2f}."
    low, high = (
        np.mean([np.quantile(t.cosine.numpy(), q) for t in probes])
        for q in (0.05, 0.95)
    )
    return (
        f"{facts} Cosines between tokens are {low:.2f} to {high:.2f} (5 and 95 %).\n\n"
    )


@cache
def describe_task(settings: Settings) -> str:
    """The constant part of all prompts: what is designed, from what, and how it is scored."""
    budget = settings.budgets[0]
    policy = BASE_POLICIES[settings.base_policy]
    score = "mean log-probability of the reference answers"
    if settings.objective == "mme":
        score = (
            "MME total of the model "
            "(accuracy and accuracy+ of each category in per cent, summed)"
        )
    score = (
        f"A score is the {score} less that of the model with all tokens, in thousandths of "
        f"{settings.objective_unit}; higher is better."
    )
    base = f"The base policy {policy.name} picks {budget} of them: {policy.doc}"
    if settings.bases:
        listed = "\n".join(
            f"- {name}: {BASE_POLICIES[name].doc}" for name in settings.bases
        )
        base = (
            f"A base policy picks {budget} of them, one of:\n{listed}\n"
            f'Scores of "base policy alone" are those of {policy.name}.'
        )
    atoms = render_language(searched_components(settings), excluded_atoms(settings))
    quota = f"q_e is 0 to {min(settings.source_budget, MAX_QUOTA)}"
    if settings.library != "paper":
        quota += ", and r_min is K - q_e: leave it out"
    more = f' "source", "budget" and "safety" may be added; K is {budget}, whatever the budget.'
    return f"""You design a policy that decides which visual tokens of an image a vision-language \
model keeps. {base} Your policy scores \
all tokens by fused signals, gathers candidates in a pool, and lets a selector exchange at most \
q_e of the {budget} picks for candidates. {describe_space(settings.space)}{score} \
These atoms can be used:

{atoms.strip()}

{_HOW_PARTS_ACT} {quota}.

A policy is one JSON object: {{"scoring": {{"signals": [...], "kernel": ..., "fusion": ...}}, \
"constraints": {{"pool": [...], "selector": ...}}, "reassembly": ...\
{', "core": {"share": ..., ...} or null' if settings.core else ""}\
{', "rank_at": ...' if settings.rank_at else ""}\
{f', "{BASE}": {{"name": ...}}' if settings.bases else ""}}}\
{more if settings.library == "paper" else ""}"""


def _build_messages(settings: Settings, request: str) -> Messages:
    """A request with the description of the task, and the form of the answer."""
    system = describe_task(settings)
    if settings.proposals_per_reply > 1:
        purposes = "\n".join(
            f"  - {name}: {meaning}" for name, meaning in PURPOSES.items()
        )
        system += f"""

Answer with {{"{PROPOSALS}": [...]}} and nothing else: a list of such objects, each beginning with

- "purpose", one of
{purposes}
- "hypothesis", a sentence of at most {MAX_HYPOTHESIS} characters: what the change does, and why
- "parent", the name of the candidate that is changed, or "{BASE_PARENT}" for the base policy alone
- "expect", the score compared with the parent's: "higher", "same" or "lower"

A difference of less than two standard errors leaves a hypothesis undecided."""
    else:
        system += "\n\nAnswer with one such object and nothing else."
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": f"{request} JSON only."},
    )


def describe_request(begin: int, total: int, purposes: Sequence[str] = ()) -> str:
    """What a prompt asks for: candidate ``begin`` of a round's ``total``, or a list from there on.

    A list has a candidate for each of ``purposes``.
    """
    count = len(purposes)
    if not count:
        return f"Propose candidate {begin + 1} of {total}, with a higher score."
    candidates = f"candidate {begin + 1}"
    if count > 1:
        candidates = f"candidates {begin + 1} to {begin + count}"
    return (
        f"Propose {candidates} of {total}, each different from all others, in search of a higher "
        f"score. Purposes that are proposed for them, in order: {', '.join(purposes)}."
    )


def proposal_prompt(
    settings: Settings, context: str, example: PruningState, request: str
) -> Messages:
    """Prompt for candidates: what is known, a valid one, and what :func:`describe_request` says.

    The context is facts of the images and the summary H_(t-1).
    """
    text = _dump_compactly(example, bool(settings.bases))
    return _build_messages(
        settings,
        f"{context}\n\nA valid candidate looks like this:\n{text}\n\n{request}",
    )


def crossover_prompt(settings: Settings, parents: Sequence[Trial]) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    described = "\n".join(
        f"Score {_score(parent.score)}:\n"
        + _dump_compactly(parent.require_state(), bool(settings.bases))
        for parent in parents
    )
    best = _score(max(parent.score for parent in parents))
    return _build_messages(
        settings,
        f"Parents:\n{described}\n\nCombine the parents, to score above {best}.",
    )


def repair_prompt(
    request: Messages, reply: str, problems: Mapping[int, Sequence[str]], count: int
) -> Messages:
    """The conversation with the problems of its reply, asking for corrected proposals.

    ``problems`` of a list's proposals by their number; without a ``count``, of the only proposal.
    """
    if count:
        listed = "\n".join(
            f"- proposal {number}: {'; '.join(texts)[:300]}"
            for number, texts in problems.items()
        )
        correction = (
            f"Not valid are:\n{listed}\nWrite a list of these {len(problems)} proposals, "
            "corrected, in this order, and nothing else."
        )
    else:
        listed = "\n".join(f"- {problem[:300]}" for problem in problems[1][:8])
        correction = f"That is not valid:\n{listed}\nWrite the corrected JSON object, nothing else."
    return (
        *request,
        {"role": "assistant", "content": reply[: _MAX_SHOWN_REPLY * max(count, 1)]},
        {"role": "user", "content": correction},
    )


def _dump_compactly(state: PruningState, bases: bool) -> str:
    return json.dumps(compact_json(state, bases), separators=(",", ":"))


_MAX_BEST = 10
"""Best candidates of different structures that a summary lists."""

_MAX_ROUNDS = 10
"""Last rounds whose scores a summary lists."""

_MAX_FAILURES = 3
_MAX_CHANGES = 6
_MAX_TABU = 12
_EXAMPLE_QUESTIONS = 2


def summarize(history: History) -> str:
    """Summary H_t: loss by category, trends, best candidates, the last round, limits, failures."""
    count = history.count_questions(history.base)
    score = _score(history.estimate(history.base))
    best = history.ranked_structures()[:_MAX_BEST]
    last = max((trial.proposal.round for trial in history.trials), default=0)
    latest = [trial for trial in history.trials if trial.proposal.round == last]
    lines = chain(
        [f"Base policy alone: {score} on {count} questions."],
        _describe_categories(history),
        _describe_trend(history),
        _describe_best(history, best),
        _describe_latest(history, latest, {trial.name for trial in best}),
        _describe_hypotheses(history, latest),
        _describe_dropped(history, last),
        _describe_failures(history),
    )
    return "\n".join(lines)


def _describe_trend(history: History) -> Iterator[str]:
    """Scores of the last rounds, from the second round on."""
    rounds: dict[int, list[float]] = {}
    for trial in history.trials:
        score = history.estimate(trial)
        if score is not None:
            rounds.setdefault(trial.proposal.round, []).append(score)
    if len(rounds) > 1:
        scores = [
            f"{number}: {_score(max(values))}, {_score(median(values))}"
            for number, values in rounds.items()
        ]
        yield f"Scores by round, best and median: {'; '.join(scores[-_MAX_ROUNDS:])}."


def _describe_best(history: History, best: Sequence[Trial]) -> Iterator[str]:
    """The best candidates, and which are tied with the leader."""
    if not best:
        return
    yield (
        "Best candidates of different structures, as changes of their parents; score, number "
        "of questions, difference to the first ± its standard error, score by category ± the "
        "same, questions better and worse than the parent:"
    )
    for trial in best:
        yield _describe(trial, history)
    tied = history.tied() if history.resolution else []
    if tied:
        yield (
            f"Not known to differ from {history.leader().name} by more than "
            f"{1000 * history.resolution:.0f}: "
            f"{', '.join(trial.name for trial in tied[:_MAX_BEST])}. Asked for are other signals "
            "and selectors than theirs."
        )


def _describe_latest(
    history: History, latest: Sequence[Trial], listed: Collection[str]
) -> Iterator[str]:
    """What became of the last round's candidates that are not ``listed``."""
    for trial in latest:
        status = trial.result.status
        if trial.name in listed or trial.state is None:
            continue
        if status == "evaluated":
            yield _describe(trial, history)
        elif status == "same":
            yield f"{trial.name} kept the same tokens as {trial.result.same_as}."
        elif status == "dropped":
            count = history.count_questions(trial)
            score = _score(history.estimate(trial))
            yield (
                f"{trial.name} was dropped after {count} questions, from which its score is "
                f"estimated as {score}; {_origin(trial, history)}"
            )


def _describe_dropped(history: History, last: int) -> Iterator[str]:
    """States that were dropped before the round ``last``."""
    dropped = {
        trial.proposal.digest or trial.name: trial.state
        for trial in history.trials
        if trial.state is not None
        and trial.result.status == "dropped"
        and trial.proposal.round != last
    }
    if dropped:
        yield "Dropped in earlier rounds, and never measured again:"
    for state in [*dropped.values()][-_MAX_TABU:]:
        yield f"- {_list_atoms(state)}"


def _describe_failures(history: History) -> Iterator[str]:
    """The most frequent reasons for which candidates could not be measured."""
    reasons = Counter[str]()
    for trial in history.trials:
        if trial.result.failed:
            reasons.update(trial.proposal.problems or [trial.result.reason])
    if reasons:
        yield "Proposals that were not valid:"
    for reason, count in reasons.most_common(_MAX_FAILURES):
        yield f"- {reason[:160]} ({count} times)"


def _describe_categories(history: History) -> Iterator[str]:
    """A row for each category, and questions of the one that costs most."""
    examples = history.examples
    best = history.best_values()
    total = float(np.nansum(best))
    if not examples or total >= 0:
        return
    rows_of: dict[str, list[int]] = {}
    for row in np.flatnonzero(np.isfinite(best + history.base_values)):
        rows_of.setdefault(examples[row].category, []).append(row)
    categories = sorted(
        (float(best[rows].sum()) / total, name, rows) for name, rows in rows_of.items()
    )
    yield "Category: questions, base policy, best so far, share of what the best still loses:"
    for share, name, rows in reversed(categories):
        base_mean = _score(float(history.base_values[rows].mean()))
        mean = _score(float(best[rows].mean()))
        yield f"- {name}: {len(rows)}, {base_mean}, {mean}, {round(100 * share)}%"
    _, name, rows = categories[-1]
    rows.sort(key=lambda row: best[row])
    questions = [examples[row].question for row in rows[:_EXAMPLE_QUESTIONS]]
    yield f"Questions of {name} that lose most: {'; '.join(questions)}"


def _describe(trial: Trial, history: History) -> str:
    """One candidate on one line: score, comparison with the best, and what was changed."""
    best = history.best()
    values = history.values(trial)
    figures = list[str]()
    if best is not None and trial is not best and history.examples:
        figures.append(_difference(history.compare(trial, best), history))
    for name, gap in history.by_category(trial).items():
        error = f" ± {1000 * gap.error:.0f}" if np.isfinite(gap.error) else ""
        figures.append(f"{name} {_score(gap.value)}{error}")
    parents = trial.proposal.parents[:1]
    reference = history.values_of(parents[0]) if parents else None
    if reference is not None and values is not None:
        gaps = values - reference
        if np.isfinite(gaps).any():
            better = np.sum(gaps > _SAME)
            worse = np.sum(gaps < -_SAME)
            figures.append(f"better {better}, worse {worse} than its parent")
    if trial.exchanges is not None:
        figures.append(f"{trial.exchanges:.1f} tokens exchanged an image")
    figures += _list_idle(trial.require_state())
    score = f"{_score(history.estimate(trial))} on {history.count_questions(trial)}"
    return f"- {trial.name}: {score} ({'; '.join(figures)}); {_origin(trial, history)}"


_SAME = 0.01  # values that differ by less count as the same


def _list_idle(state: PruningState) -> Iterator[str]:
    """Parts of a state that do nothing."""
    selector = state.constraints.selector
    fused = state.scoring.signals
    if not selector.bounds(2)[0]:
        yield "exchanges nothing, so scoring and pool do nothing"
    else:
        yield from (f"{call.atom} has weight 0" for call in fused if not call.weight)
    if state.reassembly.idle:
        yield "reassembly changes no row"


def _list_atoms(state: PruningState) -> str:
    """A state as one line: its atoms, with the numbers that differ from their defaults."""
    scoring = state.scoring
    constraints = state.constraints
    groups = (
        scoring.signals,
        (scoring.kernel,),
        (scoring.fusion,),
        constraints.pool,
        (constraints.selector,),
        (state.reassembly,),
    )
    texts = []
    for calls in groups:
        named = []
        for call in calls:
            numbers = call.model_dump(
                mode="json", exclude_defaults=True, exclude={"atom", "r_min"}
            )
            listed = ", ".join(
                f"{name} {_value(value)}" for name, value in numbers.items()
            )
            named.append(call.atom + (f"({listed})" if listed else ""))
        texts.append(" + ".join(named))
    return "; ".join(texts)


def _difference(gap: Difference, history: History) -> str:
    """A difference with its standard error and what it says."""
    return f"{_score(gap.value)} ± {1000 * gap.error:.0f}, {gap.verdict(history.resolution)}"


def _origin(trial: Trial, history: History) -> str:
    """The candidate as changes of its parent, or as a whole."""
    state = trial.require_state()
    parent = history.find(trial.proposal.parents[0]) if trial.proposal.parents else None
    if parent is not None and parent.state is not None:
        old = components_json(parent.state)
        new = components_json(state)
        if history.names_bases:
            old[BASE] = {"name": parent.state.base_policy.name}
            new[BASE] = {"name": state.base_policy.name}
        changes = list_changes(old, new)
        if len(changes) <= _MAX_CHANGES:
            texts = [_describe_change(change, old, new) for change in changes]
            return f"{parent.name} with {', '.join(texts) or 'no change'}"
    if trial.proposal.origin == "random":
        return _list_atoms(state)
    return _dump_compactly(state, history.names_bases)


def _describe_change(change: Change, old: JsonValue, new: JsonValue) -> str:
    """A change with the names of atoms in place of their positions."""
    names = list[str]()
    document = new if change.kind == "added" else old
    for part in change.where.split("/")[1:]:
        if isinstance(document, list):
            document = document[int(part)]
            names.append(
                str(document.get("atom", part)) if isinstance(document, dict) else part
            )
        elif isinstance(document, dict):
            document = document.get(part)
            names.append(part)
    name = " ".join(names[1:] if len(names) > 2 else names)
    if change.kind in ("added", "removed"):
        return f"{name} {change.kind}"
    if isinstance(change.before, dict | list) or isinstance(change.after, dict | list):
        return f"{name} = {json.dumps(change.after)}"
    return f"{name} {_value(change.before)} -> {_value(change.after)}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _score(value: float | None) -> str:
    """A score as prompts show it: an objective in thousandths."""
    return "not measured" if value is None else f"{1000 * value:+.0f}"


def _describe_hypotheses(history: History, latest: Sequence[Trial]) -> Iterator[str]:
    """A line for each hypothesis of the last round, and what the lines have; none without any."""
    tested = [
        (trial, trial.proposal.hypothesis)
        for trial in latest
        if trial.proposal.hypothesis
    ]
    if tested:
        yield "Hypotheses of the last round; score, difference to the parent ± its standard error:"
    for trial, hypothesis in tested:
        parent = trial.proposal.parents[0] if trial.proposal.parents else BASE_PARENT
        purpose = f"{hypothesis.purpose or 'no purpose'} of {parent}, expected {hypothesis.expect}"
        measured = history.find_measured(trial.name)
        reference = history.find_measured(parent)
        score = history.objective_of(trial.name)
        outcome = "not measured"
        if measured is None or score is None:
            outcome += f", {trial.result.status}: {trial.result.reason[:100]}"
        elif reference is None or reference.values is None:
            outcome = (
                f"{_score(score)}, parent not measured"  # it repeats one that failed
            )
        else:
            gap = history.compare(measured, reference)
            outcome = f"{_score(score)}, {_difference(gap, history)}"
            count = history.count_questions(measured)
            if count < history.count_questions(reference):
                outcome += f" on {count} questions"
            outcome += f": {_judge(gap, hypothesis.expect, history.resolution)}"
        yield f"- {trial.name} ({purpose}): {hypothesis.text or 'no hypothesis'} => {outcome}"


def _judge(gap: Difference, expect: Expectation, resolution: float) -> str:
    """Whether a difference confirms or refutes what was expected, or leaves it undecided."""
    verdict = gap.verdict(resolution)
    if verdict == "undecided":
        if not gap.is_tie(resolution):
            return "undecided"
        outcome: Expectation = "same"
    else:
        outcome = "higher" if verdict == "better" else "lower"
    return "confirmed" if expect == outcome else "refuted"
