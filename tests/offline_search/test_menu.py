from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from offline_search.examples import Dataset
from offline_search.history import calls, quota, structure
from offline_search.ledger import Ledger
from offline_search.menu import PARTS, QUOTA, Menu, drawn, offered
from offline_search.prompt import Messages, propose
from offline_search.proposal import MOST_SIGNALS, JsonObject, alpha, assembled, proposal_schema
from offline_search.proposers.protocol import Reply
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.space import Dice, composed, quota_scale
from offline_search.strategies.starts import paper_state, plain_state
from tests.offline_search.replies import BUDGET, sound
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.state import PruningState

DRAWS = 40
UNCOUNTED = ("reference_strict_preservation_selector", "quality_topk_selector")  # without a q_e
WIDTH = 3


def body_of(state: PruningState) -> Any:
    return json.loads(json.dumps(alpha(state)))


def likeness(state: PruningState) -> tuple[object, ...]:
    """What a menu tells apart: atoms and quota."""
    return (*structure(state), quota(state))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_no_menu_offers_what_was_shown_and_nothing_else_is_valid_on_it(
    seed: int, settings: Settings
) -> None:
    dice = Random(seed)
    shown = [plain_state(settings), paper_state(settings)][seed % 2]
    menu = drawn(dice, [shown], WIDTH, BUDGET)
    narrowed = menu.narrowed(proposal_schema(BUDGET))
    checked = jsonschema.Draft202012Validator(narrowed)
    whole = jsonschema.Draft202012Validator(proposal_schema(BUDGET))
    assert menu.changed
    assert not checked.is_valid(body_of(shown)), "the example itself is on the menu"
    on = off = 0
    for draw in range(300):
        body: dict[str, Any] = composed(Dice(Random(1000 * seed + draw)), BUDGET)
        for part in dice.sample(list(PARTS), 4):  # else a random state is hardly ever on it
            put(body, part, menu, dice)
        if not whole.is_valid(body):
            continue
        state = assembled(body, settings, "candidate")
        named = {name for names in menu.atoms.values() for name in names}
        within = (
            tuple(call.atom for call in state.scoring.signals) == menu.atoms["signals"]
            and state.constraints.selector.model_dump().get("q_e", menu.quotas[0]) in menu.quotas
            and {c.atom for c in calls(state) if ATOMS[c.atom].group in PARTS.values()} <= named
        )
        assert checked.is_valid(body) == within
        on, off = on + within, off + (not within)
        if within:
            assert likeness(state) != likeness(shown)
    assert on and off


def put(body: dict[str, Any], part: str, menu: Menu, dice: Random) -> None:
    """One part of a body as the menu has it, with the least that the schema asks for."""
    call: dict[str, Any] = {"atom": dice.choice(menu.atoms[part])}
    if part == "selector" and call["atom"] not in UNCOUNTED:
        call["q_e"] = menu.quotas[0]
    if part == "signals":
        body["scoring"]["signals"] = [{"atom": name} for name in menu.atoms["signals"]]
    elif part in ("kernel", "fusion"):
        body["scoring"][part] = call
    elif part == "selector":
        body["constraints"]["selector"] = call
    else:
        body["reassembly"] = call


def test_a_menu_is_narrow_and_says_what_it_offers(settings: Settings) -> None:
    schema = proposal_schema(BUDGET)
    shown = plain_state(settings)
    changes = set[str]()
    for seed in range(DRAWS):
        menu = drawn(Random(seed), [shown], WIDTH, BUDGET)
        assert menu == drawn(Random(seed), [shown], WIDTH, BUDGET)
        changes |= set(menu.changed)
        used = {call.atom for call in calls(shown)}
        for part, names in menu.atoms.items():
            assert {ATOMS[name].group for name in names} == {PARTS[part]}
            assert all(name in menu.told() for name in names)
            if part not in menu.changed:
                assert set(names) == used & set(ATOMS.names(PARTS[part]))
            elif part != "signals":
                assert not set(names) & used and len(names) <= WIDTH
        assert len(menu.quotas) == 1
        assert (quota(shown) in menu.quotas) == (QUOTA not in menu.changed)
        assert f"q_e is {menu.quotas[0]}." in menu.told()
        narrowed = menu.narrowed(schema)
        assert len(json.dumps(narrowed)) < len(json.dumps(schema)) / 2
        jsonschema.Draft202012Validator.check_schema(narrowed)
    assert changes == {*PARTS, QUOTA}


@pytest.mark.parametrize("atom", ATOMS.names("scoring"))
def test_every_signal_and_every_quota_comes_up(atom: str, settings: Settings) -> None:
    menus = [drawn(Random(seed), [plain_state(settings)], WIDTH, 8) for seed in range(300)]
    assert sum(atom in menu.atoms["signals"] for menu in menus) > 300 / 20
    assert {value for menu in menus for value in menu.quotas} == {0, 1, 2, 4, 8}


def test_a_menu_has_no_more_signals_than_a_proposal_may(settings: Settings) -> None:
    body = body_of(plain_state(settings))
    lengths = set()
    for seed in range(DRAWS):
        names = Random(seed).sample(ATOMS.names("scoring"), 5)
        body["scoring"]["signals"] = [{"atom": name} for name in names]
        parents = [assembled(body, settings, "a"), paper_state(settings), plain_state(settings)]
        lengths.add(len(drawn(Random(seed), parents, 5, BUDGET).atoms["signals"]))
    assert max(lengths) == MOST_SIGNALS


@pytest.mark.parametrize("budget", [1, 2, 5, BUDGET])
def test_a_quota_is_offered_where_no_other_is_left_and_where_there_was_none(
    budget: int, settings: Settings
) -> None:
    small = settings.model_copy(update={"budgets": (budget,)})
    body = body_of(plain_state(small))
    parents = []
    for value in quota_scale(budget):
        body["constraints"]["selector"]["q_e"] = value
        parents.append(assembled(body, small, "parent"))
    body["constraints"]["selector"] = {"atom": UNCOUNTED[1]}
    none = assembled(body, small, "none")
    for seed in range(DRAWS):
        assert set(drawn(Random(seed), parents, WIDTH, budget).quotas) <= set(quota_scale(budget))
        menu = drawn(Random(seed), [none], WIDTH, budget)
        assert len(menu.quotas) == 1 and QUOTA not in menu.changed


def test_two_parents_are_both_on_the_menu_of_what_stays(settings: Settings) -> None:
    parents = [plain_state(settings), paper_state(settings)]
    for seed in range(DRAWS):
        menu = drawn(Random(seed), parents, WIDTH, BUDGET)
        for part in set(PARTS) - set(menu.changed):
            used = {c.atom for state in parents for c in calls(state)}
            assert set(menu.atoms[part]) == used & set(ATOMS.names(PARTS[part]))


def test_no_menu_asks_as_before_and_draws_nothing(settings: Settings) -> None:
    dice = Random(3)
    before = dice.getstate()
    shown = plain_state(settings)
    assert offered(settings, dice, [shown]) is None
    assert dice.getstate() == before
    told = propose(settings, "history", shown, 0, 5)[1]["content"]
    assert "This time" not in told
    menu = drawn(dice, [shown], WIDTH, BUDGET)
    assert menu.told() in propose(settings, "history", shown, 0, 5, menu)[1]["content"]


@pytest.mark.parametrize("strategy", ["random", "tpe", "openevolve"])
def test_who_reads_no_menu_is_given_none(strategy: str) -> None:
    with pytest.raises(ValidationError, match="leave it out"):
        Settings(strategy=strategy, proposer="model", menu=WIDTH)
    with pytest.raises(ValidationError, match="leave it out"):
        Settings(strategy="autoprune+", proposer="", menu=WIDTH)
    assert Settings(strategy="autoprune", proposer="model", menu=WIDTH).menu == WIDTH


class Reading(ScriptedProposer):
    """Remembers what each reply was held to."""

    def __init__(self) -> None:
        super().__init__(sound(40))
        self.held: list[str] = []

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        self.held.append(json.dumps(schema))
        return await super().reply(messages, schema, seed)


@pytest.mark.parametrize("strategy", ["autoprune", "autoprune+", "evoprompting"])
def test_every_request_of_a_search_has_a_menu_of_its_own(
    strategy: str, data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data, probes=False)
    settings = Settings(
        strategy=strategy, rounds=6, per_round=4, budgets=(BUDGET,), proposer="scripted",
        evaluator=evaluator.name, menu=WIDTH,
    )  # fmt: skip
    digests = []
    for run in ("first", "again"):
        proposer = Reading()
        with Ledger(tmp_path / run) as ledger:
            asyncio.run(Search(settings, ledger, evaluator, proposer).run())
            digests.append(ledger.digest())
        whole = len(json.dumps(proposal_schema(BUDGET)))
        assert proposer.held and all(len(schema) < whole / 2 for schema in proposer.held)
        assert len(set(proposer.held)) > len(proposer.held) / 2
        assert all("This time signals" in asked[-1]["content"] for asked in proposer.asked)
    assert digests[0] == digests[1]
