"""Parsing of proposals and their assembly into states under the settings of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from offline_search.candidates.components import (
    BASE,
    COMPONENTS,
    JsonObject,
    searched_components,
)
from offline_search.candidates.hypothesis import Hypothesis
from offline_search.candidates.released_spaces import project
from offline_search.candidates.selection_program import Candidate, SelectionProgram
from offline_search.settings import Settings, budget_call
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.json_text import parse_json
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import SCHEMA, PruningState

SAFETY_CHECKS = ("preserve_budget", "no_shape_change", "deterministic", "fallback_to_selection")

MAX_REPLY_CHARACTERS = 20_000
"""Longer replies are invalid; a proposal has about a thousand characters."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed candidate: its state, or the problems that make it invalid.

    ``origin`` names the source of the proposal, ``parents`` the earlier candidates that it was
    derived from, ``program`` the code that returned it if the proposal was a program. A candidate
    in free code has ``selection`` in place of a state.
    """

    origin: str
    state: PruningState | None
    problems: tuple[Problem, ...] = ()
    parents: tuple[str, ...] = ()
    program: str = ""
    selection: SelectionProgram | None = None
    hypothesis: Hypothesis | None = None

    @property
    def candidate(self) -> Candidate | None:
        """What is evaluated, or None for an invalid proposal."""
        return self.selection if self.state is None else self.state


def assemble_state(components: Mapping[str, JsonValue], settings: Settings) -> PruningState:
    """The state with these components and the search's base policy, budget and safety checks.

    Raises :class:`StateError` with every problem.
    """
    searched = searched_components(
        settings.core, settings.rank_at, settings.library, bool(settings.bases)
    )
    parts = {name: components[name] for name in searched if name in components}
    if BASE in parts:
        parts[BASE] = _chosen_base(parts[BASE], settings)
    if settings.library == "paper":
        _refuse_extensions(parts)
    budget = budget_call(settings.source_budget).model_dump(mode="json")
    chosen = parts.get("budget")
    if isinstance(chosen, dict) and chosen.get("atom") in ATOMS.names("budget_control"):
        # Candidates are instantiated at K_0 (equation 6), so that their scores compare.
        parts["budget"] = {**chosen, **budget, "limit": chosen.get("limit")}
    document: JsonObject = {
        "schema": SCHEMA,
        "name": "candidate",
        "base_policy": {"name": settings.base_policy},
        "budget": budget,
        "safety": list(SAFETY_CHECKS),
        **parts,
        "provenance": {"found_by": f"vllm-autoprune search, strategy {settings.strategy}"},
    }
    state = load_state(json.dumps(document))
    if settings.space == "all":
        return state
    return load_state(document | project(state, settings.space))


def _chosen_base(choice: JsonValue, settings: Settings) -> JsonObject:
    """The name alone, because parameters of base policies are not searched.

    Raises :class:`StateError` for a base policy that is not offered.
    """
    name = choice.get("name") if isinstance(choice, dict) else choice
    if name not in settings.bases:
        fix = f"write {' or '.join(settings.bases)}"
        problem = Problem(f"/{BASE}", f"{str(name)[:80]!r} is not offered", fix)
        raise StateError("proposal", [problem])
    return {"name": name}


def _refuse_extensions(value: JsonValue | Mapping[str, JsonValue], where: str = "") -> None:
    """Raise :class:`StateError` for an atom that is not one of the paper's 131."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_extensions(item, f"{where}/{index}")
    elif isinstance(value, Mapping):
        atom = value.get("atom")
        if isinstance(atom, str) and atom in ATOMS and ATOMS[atom].origin == "extension":
            problem = Problem(where, f"{atom} is an extension", "write an atom of the list")
            raise StateError("proposal", [problem])
        for name, item in value.items():
            _refuse_extensions(item, f"{where}/{name}")


def parse_proposal(text: str, settings: Settings, origin: str, parents: tuple[str, ...]) -> Draft:
    """The draft in a reply: its JSON object, whatever text surrounds it.

    Never raises: an invalid reply gives a draft with problems.
    """
    try:
        return Draft(origin, assemble_state(parse_object(text), settings), (), parents)
    except StateError as error:
        return Draft(origin, None, error.problems, parents)


def parse_object(text: str) -> JsonObject:
    """The outermost JSON object of a text; raises :class:`StateError`."""
    if not text.strip():
        raise _unreadable("the reply is empty", "reply.empty")
    if len(text) > MAX_REPLY_CHARACTERS:
        raise _unreadable(f"the reply has {len(text)} characters", "reply.long")
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0:
        raise _unreadable("the reply holds no JSON object", "reply.no_object")
    if end < begin:
        raise _unreadable("the reply ends within its JSON object", "reply.cut")
    data, problems = parse_json(text[begin : end + 1], "proposal")
    if problems or not isinstance(data, dict):
        raise StateError("proposal", problems)
    return data


def _unreadable(what: str, kind: str) -> StateError:
    fix = f"write one JSON object with {', '.join(COMPONENTS)}"
    return StateError("proposal", [Problem("", what, fix, kind)])
