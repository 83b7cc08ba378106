"""Attacks: their pictures, the client that sends hostile requests, and the registry of attacks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import httpx
from PIL import Image

from benchmarks.common.requests import draw_picture, encode_picture
from benchmarks.server import Server
from vllm_autoprune.http_client import CHAT, Metrics


@dataclass(frozen=True)
class Picture:
    """A picture drawn from a seed; ``uuid`` is sent where it is given.

    With ``sent`` false only the uuid is sent, as clients do for what a server has cached. A
    ``flat`` one has a single colour.
    """

    seed: int
    width: int
    height: int
    uuid: str | None = None
    sent: bool = True
    flat: bool = False

    def named(self, uuid: str) -> Picture:
        """The same picture with a uuid."""
        return replace(self, uuid=uuid)

    @property
    def url(self) -> str:
        """A data URL."""
        return _draw_url(self.seed, self.width, self.height, self.flat)

    @property
    def part(self) -> dict[str, Any]:
        """The picture as a part of a message."""
        image = {"url": self.url} if self.sent else None
        named = {} if self.uuid is None else {"uuid": self.uuid}
        return {"type": "image_url", "image_url": image, **named}


@cache
def _draw_url(seed: int, width: int, height: int, flat: bool) -> str:
    if flat:
        return encode_picture(Image.new("RGB", (width, height), (seed % 256,) * 3), "png")
    return encode_picture(draw_picture(seed, width, height), "png")


PATIENCE = 240.0
"""Seconds that one answer may take."""

# A connection for each request: vLLM closes those that it has not heard of for five seconds.
_HTTP = httpx.Client(
    timeout=PATIENCE, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)

Logprobs = Mapping[str, float]
"""The most likely first tokens of an answer."""


@dataclass(frozen=True)
class Reply:
    """One reply: status (0 without an answer), body and seconds."""

    status: int
    text: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether there is no answer, or a server error."""
        return not 0 < self.status < 500

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer; empty if it is not one."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def message(self) -> str:
        """Message of an error."""
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else self.text

    @property
    def logprobs(self) -> Logprobs:
        """Of the first token of each answer; empty where the request was refused."""
        if self.status != 200:
            return {}
        tops = self.body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        # The endpoint for processed inputs returns token ids instead of text.
        return {str(top.get("token_id", top.get("token"))): float(top["logprob"]) for top in tops}

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message[:160]!r}"


@dataclass(frozen=True)
class Client:
    """Requests to one server; ``statuses`` has that of every answer, 0 where there was none."""

    server: Server
    statuses: list[int] = field(default_factory=list, compare=False)

    def send(self, path: str, body: Mapping[str, object] | bytes) -> Reply:
        """The answer to a POST request on a connection of its own."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        begun = time.monotonic()
        try:
            answer = _HTTP.post(
                self.server.url + path, content=sent, headers={"Content-Type": "application/json"}
            )
            status, text = answer.status_code, answer.content.decode("utf-8", "replace")
        except httpx.HTTPError as error:
            status, text = 0, repr(error)
        self.statuses.append(status)
        return Reply(status, text, time.monotonic() - begun)

    def abandon(self, body: Mapping[str, object], after: float) -> None:
        """Send a chat request and hang up before it is answered."""
        timeout = httpx.Timeout(PATIENCE, read=after)
        with contextlib.suppress(httpx.HTTPError):
            _HTTP.post(self.server.url + CHAT, json=body, timeout=timeout)

    def chat(self, text: str, *pictures: Picture, **more: object) -> Reply:
        """The answer to a question about pictures."""
        return self.send(CHAT, self.chat_body(text, *pictures, **more))

    def chat_body(self, text: str, *pictures: Picture, **more: object) -> dict[str, object]:
        """A chat request: the pictures first, then the text."""
        return {
            "model": self.server.model,
            "messages": [user_turn(text, *pictures)],
            "temperature": 0,
            "max_tokens": 4,
            "logprobs": True,
            "top_logprobs": 20,
            "return_tokens_as_token_ids": True,
            **more,
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all samples with these labels."""
        return Metrics(self.server.get("/metrics")).total(name, **labels) or 0.0


def user_turn(text: str, *pictures: Picture) -> dict[str, Any]:
    """A user's message: the pictures first, then the text."""
    parts = [*(picture.part for picture in pictures), {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def entry(**fields: object) -> dict[str, object]:
    """The part of a request body that says how its images are pruned."""
    return {"mm_processor_kwargs": {"autoprune": fields}}


Profile = Literal["default", "uncached", "trusting", "split", "stock"]
"""Which server: ``default`` lets requests bring states; ``uncached`` has both of vLLM's caches off,
the endpoints for tokens on, and lets requests set nothing; ``trusting`` lets them set arguments of
the processor too, as ``stock`` does, which has no state; ``split`` has a state with a core, budgets
by ``image_url.detail`` and the endpoints for tokens."""

PRUNED: Sequence[Profile] = ("default", "uncached", "trusting", "split")
"""Profiles of servers with a state."""

QUESTION = "what colour is the cat on the left"
SMALL, LARGE = (56, 56), (448, 448)
"""Sizes whose number of visual tokens differs wherever a backbone has any that do."""


@dataclass
class Site:
    """Target of an attack: a backbone, and clients of its servers.

    ``open_client`` and ``open_stock`` start the server anew if its engine is dead. ``notes`` are
    figures that an attack reports in addition to problems.
    """

    backbone: str
    open_client: Callable[[], Client]
    open_stock: Callable[[], Client]
    words: str = QUESTION
    notes: list[str] = field(default_factory=list)
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.open_client()

    def restart(self) -> None:
        """Start both servers again after a request that ended their engines."""
        statuses, self.client = self.client.statuses, self.open_client()
        self.client.statuses.extend(statuses)
        self.open_stock()

    def note(self, text: str) -> None:
        """Report a figure."""
        self.notes.append(text)

    def ask(self, *pictures: Picture, **more: object) -> Reply:
        """Ask the site's question about pictures."""
        return self.client.chat(self.words, *pictures, **more)

    def compare(
        self, name: str, body: Mapping[str, object], stock_body: Mapping[str, object] | None = None
    ) -> Iterable[str]:
        """A problem where a chat request is a server error, and not by stock vLLM."""
        reply = self.client.send(CHAT, body)
        if reply.status != 200:
            self.note(f"{name}: {reply}")
        if reply.failed:
            stock = self.open_stock()
            other = stock.send(CHAT, {**(stock_body or body), "model": stock.server.model})
            if not other.failed:
                yield f"{name}: {reply}, and stock answers {other.status}"

    def compare_at_once(
        self, requests: Sequence[Callable[[str], Reply]], groups: Sequence[object]
    ) -> Iterable[str]:
        """A problem for each request that is answered at once as another one of its group is alone.

        Requests take a cache salt, with which they are asked alone.
        """
        alone = [ask(f"alone {at}") for at, ask in enumerate(requests)]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda ask: ask("at once"), requests))
        yield from server_errors(*alone, *together)
        for at, reply in enumerate(together):
            peers = [other for other in range(len(alone)) if groups[other] == groups[at]]
            if reply.status == 200:
                likest = peers[nearest(reply.logprobs, [alone[i].logprobs for i in peers])]
                if likest != at:
                    yield f"request {at} is answered as request {likest}"


Run = Callable[[Site], Iterable[str]]


@dataclass(frozen=True)
class Attack:
    """One attack: ``run`` yields problems; attacks marked ``quick`` also run in pytest."""

    name: str
    summary: str
    profile: Profile
    run: Run
    quick: bool
    backbones: Sequence[str]


ATTACKS: dict[str, Attack] = {}
BACKBONES = ("qwen2_5_vl", "llava_next", "llava")


def attack(
    profile: Profile = "default", quick: bool = True, backbones: Sequence[str] = BACKBONES
) -> Callable[[Run], Run]:
    """Register a function as an attack, with its name and docstring as description."""

    def register(run: Run) -> Run:
        name = run.__name__
        summary = (run.__doc__ or "").strip().partition("\n")[0]
        ATTACKS[name] = Attack(name, summary, profile, run, quick, backbones)
        return run

    return register


# ---- what is a problem ----

SAME = 0.15
"""Mean difference of log-probabilities up to which two answers are the same.

Batches and cached prefixes round bfloat16 differently, by some hundredths; another image of a tiny
random model differs by several times that."""


def distance(answer: Logprobs, other: Logprobs) -> float:
    """Mean absolute difference of two distributions of the first token.

    A token that only one of them lists counts as the least likely that the other lists.
    """
    if not answer or not other:
        return float("inf")
    floors = min(answer.values()), min(other.values())
    tokens = {*answer, *other}
    gaps = (abs(answer.get(t, floors[0]) - other.get(t, floors[1])) for t in tokens)
    return sum(gaps) / len(tokens)


def nearest(answer: Logprobs, references: Sequence[Logprobs]) -> int:
    """The reference nearest to an answer."""
    return min(range(len(references)), key=lambda i: distance(answer, references[i]))


def server_errors(*replies: Reply) -> Iterable[str]:
    """A problem for each reply that is a server error or missing."""
    return (str(reply) for reply in replies if reply.failed)


def unlike(name: str, reply: Reply, *accepted: Reply) -> Iterable[str]:
    """A problem for an answered reply that equals none of the references."""
    yield from server_errors(reply)
    if reply.status == 200:
        gap = min(distance(reply.logprobs, other.logprobs) for other in accepted)
        if gap > SAME:
            yield f"{name}: the answer differs from the expected one by {gap:.2f}"
