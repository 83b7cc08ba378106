"""Prompts of the proposer: the task, known facts, the request, and repairs of replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Literal

from typing_extensions import TypedDict

from offline_search.candidates import Draft, Stage
from offline_search.history import History, Trial
from offline_search.settings import Settings
from offline_search.task import describe_reply, describe_task, dump_policy
from vllm_autoprune.tpdsl.state import PruningState


class _Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = tuple[_Message, ...]

_MAX_SHOWN_REPLY = 4000
"""Number of characters of an invalid proposal that are sent back with its problems."""

_MAX_PROBLEMS = 8
"""Number of problems of an invalid proposal that are sent back."""

_MAX_PROBLEM = 1000
"""Number of characters of a problem, enough for the names of all signals."""

_ORIGINS: Mapping[str, str] = {
    "warm start": "that every search starts with",
    "random": "drawn at random",
    "tpe": "drawn where a statistical model of the scores expects high ones",
    "mutation": "made of one of the best by random changes",
    "crossover": "mixed of two of the best",
}
"""Descriptions of the candidates of a round that no language model proposed, by origin."""

_AIMS: Mapping[Stage, str] = {
    "first": "",
    "open": "",
    "tied": " by one unlike those that are listed: the best of them are tied",
    "last": " by a change of one that is listed: this round is the last",
}
"""How a single proposal should reach a higher score; in lists, purposes say that."""


def describe_request(
    number: int, begin: int, stage: Stage = "open", purposes: Sequence[str] = ()
) -> str:
    """The request of a prompt: candidate ``begin`` of round ``number``, or a list from it on.

    A list has one candidate for each of ``purposes``.
    """
    name = f"{number}.{begin}"
    if not purposes:
        return f"Propose candidate {name}, in search of a higher score{_AIMS[stage]}."
    if len(purposes) == 1:
        return f"Propose candidate {name}, in search of a higher score. Its purpose: {purposes[0]}."
    return (
        f"Propose candidates {name} to {number}.{begin + len(purposes) - 1}, each different from "
        "all others, in search of a higher score. Their purposes, in order: "
        f"{', '.join(purposes)}."
    )


def describe_field(requested: int, proposed: int, others: Sequence[Draft]) -> str:
    """Sentence of a prompt: how many candidates compete in a round, and where they are from.

    Of ``proposed`` candidates of the model, ``requested`` are those of the prompt.
    """
    count = proposed + len(others)
    if count == requested:
        return "No other candidates compete in this round."
    parts = [f"the {requested} that you propose now"]
    if proposed > requested:
        parts.append(f"{proposed - requested} that you propose in other requests")
    origins = Counter(draft.origin for draft in others)
    for origin, number in origins.items():
        text = f"{number} {_ORIGINS.get(origin, origin)}"
        if origin == "warm start":
            text += f" ({_describe_starts(others)})"
        parts.append(text)
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{count} candidates compete in this round: {listed}."


def _describe_starts(drafts: Sequence[Draft]) -> str:
    """The policies that every search starts with: of several signals, of one, and of none.

    Those of none are base policies alone. Those of equal atoms and q_e differ in other numbers.
    """
    bases: list[str] = []
    quotas: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for draft in drafts:
        state = draft.state
        if draft.origin != "warm start" or state is None:
            continue
        quota = dict(state.constraints.selector).get("q_e")
        if quota is None:
            bases.append(state.base_policy.name)
            continue
        signals = tuple(call.atom for call in state.scoring.signals)
        quotas.setdefault((signals, _list_parts(state)), []).append(quota)
    together: list[str] = []
    alone: dict[str, list[str]] = {}
    for (signals, others), values in quotas.items():
        ending = f"with {others} at q_e {' and at '.join(map(str, values))}"
        if len({*values}) < len(values):
            ending += ", which differ in other numbers"
        if len(signals) > 1:
            together.append(f"of {', '.join(signals)} together, {ending}")
        else:
            alone.setdefault(ending, []).extend(signals)
    texts = [
        f"of one signal alone: {', '.join(signals)}, {ending}"
        for ending, signals in alone.items()
    ]
    if bases:
        texts.append(f"of no signal, a base policy alone: {', '.join(bases)}")
    return "; ".join([*together, *texts])


def _list_parts(state: PruningState) -> str:
    """The parts of a policy other than signals and kernel, by name."""
    constraints = state.constraints
    calls = (
        state.scoring.fusion,
        *constraints.pool,
        constraints.selector,
        state.reassembly,
    )
    parts = [call.atom for call in calls]
    if state.core is not None:
        parts.append(f"a core of {state.core.share:g}")
    if state.rank_at != "merger_out":
        parts.append(f"rank_at {state.rank_at}")
    return ", ".join(parts)


def proposal_prompt(
    settings: Settings, context: str, example: Trial | PruningState, request: str
) -> Messages:
    """Prompt for candidates: ``context``, an ``example`` of a valid one, and ``request``.

    The context has facts about the images and the summary H_(t-1); the request is that of
    :func:`describe_request`.
    """
    if isinstance(example, Trial):
        text = dump_policy(example.require_state(), settings)
        section = f"The whole of candidate {example.name}, as an example:\n{text}"
        if text in context:
            section = f"Candidate {example.name}, printed whole above, is an example of a policy."
    else:
        text = dump_policy(example, settings)
        section = f"An example of a policy:\n{text}"
    parts = filter(None, (context, section, request))
    return _build_messages(settings, "\n\n".join(parts))


def crossover_prompt(
    settings: Settings, parents: Sequence[Trial], history: History
) -> Messages:
    """EvoPrompting's prompt: parents with their scores, and the score a child should exceed."""
    scores = [history.estimate(parent) or 0.0 for parent in parents]
    decimals = history.count_decimals()
    described = "\n".join(
        f"Score {score:+.{decimals}f}:\n{dump_policy(parent.require_state(), settings)}"
        for parent, score in zip(parents, scores, strict=True)
    )
    best = f"{max(scores):+.{decimals}f}"
    return _build_messages(
        settings,
        f"Parents:\n{described}\n\nCombine the parents, to score above {best}.",
    )


def repair_prompt(
    request: Messages, reply: str, problems: Mapping[str, Sequence[str]], count: int
) -> Messages:
    """The conversation so far, followed by the problems of the reply and a request to correct it.

    ``problems`` are by the name of the candidate, in a list of ``count`` proposals; with a
    ``count`` of 0, they are those of the only proposal.
    """
    if count:
        listed = "\n".join(
            f"- candidate {name}: {_cut('; '.join(texts[:_MAX_PROBLEMS]))}"
            for name, texts in problems.items()
        )
        verb = "are" if len(problems) > 1 else "is"
        order = ", in this order" if len(problems) > 1 else ""
        correction = (
            f"Not valid {verb}:\n{listed}\nAnswer once more in the same form, with "
            f"{', '.join(problems)} alone, corrected{order}."
        )
    else:
        (texts,) = problems.values()
        listed = "\n".join(f"- {_cut(problem)}" for problem in texts[:_MAX_PROBLEMS])
        correction = f"That is not valid:\n{listed}\nWrite the corrected JSON object."
    return (
        *request,
        {"role": "assistant", "content": reply[: _MAX_SHOWN_REPLY * max(count, 1)]},
        {"role": "user", "content": correction},
    )


def _cut(problem: str) -> str:
    """The words of a problem that a prompt has room for."""
    return shorten(problem, _MAX_PROBLEM, placeholder=" ...")


def _build_messages(settings: Settings, request: str) -> Messages:
    """Messages with the description of the task, ``request``, and the form of the answer."""
    system = f"{describe_task(settings)}\n\n{describe_reply(settings)}"
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": f"{request} JSON only."},
    )
