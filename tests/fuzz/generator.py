"""Odd states: drawn from the JSON Schema, mutated as trees of values, as texts and as bytes."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, wraps
from random import Random
from typing import Any

from vllm_autoprune import PruningState
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

Json = dict[str, Any]

_WORDS = ("gqa", "Größe", "注意", "score", "a/b", "x~y", "🦙", "0", "")

ODD_TEXTS = (
    *("", " ", "\0", "\ud800", "\udfff\ud800", "\u202eetats", "e\u0301", "\U0001f999", "\x1b[2J"),
    *("line\nline", "x" * 128, "x" * 129, "\U0001f999" * 128, "x" * 5000, "../../etc/passwd"),
    *("https://example.com/state.json", "__class__", "{0.__class__}", "%s%n", "null", "32"),
)
ODD_NUMBERS: tuple[float, ...] = (
    *(0, -1, 1, 0.0, -0.0, 2.0, 2.5, 1e-9, 5e-324, 0.1 + 0.2, 640, 641, 65536, 65537),
    *(2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 1e18, 1e19, 1e300, -1e308, 10**300, 10**400),
    *(float("inf"), float("-inf"), float("nan")),
)


# ---- values ----


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
        match schema.get("type"):
            case "object":
                return self._draw_object(schema, random)
            case "array":
                return self._draw_array(schema, random)
            case "string":
                return _draw_text(schema, random)
            case "number":
                return _draw_number(schema, random)
            case "integer":
                return round(_draw_number(schema, random))
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
        return anything(random)

    def _draw_object(self, schema: Json, random: Random) -> Json:
        required = schema.get("required", ())
        drawn = {
            name: self._draw(described, random)
            for name, described in schema.get("properties", {}).items()
            if name in required or random.random() < 0.5
        }
        more = schema.get("additionalProperties", False)
        if isinstance(more, dict):
            drawn |= {random.choice(_WORDS): self._draw(more, random) for _ in range(2)}
        return drawn

    def _draw_array(self, schema: Json, random: Random) -> list[Any]:
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


def _draw_text(schema: Json, random: Random) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 40)
    size = random.choice((least, most, random.randint(least, min(most, 40))))
    return "".join(random.choice(_WORDS) or " " for _ in range(size))[:size]


def _draw_number(schema: Json, random: Random) -> float:
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
    match random.randrange(7 if depth else 5):
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


# ---- mutations of trees ----

Place = tuple[Any, Any]
"""A container and the key or index in it."""

Mutation = Callable[[Json, Random], None]

MUTATIONS: list[Mutation] = []
"""Those that change most states only a little stand in the list twice."""


def _mutation(
    where: Callable[[Any, Any], bool] | None = None, times: int = 1
) -> Callable[[Callable[[Any, Any, Random], None]], None]:
    """Register a change at a random place, or at one of those ``where`` it is possible."""

    def register(change: Callable[[Any, Any, Random], None]) -> None:
        @wraps(change)
        def mutate_somewhere(state: Json, random: Random) -> None:
            found = [place for place in _places(state) if where is None or where(*place)]
            if where is None and not found:  # every field may have been dropped
                found = [(state, "schema")]
            if found:
                change(*random.choice(found), random)

        MUTATIONS.extend([mutate_somewhere] * times)

    return register


def _places(value: Any) -> Iterator[Place]:
    """Every place in a tree, from the root down."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _get(container: Any, key: Any) -> Any:
    return container.get(key) if isinstance(container, dict) else container[key]


def _in_object(container: Any, key: Any) -> bool:
    return isinstance(container, dict)


def _is_text(container: Any, key: Any) -> bool:
    return isinstance(container[key], str)


def _is_number(container: Any, key: Any) -> bool:
    return isinstance(container[key], int | float) and not isinstance(container[key], bool)


def _names_an_atom(container: Any, key: Any) -> bool:
    return _is_text(container, key) and (container[key] in {*ATOMS.names(), *BASE_POLICIES})


def _misspell(text: str, random: Random) -> str:
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


@_mutation()
def drop(container: Any, key: Any, random: Random) -> None:
    container.pop(key, None) if isinstance(container, dict) else container.pop(key)


@_mutation(_in_object)
def rename(container: Any, key: Any, random: Random) -> None:
    value = container.pop(key)
    container[_misspell(key, random)] = value


@_mutation(_is_text)
def misspell(container: Any, key: Any, random: Random) -> None:
    container[key] = _misspell(container[key], random)


@_mutation()
def retype(container: Any, key: Any, random: Random) -> None:
    old = _get(container, key)
    plain: tuple[Any, ...] = (None, True, False, 0, 1.5, "", [], {})
    container[key] = random.choice((*plain, [old], {"atom": old}, str(old), anything(random)))


@_mutation()
def nest(container: Any, key: Any, random: Random) -> None:
    value = _get(container, key)
    for _ in range(random.choice((1, 2, 20, 40, 300))):
        value = [value] if random.random() < 0.5 else {"atom": value}
    container[key] = value


@_mutation(lambda container, _: isinstance(container, list))
def repeat(container: Any, key: Any, random: Random) -> None:
    times = random.choice((1, 2, 8, 40))
    container[key:key] = [copy.deepcopy(container[key]) for _ in range(times)]


@_mutation(_in_object)
def intrude(container: Any, key: Any, random: Random) -> None:
    """Insert a field of another part of the language, or an unknown one."""
    value = anything(random)
    container[random.choice(_field_names())] = value


@_mutation(_is_number, times=2)
def renumber(container: Any, key: Any, random: Random) -> None:
    value = container[key]
    near: tuple[float, ...] = (-value,)
    if abs(value) < 2**63:  # others may be whole numbers that no float holds
        near = (value + 1, value - 1, -value, value * 1.001, value * 10, float(value))
    container[key] = random.choice((*near, *ODD_NUMBERS))


@_mutation(_names_an_atom, times=2)
def swap_atom(container: Any, key: Any, random: Random) -> None:
    """Replace an atom's name by that of another atom of any group."""
    container[key] = random.choice([*_atoms(), *sorted(BASE_POLICIES)])


def _graft(state: Json, random: Random) -> None:
    """Replace a part of the state by another part."""
    root = [(state, "schema")]
    part = copy.deepcopy(_get(*random.choice(list(_places(state)) or root)))
    container, at = random.choice(list(_places(state)) or root)
    container[at] = part


MUTATIONS.append(_graft)


@_mutation(_is_text)
def odd_text(container: Any, key: Any, random: Random) -> None:
    container[key] = random.choice(ODD_TEXTS)


@_mutation(_in_object)
def odd_key(container: Any, key: Any, random: Random) -> None:
    value = container[key]
    container[random.choice(ODD_TEXTS)] = value


def _reversion(state: Json, random: Random) -> None:
    state["schema"] = random.choice(("autoprune-state/2", "autoprune-state/1 ", 1, None, "", []))


MUTATIONS.append(_reversion)


@cache
def _atoms() -> list[str]:
    """Sorted, so that a seed draws the same mutations wherever atoms are declared."""
    return sorted(ATOMS.names())


@cache
def _field_names() -> list[str]:
    known = [name for atom in _atoms() for name in sorted(ATOMS[atom].call.parameters())]
    return [*known, "atom", "name", "limit", "Weight"]


def mutate(state: Json, random: Random) -> list[str]:
    """Apply one to four mutations to a state in place; returns their names."""
    names = []
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        mutation = random.choice(MUTATIONS)
        mutation(state, random)
        names.append(mutation.__name__.strip("_"))
    return names


# ---- mutations of texts and bytes ----

_NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e999999999", "1e-400", "-0", "-0.0", "1E+2"),
    *("2.0", "2e0", "01", "+1", ".5", "1.", "0x10", "1_000", "--1", "9" * 400, "9" * 5000),
    "0." + "3" * 5000,
)
_INSERTED = (
    *(",", ":", '"', "\\", "\0", "{", "}", "[", "]", "'", "// so\n", "/* so */", "# so\n"),
    *("\u00a0", "\u2028", "\t", "\\ud800", "\\u0000", "null", "<"),
)
_TEXTS = ("", " ", "null", "[]", "0", '"{}"', "{", "}", "{}", "true", "\ufeff", "NaN", "1e999")
_ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7")


def written(state: Json, random: Random) -> str:
    """One of the JSON texts of a state."""
    indent = random.choice((None, None, 2, "\t"))
    text = json.dumps(state, indent=indent, ensure_ascii=random.random() < 0.5)
    return random.choice(("", "", "\n", " \r\n\t")) + text


def spoil(text: str, random: Random) -> tuple[str | bytes, str]:
    """A mutated text, and the name of its mutation."""
    at = random.randrange(len(text) + 1)
    raw = text.encode("utf-8", "surrogatepass")
    texts = ("number", "key", "cut", "insert", "deep", "many", "doubled", "quotes", "nothing")
    encodings = ("encoded", "latin", "bytes", "binary", "padded")
    # Small changes are drawn more often.
    how = random.choice((*texts, *texts[:4], *encodings, "encoded", "bytes", "bytes"))
    result: str | bytes = text
    match how:
        case "number":
            numbers = list(re.finditer(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", text))
            start, end = random.choice(numbers).span() if numbers else (len(text), len(text))
            result = text[:start] + random.choice(_NUMBERS) + text[end:]
        case "key":  # repeated at the head of an object
            keys = re.findall(r'"[^"\\]*"(?=\s*:)', text) or ['"a"']
            head = random.choice([match.end() for match in re.finditer(r"\{", text)] or [0])
            value = random.choice(("1", "null", "[]"))
            result = f"{text[:head]}{random.choice(keys)}: {value}, {text[head:]}"
        case "cut":
            after = text[at + 1 + random.randrange(5) :]
            result = random.choice((text[:at], text[at:], text[:at] + after))
        case "insert":
            result = text[:at] + random.choice(_INSERTED) + text[at:]
        case "deep":
            depth = random.choice((10, 33, 1000, 100_000))
            opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
            deep = opening * depth + "1" + closing * depth
            result = text.replace("null", deep, 1) + random.choice(("", "", "[" * depth))
        case "many":
            item = random.choice(("0", "[]", "{}", '"x"', '{"atom":"x"}', "1.5"))
            count = random.choice((100, 9000, 11_000, 60_000))
            result = text.replace("[", "[" + f"{item}," * count, 1)
        case "doubled":
            result = text + random.choice(("", " ", ",", "\n")) + text
        case "quotes":
            result = text.replace('"', random.choice(("'", "“", "")))
        case "nothing":
            result = random.choice(_TEXTS)
        case "encoded":
            result = text.encode(random.choice(_ENCODINGS), "surrogatepass")
        case "latin":
            result = text.replace("a", "ä").encode("latin-1", "replace")
        case "bytes":
            content = bytearray(raw)
            for _ in range(random.choice((1, 1, 3, 30)) if content else 0):
                content[random.randrange(len(content))] = random.randrange(256)
            result = bytes(content)
        case "binary":
            result = random.randbytes(random.choice((1, 100, 5000)))
        case "padded":
            result = raw + b" " * random.choice((1 << 20, 3 << 20))
    return result, how


def make_text(seed: int, index: int) -> tuple[str | bytes, list[str]]:
    """The text of an index, and the mutations that were applied to a valid state."""
    random = Random(f"{seed}/{index}")
    state = _grammar().state(random)
    fate = random.random()
    if fate < 0.4:
        return written(state, random), []
    if fate < 0.85:
        names = mutate(state, random)
        return written(state, random), names
    names = mutate(state, random) if random.random() < 0.2 else []
    content, how = spoil(written(state, random), random)
    return content, [*names, how]


@cache
def _grammar() -> Grammar:
    return Grammar(PruningState.model_json_schema())
