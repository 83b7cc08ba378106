"""Task of the proposer, the same in all prompts of a search: goal, scores, language, reply.

It comes first in a prompt, so that a server's prefix cache computes it once. It explains the parts
of a policy and how policies are scored; it gives no advice on what to propose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from offline_search.candidates import (
    BASE_PARENT,
    MAX_HYPOTHESIS,
    PROPOSALS,
    base_in_atoms,
    describe_purposes,
)
from offline_search.components import BASE, compact_json, searched_components
from offline_search.released_space import describe_space
from offline_search.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Objective, Settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Positions

_STEPS = """A policy starts from the picks of the base policy, and refines them in four steps:
1. Scoring: signals are min-max normalised in each image, to 0 to 1; the fusion makes the quality\
 of each token of them. No weight is negative; only instruction_guided_visual_relevance has a sign.
2. Pool: tokens that may enter, of those that are not picked.
3. Selector: exchanges picks for tokens of the pool{quota}. It reads the quality\
{exceptions}.
4. Reassembly: computes the rows of the kept tokens that the language model reads, from the \
discarded tokens that are assigned to each, its group, and their order. A pick that is kept begins \
with the row that the base policy makes of it, any other with the vision tower's. Kept tokens \
stand {positions}."""

_EXCEPTIONS = """, but reference_strict_preservation_selector reads nothing, and three read it by \
the pool alone: runtime_reference_anchor_pool_dpp_selector, and with {kernels} also \
anchor_controlled_pool_dpp_selector and constrained_pool_dpp_selector. With these, signals and \
fusion act at most on the order of rows where the pool does not read quality either, as \
diversity_pool_builder does not, nor quality_pool_builder with pool_ratio null"""

_PLACES: Mapping[Positions, str] = {
    "true": "where they stood in the whole image, whatever the order of rows",
    "spread": "evenly over the span of the whole image, in the order of rows",
    "packed": "one after the other, in the order of rows",
}
"""Descriptions of the positions that kept tokens have for the language model."""

_HOW_PARTS_ACT = """The kernel acts in reference_residual_exchange_selector where lam is set, \
anchor_controlled_pool_dpp_selector and constrained_pool_dpp_selector; the partition, \
spatial_grid_partition unless another is written, in the last alone. Where nothing is exchanged, \
scoring, pool and selector do nothing, but that rows may be ordered by quality. The orders score \
and pick act at strength 0 too."""

_EQUAL_SIGNALS = (
    "In an image of one tile redundancy_density_penalty with m null is "
    "mean_dissimilarity_saliency with its defaults."
)

_SCORES = """Scores: a score is {score}: 0 is as with all tokens, higher is better. All scores of \
a prompt are on one scale: each is an estimate for all questions that were asked so far, \
whichever of them its candidate was asked, corrected for how difficult those were and weighted by \
category. So all of them are computed again after every round, and a score may differ from that \
in an earlier prompt; one of few questions may be corrected to above 0. A difference is the mean \
over the n questions that both were asked, ± its standard error over images, which is unknown for \
fewer than four; scores are estimates for all questions asked so far, so they need not differ by \
that. Of a candidate that was asked fewer questions than the leader, the differences are more \
certain than the score, which assumes that the questions it was not asked are as hard for it as \
for the candidates that were asked them. A difference is *higher* or *lower* if it exceeds two \
standard errors, else *same* if it and two standard errors, added, do not exceed the resolution, \
else *undecided*."""

_OBJECTIVES: Mapping[Objective, str] = {
    "quality": "the mean log-probability of the reference answers less that of the model with all "
    "tokens, in thousandths of nats",
    "mme": "the MME total of the model (accuracy and accuracy+ of each category in per cent, "
    "summed) less that of the model with all tokens, in points",
}


@cache
def describe_task(settings: Settings) -> str:
    """The constant part of all prompts: the goal, the language, and how policies are scored."""
    is_small = settings.space != "all"
    language = f"""These atoms can be used:

{render_language(searched_components(settings), excluded_atoms(settings)).strip()}

{_HOW_PARTS_ACT} {_describe_quota(settings)}"""
    if is_small:
        language = describe_space(settings)
    quota = ", at most q_e of them"
    exceptions = ""
    if not is_small:
        quota += ", or up to K in quality_topk_selector, which has no q_e"
        kernels = "pairwise_cosine_kernel"
        if settings.library != "paper":
            kernels += " or centred_cosine_kernel with weighted false"
        exceptions = _EXCEPTIONS.format(kernels=kernels)
    parts = (
        _describe_goal(settings),
        _STEPS.format(
            quota=quota,
            exceptions=exceptions,
            positions=_PLACES[settings.positions],
        ),
        _SCORES.format(score=_OBJECTIVES[settings.objective]),
        language,
        _describe_form(settings),
    )
    return "\n\n".join(parts)


def describe_reply(settings: Settings) -> str:
    """The form of a reply: one policy, or a list of policies with a hypothesis each."""
    if settings.proposals_per_reply == 1:
        return "Answer with one such object and nothing else."
    purposes = "\n".join(
        f"  - {name}: {what}" for name, what in describe_purposes(settings).items()
    )
    return f"""Answer with {{"{PROPOSALS}": [...]}} and nothing else: a list of such objects, each \
beginning with

- "purpose", one of
{purposes}
- "hypothesis", a sentence of at most {MAX_HYPOTHESIS} characters: what the change does, and why
- "parent", the name of the candidate that is changed, or "{BASE_PARENT}" for the base policy alone
- "expect", the verdict on the difference to the parent: "higher", "same" or "lower"

A hypothesis is confirmed where the verdict is as expected, and refuted where it is another; where \
it is undecided, so is the hypothesis."""


def dump_policy(state: PruningState, settings: Settings) -> str:
    """JSON of a whole policy, in the form that a reply has."""
    return json.dumps(compact_json(state, bool(settings.bases)), separators=(",", ":"))


def _describe_goal(settings: Settings) -> str:
    """The goal: what has to be designed, and from which base policy."""
    budget = settings.budgets[0]
    policy = BASE_POLICIES[settings.base_policy]
    goal = (
        f"You design a policy that decides which K = {budget} of the N visual tokens of an image a "
        "vision-language model keeps. A candidate below is such a policy. "
    )
    if len(settings.budgets) > 1:
        others = ", ".join(map(str, settings.budgets[1:]))
        goal += f"It is measured at K = {others} too, and scores are means over these. "
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
        return (
            f"{goal} The atoms below cannot make its picks otherwise; any policy that exchanges "
            "nothing and changes no row is the base policy alone."
        )
    return (
        f"{goal} Written in the atoms below, with the same picks in an image of one tile, it is "
        f"{dump_policy(written, settings)}"
    )


def _describe_quota(settings: Settings) -> str:
    """Range of q_e in the whole language."""
    quota = f"q_e is 0 to {min(settings.source_budget, MAX_QUOTA)}"
    if settings.library == "paper":
        return f"{quota}."
    return f"{_EQUAL_SIGNALS} {quota}, and r_min is K - q_e: leave it out."


def _describe_form(settings: Settings) -> str:
    """The JSON of a policy."""
    optional = {
        "core": (settings.core, '"core": {"share": ..., ...} or null'),
        "rank_at": (settings.rank_at, '"rank_at": ...'),
        BASE: (bool(settings.bases), f'"{BASE}": {{"name": ...}}'),
    }
    fields = [
        '"scoring": {"signals": [...], "kernel": ..., "fusion": ...}',
        '"constraints": {"pool": [...], "selector": ...}',
        '"reassembly": ...',
        *(text for is_searched, text in optional.values() if is_searched),
    ]
    form = f"A policy is one JSON object: {{{', '.join(fields)}}}"
    if settings.library == "paper":
        form += (
            ' "source", "budget" and "safety" may be added; '
            f"K is {settings.budgets[0]}, whatever the budget."
        )
    return form
