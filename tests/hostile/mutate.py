"""Mutated requests, conversations that recall among them, on a server that stock vLLM judges."""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from benchmarks.yardsticks.examples import Example
from tests.fuzz.generator import ODD_NUMBERS, ODD_TEXTS, anything, mutate, spoil
from tests.hostile.attack import Client, Reply
from tests.hostile.attacks.requests import SPECIAL
from tests.serving.engine import CLIP, LLAVA, examples
from tests.serving.http import ask, body, text_of
from tests.serving.scenarios import ENVIRONMENTS
from tests.tpdsl.samples import sample
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.request import REQUEST_FIELD
from vllm_autoprune.serving.plan import FIELD

Request = dict[str, Any]

BODY = "body"
"""The kind of requests that change what vLLM reads itself."""

CONVERSATION = "conversation"
"""The same with several turns, whose later ones recall tokens."""

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

_CORES: Sequence[Mapping[str, object]] = (
    {"share": 0.5},
    {"share": 0.9, "policy": {"name": "divprune"}},
    {"share": 0.75, "cover": 0.5, "strength": 0.25},
    {"share": 1.0},
)
_BUDGETS = (32, 48, 64)
"""Budgets at which a core reaches the edge of a KV block, so that an image is split."""

_RECALLS = (1, 4, 8, 24, 144, 4096)
_ODD_RECALLS = (*ODD_NUMBERS, "4", True, None, [4], {"images": 1})
_TURNS = (1, 1, 2, 2, 3, 6, 40)

_NAMES = ("a", "b", "0" * 64, "renderer0-mm-7-image-0", "", "\n", "x" * 10_000, "ü🦙")
"""Few names for many images, so that they meet."""

_DETAILS: tuple[object, ...] = ("low", "high", "auto", "", "ü", 1, None, {})

_ODD: Mapping[str, tuple[object, ...]] = {
    "cache_salt": ("a", "b", "", "\0", "s" * 2000, 1, None, ["a"], *ODD_TEXTS[:8]),
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


@dataclass(frozen=True)
class Mutant:
    """A mutated request: its kind, its bytes, and its text for reports.

    ``stock`` is the same request without the plugin's entry, if it is still JSON.
    """

    kind: str
    content: bytes
    text: str
    stock: Mapping[str, object] | None


def draw(
    server: Server, examples: Sequence[Example], random: Random, adapters: Sequence[str] = ()
) -> Mutant:
    """One mutated request, to the model or to one of its adapters."""
    kind = random.choices(list(KINDS), list(KINDS.values()))[0]
    request = body(server, random.choice(examples), max_tokens=1)
    if kind == CONVERSATION:
        for _ in range(random.choice(_TURNS)):
            later = {"role": "user", "content": "And what shape is it?"}
            if random.random() < 0.2:  # with an image of its own
                later = body(server, random.choice(examples))["messages"][0]
            request["messages"] += [{"role": "assistant", "content": "red"}, later]
        recalls = _ODD_RECALLS if random.random() < 0.1 else _RECALLS
        entry: Request = {"recall": random.choice(recalls)}
        if random.random() < 0.6:
            state = {**sample(), "core": copy.deepcopy(random.choice(_CORES))}
            entry |= {"state": state, "budget": random.choice(_BUDGETS)}
        if random.random() < 0.1:  # what only the server's renderer may say
            turn = {"images": random.choice((0, 1, 2, 99, -1)), "text": random.choice(ODD_TEXTS)}
            entry["recall_turns"] = random.choice(([], [turn], [turn] * 300, turn, None))
        request["mm_processor_kwargs"] = {REQUEST_FIELD: entry}
    elif kind != BODY:
        request["mm_processor_kwargs"] = _mutate_kwargs(kind, random)
    elif random.random() < 0.5:
        request["mm_processor_kwargs"] = {REQUEST_FIELD: random.choice(_entries()[:12])}
    if kind in (BODY, CONVERSATION):
        for _ in range(random.choice((1, 1, 2, 3) if kind == BODY else (0, 1, 1, 2))):
            _change_body(request, random)
    if adapters:
        request["model"] = random.choice((server.model, *adapters))
    text = json.dumps({k: v for k, v in request.items() if k not in ("model", "messages")})
    content = json.dumps(request)
    if random.random() < _SPOILT:
        spoilt = spoil(content, random)[0]
        if isinstance(spoilt, str):
            spoilt = spoilt.encode("utf-8", "surrogatepass")
        return Mutant("spoilt", spoilt, text, None)
    stock = {key: value for key, value in request.items() if key != "mm_processor_kwargs"}
    kwargs = request.get("mm_processor_kwargs")
    if isinstance(kwargs, dict) and (others := kwargs.keys() - {REQUEST_FIELD}):
        stock["mm_processor_kwargs"] = {key: kwargs[key] for key in others}
    return Mutant(kind, content.encode(), text, stock)


def _change_body(request: Request, random: Random) -> None:
    """Change a field that vLLM reads, or the messages, as a tree or as images and texts."""
    changes = ("uuid", "uuid", "twice", "detail", "text", "turns", "tree", "tree")
    change = random.choice((*changes, *_ODD))
    if change in _ODD:
        request[change] = random.choice(_ODD[change])
        if change == "n":
            request["temperature"] = 1
        return
    messages: Any = request.get("messages")
    if change == "tree":
        tree = {"messages": copy.deepcopy(messages)}
        # Not where that nests deeper than Python copies.
        with suppress(RecursionError):
            mutate(tree, random)
            json.dumps(tree)
            request.pop("messages", None)
            request |= tree
        return
    try:
        parts = messages[0]["content"]
        images = [part for part in parts if part["type"] == "image_url"]
        if change == "uuid":
            random.choice(images)["uuid"] = random.choice((*_NAMES, *_NAMES, 1, None, ["a"]))
        elif change == "twice":
            parts.insert(0, copy.deepcopy(random.choice(images)))
        elif change == "detail":
            images[0]["image_url"]["detail"] = random.choice(_DETAILS)
        elif change == "text":
            parts[-1]["text"] = random.choice((*SPECIAL, *ODD_TEXTS)) + parts[-1]["text"]
        else:
            for _ in range(random.choice((1, 2, 5, 40))):
                text = random.choice((*SPECIAL, *ODD_TEXTS, *["and now?"] * 3))
                messages.append({"role": "assistant", "content": "red"})
                messages.append({"role": "user", "content": text})
    except (TypeError, LookupError, AttributeError):
        return  # an earlier mutation has left nothing of the kind


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


def _mutate_kwargs(kind: str, random: Random) -> Any:
    entry = random.choice(_entries())
    kwargs: Any = {REQUEST_FIELD: entry}
    if kind == "state":
        state = sample()
        if random.random() < 0.5:
            state["core"] = copy.deepcopy(random.choice(_CORES))
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
    client, other = Client(server), None if stock is None else Client(stock)

    def count_answers() -> int:
        """Answers that the engine has finished without an error, by vLLM's own count."""
        name = "vllm:request_success_total"
        return int(client.metric(name) - client.metric(name, finished_reason="error"))

    def exchange(number: int) -> tuple[int, Mutant, Reply, Reply | None]:
        mutant = draw(server, asked, Random(f"{seed}/{number}"), adapters)
        reply, mirrored = client.send(CHAT, mutant.content), None
        # What vLLM reads itself, stock vLLM may refuse or fail too.
        read_by_vllm = reply.failed or mutant.kind in (BODY, CONVERSATION)
        if other and mutant.stock is not None and read_by_vllm:
            mirrored = other.send(CHAT, mutant.stock)
        return number, mutant, reply, mirrored

    before, finished, answers = text_of(ask(server, asked[0])), count_answers(), 0
    failed: list[tuple[int, Mutant, Reply]] = []
    with ThreadPoolExecutor(at_once) as pool:
        for number, mutant, reply, mirrored in pool.map(exchange, range(count)):
            tally.kinds[mutant.kind] += 1
            tally.statuses[reply.status] += 1
            answers += len(reply.body["choices"]) if reply.status == 200 else 0
            if mirrored is not None and mirrored.status >= 500:
                tally.stock_errors[_cause(mirrored)] += 1
            if reply.failed:
                tally.errors[_cause(reply)] += 1
                failed.append((number, mutant, reply))
                print(f"number {number}: {reply}; stock: {mirrored}", flush=True)
            if (number + 1) % 250 == 0:
                spent = f"{number + 1}/{count}, {time.monotonic() - begun:.0f} s"
                print(f"[{spent}] {_format(tally.statuses)}", flush=True)
    # After the last one: what stock answers to a request depends on those before it.
    tally.faults += [
        f"seed {seed} number {number} ({mutant.kind}): {mutant.text[:200]} -> {reply}"
        for number, mutant, reply in failed
        if _cause(reply) not in tally.stock_errors
    ]
    if (reached := count_answers() - finished) != answers:
        tally.faults.append(f"the engine gave {reached} answers, and {answers} were received")
    if (after := text_of(ask(server, asked[0]))) != before:
        tally.faults.append(f"a normal request was answered {before!r}, and is now {after!r}")
    return tally


def _cause(reply: Reply) -> str:
    """An error's message without the numbers in it."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "…", f"{reply.status} {reply.message[:120]}")


def _format(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


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
    print(f"by status: {_format(tally.statuses)}")
    print(f"by kind: {_format(tally.kinds)}")
    print(f"server errors: {_format(tally.errors)}")
    print(f"of stock: {_format(tally.stock_errors)}")
    print("\n".join(tally.faults[:20]))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
