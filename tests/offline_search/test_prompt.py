"""Prompts: what a language model is told of the task, and what it is asked for."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch

from offline_search.candidates import (
    PURPOSES,
    Draft,
    Stage,
    assemble_state,
    base_in_atoms,
    base_state,
    describe_purposes,
    list_purposes,
    minimal_state,
    paper_state,
)
from offline_search.choices import RandomSource
from offline_search.components import JsonObject, components_json
from offline_search.history import History
from offline_search.image_facts import ImageFacts
from offline_search.ledger import (
    EvaluationRecord,
    ProposalRecord,
    SummaryRecord,
    TrialRecord,
)
from offline_search.prompt import (
    crossover_prompt,
    describe_field,
    describe_request,
    proposal_prompt,
    repair_prompt,
)
from offline_search.released_space import choice_of_signals
from offline_search.search_space import excluded_atoms, sample_proposal
from offline_search.settings import Settings, Space
from offline_search.strategies.sampling import _warm_start_states
from offline_search.summary import summarize
from offline_search.task import describe_task, dump_policy
from tests.offline_search.synthetic import (
    BUDGET,
    ScriptedProposer,
    Searches,
    list_reply,
    settings_of,
    trial,
)
from tests.tables import parametrize_from_file, read_tables
from vllm_autoprune.errors import StateError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, default_call, run
from vllm_autoprune.tpdsl.safety import synthetic_probes

SETTINGS = Settings(budgets=(8,), base_policy="visionzip", proposer="scripted")
LISTS = SETTINGS.model_copy(update={"proposals_per_reply": 5})
SPACES: tuple[Space, ...] = get_args(Space)
ADVICE = re.compile(
    r"\b(safe|safer|helps?|should|prefer\w*|avoid|recommend\w*|pays?|usually|try|good|advice|"
    r"instead|better to|don't|not to repeat)\b",
    re.IGNORECASE,
)
EXAMPLES = [
    Example(image=f"{n}.png", question="Q?", answer="a", category="text")
    for n in range(4)
]


@pytest.fixture
def history() -> History:
    paper = paper_state(SETTINGS)
    other = paper_state(SETTINGS, quota=4)
    trials = [
        trial("1.0", [-1.0] * 4, paper),
        trial("2.0", [-1.1] * 4, other, parent="1.0", expect="higher"),
        trial("2.1", [-2.5] * 2, minimal_state(SETTINGS), "dropped"),
        trial("2.2", status="invalid", reason="no such atom"),
    ]
    return History(trial("0.0", [-3.0] * 4), trials, EXAMPLES)


def test_prompts_give_no_advice(history: History) -> None:
    """A proposer is told what it may write and what was measured, not what to conclude."""
    summary = summarize(history)
    example = minimal_state(SETTINGS)
    requests = [describe_request(1, 0, stage) for stage in get_args(Stage)]
    requests.append(describe_request(1, 0, "open", list(PURPOSES)))
    prompts = [
        proposal_prompt(settings, summary, example, request)
        for settings in (SETTINGS, LISTS)
        for request in requests
    ]
    for space in SPACES[1:]:
        small = LISTS.model_copy(update={"space": space})
        prompts.append(proposal_prompt(small, summary, example, requests[-1]))
    prompts.append(crossover_prompt(SETTINGS, history.ranked()[:2], history))
    prompts.append(repair_prompt(prompts[-1], "reply", {"1.1": ["is invalid"]}, 5))
    for messages in prompts:
        text = "\n".join(message["content"] for message in messages)
        assert not ADVICE.findall(text)


def test_base_policies_are_named_where_a_model_chooses_them(history: History) -> None:
    settings = SETTINGS.model_copy(update={"other_bases": ("dart", "trim")})
    dart = base_state(Settings(budgets=(8,), base_policy="dart")).base_policy
    other = history.trials[0].require_state().model_copy(update={"base_policy": dart})
    history.trials.append(trial("3.0", [-1.5] * 4, other, parent="1.0"))
    history.names_bases = True
    messages = proposal_prompt(settings, summarize(history), other, "")
    for name in settings.bases:
        assert f"- {name}: {BASE_POLICIES[name].doc}" in messages[0]["content"]
    assert '1.0 with base_policy name "visionzip" -> "dart"\n' in messages[1]["content"]
    assert '"base_policy":{"name":"dart"}' in messages[1]["content"]
    plain = proposal_prompt(SETTINGS, "", other, "")[0]["content"]
    assert "base_policy" not in plain
    # Policies start from the picks of the base policy that they choose.
    start = (
        "start from the picks of their base policy, and one of visionzip that exchanges"
    )
    assert start in messages[0]["content"]
    assert "start from its picks, and one that exchanges" in plain
    # A selector says what does not act on it.
    (line,) = (
        line for line in plain.splitlines() if line.startswith("- runtime_reference")
    )
    assert "signals act by the pool, the kernel not" in line


@pytest.mark.parametrize("space", SPACES)
def test_a_task_offers_core_rank_at_and_base_policy_where_they_are_searched(
    space: Space,
) -> None:
    searched = {"core": True, "rank_at": True, "other_bases": ("dart",)}
    task = describe_task(LISTS.model_copy(update={"space": space, **searched}))
    assert "core (/core)" in task and "rank_at (/rank_at)" in task
    structure = (
        "of all its atoms in their order, of its base policy and of its core's policy, "
        "and rank_at"
    )
    assert structure in task and "the same for all" not in task
    offered = "yours to choose, and core, rank_at, base_policy. All else is fixed"
    assert (offered in task) == (space != "all")


async def test_prompts_say_what_proposers_asked_for(search: Searches) -> None:
    replies = [list_reply(3 * number, 3) for number in range(10)]
    await search(replies, rounds=6, proposals_per_reply=3)
    said = read_tables(Path(__file__).with_suffix(".yaml"))
    prompts = {
        number: "\n".join(
            message["content"] for message in search.proposer.requests[number - 1]
        )
        for number in (1, 6)
    }
    print(*prompts.values(), sep="\n\n")
    silent = [
        point
        for point, (number, text) in said[
            "prompts_say_what_proposers_asked_for"
        ].items()
        if not re.search(text, prompts[number])
    ]
    assert silent == []
    assert not any(ADVICE.findall(prompt) for prompt in prompts.values())


def test_a_task_says_at_which_of_several_k_exchanges_are_counted() -> None:
    """Scores are means over all of them; a candidate is run on images at the first."""
    several = describe_task(LISTS.model_copy(update={"budgets": (8, "1/4")}))
    assert "means over these; what it exchanges is told at K = 8." in several
    assert "is told at K" not in describe_task(LISTS)


def test_a_task_names_the_kernels_that_it_offers() -> None:
    paper = describe_task(LISTS.model_copy(update={"library": "paper"}))
    assert "centred_cosine_kernel" not in paper


async def test_a_drop_names_the_candidate_that_was_better_and_by_how_much(
    search: Searches,
) -> None:
    """In the first round the leader before it is the base policy."""
    replies = [list_reply(3 * number, 3) for number in range(9)]
    proposer = ScriptedProposer(replies, in_order=True)
    await search(proposer, strategy="autoprune+", rounds=2, proposals_per_reply=3)
    answers: dict[str, list[float]] = {}
    for record in search.records(EvaluationRecord):
        if record.split == "search":
            answers.setdefault(record.digest, []).extend(record.logprob)
    digests = {record.name: record.digest for record in search.records(ProposalRecord)}
    digests["base"] = base_state(settings_of()).digest
    leaders = {1: "base"}
    for summary in search.records(SummaryRecord):
        assert summary.standing is not None
        leaders[summary.round + 1] = summary.standing.best
    results = {result.name: result for result in search.records(TrialRecord)}
    verbs: dict[str, int] = {}
    for name, result in results.items():
        if result.status != "dropped":
            continue
        pattern = (
            r"(behind|tied with|outranked).* (?:with |by |behind )?(base|\d+\.\d+)"
            r".*: ([+-][\d.]+) ± (\S+) on the same (\d+) questions$"
        )
        found = re.match(pattern, result.reason)
        assert found is not None, result.reason
        verb, rival, gap, _, count = found.groups()
        verbs[verb] = verbs.get(verb, 0) + 1
        assert int(count) == result.examples and rival == result.rival
        mean, of_rival = (
            float(np.mean(answers[digests[each]][: int(count)]))
            for each in (name, rival)
        )
        assert float(gap) == pytest.approx(mean - of_rival, abs=0.0051)
        if verb == "outranked":
            assert results[rival].examples > int(count) and mean <= of_rival
        else:
            assert rival == leaders[result.round]
    assert verbs["behind"] and verbs["outranked"]
    for messages in search.proposer.requests:
        assert read_problems(messages[1]["content"].split("Propose ")[0]) == []


@pytest.mark.parametrize(("strategy", "size"), [("autoprune", 2), ("autoprune+", 5)])
async def test_a_prompt_says_who_else_competes(
    strategy: str, size: int, search: Searches
) -> None:
    """With what other requests ask for, and what no model proposed, it is the whole round."""
    replies = [list_reply(3 * number, 5) for number in range(9)]
    await search(
        replies, strategy=strategy, rounds=2, per_round=5, proposals_per_reply=size
    )
    counts: dict[int, int] = {}
    for result in search.records(TrialRecord):
        counts[result.round] = counts.get(result.round, 0) + 1
    firsts = [messages for messages in search.proposer.requests if len(messages) == 2]
    for messages in firsts:
        text = messages[1]["content"]
        number, begin, end = re.findall(
            r"candidates? (\d)\.(\d+)(?: to \d\.(\d+))?", text
        )[-1]
        parts = re.findall(
            r"\. (\d+) candidates compete in this round: the (\d+) that .*? now(.*)\.",
            text,
        )
        (total, requested, others) = parts[0]
        assert int(total) == counts[int(number)]
        assert int(requested) == int(end or begin) - int(begin) + 1
        rest = sum(map(int, re.findall(r"(?:, | and )(\d+) ", others.split(". ")[0])))
        assert rest == int(total) - int(requested)
    assert (
        "are taken, those of base not counted" not in text or strategy == "autoprune+"
    )
    starts = "that every search starts with (of instruction_guided_visual_relevance, "
    alone = "; of one signal alone: instruction_guided_visual_relevance, "
    prompt = firsts[0][1]["content"]
    others = (
        "with weighted_sum_fusion, quality_pool_builder, reference_residual_exchange_selector, "
        "mean_residual at q_e 8)"
    )
    told = [text in prompt for text in (starts, alone, others)]
    assert told == [strategy == "autoprune+"] * 3


# ---- no contradiction ----


def _list_problems_of_differences(prompt: str) -> list[str]:
    """Differences that a prompt tells in two ways, or that contradict scores for all questions."""
    scores = dict(
        re.findall(r"^- (\d+\.\d+): ([+-][\d.]+) o[nf]", prompt, re.MULTILINE)
    )
    scores |= {"base": _read_score_of_base(prompt)}
    duplicates = r"^- (\S+) \([^)]*; tokens and rows of (\S+)\)"
    for name, measured in re.findall(duplicates, prompt, re.MULTILINE):
        scores[name] = scores[measured]
    problems: list[str] = []
    differences: dict[tuple[str, str], str] = {}
    for line in prompt.splitlines():
        name = line[2:].split()[0].strip(":") if line.startswith("- ") else ""
        gap = r"([+-][\d.]+ ± \S+ \w+ \([^)]*\))"
        gaps = re.findall(rf"; to (\S+) {gap}", line)
        gaps += re.findall(rf"[ (]of (\S+), expected .* => {gap}", line)
        for reference, gap in gaps:
            if differences.setdefault((name, reference), gap) != gap:
                problems.append(f"{name} differs from {reference} by {gap} too")
            if f"(of {_count_asked(prompt)}," in gap:
                gap_of_scores = float(scores[name]) - float(scores[reference])
                if abs(gap_of_scores - float(gap.split()[0])) > 0.0002:
                    problems.append(f"{name} differs from {reference} by {gap}")
    return problems


def _list_problems_of_verdicts(prompt: str) -> list[str]:
    """Differences whose printed verdict is not that of the printed figures."""
    resolution = re.findall(r"Resolution: ([\d.]+)\.", prompt)
    limit = Fraction(resolution[0]) if resolution else Fraction()
    problems: list[str] = []
    for value, error, verdict in re.findall(
        r"([+-][\d.]+) ± ([\d.]+), (\w+) \(of ", prompt
    ):
        size, reach = abs(Fraction(value)), 2 * Fraction(error)
        expected = "undecided"
        if size + reach <= limit:
            expected = "same"
        elif size > reach:
            expected = "higher" if value[0] == "+" else "lower"
        if verdict != expected:
            problems.append(f"{value} ± {error} is {expected}, not {verdict}")
    return problems


def read_problems(prompt: str) -> list[str]:
    """What a reader of a prompt would ask about."""
    problems = _list_problems_of_verdicts(prompt)
    printed = re.findall(r"^- (\d+\.\d+): ", prompt, re.MULTILINE)
    named = re.findall(
        r"(?:[ (]of| than| as|;|to|from| by|behind|tied with) (\d+\.\d+)"
        r"(?: with| at place|,|;|\)| [+-]|$)",
        prompt,
    )
    problems += [f"{name} is named only" for name in {*named} - {*printed}]
    problems += [
        f"{name} is printed twice" for name in {*printed} if printed.count(name) > 1
    ]
    problems += _list_problems_of_differences(prompt)
    shares = dict(re.findall(r"^- ([a-z]+): (\d+), ", prompt, re.MULTILINE))
    total = _count_asked(prompt)
    if sum(map(int, shares.values())) != int(total):
        problems.append(f"categories have not {total} questions")
    for line in prompt.splitlines():
        parts = re.findall(r"(colour|digit) ([+-][\d.]+)", line)
        if len(parts) == len(shares) and f" on {total} questions" in line:
            gain = sum(int(shares[part]) * float(score) for part, score in parts)
            score = float(line.split(": ")[1].split()[0])
            of_base = float(_read_score_of_base(prompt))
            if abs(gain / int(total) - (score - of_base)) > 0.0002:
                problems.append(f"categories contradict the score: {line[:80]}")
        if "+0.0000 ± 0.0000" in line and "refuted" in line:
            problems.append("an effect of nothing refutes")
        if re.search(r"-0\.0+(?![\d.])", line):
            problems.append(f"a negative zero: {line[:80]}")
        if re.search(r"not asked|, \+0\.0*, 0%; \"", line):
            problems.append(f"a line tells nothing: {line[:80]}")
        is_read = "dpp_selector" in line or '"lam":' in line
        if '"kernel":' in line and not is_read and "Answer" not in line:
            problems.append(f"a kernel that nothing reads: {line[:80]}")
    problems += _list_problems_of_trend(prompt)
    problems += [f"{word} is not said" for word in UNDEFINED if word in prompt]
    return problems


def _list_problems_of_trend(prompt: str) -> list[str]:
    """Measured candidates whose printed score is above the best that is told of their round."""
    trend = re.findall(r", as estimated now: (.*)\.\n", prompt)
    best = dict(re.findall(r"(\d+): ([+-][\d.]+), ", trend[0] if trend else ""))
    measured = r"^- ((\d+)\.\d+): ([+-][\d.]+) on \d+ questions;"
    return [
        f"{name} is above the best of its round"
        for name, number, score in re.findall(measured, prompt, re.MULTILINE)
        if number in best and float(score) > float(best[number])
    ]


UNDEFINED = (
    "equation",
    "thousandths",
    "nothing else",
    "released search",
    "examples:",
    "earlier leaders",
    "quality g",
)
"""Words that a proposer has no explanation of."""


def _read_score_of_base(prompt: str) -> str:
    return str(re.findall(r"\(base\): ([+-][\d.]+)\.", prompt)[0])


def _count_asked(prompt: str) -> str:
    """Number of questions asked so far that a prompt states."""
    return re.findall(r"Questions asked so far, all of them of base: (\d+)\.", prompt)[
        0
    ]


@pytest.mark.parametrize("space", SPACES)
async def test_no_prompt_contradicts_itself(space: Space, search: Searches) -> None:
    """Rounds of fresh questions, in every space, with candidates of earlier parents."""
    settings = settings_of(space=space)
    replies = []
    for number in range(12):
        fields = {"purpose": "explore", "expect": "higher", "hypothesis": "Why."}
        fields["parent"] = f"{number // 3}.{number % 3}"
        drawn = [
            sample_proposal(RandomSource(Random(10 * number + index)), settings)
            for index in range(3)
        ]
        replies.append(json.dumps({"proposals": [fields | state for state in drawn]}))
    await search(replies, space=space, rounds=6, proposals_per_reply=3, block=8)
    prompts = [messages for messages in search.proposer.requests if len(messages) == 2]
    assert len(prompts) >= 4
    assert not [word for word in UNDEFINED if word in prompts[0][0]["content"]]
    for messages in prompts:
        text, request = messages[1]["content"].split("Propose ")
        assert read_problems(text) == []
        assert "explore" not in request or "the last one" not in text
        # What a smaller space does not offer is not told: it would be a term without meaning.
        inputs = re.findall(
            r'\[CLS\]|The sign "auto"|Text segments|With pool_ratio', text
        )
        assert bool(inputs) == (space == "all")
        assert ("others than those of the round before" in text) == (
            "Round 1 " not in text
        )
    task = prompts[0][0]["content"]
    assert "0 to 640" not in task and "r_min" not in task
    has_one = ["the same for all" in task, "of the best candidate and base" in task]
    assert has_one == [space == "numbers"] * 2
    assert ("has a sign" in task) == ("; null:" in task) == (space == "all")
    assert len(re.findall(r"q_e [^;]*?(?:0 to \d+|is fixed at \d+)", task)) == 1
    hypotheses = prompts[-1][1]["content"].split("Hypotheses: ")[1]
    told = set(re.findall(r"^- (\d)\.\d \(", hypotheses, re.MULTILINE))
    assert told == {str(number) for number in range(1, len(prompts))}


@parametrize_from_file("counts", "budget", "text")
def test_facts_of_images_count_what_each_size_has(
    counts: list[int], budget: int | str, text: str
) -> None:
    """K of a share, others and largest pools are those of the same image."""
    facts = ImageFacts(tuple(counts), grids=("1 x 6 x 6",) * len(counts))
    assert facts.describe(BudgetCall.parse(budget)) == text


def test_a_repair_names_candidates_as_the_request_does() -> None:
    request = proposal_prompt(LISTS, "", minimal_state(SETTINGS), "")
    *_, correction = repair_prompt(
        request, "reply", {"4.0": ["a"], "4.2": ["b", "c"]}, 4
    )
    assert correction["content"] == (
        "Not valid are:\n- candidate 4.0: a\n- candidate 4.2: b; c\n"
        "Answer once more in the same form, with 4.0, 4.2 alone, corrected, in this order."
    )
    *_, correction = repair_prompt(request, "reply", {"4.1": ["a"]}, 4)
    assert correction["content"] == (
        "Not valid is:\n- candidate 4.1: a\n"
        "Answer once more in the same form, with 4.1 alone, corrected."
    )


def test_a_policy_that_a_line_holds_is_not_printed_again(history: History) -> None:
    summary = summarize(history)
    parent, child = history.trials[:2]
    prompt = proposal_prompt(SETTINGS, summary, parent, "")[1]["content"]
    assert "Candidate 1.0, printed whole above, is an example of a policy." in prompt
    assert prompt.count(dump_policy(parent.require_state(), SETTINGS)) == 1
    prompt = proposal_prompt(SETTINGS, summary, child, "")[1]["content"]
    policy = dump_policy(child.require_state(), SETTINGS)
    assert f"The whole of candidate 2.0, as an example:\n{policy}" in prompt


def test_each_stage_asks_for_what_it_can_use() -> None:
    assert set(list_purposes(0, 9, "open")) == set(PURPOSES)
    assert {*list_purposes(0, 5, "first"), *list_purposes(0, 5, "tied")} == {"explore"}
    assert "explore" not in list_purposes(2, 9, "last")
    assert describe_request(3, 5, "open", ["exploit"]) == (
        "Propose candidate 3.5, in search of a higher score. Its purpose: exploit."
    )
    assert "unlike those that are listed" in describe_request(3, 0, "tied")
    assert "of one that is listed" in describe_request(3, 0, "last")


@pytest.mark.parametrize("name", ["cdpruner", "cen_cdpruner", "norm"])
def test_a_base_policy_written_in_atoms_makes_its_picks(name: str) -> None:
    settings = Settings(budgets=(BUDGET,), base_policy=name)
    written = base_in_atoms(settings)
    assert written is not None
    budget = BudgetCall.parse(BUDGET)
    others = minimal_state(settings, quota=BUDGET)
    for tokens in synthetic_probes(BUDGET)[:2]:
        picks = [
            set(refine(materialize(state, budget), tokens).indices[0].tolist())
            for state in (base_state(settings), written, others)
        ]
        assert picks[0] == picks[1]
    assert materialize(written, budget).refines, "it is an exchange, whatever is picked"
    selector = written.constraints.selector.model_dump()
    assert selector.get("q_e", BUDGET) == BUDGET, "prompts offer no larger one"
    assert base_in_atoms(Settings(base_policy="visionzip")) is None
    papers = Settings(base_policy="cen_cdpruner", library="paper")
    assert base_in_atoms(papers) is None, "the paper has no centred kernel"


@parametrize_from_file("space", "field", "value", "message")
def test_a_proposal_outside_its_space_is_refused_with_what_is_inside(
    space: Space, field: str, value: object, message: str
) -> None:
    """It is never made into another one in silence, on which its hypothesis would be judged."""
    settings = settings_of(space=space)
    proposal = sample_proposal(RandomSource(Random(3)), settings)
    assert assemble_state(proposal, settings).digest
    scoring, constraints = proposal["scoring"], proposal["constraints"]
    assert isinstance(scoring, dict) and isinstance(constraints, dict)
    if field == "signal":
        scoring["signals"] = [{"atom": str(value), "weight": 1.0}]
    else:
        selector = constraints["selector"]
        assert isinstance(selector, dict)
        constraints["selector"] = {**selector, field: value}  # type: ignore[dict-item]
    with pytest.raises(StateError, match=re.escape(message)):
        assemble_state(proposal, settings)


def _is_accepted(proposal: JsonObject, settings: Settings) -> bool:
    """Whether a proposal is a state of the search's space."""
    try:
        assemble_state(proposal, settings)
    except StateError:
        return False
    return True


@pytest.mark.parametrize("space", SPACES[1:])
def test_purposes_ask_for_what_their_space_accepts(space: Space) -> None:
    settings = settings_of(space=space)
    (proposal, fewer) = (
        sample_proposal(RandomSource(Random(3)), settings) for _ in range(2)
    )
    assert _is_accepted(proposal, settings)
    scoring = fewer["scoring"]
    assert isinstance(scoring, dict) and isinstance(scoring["signals"], list)
    scoring["signals"] = scoring["signals"][1:]
    purposes = describe_purposes(settings)
    assert ("without one of its signals" in purposes["ablate"]) == _is_accepted(
        fewer, settings
    )
    offered = choice_of_signals(space) != "fixed"
    for purpose in ("explore", "combine"):
        assert ("signal" in purposes[purpose]) == offered


@pytest.mark.parametrize("space", SPACES[1:])
def test_purposes_of_a_smaller_space_name_what_else_is_searched(space: Space) -> None:
    purposes = describe_purposes(
        settings_of(space=space, other_bases=("divprune",), core=True)
    )
    assert purposes["explore"].endswith(", or another core or base_policy")
    assert purposes["combine"].endswith("; core, base_policy may come from any of them")


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("core", [True, False])
def test_the_starts_that_are_told_are_as_many_as_there_are(
    space: Space, core: bool
) -> None:
    """Those that differ in numbers alone too, and those with a core with its share."""
    settings = settings_of(space=space, core=core, budgets=(8,))
    states = _warm_start_states(settings)
    drafts = [Draft("warm start", state) for state in states]
    told = describe_field(1, 1, drafts)
    assert f" {len(states)} that every search starts with (" in told
    assert ("a core of 0.5" in told) == core
    (starts,) = re.findall(r"starts with \((.*)\)", told)
    count = 0
    for part in starts.split("; "):
        names = re.findall(r"of one signal alone: (.*), with ", part)
        signals = names[0].split(", ") if names else ["together"]
        quotas, *differ = part.split(" at q_e ")[1].split(", which differ in other ")
        values = quotas.split(" and at ")
        assert differ == (["numbers"] if len({*values}) < len(values) else [])
        count += len(signals) * len(values)
    assert count == len(states)


def test_the_starts_that_are_told_name_their_base_policy_and_place_of_ranking() -> None:
    """What starts of equal signals and q_e differ in is named; no q_e is that of a base alone."""
    settings = settings_of(other_bases=("dart", "trim"), rank_at=True)
    states = _warm_start_states(settings)
    told = describe_field(1, 1, [Draft("warm start", state) for state in states])
    assert "; of no signal, a base policy alone: dart, trim)" in told
    assert "reference_strict_preservation_selector" not in told
    assert "anchor_weighted_residual, rank_at merger_in at q_e 2; " in told


def test_what_no_prompt_of_a_strategy_has_is_not_explained() -> None:
    for strategy in ("autoprune", "autoprune+", "evoprompting", "openevolve"):
        task = describe_task(settings_of(strategy=strategy))
        assert ("The resolution is" in task) == strategy.startswith("autoprune")
        assert "All scores of a prompt are on one scale" in task


@pytest.mark.parametrize("space", SPACES[1:])
def test_a_task_says_where_a_weight_may_be_left_out(space: Space) -> None:
    """It is left out of printed policies too, where it is 1."""
    settings = settings_of(space=space)
    call: JsonObject = {
        "atom": "attention_proxy_saliency",
        "measure": "norm_and_place",
    }
    policy = components_json(paper_state(settings))
    scoring = policy["scoring"]
    assert isinstance(scoring, dict)
    accepted = _is_accepted(
        {**policy, "scoring": {**scoring, "signals": [call]}}, settings
    )
    task = describe_task(settings)
    assert accepted == (", by default 1; the" in task or "its weight is 1:" in task)


def test_sentences_of_a_task_end() -> None:
    """Of every paragraph that is not a list, a title, or followed by one."""
    for settings in (LISTS, settings_of(library="paper"), settings_of(space="numbers")):
        for paragraph in describe_task(settings).split("\n\n"):
            line = paragraph.splitlines()[-1]
            is_sentence = line[0].isupper() or line.startswith('"')
            assert not is_sentence or line.endswith((".", ":", "}")), line


def test_core_policies_are_described_where_a_core_is_searched() -> None:
    task = describe_task(settings_of(core=True))
    for name in CORE_POLICIES:
        assert f"    {name}: {BASE_POLICIES[name].doc}" in task
        without = (
            f"{BASE_POLICIES[name].doc} Here without what it says of the question."
        )
        assert (without in task) == BASE_POLICIES[name].reads_instruction
    assert f"    divprune: {BASE_POLICIES['divprune'].doc}" not in describe_task(
        settings_of()
    )


@pytest.mark.parametrize(("quota", "largest"), [(1, 1), (2, 2), (8, 3), ("1/8", 3)])
def test_a_task_offers_exchanges_up_to_k(quota: int | str, largest: int) -> None:
    settings = settings_of(space="numbers", budgets=(quota,))
    assert f"q_e integer 0 to {largest}, " in describe_task(settings)


def test_a_task_names_the_weights_of_signals_that_are_fixed() -> None:
    task = describe_task(settings_of(space="numbers"))
    for signal in load_state("autoprune").scoring.signals:
        assert f"weight is fixed at {signal.weight} (" in task
    for space in SPACES[2:]:
        assert "weight is fixed" not in describe_task(settings_of(space=space))


@pytest.mark.parametrize("space", SPACES[1:])
def test_fixed_parts_of_a_smaller_space_are_described_as_they_are(space: Space) -> None:
    task = describe_task(settings_of(space=space))
    for words in (
        "Relevance to the instruction",
        "Attention of [CLS]",
        "Gaussian of the",
        "the m most similar",
        "by softmax",
        "within the radius",
    ):
        assert words not in task
    assert ("that are unlike the kept ones" in task) == (space != "without-diversity")


@pytest.mark.parametrize("space", SPACES)
@parametrize_from_file("part", "names")
def test_a_repair_offers_what_the_space_accepts(
    space: Space, part: str, names: str
) -> None:
    """Every name is whole; where there are too many, the task's list is pointed at."""
    settings = settings_of(space=space)
    proposal = json.loads(
        json.dumps(sample_proposal(RandomSource(Random(3)), settings))
    )
    *path, last = part.split("/")
    parent = proposal
    for step in path:
        parent = parent[int(step) if step.isdecimal() else step]
    parent[int(last) if last.isdecimal() else last] = {"atom": "zzz"}
    with pytest.raises(StateError) as refused:
        assemble_state(proposal, settings)
    request = proposal_prompt(LISTS, "", minimal_state(SETTINGS), "")
    problems = [str(problem) for problem in refused.value.problems]
    *_, correction = repair_prompt(request, "reply", {"4.0": problems}, 4)
    (line,) = re.findall(r"- candidate 4.0: (.*)", correction["content"])
    offered = re.findall(r"use one of: (.*)", line)
    if space == "all" and names == "many":
        assert line.endswith("use one of those that the task lists for this part")
    else:
        left_out = excluded_atoms(settings)
        listed = offered[0].split(", ")
        assert set(listed) <= {*ATOMS} - left_out
        assert len(listed) == 1 or space == "all" or names == "signals"


def test_names_that_the_task_seems_to_allow_are_refused_with_what_to_write() -> None:
    proposal = sample_proposal(RandomSource(Random(3)), SETTINGS)
    nested: JsonObject = {
        "atom": "multi_source_pool_builder",
        "sources": [{"atom": "multi_source_pool_builder"}, {"atom": "zzz"}],
    }
    proposal["constraints"] = {
        "pool": [nested],
        "selector": {"atom": "quality_topk_selector"},
    }
    proposal["reassembly"] = {"atom": "reassemble/nearest.mean.residual.raster"}
    with pytest.raises(StateError) as refused:
        assemble_state(proposal, SETTINGS)
    union, unknown, longer = (problem.fix for problem in refused.value.problems)
    assert union.startswith("that is one of candidate_pool, this field takes others of")
    sources = ("quality_pool_builder", "spatial_coverage_pool_builder")
    assert unknown == f"use one of: {', '.join(sources)}, diversity_pool_builder"
    assert longer == "its name is 'mean_residual'"


@pytest.mark.parametrize("space", SPACES[1:])
def test_a_smaller_space_names_its_atoms_and_ranges_alone(space: Space) -> None:
    task = describe_task(settings_of(space=space))
    offered = "redundancy_density_penalty" in task
    assert offered == (space != "without-fusion")
    assert "local_detail_energy" not in task and "overwritten" not in task
    assert 'measure is fixed at "negative_mean"' in task, "not by relevance"
    assert "is refused" in task and "as in every policy that a prompt prints" in task


def test_signals_that_are_said_to_be_equal_are() -> None:
    tokens = synthetic_probes(BUDGET)[0]
    picks = torch.zeros(1, 1, dtype=torch.long)
    density = default_call(AtomCall, "redundancy_density_penalty")
    calls = (
        density.model_copy(update={"m": None}),
        default_call(AtomCall, "mean_dissimilarity_saliency"),
    )
    signals = [
        min_max_normalise(run(torch.Tensor, call, tokens, picks)) for call in calls
    ]
    torch.testing.assert_close(*signals)
