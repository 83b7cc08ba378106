"""Mutations of a state as a tree of values, from typos to arbitrary values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.fuzz.grammar import Json, anything
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

Place = tuple[Any, Any]
"""A container and the key or index in it."""

Mutation = Callable[[Json, Random], None]

# Sorted, so that a seed draws the same mutations wherever atoms are declared.
_ATOMS = sorted(ATOMS.names())

ODD_TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\u202eetats",
    "e\u0301",
    "\U0001f999",
    "\x1b[2J",
    "line\nline",
    "x" * 128,
    "x" * 129,
    "\U0001f999" * 128,
    "x" * 5000,
    "../../etc/passwd",
    "https://example.com/state.json",
    "__class__",
    "{0.__class__}",
    "%s%n",
    "null",
    "32",
)

ODD_NUMBERS = (
    0,
    -1,
    1,
    0.0,
    -0.0,
    2.0,
    2.5,
    1e-9,
    5e-324,
    0.1 + 0.2,
    640,
    641,
    65536,
    65537,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    1e18,
    1e19,
    1e300,
    -1e308,
    10**300,
    10**400,
    float("inf"),
    float("-inf"),
    float("nan"),
)


def places(value: Any) -> Iterator[Place]:
    """Every place in a tree, from the root down."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def _random_place(state: Json, random: Random) -> Place:
    # The root, because every field may have been dropped.
    return random.choice(list(places(state)) or [(state, "schema")])


def _find_place(
    state: Json, random: Random, wanted: Callable[[Any, Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """One matching place, or None."""
    actual = [place for place in places(state) if wanted(*place)]
    if actual:
        yield random.choice(actual)


def _typo(text: str, random: Random) -> str:
    if not text:
        return "x"
    at = random.randrange(len(text))
    return random.choice(
        (
            text[:at] + text[at + 1 :],
            text[:at] + random.choice("aez_-@ 0") + text[at:],
            text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
            text.upper(),
            text.replace("_", "-"),
            f" {text}",
            f"{text}\n",
            text.replace("a", "а").replace("e", "е"),  # Cyrillic
        )
    )


def drop(state: Json, random: Random) -> None:
    container, key = _random_place(state, random)
    container.pop(key, None) if isinstance(container, dict) else container.pop(key)


def rename(state: Json, random: Random) -> None:
    for container, key in _find_place(state, random, lambda c, _: isinstance(c, dict)):
        container[_typo(key, random)] = container.pop(key)


def misspell(state: Json, random: Random) -> None:
    for container, key in _find_place(state, random, lambda c, k: isinstance(c[k], str)):
        container[key] = _typo(container[key], random)


def retype(state: Json, random: Random) -> None:
    container, key = _random_place(state, random)
    old = container.get(key) if isinstance(container, dict) else container[key]
    new: tuple[Any, ...] = (
        None,
        True,
        False,
        0,
        1.5,
        "",
        [],
        {},
        [old],
        {"atom": old},
        str(old),
        anything(random),
    )
    container[key] = random.choice(new)


def nest(state: Json, random: Random) -> None:
    container, key = _random_place(state, random)
    value = container.get(key) if isinstance(container, dict) else container[key]
    for _ in range(random.choice((1, 2, 20, 40, 300))):
        value = [value] if random.random() < 0.5 else {"atom": value}
    container[key] = value


def repeat(state: Json, random: Random) -> None:
    def in_list(container: Any, key: Any) -> bool:
        return isinstance(container, list)

    for container, key in _find_place(state, random, in_list):
        times = random.choice((1, 2, 8, 40))
        container[key:key] = [copy.deepcopy(container[key]) for _ in range(times)]


def intrude(state: Json, random: Random) -> None:
    """Insert a field of another part of the language, or an unknown one."""

    def holds_fields(container: Any, key: Any) -> bool:
        return isinstance(container, dict)

    known = [name for atom in _ATOMS for name in sorted(ATOMS[atom].call.parameters())]
    for container, _ in _find_place(state, random, holds_fields):
        container[random.choice([*known, "atom", "name", "limit", "Weight"])] = anything(random)


def renumber(state: Json, random: Random) -> None:
    def is_number(container: Any, key: Any) -> bool:
        return isinstance(container[key], int | float) and not isinstance(container[key], bool)

    for container, key in _find_place(state, random, is_number):
        value = container[key]
        near: tuple[float, ...] = (-value,)
        if abs(value) < 2**63:  # others may be whole numbers that no float holds
            near = (value + 1, value - 1, -value, value * 1.001, value * 10, float(value))
        container[key] = random.choice((*near, *ODD_NUMBERS))


def swap_atom(state: Json, random: Random) -> None:
    """Replace an atom's name by that of another atom of any group."""

    def names_an_atom(container: Any, key: Any) -> bool:
        value = container[key]
        return isinstance(value, str) and (value in ATOMS.names() or value in BASE_POLICIES)

    for container, key in _find_place(state, random, names_an_atom):
        container[key] = random.choice([*_ATOMS, *sorted(BASE_POLICIES)])


def graft(state: Json, random: Random) -> None:
    """Replace a part of the state by another part."""
    source, key = _random_place(state, random)
    part = copy.deepcopy(source.get(key) if isinstance(source, dict) else source[key])
    container, at = _random_place(state, random)
    container[at] = part


def odd_text(state: Json, random: Random) -> None:
    for container, key in _find_place(state, random, lambda c, k: isinstance(c[k], str)):
        container[key] = random.choice(ODD_TEXTS)


def odd_key(state: Json, random: Random) -> None:
    for container, key in _find_place(state, random, lambda c, _: isinstance(c, dict)):
        container[random.choice(ODD_TEXTS)] = container[key]


def reversion(state: Json, random: Random) -> None:
    state["schema"] = random.choice(("autoprune-state/2", "autoprune-state/1 ", 1, None, "", []))


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    rename,
    misspell,
    retype,
    nest,
    repeat,
    intrude,
    renumber,
    renumber,
    swap_atom,
    swap_atom,
    graft,
    odd_text,
    odd_key,
    reversion,
)
"""Those that change most states only a little stand in the list twice."""


def mutate(state: Json, random: Random) -> list[str]:
    """Apply one to four mutations to a state in place; returns their names."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        mutation = random.choice(MUTATIONS)
        mutation(state, random)
        done.append(mutation.__name__)
    return done
