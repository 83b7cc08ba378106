"""Conversations that recall tokens of images with and without a core, and mutations of them."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from benchmarks.yardsticks.examples import Example
from tests.fuzz.generator import ODD_NUMBERS, ODD_TEXTS, anything, mutate, spoil
from tests.hostile.attack import CHAT, Client, Reply
from tests.hostile.attacks.requests import SPECIAL
from tests.serving.engine import CLIP, LLAVA, examples
from tests.serving.http import ask, body, text_of
from tests.serving.scenarios import ENVIRONMENTS
from tests.tpdsl.samples import sample
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.serving.api.request import REQUEST_FIELD
from vllm_autoprune.serving.plan import FIELD
from vllm_autoprune.tpdsl.loading import load_state

CORES: Sequence[Mapping[str, object]] = (
    {"share": 0.5},
    {"share": 0.9, "policy": {"name": "divprune"}},
    {"share": 0.75, "cover": 0.5, "strength": 0.25},
    {"share": 1.0},
)
_BUDGETS = (32, 48, 64)
"""Budgets at which a core reaches the edge of a KV block, so that an image is split."""

_RECALLS = (1, 4, 8, 24, 144, 4096)
_TURNS = (1, 1, 2, 2, 3, 6, 40)
_ROLES = ("user", "assistant", "system", "tool", "developer", "", None, 1)

Request = dict[str, Any]


def draw_conversation(server: Server, examples: Sequence[Example], random: Random) -> Request:
    """A conversation with up to two mutations of its messages or its entry; often none."""
    request: Request = body(server, random.choice(examples), max_tokens=1)
    messages = request["messages"]
    for _ in range(random.choice(_TURNS)):
        messages.append({"role": "assistant", "content": "red"})
        messages.append(_draw_turn(server, examples, random))
    entry: dict[str, object] = {"recall": random.choice(_RECALLS)}
    if random.random() < 0.6:
        state = {**sample(), "core": copy.deepcopy(random.choice(CORES))}
        entry |= {"state": state, "budget": random.choice(_BUDGETS)}
    request["mm_processor_kwargs"] = {REQUEST_FIELD: entry}
    for change in random.choices(_CHANGES, k=random.choice((0, 1, 1, 2))):
        change(request, random)
    if random.random() < 0.15:  # last: it leaves nothing to rely on
        _mutate_messages(request, random)
    return request


def _mutate_messages(request: Request, random: Random) -> None:
    """Mutate the messages as a tree; not at all where that nests deeper than Python copies."""
    tree = {"messages": copy.deepcopy(request["messages"])}
    with contextlib.suppress(RecursionError):
        mutate(tree, random)
        json.dumps(tree)
        del request["messages"]
        request |= tree


def _draw_turn(server: Server, examples: Sequence[Example], random: Random) -> Request:
    """A user turn that recalls, or one with an image of its own."""
    if random.random() < 0.2:
        shown: Request = body(server, random.choice(examples))
        return dict(shown["messages"][0])
    return {"role": "user", "content": "And what shape is it?"}


def _replace(request: Request, random: Random, **fields: object) -> None:
    """Change a random message, where an earlier mutation has left one."""
    messages = request["messages"]
    if places := [at for at, message in enumerate(messages) if isinstance(message, dict)]:
        at = random.choice(places)
        messages[at] = {**messages[at], **fields}


def _change_role(request: Request, random: Random) -> None:
    _replace(request, random, role=random.choice(_ROLES))


def _change_content(request: Request, random: Random) -> None:
    text = random.choice((*SPECIAL, *ODD_TEXTS))
    _replace(request, random, content=random.choice((text, [{"type": "text", "text": text}])))


def _empty_content(request: Request, random: Random) -> None:
    _replace(request, random, content=random.choice((None, "", [], [{}], [None], {}, 1)))


def _show_image_anywhere(request: Request, random: Random) -> None:
    """Give the content of one message, such as that of the first turn, to another."""
    shown = [
        one["content"] for one in request["messages"] if isinstance(one, dict) and "content" in one
    ]
    if shown:
        _replace(request, random, content=copy.deepcopy(shown[0]))


def _drop_message(request: Request, random: Random) -> None:
    messages = request["messages"]
    if messages:
        del messages[random.choice((0, random.randrange(len(messages))))]


def _shuffle_messages(request: Request, random: Random) -> None:
    random.shuffle(request["messages"])


def _end_with_answer(request: Request, random: Random) -> None:
    request["messages"].append({"role": "assistant", "content": "It is"})
    request["add_generation_prompt"] = random.random() < 0.5
    request["continue_final_message"] = random.random() < 0.7


def _change_recall(request: Request, random: Random) -> None:
    odd = (*ODD_NUMBERS, "4", True, None, [4], {"images": 1})
    _entry(request)["recall"] = random.choice(odd)


def _forge_turns(request: Request, random: Random) -> None:
    """Say what only the server's renderer may say: which turns recall."""
    turn = {"images": random.choice((0, 1, 2, 99, -1, 2**63)), "text": random.choice(ODD_TEXTS)}
    _entry(request)["recall_turns"] = random.choice(([], [turn], [turn] * 300, turn, None))


def _mutate_entry(request: Request, random: Random) -> None:
    entry = copy.deepcopy(_entry(request))
    with contextlib.suppress(RecursionError):
        mutate(entry, random)
        json.dumps(entry)
        request["mm_processor_kwargs"][REQUEST_FIELD] = entry


def _entry(request: Request) -> dict[str, Any]:
    entry = request["mm_processor_kwargs"][REQUEST_FIELD]
    assert isinstance(entry, dict)
    return entry


_CHANGES: Sequence[Callable[[Request, Random], None]] = (
    _change_role,
    _change_content,
    _empty_content,
    _show_image_anywhere,
    _drop_message,
    _shuffle_messages,
    _end_with_answer,
    _change_recall,
    _forge_turns,
    _mutate_entry,
)


BODY = "body"
"""The kind of requests that change what vLLM reads itself."""

CONVERSATION = "conversation"
"""The kind of requests with several turns, whose later ones recall tokens."""

READ_BY_VLLM = (BODY, CONVERSATION)
"""Kinds of requests that stock vLLM may refuse or fail too."""

KINDS: Mapping[str, float] = {
    "state": 34,
    "entry": 25,
    "kwargs": 8,
    "anything": 8,
    "huge": 2,
    "sound": 6,
    BODY: 17,
    CONVERSATION: 30,
}
"""How often each kind is drawn."""

_SPOILT = 0.03
"""Share of requests whose text is no longer JSON, or is hardly any."""

_NAMES = ("a", "b", "0" * 64, "renderer0-mm-7-image-0", "", "\n", "x" * 10_000, "ü🦙")
"""Few names for many images, so that they meet."""

_ODD: Mapping[str, tuple[object, ...]] = {
    "cache_salt": ("a", "b", "", "\0", "s" * 2000, 1, None, ["a"], *ODD_TEXTS[:8]),
    "n": (0, 1, 2, 3, -1, 10**6, 2**63, "2", 1.5, None, True),
    "truncate_prompt_tokens": (-2, -1, 0, 1, 5, 20, 40, 200, 10**6, 2**63, "1", None),
    "truncation_side": ("left", "right", "", 1, None),
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
_DETAILS: tuple[object, ...] = ("low", "high", "auto", "", "ü", 1, None, {})


@dataclass(frozen=True)
class Mutant:
    """A mutated request: its kind, its bytes, and its text for reports.

    ``stock`` is the same request without the plugin's entry, if it is still JSON.
    """

    kind: str
    content: bytes
    shown: str
    stock: Mapping[str, object] | None


def draw(
    server: Server, examples: list[Example], random: Random, adapters: Sequence[str] = ()
) -> Mutant:
    """One mutated request, to the model or to one of its adapters."""
    kind = random.choices(list(KINDS), list(KINDS.values()))[0]
    request = body(server, random.choice(examples), max_tokens=1)
    if kind == CONVERSATION:
        request = draw_conversation(server, examples, random)
    elif kind == BODY:
        _change_body(request, random)
    else:
        request["mm_processor_kwargs"] = _mutate_kwargs(kind, random)
    if adapters:
        request["model"] = random.choice((server.model, *adapters))
    text = json.dumps(request)
    shown = json.dumps({k: v for k, v in request.items() if k not in ("model", "messages")})
    if random.random() < _SPOILT:
        spoilt = spoil(text, random)[0]
        content = spoilt.encode("utf-8", "surrogatepass") if isinstance(spoilt, str) else spoilt
        return Mutant("spoilt", content, shown, None)
    return Mutant(kind, text.encode(), shown, _without_entry(request))


def _without_entry(request: Mapping[str, object]) -> dict[str, object]:
    plain = dict(request)
    kwargs = plain.pop("mm_processor_kwargs", None)
    if isinstance(kwargs, dict):
        rest = {key: value for key, value in kwargs.items() if key != REQUEST_FIELD}
        if rest:
            plain["mm_processor_kwargs"] = rest
    return plain


def entries() -> list[Any]:
    """Valid entries to mutate."""
    state = json.loads(load_state("visionzip").dumps())
    with_cores = [{**sample(), "core": core} for core in CORES]
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
        *({"state": copy.deepcopy(whole)} for whole in (sample(), state) for _ in range(6)),
        *({"state": whole, "budget": budget} for whole in with_cores for budget in (8, 48)),
    ]


def _mutate_kwargs(kind: str, random: Random) -> Any:
    entry = random.choice(entries())
    kwargs: Any = {REQUEST_FIELD: entry}
    if kind == "state":
        state = sample()
        if random.random() < 0.5:
            state["core"] = copy.deepcopy(random.choice(CORES))
        kwargs[REQUEST_FIELD] = {"state": state, "budget": random.choice((None, 8, 16, 64))}
        # Else hardly any would change the core.
        mutate(state["core"] if "core" in state and random.random() < 0.5 else state, random)
    elif kind == "entry":
        mutate(entry, random)
    elif kind == "kwargs":
        mutate(kwargs, random)
    elif kind == "anything":
        kwargs = random.choice((anything(random), {REQUEST_FIELD: anything(random)}))
    elif kind == "huge":
        kwargs[REQUEST_FIELD] = _draw_huge_entry(random)
    return kwargs


def _draw_huge_entry(random: Random) -> Any:
    deep: Any = 1
    for _ in range(random.choice((300, 900))):
        deep = {"state": deep}
    return random.choice(
        (
            {"state": {**sample(), "provenance": {"notes": "n" * 10_000_000}}},
            {"state": "n" * 10_000_000},
            {"budget": [8] * 1_000_000},
            {"n" * 1_000_000: 8},
            {str(i): i for i in range(50_000)},
            deep,
        )
    )


def _change_body(request: dict[str, object], random: Random) -> None:
    """Mutate one to three fields that vLLM reads, with a valid entry or none."""
    if random.random() < 0.5:
        request["mm_processor_kwargs"] = {REQUEST_FIELD: random.choice(entries()[:12])}
    messages = request["messages"]
    assert isinstance(messages, list)
    parts: list[dict[str, Any]] = messages[0]["content"]
    for _ in range(random.choice((1, 1, 2, 3))):
        change = random.choice(("uuid", "uuid", "twice", "detail", "text", "turns", *_ODD))
        images = [part for part in parts if part["type"] == "image_url"]
        if change in _ODD:
            request[change] = random.choice(_ODD[change])
            if change == "n":
                request["temperature"] = 1
        elif change == "uuid":
            random.choice(images)["uuid"] = random.choice((*_NAMES, *_NAMES, 1, None, ["a"]))
        elif change == "twice":
            parts.insert(0, copy.deepcopy(random.choice(images)))
        elif change == "turns":
            for _ in range(random.choice((1, 2, 5, 40))):
                text = random.choice((*SPECIAL, *ODD_TEXTS, "and now?", "and now?", "and now?"))
                messages.append({"role": "assistant", "content": "red"})
                messages.append({"role": "user", "content": text})
        elif change == "detail":
            image = random.choice(images)["image_url"]
            image["detail"] = random.choice(_DETAILS)
        else:
            parts[-1]["text"] = random.choice((*SPECIAL, *ODD_TEXTS)) + parts[-1]["text"]


FLAGS = (
    *("--enforce-eager", "--max-model-len", "2048", "--block-size", "32"),
    *("--num-gpu-blocks-override", "1024"),
)
PRUNED = (
    *("--autoprune-state", "minillava-split", "--autoprune-budget", "64"),
    *("--autoprune-text-tower", str(CLIP), "--autoprune-recall", "4"),
    *("--autoprune-requests", "states:1-256", "--autoprune-detail", "low=8,high=64"),
)
API_SERVERS = 2
START_TIMEOUT = 1200.0
"""Seconds that a server may take to start on a busy machine."""

PROGRESS = 250
"""Requests after which progress is printed."""

SHOWN = 200
"""Characters of a bad exchange that are shown."""


@dataclass
class Tally:
    """What became of the requests.

    ``errors`` and ``stock_errors`` count server errors by their message.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    stock_errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: int = 0


@dataclass(frozen=True)
class Exchange:
    """A request with its number, and what it was answered here and, where asked, by stock."""

    number: int
    mutant: Mutant
    reply: Reply
    stock: Reply | None


def _count_exchange(tally: Tally, exchange: Exchange) -> bool:
    """Count one request; True where the server failed."""
    reply, stock = exchange.reply, exchange.stock
    failed = not 0 < reply.status < 500
    tally.kinds[exchange.mutant.kind] += 1
    tally.statuses[reply.status] += 1
    if reply.status == 200:
        tally.answers += len(reply.body["choices"])
    if failed:
        tally.errors[_cause(reply)] += 1
    if stock is not None and stock.status >= 500:
        tally.stock_errors[_cause(stock)] += 1
    return failed


def run(
    server: Server,
    count: int,
    seed: int = 0,
    at_once: int = 4,
    stock: Server | None = None,
    adapters: Sequence[str] = (),
) -> Tally:
    """Send ``count`` requests, ``at_once`` at a time, and hold the server to its promises.

    Without a ``stock`` server no server error is excused.
    """
    begun, tally, asked = time.monotonic(), Tally(), examples(2)
    before, engine = text_of(ask(server, asked[0])), _finished_by_engine(server)
    client, other = Client(server), None if stock is None else Client(stock)

    def exchange(number: int) -> Exchange:
        mutant = draw(server, asked, Random(f"{seed}/{number}"), adapters)
        reply = client.send(CHAT, mutant.content)
        failed = not 0 < reply.status < 500
        mirrored = None
        if other and mutant.stock is not None and (failed or mutant.kind in READ_BY_VLLM):
            mirrored = other.send(CHAT, mutant.stock)
        return Exchange(number, mutant, reply, mirrored)

    wrong: list[Exchange] = []
    with ThreadPoolExecutor(at_once) as pool:
        for made in pool.map(exchange, range(count)):
            if _count_exchange(tally, made):
                wrong.append(made)
                print(f"number {made.number}: {made.reply}; stock: {made.stock}", flush=True)
            if (made.number + 1) % PROGRESS == 0:
                spent = f"{made.number + 1}/{count}, {time.monotonic() - begun:.0f} s"
                print(f"[{spent}] {_format_counts(tally.statuses)}", flush=True)
    # After the last one: what stock answers to a request depends on those before it.
    tally.faults += [
        f"seed {seed} number {one.number} ({one.mutant.kind}): {one.mutant.shown[:SHOWN]} -> "
        f"{one.reply}"
        for one in wrong
        if _cause(one.reply) not in tally.stock_errors
    ]
    reached = _finished_by_engine(server) - engine
    if reached != tally.answers:
        tally.faults.append(f"the engine gave {reached} answers, and {tally.answers} were received")
    after = text_of(ask(server, asked[0]))
    if after != before:
        tally.faults.append(f"a normal request was answered {before!r}, and is now {after!r}")
    return tally


def _cause(reply: Reply) -> str:
    """An error's message without the numbers in it."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "…", f"{reply.status} {reply.message[:120]}")


def _finished_by_engine(server: Server) -> int:
    """Answers that the engine has finished without an error, by vLLM's own count."""
    client, name = Client(server), "vllm:request_success_total"
    return int(client.metric(name) - client.metric(name, finished_reason="error"))


def _format_counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server and a stock one, send mutated requests, and report."""
    parser = CommandParser(
        prog="python -m tests.hostile.mutate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, help="number of requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument(
        "--runner", choices=[*ENVIRONMENTS], default="v1", help="model runner of vLLM"
    )
    parser.add_argument("--at-once", type=int, default=4, help="requests in flight")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapters-")))
        write_adapters(folder)
        flags, env = (*FLAGS, *adapter_flags(folder)), ENVIRONMENTS[options.runner]
        stock = stack.enter_context(serve(LLAVA, *flags, env=env, patience=START_TIMEOUT))
        pruned = (*flags, *PRUNED, "--api-server-count", str(API_SERVERS))
        server = stack.enter_context(serve(LLAVA, *pruned, env=env, patience=START_TIMEOUT))
        server.await_api_servers(API_SERVERS, START_TIMEOUT)
        tally = run(server, options.count, options.seed, options.at_once, stock, ADAPTERS)
    print(f"{sum(tally.statuses.values())} requests, {len(tally.faults)} faults")
    print(f"by status: {_format_counts(tally.statuses)}")
    print(f"by kind: {_format_counts(tally.kinds)}")
    print(f"server errors: {_format_counts(tally.errors) or 'none'}")
    print(f"of stock: {_format_counts(tally.stock_errors) or 'none'}")
    print("\n".join(tally.faults[:20]))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
