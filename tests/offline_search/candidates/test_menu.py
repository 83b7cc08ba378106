from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from offline_search.candidates.components import (
    JsonObject,
    atom_calls,
    compact_json,
    exchange_quota,
    structure,
)
from offline_search.candidates.menu import PARTS, QUOTA, Menu, draw_menu, draw_menu_if_enabled
from offline_search.candidates.proposal import assemble_state
from offline_search.candidates.schema import MAX_SIGNALS, proposal_schema
from offline_search.candidates.search_space import RandomSource, quota_scale, sample_proposal
from offline_search.dataset import Dataset
from offline_search.ledger import Ledger
from offline_search.proposers.prompt import Messages, proposal_prompt
from offline_search.proposers.proposal_client import Reply
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.strategies.start_states import minimal_state, paper_state
from tests.offline_search.replies import BUDGET, valid_replies
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.state import PruningState

DRAWS = 40
SELECTORS_WITHOUT_QUOTA = ("reference_strict_preservation_selector", "quality_topk_selector")
WIDTH = 3


def as_mutable_json(state: PruningState) -> Any:
    return json.loads(json.dumps(compact_json(state)))


def menu_features(state: PruningState) -> tuple[object, ...]:
    """The parts of a state that a menu restricts: atoms and quota."""
    return (*structure(state), exchange_quota(state))


def test_a_menu_offers_other_base_policies_where_the_search_has_several(
    settings: Settings,
) -> None:
    bases = ("cdpruner", "divprune", "dart")
    body = {**as_mutable_json(minimal_state(settings)), "base_policy": {"name": "cdpruner"}}
    schema = proposal_schema(BUDGET, bases=bases)
    assert jsonschema.Draft202012Validator(schema).is_valid(body)
    offered = set[tuple[str, ...]]()
    for seed in range(DRAWS):
        menu = draw_menu(Random(seed), [minimal_state(settings)], 1, BUDGET, bases)
        offered.add(menu.bases)
        narrowed = menu.restrict(schema)["properties"]["base_policy"]  # type: ignore[index,call-overload]
        checked = jsonschema.Draft202012Validator(narrowed)
        assert {name for name in bases if checked.is_valid({"name": name})} == set(menu.bases)
        assert f"base_policy is {menu.bases[0]}." in menu.describe()
    assert offered == {(name,) for name in bases}


@pytest.mark.parametrize("seed", range(8))
def test_the_restricted_schema_accepts_exactly_the_menu(seed: int, settings: Settings) -> None:
    rng = Random(seed)
    shown = [minimal_state(settings), paper_state(settings)][seed % 2]
    menu = draw_menu(rng, [shown], WIDTH, BUDGET)
    narrowed = menu.restrict(proposal_schema(BUDGET))
    checked = jsonschema.Draft202012Validator(narrowed)
    whole = jsonschema.Draft202012Validator(proposal_schema(BUDGET))
    assert menu.changed
    assert not checked.is_valid(as_mutable_json(shown)), "the menu offers the example itself"
    on = off = 0
    for draw in range(100):
        body: dict[str, Any] = sample_proposal(RandomSource(Random(1000 * seed + draw)), BUDGET)
        for part in rng.sample(list(PARTS), 4):  # because a random state rarely follows the menu
            use_menu(body, part, menu, rng)
        if not whole.is_valid(body):
            continue
        state = assemble_state(body, settings)
        named = {name for names in menu.atoms.values() for name in names}
        within = (
            tuple(call.atom for call in state.scoring.signals) == menu.atoms["signals"]
            and state.constraints.selector.model_dump().get("q_e", menu.quotas[0]) in menu.quotas
            and {c.atom for c in atom_calls(state) if ATOMS[c.atom].group in PARTS.values()}
            <= named
        )
        assert checked.is_valid(body) == within
        on, off = on + within, off + (not within)
        if within:
            assert menu_features(state) != menu_features(shown)
    assert on and off


def use_menu(body: dict[str, Any], part: str, menu: Menu, rng: Random) -> None:
    """Fill one part of a proposal with an offered atom and its required parameters."""
    call: dict[str, Any] = {"atom": rng.choice(menu.atoms[part])}
    if part == "selector" and call["atom"] not in SELECTORS_WITHOUT_QUOTA:
        call["q_e"] = menu.quotas[0]
    if part == "signals":
        body["scoring"]["signals"] = [{"atom": name} for name in menu.atoms["signals"]]
    elif part in ("kernel", "fusion"):
        body["scoring"][part] = call
    elif part == "selector":
        body["constraints"]["selector"] = call
    else:
        body["reassembly"] = call


def test_a_menu_is_small_and_appears_in_the_prompt(settings: Settings) -> None:
    schema = proposal_schema(BUDGET)
    shown = minimal_state(settings)
    changes = set[str]()
    for seed in range(DRAWS):
        menu = draw_menu(Random(seed), [shown], WIDTH, BUDGET)
        assert menu == draw_menu(Random(seed), [shown], WIDTH, BUDGET)
        changes |= set(menu.changed)
        used = {call.atom for call in atom_calls(shown)}
        for part, names in menu.atoms.items():
            assert {ATOMS[name].group for name in names} == {PARTS[part]}
            assert all(name in menu.describe() for name in names)
            if part not in menu.changed:
                assert set(names) == used & set(ATOMS.names(PARTS[part]))
            elif part != "signals":
                assert not set(names) & used and len(names) <= WIDTH
        assert len(menu.quotas) == 1
        assert (exchange_quota(shown) in menu.quotas) == (QUOTA not in menu.changed)
        assert f"q_e is {menu.quotas[0]}." in menu.describe()
        narrowed = menu.restrict(schema)
        assert len(json.dumps(narrowed)) < len(json.dumps(schema)) / 2
        jsonschema.Draft202012Validator.check_schema(narrowed)
    assert changes == {*PARTS, QUOTA}


def test_every_signal_and_quota_is_offered_eventually(settings: Settings) -> None:
    menus = [draw_menu(Random(seed), [minimal_state(settings)], WIDTH, 8) for seed in range(300)]
    for atom in ATOMS.names("scoring"):
        assert sum(atom in menu.atoms["signals"] for menu in menus) > 300 / 20, atom
    assert {value for menu in menus for value in menu.quotas} == {0, 1, 2, 4, 8}


def test_a_menu_respects_the_maximum_of_signals(settings: Settings) -> None:
    body = as_mutable_json(minimal_state(settings))
    lengths = set()
    for seed in range(DRAWS):
        names = Random(seed).sample(ATOMS.names("scoring"), 5)
        body["scoring"]["signals"] = [{"atom": name} for name in names]
        parents = [
            assemble_state(body, settings),
            paper_state(settings),
            minimal_state(settings),
        ]
        lengths.add(len(draw_menu(Random(seed), parents, 5, BUDGET).atoms["signals"]))
    assert max(lengths) == MAX_SIGNALS


@pytest.mark.parametrize("budget", [1, 2, 5, BUDGET])
def test_quotas_are_offered_when_all_or_none_were_shown(budget: int, settings: Settings) -> None:
    small = settings.model_copy(update={"budgets": (budget,)})
    body = as_mutable_json(minimal_state(small))
    parents = []
    for value in quota_scale(budget):
        body["constraints"]["selector"]["q_e"] = value
        parents.append(assemble_state(body, small))
    body["constraints"]["selector"] = {"atom": SELECTORS_WITHOUT_QUOTA[1]}
    none = assemble_state(body, small)
    for seed in range(DRAWS):
        assert set(draw_menu(Random(seed), parents, WIDTH, budget).quotas) <= set(
            quota_scale(budget)
        )
        menu = draw_menu(Random(seed), [none], WIDTH, budget)
        assert len(menu.quotas) == 1 and QUOTA not in menu.changed


def test_unchanged_parts_offer_the_atoms_of_both_parents(settings: Settings) -> None:
    parents = [minimal_state(settings), paper_state(settings)]
    for seed in range(DRAWS):
        menu = draw_menu(Random(seed), parents, WIDTH, BUDGET)
        for part in set(PARTS) - set(menu.changed):
            used = {c.atom for state in parents for c in atom_calls(state)}
            assert set(menu.atoms[part]) == used & set(ATOMS.names(PARTS[part]))


def test_a_search_without_menus_draws_nothing(settings: Settings) -> None:
    rng = Random(3)
    before = rng.getstate()
    shown = minimal_state(settings)
    assert draw_menu_if_enabled(settings, rng, [shown]) is None
    assert rng.getstate() == before
    prompt = proposal_prompt(settings, "history", shown, 0, 5)[1]["content"]
    assert "This time" not in prompt
    menu = draw_menu(rng, [shown], WIDTH, BUDGET)
    assert menu.describe() in proposal_prompt(settings, "history", shown, 0, 5, menu)[1]["content"]


@pytest.mark.parametrize("strategy", ["random", "tpe", "openevolve-states"])
def test_menus_are_refused_for_strategies_that_ignore_them(strategy: str) -> None:
    with pytest.raises(ValidationError, match="leave it out"):
        Settings(strategy=strategy, proposer="model", menu=WIDTH)
    with pytest.raises(ValidationError, match="leave it out"):
        Settings(strategy="autoprune+", proposer="", menu=WIDTH)
    assert Settings(strategy="autoprune", proposer="model", menu=WIDTH).menu == WIDTH


class SchemaRecordingProposer(ScriptedProposer):
    """Records the schema of each request."""

    def __init__(self) -> None:
        super().__init__(valid_replies(40))
        self.schemas: list[str] = []

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        self.schemas.append(json.dumps(schema))
        return await super().reply(messages, schema, seed)


@pytest.mark.parametrize("strategy", ["autoprune", "evoprompting-states"])
def test_every_request_has_its_own_menu(strategy: str, data: Dataset, tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(data, probes=False)
    settings = Settings(
        strategy=strategy, rounds=6, per_round=4, budgets=(BUDGET,), proposer="scripted",
        evaluator=evaluator.name, menu=WIDTH,
    )  # fmt: skip
    digests = []
    for run in ("first", "again"):
        proposer = SchemaRecordingProposer()
        with Ledger(tmp_path / run) as ledger:
            asyncio.run(Search(settings, ledger, evaluator, proposer).run())
            digests.append(ledger.digest())
        whole = len(json.dumps(proposal_schema(BUDGET)))
        assert proposer.schemas and all(len(schema) < whole / 2 for schema in proposer.schemas)
        assert len(set(proposer.schemas)) > len(proposer.schemas) / 2
        assert all("This time signals" in messages[-1]["content"] for messages in proposer.requests)
    assert digests[0] == digests[1]
