"""Menu: a random restriction of the atoms that one proposal may use.

A small model tends to copy the example that it is shown, to repeat one signal and to choose the
smallest quota. A menu keeps the example's atoms in some parts, offers a few other atoms in the
rest, and prescribes signals and quota, so that every proposal differs from the example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from random import Random

from pydantic import JsonValue

from offline_search.candidates.components import BASE, JsonObject, atom_calls, exchange_quota
from offline_search.candidates.schema import (
    MAX_SIGNALS,
    base_choice_schema,
    called_atom,
    definitions,
    reference_name,
    referenced_definitions,
)
from offline_search.candidates.search_space import quota_scale
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.registry import ATOMS, Group
from vllm_autoprune.tpdsl.states.state import PruningState

PARTS: Mapping[str, Group] = {
    "signals": "scoring",
    "kernel": "similarity_kernel",
    "fusion": "score_fusion",
    "selector": "selection_constraints",
    "reassembly": "reassembly",
}
"""Parts of a proposal that a menu restricts, with the atom group of each. Pools stay open, because
there are few of them."""

QUOTA = "q_e"
"""The numeric part of a menu: the objective depends too much on it to leave it to a small model."""


@dataclass(frozen=True, slots=True)
class Menu:
    """Offered atoms by part, in registry order, values of q_e, and base policies if any.

    A proposal uses all of the signals, each once and in this order, and one atom of each other
    part. ``changed`` names the parts that offer other atoms than the example has.
    """

    atoms: Mapping[str, tuple[str, ...]]
    quotas: tuple[int, ...]
    changed: tuple[str, ...]
    bases: tuple[str, ...] = ()

    def describe(self) -> str:
        """The menu as one sentence of a prompt."""
        offers = [
            f"{part} {'are all of' if part == 'signals' else _verb(names)} {', '.join(names)}"
            for part, names in self.atoms.items()
        ]
        offers.append(f"{QUOTA} {_verb(self.quotas)} {', '.join(map(str, self.quotas))}")
        if self.bases:
            offers.append(f"{BASE} {_verb(self.bases)} {', '.join(self.bases)}")
        return f"This time {'; '.join(offers)}."

    def restrict(self, schema: JsonObject) -> JsonObject:
        """The schema of a proposal without atoms that are not offered."""
        known = definitions(schema)
        by_atom = {atom: name for name, body in known.items() if (atom := called_atom(body))}
        removed = {by_atom[atom] for atom in by_atom if self._excludes(atom)}
        signals = [by_atom[name] for name in self.atoms["signals"]]
        quota: JsonObject = {"type": "integer", "enum": list(self.quotas)}
        fixed = {"signals": _fixed_list_schema(signals), QUOTA: quota}
        if self.bases:
            fixed[BASE] = base_choice_schema(self.bases)
        kept = {name: body for name, body in known.items() if name not in removed}
        restricted = _restrict_object({**schema, "$defs": kept}, removed, fixed)
        remaining = definitions(restricted)
        del restricted["$defs"]
        needed = referenced_definitions(restricted, remaining)
        used = {name: body for name, body in remaining.items() if name in needed}
        return {**restricted, "$defs": used}

    def _excludes(self, atom: str) -> bool:
        offered = set(chain.from_iterable(self.atoms.values()))
        return ATOMS[atom].group in set(PARTS.values()) and atom not in offered


def draw_menu_if_enabled(
    settings: Settings, rng: Random, examples: Sequence[PruningState]
) -> Menu | None:
    """A menu around the examples, or None (without using ``rng``) in a search without menus."""
    if not settings.menu:
        return None
    return draw_menu(rng, examples, settings.menu, settings.source_budget, settings.bases)


def draw_menu(
    rng: Random,
    examples: Sequence[PruningState],
    width: int,
    budget: int,
    bases: Sequence[str] = (),
) -> Menu:
    """A random menu around the example states of a prompt, in a search of ``bases`` if any.

    Each part changes with probability one half, and at least one part changes. A changed part
    offers up to ``width`` atoms that no example has there, and a changed quota one value that
    none of them has. Changed signals keep a random subset and gain up to ``width`` new ones. A
    changed base policy is one of up to ``width`` others.
    """
    quotas = sorted({q for state in examples if (q := exchange_quota(state)) is not None})
    used = {call.atom for state in examples for call in atom_calls(state)}
    parts = [*PARTS, *([QUOTA] if quotas else []), *([BASE] if bases else [])]
    changed = [part for part in parts if rng.random() < 0.5] or [rng.choice(parts)]
    atoms = {
        part: _draw_atoms(rng, part, ATOMS.names(group), used, width * (part in changed))
        for part, group in PARTS.items()
    }
    offered = _draw_quotas(rng, quotas, budget, QUOTA in changed)
    shown = {state.base_policy.name for state in examples}
    policies = _draw_bases(rng, bases, shown, width * (BASE in changed))
    return Menu(atoms, offered, tuple(changed), policies)


def _draw_atoms(
    rng: Random, part: str, names: Sequence[str], used: Set[str], width: int
) -> tuple[str, ...]:
    """Atoms of one part; a part of width 0 keeps those that are used."""
    present = [name for name in names if name in used]
    others = [name for name in names if name not in used]
    if part == "signals":
        offered = _draw_signals(rng, present, others, width)
    else:
        offered = rng.sample(others, min(width, len(others))) if width else []
    return tuple(name for name in names if name in (offered or present))


def _draw_signals(
    rng: Random, present: Sequence[str], others: Sequence[str], width: int
) -> list[str]:
    """Signals of a menu: those of the parents, at most :data:`MAX_SIGNALS`.

    With a width, up to as many new ones and about half of the parents'.
    """
    if not width or not others:
        return rng.sample(present, min(len(present), MAX_SIGNALS))
    new = rng.sample(others, rng.randint(1, min(width, len(others), MAX_SIGNALS)))
    kept = [name for name in present if rng.random() < 0.5]
    return [*new, *rng.sample(kept, min(len(kept), MAX_SIGNALS - len(new)))]


def _draw_quotas(
    rng: Random, present: Sequence[int], budget: int, changed: bool
) -> tuple[int, ...]:
    if present and not changed:
        return tuple(present)
    return (rng.choice([q for q in quota_scale(budget) if q not in present] or present),)


def _draw_bases(rng: Random, bases: Sequence[str], shown: Set[str], width: int) -> tuple[str, ...]:
    """Base policies of a menu: those of the examples, or with a width so many others."""
    others = [name for name in bases if name not in shown]
    drawn = rng.sample(others, min(width, len(others))) if width else shown
    return tuple(name for name in bases if name in drawn)


def _verb(offers: Sequence[object]) -> str:
    return "is" if len(offers) == 1 else "is one of"


def _fixed_list_schema(names: Sequence[str]) -> JsonObject:
    """Schema of a list that has one item of each definition, in this order."""
    items: list[JsonValue] = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {
        "type": "array", "prefixItems": items, "items": False,
        "minItems": len(names), "maxItems": len(names),
    }  # fmt: skip


def _restrict_object(
    schema: JsonObject, removed: Set[str], fixed: Mapping[str, JsonObject]
) -> JsonObject:
    """Drop references to removed definitions, and replace the schemas of fixed fields."""
    return {
        name: fixed[name]
        if name in fixed and isinstance(item, dict)
        else _restrict(item, removed, fixed)
        for name, item in schema.items()
    }


def _restrict(value: JsonValue, removed: Set[str], fixed: Mapping[str, JsonObject]) -> JsonValue:
    if isinstance(value, list):
        kept = [item for item in value if reference_name(item) not in removed]
        return [_restrict(item, removed, fixed) for item in kept]
    return _restrict_object(value, removed, fixed) if isinstance(value, dict) else value
