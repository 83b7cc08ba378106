"""A menu: the few atoms that one proposal may use, so that a proposer cannot repeat itself.

Knows nothing about proposers. A small model, left to itself, writes the example again, names one
signal several times and gives the least quota. The menu keeps some parts of the candidates that it
was shown and takes their atoms away from the others, where it offers a few others instead; signals
and quota it prescribes. So a proposal differs from each candidate that was shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random

from pydantic import JsonValue

from offline_search.history import calls, quota
from offline_search.proposal import MOST_SIGNALS, JsonObject, reached
from offline_search.settings import Settings
from offline_search.space import quota_scale
from vllm_autoprune.tpdsl.registry import ATOMS, Group
from vllm_autoprune.tpdsl.states.state import PruningState

PARTS: Mapping[str, Group] = {
    "signals": "scoring",
    "kernel": "similarity_kernel",
    "fusion": "score_fusion",
    "selector": "selection_constraints",
    "reassembly": "reassembly",
}
"""Parts of a proposal that a menu narrows, and the group of each. Pools are few, and stay open."""

QUOTA = "q_e"
"""The part that is a number: no atom, and too much hangs on it to leave it to a small model."""


@dataclass(frozen=True, slots=True)
class Menu:
    """Atoms by part, in the order of the registry; changed names the parts that are offered others.

    A proposal has every one of the signals, each once and in this order, and one of each other
    part; quotas are the values of q_e that it may have.
    """

    atoms: Mapping[str, tuple[str, ...]]
    quotas: tuple[int, ...]
    changed: tuple[str, ...]

    def told(self) -> str:
        """One sentence for a prompt."""
        offers = [
            f"{part} {'are all of' if part == 'signals' else _verb(names)} {', '.join(names)}"
            for part, names in self.atoms.items()
        ]
        offers.append(f"{QUOTA} {_verb(self.quotas)} {', '.join(map(str, self.quotas))}")
        return f"This time {'; '.join(offers)}."

    def narrowed(self, schema: JsonObject) -> JsonObject:
        """The schema of a proposal, less every atom that is not on the menu."""
        known = schema["$defs"]
        assert isinstance(known, dict)
        groups = set(PARTS.values())
        offered = {name for names in self.atoms.values() for name in names}
        called = {atom: described for described, body in known.items() if (atom := _atom(body))}
        off = {
            described
            for atom, described in called.items()
            if ATOMS[atom].group in groups and atom not in offered
        }
        prescribed: Mapping[str, JsonObject] = {
            "signals": _row([called[name] for name in self.atoms["signals"]]),
            QUOTA: {"type": "integer", "enum": list(self.quotas)},
        }
        parts = {name: part for name, part in schema.items() if name != "$defs"}
        narrow = {name: _narrow(part, off, prescribed) for name, part in parts.items()}
        left = {
            name: _narrow(body, off, prescribed) for name, body in known.items() if name not in off
        }
        needed = reached(narrow, left)
        return {**narrow, "$defs": {name: body for name, body in left.items() if name in needed}}


def offered(settings: Settings, dice: Random, shown: Sequence[PruningState]) -> Menu | None:
    """A menu where the search is one with menus; the dice are not touched where it is not."""
    if not settings.menu:
        return None
    return drawn(dice, shown, settings.menu, settings.source_budget)


def drawn(dice: Random, shown: Sequence[PruningState], width: int, budget: int) -> Menu:
    """A menu around the candidates that a proposer is shown; each part changes every other time.

    A part that changes has up to ``width`` atoms that none of the shown has there, the quota one
    value that none of them has; at least one part changes. Signals that change keep some of those
    that were there and gain up to ``width``.
    """
    had = sorted({asked for state in shown if (asked := quota(state)) is not None})
    used = {call.atom for state in shown for call in calls(state)}
    parts = [*PARTS, *([QUOTA] if had else [])]
    changed = [part for part in parts if dice.random() < 0.5] or [dice.choice(parts)]
    atoms = {}
    for part, group in PARTS.items():
        held = [name for name in ATOMS.names(group) if name in used]
        others = [name for name in ATOMS.names(group) if name not in used]
        if part == "signals":
            held = _signals(dice, held, others, width if part in changed else 0)
        elif part in changed:
            held = dice.sample(others, min(width, len(others))) or held
        atoms[part] = tuple(name for name in ATOMS.names(group) if name in held)
    fresh = [other for other in quota_scale(budget) if other not in had] or had
    kept = QUOTA not in changed and had
    return Menu(atoms, tuple(had) if kept else (dice.choice(fresh),), tuple(changed))


def _signals(dice: Random, held: Sequence[str], others: Sequence[str], width: int) -> list[str]:
    """All that are held, as many as a proposal may have; or some of them and some others."""
    if not width or not others:
        return dice.sample(held, min(len(held), MOST_SIGNALS))
    new = dice.sample(others, dice.randint(1, min(width, len(others), MOST_SIGNALS)))
    kept = [name for name in held if dice.random() < 0.5]
    return [*new, *dice.sample(kept, min(len(kept), MOST_SIGNALS - len(new)))]


def _verb(offers: Sequence[object]) -> str:
    return "is" if len(offers) == 1 else "is one of"


def _row(definitions: Sequence[str]) -> JsonObject:
    """The schema of a list that has one call of each, in this order."""
    length = len(definitions)
    items: list[JsonValue] = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    return {
        "type": "array", "prefixItems": items, "items": False,
        "minItems": length, "maxItems": length,
    }  # fmt: skip


def _atom(body: JsonValue) -> str:
    """The atom that a definition calls, or nothing."""
    properties = body.get("properties") if isinstance(body, dict) else None
    atom = properties.get("atom") if isinstance(properties, dict) else None
    name = atom.get("const") if isinstance(atom, dict) else None
    return name if isinstance(name, str) else ""


def _narrow(value: JsonValue, off: Set[str], prescribed: Mapping[str, JsonObject]) -> JsonValue:
    """A schema less the branches that lead to what is off the menu, with what is prescribed."""
    if isinstance(value, list):
        return [_narrow(item, off, prescribed) for item in value if _leads(item) not in off]
    if isinstance(value, dict):
        return {
            name: prescribed[name]
            if name in prescribed and isinstance(item, dict)
            else _narrow(item, off, prescribed)
            for name, item in value.items()
        }
    return value


def _leads(value: JsonValue) -> str:
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""
