"""Attacks: their registry, pictures, a client of the attacked server, and what must not happen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import httpx
from PIL import Image

from benchmarks.common.requests import draw_picture, encode_picture
from benchmarks.server import Server
from tests.fuzz.generator import Json, without_entry
from vllm_autoprune.http_client import CHAT, Metrics

QUESTION = "what colour is the cat on the left"
SMALL = (56, 56)
LARGE = (448, 448)
"""Sizes whose number of visual tokens differs wherever a backbone has any that do."""

PATIENCE = 240.0
"""Seconds that one answer may take."""

SAME = 0.15
"""Mean difference of log-probabilities up to which two answers are the same.

Batches and cached prefixes round bfloat16 differently, by some hundredths; another image of a tiny
random model differs by several times that."""

Profile = Literal["default", "uncached", "split", "stock"]
"""Which server: ``default`` lets requests bring states; ``uncached`` has both of vLLM's caches off,
the endpoints for tokens on, and lets requests set nothing; ``split`` has a state with a core,
budgets by ``image_url.detail`` and the endpoints for tokens; ``stock`` has no state."""

# A connection for each request: vLLM closes those that it has not heard of for five seconds.
HTTP = httpx.Client(
    timeout=PATIENCE,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)


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
    def part(self) -> Json:
        """The picture as a part of a message."""
        image = {"url": self.url} if self.sent else None
        named = {} if self.uuid is None else {"uuid": self.uuid}
        return {"type": "image_url", "image_url": image, **named}


@cache
def _draw_url(seed: int, width: int, height: int, flat: bool) -> str:
    grey = Image.new("RGB", (width, height), (seed % 256,) * 3)
    return encode_picture(grey if flat else draw_picture(seed, width, height), "png")


def user_turn(text: str, *pictures: Picture) -> Json:
    """A user's message: the pictures first, then the text."""
    parts = [*(picture.part for picture in pictures), {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


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
    def body(self) -> Json:
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
        return {
            str(top.get("token_id", top.get("token"))): float(top["logprob"])
            for top in tops
        }

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message[:160]!r}"


@dataclass
class Client:
    """Requests to one server."""

    server: Server

    def send(self, path: str, body: Mapping[str, object] | bytes) -> Reply:
        """The answer to a POST request on a connection of its own."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        begun = time.monotonic()
        try:
            answer = HTTP.post(self.server.url + path, content=content, headers=headers)
            status = answer.status_code
            text = answer.content.decode("utf-8", "replace")
        except httpx.HTTPError as error:
            status = 0
            text = repr(error)
        return Reply(status, text, time.monotonic() - begun)

    def body(self, *pictures: Picture, text: str = QUESTION, **more: Any) -> Json:
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

    def ask(self, *pictures: Picture, text: str = QUESTION, **more: Any) -> Reply:
        """The answer to a question about pictures."""
        return self.send(CHAT, self.body(*pictures, text=text, **more))

    def lives(self) -> bool:
        """Whether a usual question is answered."""
        return self.ask(Picture(0, *SMALL)).status == 200

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all samples with these labels."""
        return Metrics(self.server.get("/metrics")).total(name, **labels) or 0.0


OddRequests = Iterable[tuple[Any, ...]]
"""What is odd, a request, and requests as one of which it may be answered."""


@dataclass
class Site(Client):
    """Target of an attack: a client of its server, and servers of all profiles."""

    get: Callable[[Profile], Server] = field(kw_only=True)
    profile: Profile = field(kw_only=True)
    _known: dict[str, Reply] = field(default_factory=dict)

    def stock(self) -> Client:
        """A client of the server without a state."""
        return Client(self.get("stock"))

    def check(self, name: str, body: Json, *accepted: Json) -> Reply:
        """Fail where a chat request is a server error, and without its entry not by stock.

        And where it is answered as none of the ``accepted`` requests, which are sent once before.
        """
        for other in accepted:
            if (key := json.dumps(other)) not in self._known:
                self._known[key] = self.send(CHAT, other)
        reply = self.send(CHAT, body)
        if reply.failed:
            stock = self.stock()
            by_stock = stock.send(
                CHAT, {**without_entry(body), "model": stock.server.model}
            )
            assert by_stock.failed, (
                f"{name}: {reply}, and stock answers {by_stock.status}"
            )
        elif accepted:
            assert_same(
                name, reply, *(self._known[json.dumps(other)] for other in accepted)
            )
        return reply

    def check_each(self, requests: OddRequests) -> None:
        """:meth:`check` of each request."""
        for name, *bodies in requests:
            self.check(name, *bodies)


# ---- what must not happen ----


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


def assert_no_error(*replies: Reply) -> None:
    """No reply is missing or a server error."""
    assert [str(reply) for reply in replies if reply.failed] == []


def assert_same(name: str, reply: Reply, *accepted: Reply) -> None:
    """No server error, and an answer equals one of the references."""
    assert_no_error(reply)
    if reply.status == 200:
        gap = min(distance(reply.logprobs, other.logprobs) for other in accepted)
        assert gap <= SAME, (
            f"{name}: the answer differs from the expected one by {gap:.2f}"
        )


# ---- attacks ----

BACKBONES = ("qwen2_5_vl", "llava_next", "llava")


@dataclass(frozen=True)
class Attack:
    """One attack on a server of each of ``profiles``; ``quick`` ones run without --exhaustive."""

    profiles: Sequence[Profile]
    quick: bool
    backbones: Sequence[str]
    run: Callable[[Site], None]


ATTACKS: dict[str, Attack] = {}


def attack(
    *profiles: Profile,
    quick: bool = True,
    backbones: Sequence[str] = BACKBONES,
    judge: Callable[[Site, Any], None] = lambda site, nothing: None,
) -> Callable[[Callable[[Site], Any]], Callable[[Site], Any]]:
    """Register a function as an attack by its name; it fails where something happens.

    Or ``judge`` does, such as ``Site.check_each``, for what it yields.
    """

    def register(function: Callable[[Site], Any]) -> Callable[[Site], Any]:
        run: Callable[[Site], None] = lambda site: judge(site, function(site))  # noqa: E731
        ATTACKS[function.__name__] = Attack(
            profiles or ("default",), quick, backbones, run
        )
        return function

    return register


def run_attack(name: str, profile: Profile, get: Callable[[Profile], Server]) -> None:
    """Run an attack on a server, which afterwards answers a usual question as before."""
    site = Site(get(profile), get=get, profile=profile)
    question = site.body(Picture(0, 448, 448), text="what colour is the cat")
    reply = site.send(CHAT, question)
    assert reply.status == 200, reply
    ATTACKS[name].run(site)
    after = site.send(CHAT, question)
    assert after.status == 200, f"{after}\n{site.server.logged()[-3000:]}"
    assert_same("a usual question afterwards", after, reply)
