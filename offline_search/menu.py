"""A menu: the few atoms that one proposal may use, so that a proposer cannot repeat itself.

Knows nothing about proposers. A small model, left to itself, writes the example again: the menu
keeps some parts of the candidates that it was shown and takes their atoms away from the others,
where it offers a few others instead. So a proposal differs in structure from each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random

from pydantic import JsonValue

from offline_search.history import calls
from offline_search.proposal import JsonObject, reached
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.atom import ATOMS, Group
from vllm_autoprune.tpdsl.state import PruningState

PARTS: Mapping[str, Group] = {
    "signals": "scoring",
    "kernel": "similarity_kernel",
    "fusion": "score_fusion",
    "selector": "selection_constraints",
    "reassembly": "reassembly",
}
"""Parts of a proposal that a menu narrows, and the group of each. Pools are few, and stay open."""


@dataclass(frozen=True, slots=True)
class Menu:
    """Atoms by part, in the order of the registry; changed names the parts that are offered others.

    Signals that are kept stand beside the new ones, because a candidate has several.
    """

    atoms: Mapping[str, tuple[str, ...]]
    changed: tuple[str, ...]

    def told(self) -> str:
        """One sentence for a prompt."""
        offers = [
            f"{part} {'is' if len(names) == 1 else 'from'} {', '.join(names)}"
            for part, names in self.atoms.items()
        ]
        return f"This time {'; '.join(offers)}."

    def narrowed(self, schema: JsonObject) -> JsonObject:
        """The schema of a proposal, less every atom that is not on the menu."""
        known = schema["$defs"]
        assert isinstance(known, dict)
        groups = set(PARTS.values())
        offered = {name for names in self.atoms.values() for name in names}
        off = {
            described
            for described, body in known.items()
            if (atom := _atom(body)) and ATOMS[atom].group in groups and atom not in offered
        }
        parts = {name: part for name, part in schema.items() if name != "$defs"}
        narrow = {name: _without(part, off) for name, part in parts.items()}
        left = {name: _without(body, off) for name, body in known.items() if name not in off}
        needed = reached(narrow, left)
        return {**narrow, "$defs": {name: body for name, body in left.items() if name in needed}}


def offered(settings: Settings, dice: Random, shown: Sequence[PruningState]) -> Menu | None:
    """A menu where the search is one with menus; the dice are not touched where it is not."""
    return drawn(dice, shown, settings.menu) if settings.menu else None


def drawn(dice: Random, shown: Sequence[PruningState], width: int) -> Menu:
    """A menu around the candidates that a proposer is shown; each part changes every other time.

    A part that changes has up to ``width`` atoms that none of the shown has there; at least one
    part does.
    """
    changed = [part for part in PARTS if dice.random() < 0.5] or [dice.choice(list(PARTS))]
    atoms = {}
    for part, group in PARTS.items():
        used = {call.atom for state in shown for call in calls(state)}
        held = [name for name in ATOMS.names(group) if name in used]
        if part in changed:
            others = [name for name in ATOMS.names(group) if name not in used]
            kept = dice.sample(held, dice.randrange(max(1, len(held)))) if part == "signals" else []
            held = [*kept, *dice.sample(others, min(width, len(others)))] or held
        atoms[part] = tuple(held)
    return Menu(atoms, tuple(changed))


def _atom(body: JsonValue) -> str:
    """The atom that a definition calls, or nothing."""
    properties = body.get("properties") if isinstance(body, dict) else None
    atom = properties.get("atom") if isinstance(properties, dict) else None
    name = atom.get("const") if isinstance(atom, dict) else None
    return name if isinstance(name, str) else ""


def _without(value: JsonValue, off: Set[str]) -> JsonValue:
    """A schema less the branches that lead to what is off the menu."""
    if isinstance(value, list):
        return [_without(item, off) for item in value if _leads(item) not in off]
    if isinstance(value, dict):
        return {name: _without(item, off) for name, item in value.items()}
    return value


def _leads(value: JsonValue) -> str:
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""
