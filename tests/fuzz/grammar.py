"""Random states generated from the JSON Schema."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

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
