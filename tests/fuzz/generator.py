"""Odd states and odd requests, drawn from a seed: the one generator of fuzzing and hostile tests.

States are drawn from the JSON Schema, then mutated as trees of values, as texts and as bytes.
Requests are chat requests whose pruning entry or messages were mutated.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from tests.tpdsl.samples import sample
from vllm_autoprune import PruningState
from vllm_autoprune.serving.plan import FIELD, REQUEST_FIELD
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

Json = dict[str, Any]

_WORDS = ("gqa", "Größe", "注意", "score", "a/b", "x~y", "🦙", "0", "")
_ODD_TEXTS = (
    *("", " ", "\0", "\ud800", "\udfff\ud800", "\u202eetats", "e\u0301", "\U0001f999", "\x1b[2J"),
    *("line\nline", "x" * 128, "x" * 129, "\U0001f999" * 128, "x" * 5000, "../../etc/passwd"),
    *("https://example.com/state.json", "__class__", "{0.__class__}", "%s%n", "null", "32"),
)
_ODD_NUMBERS: tuple[float, ...] = (
    *(0, -1, 1, 0.0, -0.0, 2.0, 2.5, 1e-9, 5e-324, 0.1 + 0.2, 640, 641, 65536, 65537),
    *(2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 1e18, 1e19, 1e300, -1e308, 10**300, 10**400),
    *(float("inf"), float("-inf"), float("nan")),
)


# ---- values ----


@cache
def state_schema() -> Json:
    """The JSON Schema of states."""
    return PruningState.model_json_schema()


def draw_state(random: Random) -> Json:
    """A state that the schema describes, valid except for rules that no schema can express."""
    state: Json = _draw(state_schema(), random)
    return state


def _draw(schema: Json, random: Random) -> Any:
    match schema:
        case {"$ref": str(ref)}:
            return _draw(state_schema()["$defs"][ref.rpartition("/")[2]], random)
        case {"const": value}:
            return value
        case {"oneOf": list(branches)} | {"anyOf": list(branches)}:
            return _draw(random.choice(branches), random)
        case {"enum": list(values)}:
            return random.choice(values)
        case {"type": "object"}:
            fields = {
                name: _draw(described, random)
                for name, described in schema.get("properties", {}).items()
                if name in schema.get("required", ()) or random.random() < 0.5
            }
            if isinstance(more := schema.get("additionalProperties", False), dict):
                fields |= {random.choice(_WORDS): _draw(more, random) for _ in range(2)}
            return fields
        case {"type": "array"}:
            least, most = schema.get("minItems", 0), schema.get("maxItems", 8)
            size = least + min(most - least, int(random.expovariate(0.6)))
            items = [
                _draw(schema["items"], random)
                for _ in range(most if random.random() < 0.02 else size)
            ]
            if random.random() < 0.2:
                return items
            # Mostly without repetition, which some lists do not allow.
            named = {item["atom"] if isinstance(item, dict) else str(item): item for item in items}
            return list(named.values())
        case {"type": "string"}:
            least, most = schema.get("minLength", 0), schema.get("maxLength", 40)
            size = random.choice((least, most, random.randint(least, min(most, 40))))
            return "".join(random.choice(_WORDS) or " " for _ in range(size))[:size]
        case {"type": "number"}:
            return _draw_number(schema, random)
        case {"type": "integer"}:
            return round(_draw_number(schema, random))
        case {"type": "boolean"}:
            return random.random() < 0.5
        case {"type": "null"}:
            return None
    return draw_json(random)


def _draw_number(schema: Json, random: Random) -> float:
    """As often an end of the range as a number within it, on a logarithmic scale if it is wide.

    Most faults occur there.
    """
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


def draw_json(random: Random, depth: int = 3) -> Any:
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
            return [draw_json(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(_WORDS): draw_json(random, depth - 1) for _ in range(random.randrange(4))}


# ---- mutations of trees ----

_Place = tuple[Any, Any]
"""A container and the key or index in it."""

# Those that change most states only a little stand here twice.
_MUTATIONS = (
    *("drop", "rename", "misspell", "retype", "nest", "repeat", "intrude", "renumber", "renumber"),
    *("swap_atom", "swap_atom", "graft", "odd_text", "odd_key", "reversion"),
)


def _is_possible(how: str, container: Any, key: Any) -> bool:
    """Whether a mutation is possible at a place."""
    value = container[key]
    match how:
        case "rename" | "intrude" | "odd_key":
            return isinstance(container, dict)
        case "misspell" | "odd_text":
            return isinstance(value, str)
        case "repeat":
            return isinstance(container, list)
        case "renumber":
            return type(value) in (int, float)
        case "swap_atom":
            return isinstance(value, str) and value in {*ATOMS.names(), *BASE_POLICIES}
    return True


def _places(value: Any) -> Iterator[_Place]:
    """Every place in a tree, from the root down."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _get(container: Any, key: Any) -> Any:
    return container.get(key) if isinstance(container, dict) else container[key]


@cache
def _atoms() -> list[str]:
    """Sorted, so that a seed draws the same mutations wherever atoms are declared."""
    return sorted(ATOMS.names())


@cache
def _field_names() -> list[str]:
    known = [name for atom in _atoms() for name in sorted(ATOMS[atom].call.parameters())]
    return [*known, "atom", "name", "limit", "Weight"]


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


def mutate(state: Json, random: Random) -> list[str]:
    """Apply one to four mutations in place, each where it is possible, if it is anywhere.

    Returns their names.
    """
    names = []
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        names.append(how := random.choice(_MUTATIONS))
        root = [(state, "schema")]  # every field may have been dropped
        if how == "reversion":
            state["schema"] = random.choice(
                ("autoprune-state/2", "autoprune-state/1 ", 1, None, "", [])
            )
            continue
        if how == "graft":  # a part in place of another one
            part = copy.deepcopy(_get(*random.choice(list(_places(state)) or root)))
            container, key = random.choice(list(_places(state)) or root)
            container[key] = part
            continue
        places = [place for place in _places(state) if _is_possible(how, *place)]
        if not places and how not in ("drop", "retype", "nest"):
            continue
        container, key = random.choice(places or root)
        value = _get(container, key)
        match how:
            case "drop":
                container.pop(key, None) if isinstance(container, dict) else container.pop(key)
            case "rename":
                container.pop(key)
                container[_misspell(key, random)] = value
            case "misspell":
                container[key] = _misspell(value, random)
            case "retype":
                plain: tuple[Any, ...] = (None, True, False, 0, 1.5, "", [], {})
                nested = ([value], {"atom": value}, str(value), draw_json(random))
                container[key] = random.choice((*plain, *nested))
            case "nest":
                for _ in range(random.choice((1, 2, 20, 40, 300))):
                    value = [value] if random.random() < 0.5 else {"atom": value}
                container[key] = value
            case "repeat":
                times = random.choice((1, 2, 8, 40))
                container[key:key] = [copy.deepcopy(value) for _ in range(times)]
            case "intrude":  # a field of another part of the language, or an unknown one
                intruder = draw_json(random)
                container[random.choice(_field_names())] = intruder
            case "renumber":
                near: tuple[float, ...] = (-value,)
                if abs(value) < 2**63:  # others may be whole numbers that no float holds
                    near = (value + 1, value - 1, -value, value * 1.001, value * 10, float(value))
                container[key] = random.choice((*near, *_ODD_NUMBERS))
            case "swap_atom":  # the name of another atom of any group
                container[key] = random.choice([*_atoms(), *sorted(BASE_POLICIES)])
            case "odd_text":
                container[key] = random.choice(_ODD_TEXTS)
            case "odd_key":
                container[random.choice(_ODD_TEXTS)] = value
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
# Small changes are drawn more often.
_SPOILING = (
    *("number", "key", "cut", "insert") * 2,
    *("deep", "many", "doubled", "quotes", "nothing"),
    *("encoded", "encoded", "latin", "bytes", "bytes", "bytes", "binary", "padded"),
)


def _spoil(text: str, random: Random) -> tuple[str | bytes, str]:
    """A mutated text, and the name of its mutation."""
    at, how = random.randrange(len(text) + 1), random.choice(_SPOILING)
    raw = text.encode("utf-8", "surrogatepass")
    spoilt: str | bytes = text
    match how:
        case "number":
            numbers = list(re.finditer(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", text))
            start, end = random.choice(numbers).span() if numbers else (len(text), len(text))
            spoilt = text[:start] + random.choice(_NUMBERS) + text[end:]
        case "key":  # repeated at the head of an object
            keys = re.findall(r'"[^"\\]*"(?=\s*:)', text) or ['"a"']
            head = random.choice([match.end() for match in re.finditer(r"\{", text)] or [0])
            value = random.choice(("1", "null", "[]"))
            spoilt = f"{text[:head]}{random.choice(keys)}: {value}, {text[head:]}"
        case "cut":
            after = text[at + 1 + random.randrange(5) :]
            spoilt = random.choice((text[:at], text[at:], text[:at] + after))
        case "insert":
            spoilt = text[:at] + random.choice(_INSERTED) + text[at:]
        case "deep":
            depth = random.choice((10, 33, 1000, 100_000))
            opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
            deep = opening * depth + "1" + closing * depth
            spoilt = text.replace("null", deep, 1) + random.choice(("", "", "[" * depth))
        case "many":
            item = random.choice(("0", "[]", "{}", '"x"', '{"atom":"x"}', "1.5"))
            count = random.choice((100, 9000, 11_000, 60_000))
            spoilt = text.replace("[", "[" + f"{item}," * count, 1)
        case "doubled":
            spoilt = text + random.choice(("", " ", ",", "\n")) + text
        case "quotes":
            spoilt = text.replace('"', random.choice(("'", "“", "")))
        case "nothing":
            spoilt = random.choice(_TEXTS)
        case "encoded":
            spoilt = text.encode(random.choice(_ENCODINGS), "surrogatepass")
        case "latin":
            spoilt = text.replace("a", "ä").encode("latin-1", "replace")
        case "bytes":
            content = bytearray(raw)
            for _ in range(random.choice((1, 1, 3, 30)) if content else 0):
                content[random.randrange(len(content))] = random.randrange(256)
            spoilt = bytes(content)
        case "binary":
            spoilt = random.randbytes(random.choice((1, 100, 5000)))
        case "padded":
            spoilt = raw + b" " * random.choice((1 << 20, 3 << 20))
    return spoilt, how


def draw_text(seed: int, index: int) -> tuple[str | bytes, list[str]]:
    """The text of an index, and the mutations that were applied to a valid state."""
    random = Random(f"{seed}/{index}")
    state, fate = draw_state(random), random.random()
    names = mutate(state, random) if 0.4 <= fate < 0.85 or fate > 0.97 else []
    indent = random.choice((None, None, 2, "\t"))
    text = json.dumps(state, indent=indent, ensure_ascii=random.random() < 0.5)
    text = random.choice(("", "", "\n", " \r\n\t")) + text
    if fate < 0.85:
        return text, names
    content, how = _spoil(text, random)
    return content, [*names, how]


# ---- requests ----

SPECIAL_TOKENS = (
    *("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    *("</s>", "<s>", "<pad>", "<|vision_start|><|image_pad|><|vision_end|>"),
)
REQUEST_KINDS: Mapping[str, float] = {
    "state": 34,
    "entry": 25,
    "kwargs": 8,
    "anything": 8,
    "huge": 2,
    "sound": 6,
    "body": 17,
    "conversation": 30,
}
"""How often each kind is drawn: what is mutated in the pruning entry, or in what vLLM reads."""

_SPOILT = 0.03
"""Share of requests whose text is no longer JSON, or is hardly any."""

_CORES: Sequence[Mapping[str, object]] = (
    {"share": 0.5},
    {"share": 0.9, "policy": {"name": "divprune"}},
    {"share": 0.75, "cover": 0.5, "strength": 0.25},
    {"share": 1.0},
)
_ODD_FIELDS: Mapping[str, tuple[object, ...]] = {
    "cache_salt": ("a", "b", "", "\0", "s" * 2000, 1, None, ["a"], *_ODD_TEXTS[:8]),
    "n": (0, 1, 2, 3, -1, 10**6, 2**63, "2", 1.5, None, True),
    "truncate_prompt_tokens": (-2, -1, 0, 1, 5, 20, 40, 200, 10**6, 2**63, "1", None),
    "truncation_side": ("left", "right", "", 1, None),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "mm_processor_kwargs": (
        {REQUEST_FIELD: {REQUEST_FIELD: {"budget": 8}}},
        {"images_kwargs": {REQUEST_FIELD: {"budget": 8}}},
        {REQUEST_FIELD: {"budget": 8}, "images_kwargs": {"do_resize": False}},
        {REQUEST_FIELD: {"instructions": ["forged"]}},
        {REQUEST_FIELD: {"instructions": [1, None]}},
        {FIELD: [[1, 0, 1, 0, 0, 0, 0]]},
        {REQUEST_FIELD: {}, FIELD: [1, 2, 3]},
        {"_autoprune_plan": {"items": []}},
        {"_autoprune_profile": True},
        {"_autoprune_uncounted": True},
        {REQUEST_FIELD: {"budget": 8, "_autoprune_profile": True}},
        [{REQUEST_FIELD: {}}],
        "autoprune",
    ),
}
"""Fields of a request with odd values of theirs."""

# Few names for many images, so that they meet.
_NAMES = ("a", "b", "0" * 64, "renderer0-mm-7-image-0", "", "\n", "x" * 10_000, "ü🦙")
_DETAILS: tuple[object, ...] = ("low", "high", "auto", "", "ü", 1, None, {})


@dataclass(frozen=True)
class MutatedRequest:
    """A chat request: its kind, its bytes, and its text for reports.

    ``stock`` is the same request without the plugin's entry, if it is still JSON.
    """

    kind: str
    content: bytes
    text: str
    stock: Json | None


def without_entry(body: Mapping[str, Any]) -> Json:
    """A request as a client of stock vLLM sends it: without the plugin's entry."""
    kwargs = body.get("mm_processor_kwargs")
    stock = {key: value for key, value in body.items() if key != "mm_processor_kwargs"}
    if isinstance(kwargs, dict) and (names := kwargs.keys() - {REQUEST_FIELD}):
        stock["mm_processor_kwargs"] = {key: kwargs[key] for key in names}
    return stock


def draw_request(
    bodies: Sequence[Json], random: Random, models: Sequence[str] = ()
) -> MutatedRequest:
    """A mutation of one of the chat requests ``bodies``, to one of the models where given."""
    (kind,) = random.choices(list(REQUEST_KINDS), list(REQUEST_KINDS.values()))
    request = copy.deepcopy(random.choice(bodies))
    if kind == "conversation":
        for _ in range(random.choice((1, 1, 2, 2, 3, 6, 40))):
            later = {"role": "user", "content": "And what shape is it?"}
            if random.random() < 0.2:  # with an image of its own
                later = copy.deepcopy(random.choice(bodies)["messages"][0])
            request["messages"] += [{"role": "assistant", "content": "red"}, later]
        odd = (*_ODD_NUMBERS, "4", True, None, [4], {"images": 1})
        recalls = odd if random.random() < 0.1 else (1, 4, 8, 24, 144, 4096)
        entry: Json = {"recall": random.choice(recalls)}
        if random.random() < 0.6:  # budgets at which a core reaches the edge of a KV block
            state = {**sample(), "core": copy.deepcopy(random.choice(_CORES))}
            entry |= {"state": state, "budget": random.choice((32, 48, 64))}
        if random.random() < 0.1:  # what only the server's renderer may say
            turn = {"images": random.choice((0, 1, 2, 99, -1)), "text": random.choice(_ODD_TEXTS)}
            entry["recall_turns"] = random.choice(([], [turn], [turn] * 300, turn, None))
        request["mm_processor_kwargs"] = {REQUEST_FIELD: entry}
    elif kind != "body":
        request["mm_processor_kwargs"] = _draw_kwargs(kind, random)
    elif random.random() < 0.5:
        request["mm_processor_kwargs"] = {REQUEST_FIELD: random.choice(_entries()[:12])}
    if kind in ("body", "conversation"):
        for _ in range(random.choice((1, 1, 2, 3) if kind == "body" else (0, 1, 1, 2))):
            _change_body(request, random)
    if models:
        request["model"] = random.choice(models)
    text = json.dumps({k: v for k, v in request.items() if k not in ("model", "messages")})
    content = json.dumps(request)
    if random.random() < _SPOILT:
        spoilt, _ = _spoil(content, random)
        raw = spoilt.encode("utf-8", "surrogatepass") if isinstance(spoilt, str) else spoilt
        return MutatedRequest("spoilt", raw, text, None)
    return MutatedRequest(kind, content.encode(), text, without_entry(request))


def _change_body(request: Json, random: Random) -> None:
    """Change a field that vLLM reads, or the messages, as a tree or as images and texts."""
    changes = ("uuid", "uuid", "twice", "detail", "text", "turns", "tree", "tree")
    change = random.choice((*changes, *_ODD_FIELDS))
    if change in _ODD_FIELDS:
        request[change] = random.choice(_ODD_FIELDS[change])
        if change == "n":
            request["temperature"] = 1
        return
    messages: Any = request.get("messages")
    if change == "tree":
        tree = {"messages": copy.deepcopy(messages)}
        with suppress(RecursionError):  # not where that nests deeper than Python copies
            mutate(tree, random)
            json.dumps(tree)
            request.pop("messages", None)
            request |= tree
        return
    # An earlier mutation may have left nothing of the kind.
    with suppress(TypeError, LookupError, AttributeError):
        parts = messages[0]["content"]
        images = [part for part in parts if part["type"] == "image_url"]
        odd = (*SPECIAL_TOKENS, *_ODD_TEXTS)
        match change:
            case "uuid":
                random.choice(images)["uuid"] = random.choice((*_NAMES, *_NAMES, 1, None, ["a"]))
            case "twice":
                parts.insert(0, copy.deepcopy(random.choice(images)))
            case "detail":
                images[0]["image_url"]["detail"] = random.choice(_DETAILS)
            case "text":
                parts[-1]["text"] = random.choice(odd) + parts[-1]["text"]
            case "turns":
                for _ in range(random.choice((1, 2, 5, 40))):
                    text = random.choice((*odd, *["and now?"] * 3))
                    messages.append({"role": "assistant", "content": "red"})
                    messages.append({"role": "user", "content": text})


def _entries() -> list[Any]:
    """Valid entries to mutate."""
    with_cores = [{**sample(), "core": copy.deepcopy(core)} for core in _CORES]
    return [
        {"budget": 8},
        {"budget": [8]},
        {"budget": {"shared": 8}},
        {"budget": 8, "keep": "reference"},
        {"keep": "random", "enabled": True},
        {"budget": 8, "keep": "resized"},
        {"budget": 8, "recall": 4},
        {"recall": 4, "recall_turns": [{"images": 1, "text": "and now?"}]},
        {"enabled": False},
        {"state": "visionzip", "budget": 8},
        *({"state": name, "budget": 16} for name in ("fastv", "prumerge_plus")),
        *({"state": sample()} for _ in range(12)),
        *({"state": state, "budget": budget} for state in with_cores for budget in (8, 48)),
    ]


def _draw_kwargs(kind: str, random: Random) -> Any:
    entry = random.choice(_entries())
    kwargs: Any = {REQUEST_FIELD: entry}
    match kind:
        case "state":
            state = sample()
            if random.random() < 0.5:
                state["core"] = copy.deepcopy(random.choice(_CORES))
            kwargs[REQUEST_FIELD] = {"state": state, "budget": random.choice((None, 8, 16, 64))}
            # Else hardly any would change the core.
            mutate(state["core"] if "core" in state and random.random() < 0.5 else state, random)
        case "entry":
            mutate(entry, random)
        case "kwargs":
            mutate(kwargs, random)
        case "anything":
            kwargs = random.choice((draw_json(random), {REQUEST_FIELD: draw_json(random)}))
        case "huge":
            deep: Any = 1
            for _ in range(random.choice((300, 900))):
                deep = {"state": deep}
            huge: tuple[Any, ...] = (
                {"state": {**sample(), "provenance": {"notes": "n" * 10_000_000}}},
                {"state": "n" * 10_000_000},
                {"budget": [8] * 1_000_000},
                {"n" * 1_000_000: 8},
                {str(i): i for i in range(50_000)},
                deep,
            )
            kwargs[REQUEST_FIELD] = random.choice(huge)
    return kwargs
