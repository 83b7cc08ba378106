"""Odd states and odd requests: the one generator of the fuzz test and of the hostile tests.

States are drawn from the JSON Schema by Hypothesis, then mutated as trees of values, as texts and
as bytes. Requests are chat requests whose pruning entry or messages were mutated.
"""

from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.tpdsl.samples import sample
from vllm_autoprune import PruningState
from vllm_autoprune.serving.plan import FIELD, REQUEST_FIELD
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS

Json = dict[str, Any]

_ODD_FILE = Path(__file__).with_name("odd.json")
_ODD = json.loads(_ODD_FILE.read_text(encoding="utf-8"))
"""Odd values by what they are put in place of."""

_ODD_TEXTS = (
    *_ODD["texts of states"],
    "x" * 128,
    "x" * 129,
    "\U0001f999" * 128,
    "x" * 5000,
)
_ODD_NUMBERS: tuple[float, ...] = (
    *_ODD["numbers of states"],
    0.1 + 0.2,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**300,
    10**400,
)
_ODD_VALUES: tuple[Any, ...] = (*_ODD["values"], 2**53 + 1, 10**30)


# ---- states that the schema describes ----

SCHEMA: Json = PruningState.model_json_schema()


@cache
def states(definition: str = "") -> st.SearchStrategy[Any]:
    """What the schema, or one of its definitions, describes.

    Valid except for rules that no schema can express.
    """
    return _values(SCHEMA["$defs"][definition] if definition else SCHEMA)


def _values(schema: Json) -> st.SearchStrategy[Any]:  # noqa: C901
    match schema:
        case {"$ref": str(ref)}:
            return st.deferred(lambda: states(ref.rpartition("/")[2]))
        case {"const": value}:
            return st.just(value)
        case {"oneOf": list(branches)} | {"anyOf": list(branches)}:
            return st.one_of(*map(_values, branches))
        case {"enum": list(values)}:
            return st.sampled_from(values)
        case {"type": "object"}:
            fields = {
                name: _values(field)
                for name, field in schema.get("properties", {}).items()
            }
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            objects = st.fixed_dictionaries(required, optional=fields)
            if isinstance(more := schema.get("additionalProperties", False), dict):
                unknown = st.dictionaries(
                    st.text(max_size=8), _values(more), max_size=2
                )
                return st.builds(operator.or_, unknown, objects)
            return objects
        case {"type": "array"}:
            sizes = {
                "min_size": schema.get("minItems", 0),
                "max_size": schema.get("maxItems", 8),
            }
            items = _values(schema["items"])
            # Some lists allow no repetition.
            name = lambda item: item["atom"] if isinstance(item, dict) else str(item)  # noqa: E731
            return st.lists(items, **sizes, unique_by=name) | st.lists(items, **sizes)
        case {"type": "string"}:
            longest = min(schema.get("maxLength", 40), 40)
            return st.text(min_size=schema.get("minLength", 0), max_size=longest)
        case {"type": "number" | "integer" as kind}:
            low = schema.get("minimum")
            high = schema.get("maximum")
            above = schema.get("exclusiveMinimum")
            below = schema.get("exclusiveMaximum")
            if kind == "integer":
                return st.integers(
                    low if above is None else above + 1,
                    high if below is None else below - 1,
                )
            return st.floats(
                low if above is None else above,
                high if below is None else below,
                exclude_min=above is not None,
                exclude_max=below is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "null"}:
            return st.none()
    return st.sampled_from(_ODD_VALUES)


# ---- mutations of trees ----


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree with each key or index in it, from the root down."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@cache
def _atoms() -> list[str]:
    """Sorted, so that a seed draws the same mutations wherever atoms are declared."""
    return sorted({*ATOMS.names(), *BASE_POLICIES})


@cache
def _field_names() -> list[str]:
    names = [
        name
        for atom in sorted(ATOMS.names())
        for name in sorted(ATOMS[atom].call.parameters())
    ]
    return [*names, "atom", "name", "limit", "Weight"]


def _respell(text: str, random: Random) -> str:
    """A text with a mistake, or another one that is odd."""
    position = random.randrange(len(text) + 1)
    mistakes = (
        text[:position] + text[position + 1 :],
        text[:position] + random.choice("aez_-@ 0") + text[position:],
        text.upper(),
        text.replace("_", "-"),
        f" {text}",
        f"{text}\n",
        text.replace("a", "а").replace("e", "е"),  # Cyrillic
    )
    return random.choice(mistakes if random.random() < 0.5 else _ODD_TEXTS)


def mutate(tree: Json, random: Random) -> None:  # noqa: C901
    """Apply one to four mutations in place, each as the place allows."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        places = list(_places(tree))
        if not places:
            return
        container, key = random.choice(places)
        value = container[key]
        kinds = ["drop", "retype", "nest", "graft"]
        kinds += ["rename", "intrude"] if isinstance(container, dict) else ["repeat"]
        # What changes most states only a little is drawn more often.
        if isinstance(value, str):
            kinds += ["respell", *(["swap"] * 4 if value in _atoms() else [])]
        if type(value) in (int, float):
            kinds += ["renumber"] * 4
        match random.choice(kinds):
            case "drop":
                del container[key]
            case "retype":
                odd = (*_ODD_VALUES, [value], {"atom": value}, str(value))
                container[key] = copy.deepcopy(random.choice(odd))
            case "nest":
                for _ in range(random.choice((1, 2, 20, 40, 300))):
                    value = [value] if random.random() < 0.5 else {"atom": value}
                container[key] = value
            case "graft":  # a part in place of another one
                with suppress(
                    RecursionError
                ):  # nested twice, it is too deep to be copied
                    part = copy.deepcopy(value)
                    container, key = random.choice(places)
                    container[key] = part
            case "rename":
                container[_respell(key, random)] = container.pop(key)
            case (
                "intrude"
            ):  # a field of another part of the language, or an unknown one
                odd_value = copy.deepcopy(random.choice(_ODD_VALUES))
                container[random.choice(_field_names())] = odd_value
            case "repeat":
                times = random.choice((1, 2, 8, 40))
                with suppress(RecursionError):
                    container[key:key] = [copy.deepcopy(value) for _ in range(times)]
            case "respell":
                container[key] = _respell(value, random)
            case "swap":  # the name of another atom of any group
                container[key] = random.choice(_atoms())
            case "renumber":
                near: tuple[float, ...] = (-value,)
                if (
                    abs(value) < 2**63
                ):  # others may be whole numbers that no float holds
                    near = (
                        value + 1,
                        value - 1,
                        -value,
                        value * 1.001,
                        value * 10,
                        float(value),
                    )
                container[key] = random.choice((*near, *_ODD_NUMBERS))


# ---- mutations of texts and bytes ----

_NUMBERS = (*_ODD["numbers as text"], "9" * 400, "9" * 5000, "0." + "3" * 5000)
_INSERTED = tuple(_ODD["inserted"])
_TEXTS = tuple(_ODD["texts"])
_ENCODINGS = (
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-be",
    "utf-7",
)


def spoil(text: str, random: Random) -> str | bytes:
    """A text that is no longer JSON, or is hardly any; long and deep ones: test_loading.py."""
    position = random.randrange(len(text) + 1)
    match random.choice(
        ("number", "key", "cut", "insert", "nothing", "encoded", "bytes")
    ):
        case "number":
            numbers = list(re.finditer(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", text))
            start, end = (
                random.choice(numbers).span() if numbers else (len(text), len(text))
            )
            return text[:start] + random.choice(_NUMBERS) + text[end:]
        case "key":  # repeated at the head of an object
            keys = re.findall(r'"[^"\\]*"(?=\s*:)', text) or ['"a"']
            head = random.choice(
                [match.end() for match in re.finditer(r"\{", text)] or [0]
            )
            return f"{text[:head]}{random.choice(keys)}: null, {text[head:]}"
        case "cut":
            after = text[position + 1 + random.randrange(5) :]
            return random.choice(
                (text[:position], text[position:], text[:position] + after)
            )
        case "insert":
            return text[:position] + random.choice(_INSERTED) + text[position:]
        case "nothing":
            return random.choice(_TEXTS)
        case "encoded":
            return text.encode(random.choice(_ENCODINGS), "surrogatepass")
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((1, 1, 3, 30)) if content else 0):
        content[random.randrange(len(content))] = random.randrange(256)
    return bytes(content)


@st.composite
def texts(draw: st.DrawFn) -> str | bytes:
    """Texts of states: as the schema has them, mutated, and spoilt."""
    state = draw(states())
    random = Random(draw(st.integers(0, 2**32)))
    fate = draw(st.sampled_from(("sound", "mutated", "mutated", "spoilt")))
    if fate == "mutated":
        mutate(state, random)
    indent = random.choice((None, None, 2, "\t"))
    text = json.dumps(state, indent=indent, ensure_ascii=random.random() < 0.5)
    text = random.choice(("", "", "\n", " \r\n\t")) + text
    return spoil(text, random) if fate == "spoilt" else text


# ---- requests ----

SPECIAL_TOKENS = (
    "<image>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "</s>",
    "<s>",
    "<pad>",
    "<|vision_start|><|image_pad|><|vision_end|>",
)
REQUEST_KINDS: Mapping[str, float] = {
    "state": 34,
    "entry": 34,
    "anything": 10,
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
    "media_io_kwargs": (
        {"image": {"image_mode": "L"}},
        {"autoprune": {"budget": 8}},
        {"image": 1},
    ),
    "continue_final_message": (True, False),
    "mm_processor_kwargs": (
        {REQUEST_FIELD: {REQUEST_FIELD: {"budget": 8}}},
        {REQUEST_FIELD: {"budget": 8}, "images_kwargs": {"do_resize": False}},
        {REQUEST_FIELD: {"instructions": ["forged", 1, None]}},
        {REQUEST_FIELD: {}, FIELD: [[1, 0, 1, 0, 0, 0, 0]]},
        {"_autoprune_plan": {"items": []}},
        {
            REQUEST_FIELD: {"budget": 8, "_autoprune_profile": True},
            "_autoprune_uncounted": True,
        },
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


def draw_request(  # noqa: C901
    bodies: Sequence[Json], random: Random, models: Sequence[str] = ()
) -> MutatedRequest:
    """A mutation of one of the chat requests ``bodies``, to one of the models where given."""
    (kind,) = random.choices(list(REQUEST_KINDS), list(REQUEST_KINDS.values()))
    request = copy.deepcopy(random.choice(bodies))
    entry: Json = random.choice(_entries())
    kwargs: Any = {REQUEST_FIELD: entry}
    match kind:
        case "state":
            entry = {"state": sample(), "budget": random.choice((None, 8, 16, 64))}
            changed: Json = entry["state"]
            if random.random() < 0.5:
                changed["core"] = copy.deepcopy(random.choice(_CORES))
                # Else hardly any would change the core.
                changed = random.choice((changed, changed["core"]))
            kwargs[REQUEST_FIELD] = entry
            mutate(changed, random)
        case "entry":
            mutate(random.choice((entry, entry, kwargs)), random)
        case "anything":
            odd = random.choice(
                (*_ODD_VALUES, *(_huge_entries() if random.random() < 0.2 else ()))
            )
            kwargs = random.choice((odd, {REQUEST_FIELD: odd}))
        case "conversation":
            kwargs[REQUEST_FIELD] = _draw_conversation(request, bodies, random)
    if kind != "body" or random.random() < 0.5:
        request["mm_processor_kwargs"] = kwargs
    if kind in ("body", "conversation"):
        for _ in range(random.choice((1, 1, 2, 3) if kind == "body" else (0, 1, 1, 2))):
            _change_body(request, random)
    if models:
        request["model"] = random.choice(models)
    text = json.dumps(
        {k: v for k, v in request.items() if k not in ("model", "messages")}
    )
    content = json.dumps(request)
    if random.random() < _SPOILT:
        spoilt = spoil(content, random)
        raw = (
            spoilt.encode("utf-8", "surrogatepass")
            if isinstance(spoilt, str)
            else spoilt
        )
        return MutatedRequest("spoilt", raw, text, None)
    return MutatedRequest(kind, content.encode(), text, without_entry(request))


def _entries() -> list[Json]:
    """Valid entries to mutate."""
    with_cores = [{**sample(), "core": copy.deepcopy(core)} for core in _CORES]
    return [
        *({"budget": budget} for budget in (8, [8], {"shared": 8})),
        *({"budget": 8, "keep": keep} for keep in ("reference", "resized")),
        {"keep": "random", "enabled": True},
        {"recall": 4, "recall_turns": [{"images": 1, "text": "and now?"}]},
        {"enabled": False},
        *(
            {"state": name, "budget": 16}
            for name in ("visionzip", "fastv", "prumerge_plus")
        ),
        *({"state": sample()} for _ in range(6)),
        *(
            {"state": state, "budget": budget}
            for state in with_cores
            for budget in (8, 48)
        ),
    ]


def _huge_entries() -> Sequence[object]:
    deep: Any = 1
    for _ in range(900):
        deep = {"state": deep}
    return (
        {"state": {**sample(), "provenance": {"notes": "n" * 10_000_000}}},
        {"budget": [8] * 1_000_000},
        {"n" * 1_000_000: 8},
        {str(i): i for i in range(50_000)},
        deep,
    )


def _draw_conversation(request: Json, bodies: Sequence[Json], random: Random) -> Json:
    """Add later turns, some with an image of their own; an entry that lets them recall."""
    for _ in range(random.choice((1, 1, 2, 2, 3, 6, 40))):
        later = {"role": "user", "content": "And what shape is it?"}
        if random.random() < 0.2:
            later = copy.deepcopy(random.choice(bodies)["messages"][0])
        request["messages"] += [{"role": "assistant", "content": "red"}, later]
    odd = (*_ODD_NUMBERS, "4", True, None, [4], {"images": 1})
    recalls = odd if random.random() < 0.1 else (1, 4, 8, 24, 144, 4096)
    entry: Json = {"recall": random.choice(recalls)}
    if random.random() < 0.6:  # budgets at which a core reaches the edge of a KV block
        state = {**sample(), "core": copy.deepcopy(random.choice(_CORES))}
        entry |= {"state": state, "budget": random.choice((32, 48, 64))}
    if random.random() < 0.1:  # what only the server's renderer may say
        turn = {
            "images": random.choice((0, 1, 99, -1)),
            "text": random.choice(_ODD_TEXTS),
        }
        entry["recall_turns"] = random.choice(([], [turn] * 300, turn, None))
    return entry


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
    # An earlier mutation may have left nothing of the kind, or nest deeper than Python copies.
    with suppress(TypeError, LookupError, AttributeError, RecursionError):
        if change == "tree":
            tree = {"messages": copy.deepcopy(messages)}
            mutate(tree, random)
            json.dumps(tree)
            request.pop("messages", None)
            request |= tree
            return
        parts = messages[0]["content"]
        images = [part for part in parts if part["type"] == "image_url"]
        odd = (*SPECIAL_TOKENS, *_ODD_TEXTS)
        match change:
            case "uuid":
                random.choice(images)["uuid"] = random.choice(
                    (*_NAMES, *_NAMES, 1, None, ["a"])
                )
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
