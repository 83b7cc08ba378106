"""Summary H_t of Algorithm 2: what was measured so far, as every prompt shows it.

Scores are objectives in thousandths, with their standard error where they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from offline_search.candidates import BASE_PARENT
from offline_search.components import (
    BASE,
    base_choice,
    compact_text,
    components_json,
)
from offline_search.history import History, Trial, best_of_each_structure, paired_error
from offline_search.prompt import format_score
from offline_search.search_space import numbers_at_upper_end
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.transfer import list_changes

_MAX_BEST = 10
"""Best candidates of different structures that a summary lists."""

_MAX_ROUNDS = 10
"""Last rounds whose scores a summary lists."""

_MAX_FAILURES = 3
_MAX_CHANGES = 6
_EXAMPLE_QUESTIONS = 2


def summarize(history: History) -> str:
    """Loss by category, score trends, best candidates, the last round, limits, failures."""
    lines = [f"Base policy alone: {_score(history.base.objective)}."]
    lines += _describe_categories(history)
    lines += _describe_trends(history)
    ranked = [trial for trial in history.ranked() if trial.state is not None]
    best = best_of_each_structure(ranked)[:_MAX_BEST]
    if ranked:
        lines.append(
            "Best candidates of different structures, as changes of their parents; score, and "
            "difference to the first with its standard error:"
        )
        lines += [_describe(trial, history) for trial in best]
        components = components_json(ranked[0].require_state())
        numbers = (f"{path} = {value:g}" for path, value in numbers_at_upper_end(components))
        if listed := ", ".join(numbers):
            lines.append(f"At the upper end of its range in {ranked[0].name}: {listed}.")
    lines += _describe_last_round(history, {trial.name for trial in best})
    lines += _describe_hypotheses(history)
    if failures := history.count_failures().most_common(_MAX_FAILURES):
        lines.append("Proposals that were not valid:")
        lines += [f"- {reason[:160]} ({count} times)" for reason, count in failures]
    return "\n".join(lines)


def _describe_categories(history: History) -> Iterator[str]:
    """A row for each category, and questions of the one that costs most."""
    examples, best = history.examples, history.best_values()
    total = float(best.sum())
    if not examples or len(examples) != len(best) or total >= 0:
        return
    places: dict[str, list[int]] = {}
    for place, example in enumerate(examples):
        places.setdefault(example.category, []).append(place)
    rows = sorted((float(best[where].sum()) / total, name, where) for name, where in places.items())
    yield "Category: questions, base policy, best so far, share of what the best still loses:"
    for share, name, where in reversed(rows):
        means = ", ".join(_score(float(v[where].mean())) for v in (history.base_values, best))
        yield f"- {name}: {len(where)}, {means}, {round(100 * share)}%"
    _, name, where = rows[-1]
    asked = [examples[row].question for row in sorted(where, key=lambda row: best[row])]
    yield f"Questions of {name} that lose most: {'; '.join(asked[:_EXAMPLE_QUESTIONS])}"


def _describe_trends(history: History) -> Iterator[str]:
    """Best and median score of each round, from the second round with scores on."""
    rounds: dict[int, list[float]] = {}
    for trial in history.trials:
        score = history.estimate(trial)
        if score is not None:
            rounds.setdefault(trial.proposal.round, []).append(score)
    if len(rounds) > 1:
        listed = [
            f"{number}: {_score(max(scores))}, {_score(median(scores))}"
            for number, scores in rounds.items()
        ]
        yield f"Scores by round, best and median: {'; '.join(listed[-_MAX_ROUNDS:])}."


def _describe(trial: Trial, history: History) -> str:
    """One candidate on one line: score, comparison with the best, and what was changed."""
    best, difference = history.best(), ""
    values, reference = trial.values, None if best is None else best.values
    compared = trial is not best and history.examples
    if compared and values is not None and reference is not None and len(values) == len(reference):
        gaps: Floats = values - reference
        gap, error = float(gaps.mean()), paired_error(history.examples, gaps)
        tied = ", tied" if abs(gap) < 2 * error else ""
        difference = f" ({_score(gap)} ± {1000 * error:.0f}{tied})"
    return f"- {trial.name}: {_score(trial.score)}{difference}; {_origin(trial, history)}"


def _origin(trial: Trial, history: History) -> str:
    """The candidate as changes of its parent, or as a whole."""
    state = trial.require_state()
    parent = history.find(trial.proposal.parents[0]) if trial.proposal.parents else None
    if parent is not None and parent.state is not None:
        before, after = (
            {**components_json(each), **({BASE: base_choice(each)} if history.names_bases else {})}
            for each in (parent.state, state)
        )
        changes = list_changes(before, after)
        if len(changes) <= _MAX_CHANGES:
            listed = [f"{c.where} {_value(c.before)} -> {_value(c.after)}" for c in changes]
            return f"{parent.name} with {', '.join(listed) or 'no change'}"
    return compact_text(state, history.names_bases)


def _describe_last_round(history: History, listed: set[str]) -> Iterator[str]:
    """Candidates of the last round that are not listed among the best."""
    last = max((trial.proposal.round for trial in history.trials), default=0)
    for trial in history.trials:
        if trial.proposal.round != last or trial.name in listed or trial.state is None:
            continue
        if trial.result.status == "evaluated":
            yield _describe(trial, history)
        elif trial.result.status == "same":
            yield f"{trial.name} kept the same tokens as {trial.result.same_as}."
        elif trial.result.status == "dropped":
            count = 0 if trial.values is None else len(trial.values)
            yield (
                f"{trial.name} was dropped after {count} questions at about "
                f"{_score(history.estimate(trial))}; {_origin(trial, history)}"
            )


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _score(value: float | None) -> str:
    return "not measured" if value is None else format_score(value)


def _describe_hypotheses(history: History) -> Iterator[str]:
    """A line for each hypothesis of the last round, and what the lines have; none without any."""
    last = max((trial.proposal.round for trial in history.trials), default=0)
    tested = [
        (trial, trial.proposal.hypothesis)
        for trial in history.trials
        if trial.proposal.round == last and trial.proposal.hypothesis is not None
    ]
    if tested:
        yield "Hypotheses of the last round; score, difference to the parent ± its standard error:"
    for trial, hypothesis in tested:
        parent = trial.proposal.parents[0] if trial.proposal.parents else BASE_PARENT
        purpose = f"{hypothesis.purpose or 'no purpose'} of {parent}, expected {hypothesis.expect}"
        values, reference = history.values_of(trial.name), history.values_of(parent)
        if values is None:
            outcome = f"not measured, {trial.result.status}: {trial.result.reason[:100]}"
        elif reference is None:  # its parent repeats a candidate whose measurement failed
            outcome = f"{_score(float(values.mean()))}, parent not measured"
        else:
            count = min(len(values), len(reference))
            gaps: Floats = values[:count] - reference[:count]
            gap, error = float(gaps.mean()), paired_error(history.examples, gaps)
            confirmed = {
                "same": abs(gap) <= 2 * error < float("inf"),
                "higher": gap > 2 * error,
                "lower": gap < -2 * error,
            }[hypothesis.expect]
            outcome = f"{_score(float(values.mean()))}, {_score(gap)} ± {1000 * error:.0f}"
            if count < len(history.base_values):
                outcome += f" on the first {count} questions"
            outcome += ": confirmed" if confirmed else ": not confirmed"
        yield f"- {trial.name} ({purpose}): {hypothesis.text or 'no hypothesis'} => {outcome}"
