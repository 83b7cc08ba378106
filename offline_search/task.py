"""Task of the proposer, the same in all prompts of a search: goal, scores, language, reply.

It comes first in a prompt, so that a server's prefix cache computes it once. It explains the parts
of a policy and how policies are scored; it gives no advice on what to propose.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from offline_search.candidates import (
    BASE_PARENT,
    MAX_HYPOTHESIS,
    PROPOSALS,
    base_in_atoms,
    describe_purposes,
)
from offline_search.components import (
    BASE,
    compact_json,
    dump_json,
    optional_components,
    searched_components,
)
from offline_search.differences import SMALLEST_CHANGE
from offline_search.released_space import choice_of_signals, describe_space
from offline_search.search_space import excluded_atoms
from offline_search.settings import (
    MAX_QUOTA,
    STRATEGIES_WITH_LISTS,
    Objective,
    Settings,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Positions

_STEPS = """A policy starts from the K tokens that the base policy picks, in an order: the \
reference selection. It refines them in four steps:
1. Scoring: signals are min-max normalised in each image, to 0 to 1; the fusion makes of them the \
quality of each token, which is normalised again only where an atom says so.{signs}
2. Pool: tokens that may enter, of those outside the reference selection.
3. Selector: exchanges reference tokens for tokens of the pool{quota}.
4. Reassembly: computes the row that the language model reads of each kept token, from the \
discarded tokens that are assigned to it, its group, and puts the rows in an order. A reference \
token that is kept begins with the row that the base policy makes of it, any other with the vision \
tower's. Kept tokens stand {positions}."""

_NO_SIGN = " No weight is negative."
_ONE_SIGN = (
    " No weight is negative; only instruction_guided_visual_relevance has a sign."
)
"""What is said of signs, without and with the signal that has one."""

_PLACES: Mapping[Positions, str] = {
    "true": "where they stood in the whole image, whatever the order of rows",
    "spread": "evenly over the span of the whole image, in the order of rows",
    "packed": "one after the other, in the order of rows",
}
"""Descriptions of the positions that kept tokens have for the language model."""

_WHAT_READS_WHAT = """Parts that nothing reads change nothing:
- Quality, and with it signals and fusion, is read by quality_pool_builder unless pool_ratio is \
null and by spatial_coverage_pool_builder, also as sources; by kernels that scale by it; by the \
order score; and by all selectors but {unread}.
- The pool is read by all selectors but reference_strict_preservation_selector and \
quality_topk_selector.
- The kernel is read by reference_residual_exchange_selector where lam is set, by \
anchor_controlled_pool_dpp_selector and by constrained_pool_dpp_selector. With others leave it out.
- Where nothing is exchanged, only reassembly acts; the order score reads quality there too."""

_WITHOUT_QUALITY = (
    "reference_strict_preservation_selector",
    "runtime_reference_anchor_pool_dpp_selector",
    "anchor_controlled_pool_dpp_selector",
    "constrained_pool_dpp_selector",
)
"""Selectors that do not read the quality of tokens."""

_LIMITS = (
    "A q_e above K acts as K, which leaves no anchor; clusters or m above the number of tokens "
    "act as that number. They are the same in every image, whatever its N and K. A signal may "
    "stand twice."
)

_TILES = 'Where an atom says "tile or image", it compares tokens of a tile.'

_EQUAL_SIGNALS = (
    "In an image of one tile redundancy_density_penalty with m null is "
    "mean_dissimilarity_saliency with its defaults."
)

_SCORES = """Scores: a score is {score}: 0 is as with all tokens, higher is better. All scores of \
a prompt are on one scale, estimates for all questions that were asked so far: the mean over those \
that a candidate was asked, corrected for how difficult they were and weighted by category. They \
are estimated again after every round, so one may differ from that in an earlier prompt; that of \
few questions is rough, and may come out above 0."""

_DIFFERENCES = """
A difference of two candidates is firmer: the mean over the questions that both were asked, which \
need not be the difference of their scores, ± its standard error over images, unknown for fewer \
than four; then the verdict, undecided where the error is unknown, and at how many of those \
questions the first is up and down by more than {smallest}. The resolution is {resolution}. The \
verdict is *same* if the difference and two standard errors, added, are within the resolution, \
which a standard error above half of it rules out, else *higher* or *lower* if the difference \
exceeds two standard errors, else *undecided*. A policy is not measured again if it is a measured \
one, or if, where the search can run it on a few images, it keeps the same tokens with the same \
rows as a measured one: what is listed of it is that one's, also where it is a parent."""

_RESOLUTION = (
    "the smallest difference that the search can tell: two standard errors of the difference of "
    "the scores of {leaders}, once they have answered all questions, or those of {rounds} rounds "
    "where rounds have others; it is estimated anew after every round"
)

_OBJECTIVES: Mapping[Objective, str] = {
    "quality": "the mean log-probability of the reference answers less that of the model with all "
    "tokens, in nats",
    "mme": "the MME total of the model (accuracy and accuracy+ of each category in per cent, "
    "summed) less that of the model with all tokens, in thousands of points",
}


_SHARE = (
    "the mean over the models, each of which counts alike, of the log-probability of the reference "
    "answers less that of the model with all tokens, as a share of what the base policy alone "
    "loses on that model, so that -1 is about as the base policy alone"
)


@cache
def describe_task(settings: Settings) -> str:
    """The constant part of all prompts: the goal, the language, and how policies are scored."""
    quota = ", at most q_e of them"
    signs = ""
    if settings.space == "all":
        language = _describe_language(settings)
        quota += "; quality_topk_selector has no q_e"
        signs = _NO_SIGN if settings.question_free else _ONE_SIGN
    else:
        language = describe_space(settings)
        if "tile or image" in language:
            language += f"\n\n{_TILES}"
    parts = (
        _describe_goal(settings),
        _STEPS.format(quota=quota, signs=signs, positions=_PLACES[settings.positions]),
        _describe_scores(settings),
        language,
        _describe_form(settings),
    )
    return "\n\n".join(parts)


def _describe_scores(settings: Settings) -> str:
    """What a score is and, for strategies whose prompts have them, a difference and a verdict."""
    score = _SHARE if settings.models else _OBJECTIVES[settings.objective]
    text = _SCORES.format(score=score)
    if settings.strategy not in STRATEGIES_WITH_LISTS:
        return text
    leaders = "leading candidates of different structures"
    if _has_one_structure(settings):
        leaders = f"the best candidate and {BASE_PARENT}"
    resolution = _RESOLUTION.format(leaders=leaders, rounds=settings.rounds)
    if settings.resolution:
        resolution = f"{settings.resolution:g}, the smallest difference that counts"
    return text + _DIFFERENCES.format(smallest=SMALLEST_CHANGE, resolution=resolution)


def _describe_language(settings: Settings) -> str:
    """The atoms of the whole language with their parameters, and which of them act on what."""
    left_out = excluded_atoms(settings)
    quota = min(settings.source_budget, MAX_QUOTA)
    *names, last = (name for name in _WITHOUT_QUALITY if name not in left_out)
    notes = [_WHAT_READS_WHAT.format(unread=f"{', '.join(names)} and {last}"), _LIMITS]
    if settings.library != "paper":
        left_out |= {"r_min"}  # it follows from q_e
        notes += [_TILES, _EQUAL_SIGNALS]
    atoms = render_language(searched_components(settings), left_out, quota)
    return "\n\n".join(("These atoms can be used:", atoms.strip(), *notes))


def describe_reply(settings: Settings) -> str:
    """The form of a reply: one policy, or a list of policies with a hypothesis each."""
    if settings.proposals_per_reply == 1:
        return "Answer with one such object."
    purposes = "\n".join(
        f"  - {name}: {what}" for name, what in describe_purposes(settings).items()
    )
    return f"""Answer with the object {{"{PROPOSALS}": [...]}}, a list of policies. Each \
of them has, before its other fields,

- "purpose", one of
{purposes}
- "hypothesis", a sentence of at most {MAX_HYPOTHESIS} characters: what the change does, and why
- "parent", the name of the earlier candidate that is changed, of several the one to compare with, \
or "{BASE_PARENT}" for the base policy alone; an unknown name counts as the best candidate, as \
does one listed as not measured
- "expect", the verdict on the difference to the parent: "higher", "same" or "lower"

A hypothesis is confirmed where the verdict is as expected, and else refuted; undecided where the \
verdict is; and untested where a change was expected and no answer changed, or no question was \
asked of both."""


def dump_policy(state: PruningState, settings: Settings) -> str:
    """JSON of a whole policy, in the form that a reply has."""
    return dump_json(compact_json(state, bool(settings.bases)))


def _has_one_structure(settings: Settings) -> bool:
    """Whether all candidates have the same atoms and policies, and rank tokens at one place."""
    varies = settings.space == "all" or choice_of_signals(settings.space) != "fixed"
    return not (varies or optional_components(settings))


def _describe_structure(settings: Settings) -> str:
    """The names that make the structure of a candidate."""
    if _has_one_structure(settings):
        return "the names of all its atoms, here the same for all"
    parts = ["of all its atoms in their order"]
    if settings.bases:
        parts.append("of its base policy")
    if settings.core:
        parts.append("of its core's policy")
    names = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    place = ", and rank_at" if settings.rank_at else ""
    return f"the names {names}{place}, whatever their parameters"


def _describe_goal(settings: Settings) -> str:
    """The goal: what has to be designed, and from which base policy."""
    budget = settings.budgets[0]
    policy = BASE_POLICIES[settings.base_policy]
    goal = (
        f"You design a policy that decides which K = {budget} of the N visual tokens of an image a "
        "vision-language model keeps for a question, the instruction. A candidate is a policy; its "
        f"structure is {_describe_structure(settings)}. "
    )
    if len(settings.budgets) > 1:
        others = ", ".join(map(str, settings.budgets[1:]))
        goal += (
            f"It is measured at K = {others} too, and scores are means over these; what it "
            f"exchanges is told at K = {budget}. "
        )
    if settings.question_free:
        goal += (
            "It must not read the question: all questions about an image are answered from the "
            "same tokens. "
        )
    if settings.models:
        same = "N" if isinstance(budget, int) else "N, K"
        goal += (
            f"One policy has to suit {len(settings.models)} models: {', '.join(settings.models)}. "
            f"{same} and the categories are each model's own, and a question counts once for each "
            "model that is asked. "
        )
    if settings.bases:
        listed = "\n".join(
            f"- {name}: {BASE_POLICIES[name].doc}" for name in settings.bases
        )
        goal += (
            f"The base policy is one of:\n{listed}\n"
            f'"Base policy alone" below is {policy.name}.'
        )
    else:
        goal += f"The base policy is {policy.name}: {policy.doc}"
    if settings.space != "all":
        return goal
    written = base_in_atoms(settings)
    if written is None:
        picks = "its picks, and one"
        if settings.bases:
            picks = f"the picks of their base policy, and one of {policy.name}"
        return (
            f"{goal} The atoms below cannot express it: policies start from {picks} that exchanges "
            "nothing and changes no row is the base policy alone."
        )
    goal += (
        " Written in the atoms below, with the same picks in an image of one tile, it is "
        f"{dump_policy(written, settings)}"
    )
    if not written.reads_quality:
        goal += " (its signals and fusion act on nothing)."
    return goal


def _describe_form(settings: Settings) -> str:
    """The JSON of a policy."""
    optional = {
        "core": (settings.core, '"core": {"share": ..., ...} or null'),
        "rank_at": (settings.rank_at, '"rank_at": ...'),
        BASE: (bool(settings.bases), f'"{BASE}": {{"name": ...}}'),
    }
    partition = '"partition": ..., ' if settings.space == "all" else ""
    fields = [
        '"scoring": {"signals": [...], "kernel": ..., "fusion": ...}',
        f'"constraints": {{"pool": [...], {partition}"selector": ...}}',
        '"reassembly": ...',
        *(text for is_searched, text in optional.values() if is_searched),
    ]
    form = (
        f"A policy is one JSON object: {{{', '.join(fields)}}}. It has signals, fusion, pool and "
        "selector even where nothing reads them."
    )
    if settings.library == "paper":
        form += (
            '\n"source", "budget" and "safety" may be added; '
            f"K is {settings.budgets[0]}, whatever the budget."
        )
    return form
