"""Odd states: drawn from the JSON Schema, mutated as trees of values, as texts and as bytes."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

from vllm_autoprune import PruningState
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

Json = dict[str, Any]

_WORDS = ("gqa", "Größe", "注意", "score", "a/b", "x~y", "🦙", "0", "")


class Grammar:
    """Draws values that a JSON Schema describes.

    Numbers are drawn from the ends of their range as often as from within, and on a logarithmic
    scale if the range is wide, because most faults occur there.
    """

    def __init__(self, schema: Json) -> None:
        self._schema = schema

    def state(self, random: Random) -> Json:
        """One state, valid except for rules that no schema can express."""
        drawn: Json = self._draw(self._schema, random)
        return drawn

    def _draw(self, schema: Json, random: Random) -> Any:
        if "$ref" in schema:
            return self._draw(self._schema["$defs"][schema["$ref"].rpartition("/")[2]], random)
        if "const" in schema:
            return schema["const"]
        if branches := schema.get("oneOf") or schema.get("anyOf"):
            return self._draw(random.choice(branches), random)
        if "enum" in schema:
            return random.choice(schema["enum"])
        draw_type: dict[str, Callable[[Json, Random], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": _text,
            "number": _number,
            "integer": lambda schema, random: round(_number(schema, random)),
            "boolean": lambda _, random: random.random() < 0.5,
            "null": lambda _, random: None,
        }
        draw = draw_type.get(schema.get("type", ""))
        return anything(random) if draw is None else draw(schema, random)

    def _object(self, schema: Json, random: Random) -> Json:
        required = schema.get("required", ())
        drawn = {
            name: self._draw(described, random)
            for name, described in schema.get("properties", {}).items()
            if name in required or random.random() < 0.5
        }
        others = schema.get("additionalProperties", False)
        if isinstance(others, dict):
            drawn |= {random.choice(_WORDS): self._draw(others, random) for _ in range(2)}
        return drawn

    def _array(self, schema: Json, random: Random) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", 8)
        size = least + min(most - least, int(random.expovariate(0.6)))
        if random.random() < 0.02:
            size = most
        drawn = [self._draw(schema["items"], random) for _ in range(size)]
        if random.random() < 0.2:
            return drawn
        # Mostly without repetition, which some lists do not allow.
        named = {item["atom"] if isinstance(item, dict) else str(item): item for item in drawn}
        return list(named.values())


def _text(schema: Json, random: Random) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 40)
    size = random.choice((least, most, random.randint(least, min(most, 40))))
    text = "".join(random.choice(_WORDS) or " " for _ in range(size))
    return text[:size]


def _number(schema: Json, random: Random) -> float:
    low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -1000))
    high: Any = schema.get("maximum", schema.get("exclusiveMaximum", 1000))
    if "exclusiveMaximum" in schema and schema["type"] == "integer":
        high -= 1
    if random.random() < 0.3:
        ends = [low, high, schema.get("default")]
        return random.choice([end for end in ends if isinstance(end, int | float)])
    if low >= 0 and high - low > 16:
        return float(min(high, low + math.expm1(random.random() * math.log1p(high - low))))
    return random.uniform(low, high)


def anything(random: Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kinds = 7 if depth else 5
    match random.randrange(kinds):
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2:
            return random.choice((0, 1, -1, 2**31, 2**53 + 1, -(2**63), 2**64, 10**30))
        case 3:
            return random.choice((0.5, -0.0, 1e-320, 1.5e308, 2.0, random.random()))
        case 4:
            return random.choice(_WORDS)
        case 5:
            return [anything(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(_WORDS): anything(random, depth - 1) for _ in range(random.randrange(4))}


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


NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e999999999",
    "1e-400",
    "-0",
    "-0.0",
    "1E+2",
    "2.0",
    "2e0",
    "01",
    "+1",
    ".5",
    "1.",
    "0x10",
    "1_000",
    "--1",
    "9" * 400,
    "9" * 5000,
    "0." + "3" * 5000,
)

INSERTED = (
    ",",
    ":",
    '"',
    "\\",
    "\0",
    "{",
    "}",
    "[",
    "]",
    "'",
    "// so\n",
    "/* so */",
    "# so\n",
    "\u00a0",
    "\u2028",
    "\t",
    "\\ud800",
    "\\u0000",
    "null",
    "<",
)


def written(state: Json, random: Random) -> str:
    """One of the JSON texts of a state."""
    indent = random.choice((None, None, 2, "\t"))
    ascii_only = random.random() < 0.5
    text = json.dumps(state, indent=indent, ensure_ascii=ascii_only)
    return random.choice(("", "", "\n", " \r\n\t")) + text


def _replace_number(text: str, random: Random) -> str:
    actual = list(re.finditer(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", text))
    if not actual:
        return text + random.choice(NUMBERS)
    at = random.choice(actual)
    return text[: at.start()] + random.choice(NUMBERS) + text[at.end() :]


def _twice(text: str, random: Random) -> str:
    """Repeat a key at the head of an object."""
    keys = re.findall(r'"[^"\\]*"(?=\s*:)', text) or ['"a"']
    heads = [match.end() for match in re.finditer(r"\{", text)] or [0]
    at, key = random.choice(heads), random.choice(keys)
    return f"{text[:at]}{key}: {random.choice(('1', 'null', '[]'))}, {text[at:]}"


def _cut(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return random.choice((text[:at], text[at:], text[:at] + text[at + 1 + random.randrange(5) :]))


def _insert(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(INSERTED) + text[at:]


def _deep(text: str, random: Random) -> str:
    depth = random.choice((10, 33, 1000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    return text.replace("null", opening * depth + "1" + closing * depth, 1) + random.choice(
        ("", "", "[" * depth)
    )


def _many(text: str, random: Random) -> str:
    items = random.choice(("0", "[]", "{}", '"x"', '{"atom":"x"}', "1.5"))
    count = random.choice((100, 9000, 11_000, 60_000))
    return text.replace("[", "[" + f"{items}," * count, 1)


def _doubled(text: str, random: Random) -> str:
    return text + random.choice(("", " ", ",", "\n")) + text


def _quotes(text: str, random: Random) -> str:
    return text.replace('"', random.choice(("'", "“", "")))


def _nothing(text: str, random: Random) -> str:
    return random.choice(
        ("", " ", "null", "[]", "0", '"{}"', "{", "}", "{}", "true", "\ufeff", "NaN", "1e999")
    )


CHARACTERS: tuple[Callable[[str, Random], str], ...] = (
    _replace_number,
    _replace_number,
    _twice,
    _twice,
    _twice,
    _cut,
    _insert,
    _insert,
    _deep,
    _many,
    _doubled,
    _quotes,
    _nothing,
)

ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7")


def _encoded(text: str, random: Random) -> bytes:
    return text.encode(random.choice(ENCODINGS), "surrogatepass")


def _latin(text: str, random: Random) -> bytes:
    return text.replace("a", "ä").encode("latin-1", "replace")


def _bytes(text: str, random: Random) -> bytes:
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((1, 1, 3, 30))):
        if content:
            content[random.randrange(len(content))] = random.randrange(256)
    return bytes(content)


def _binary(text: str, random: Random) -> bytes:
    return random.randbytes(random.choice((1, 100, 5000)))


def _padded(text: str, random: Random) -> bytes:
    return text.encode("utf-8", "surrogatepass") + b" " * random.choice((1 << 20, 3 << 20))


BYTES: tuple[Callable[[str, Random], bytes], ...] = (
    _encoded,
    _encoded,
    _latin,
    _bytes,
    _bytes,
    _bytes,
    _binary,
    _padded,
)


def spoil(text: str, random: Random) -> tuple[str | bytes, str]:
    """A mutated text, and the name of its mutation."""
    if random.random() < 0.6:
        change = random.choice(CHARACTERS)
        return change(text, random), change.__name__.strip("_")
    damage = random.choice(BYTES)
    return damage(text, random), damage.__name__.strip("_")


def make_text(seed: int, index: int) -> tuple[str | bytes, list[str]]:
    """The text of an index, and the mutations that were applied to a valid state."""
    random = Random(f"{seed}/{index}")
    state = _grammar().state(random)
    fate = random.random()
    if fate < 0.4:
        return written(state, random), []
    if fate < 0.85:
        done = mutate(state, random)
        return written(state, random), done
    done = mutate(state, random) if random.random() < 0.2 else []
    content, how = spoil(written(state, random), random)
    return content, [*done, how]


@cache
def _grammar() -> Grammar:
    return Grammar(PruningState.model_json_schema())
