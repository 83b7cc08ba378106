"""Forged plans, sent through vLLM's endpoint for processed inputs (``--enable-scale-out``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.hostile.attack import LARGE, QUESTION, Site, attack, server_errors, unlike
from tests.hostile.client import Client, content, entry, nearest
from tests.hostile.pictures import Picture
from vllm_autoprune.serving.plan import FIELD, ItemPlan

RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
_PICTURE = Picture(16, *LARGE)

Forge = Callable[[Tensor], Tensor | None]
"""A forged plan made of a sound one; None leaves the field out."""


def _with(at: int, value: int) -> Forge:
    def forge(plan: Tensor) -> Tensor:
        forged = plan.clone()
        forged[at % len(forged)] = value
        return forged

    return forge


_WORDS = range(12)
"""Words at the head of a plan: budget, keep, part and the like."""

_ODD = (0, -1, 1, 9, 33, 10_000, 2**31, 2**62, -(2**63))


def same(plan: Tensor) -> Tensor:
    """The plan as it is."""
    return plan


def changed(**fields: object) -> Forge:
    """Other values of some of a plan's fields."""

    def forge(plan: Tensor) -> Tensor:
        return replace(ItemPlan.decode(plan), **fields).encode()  # type: ignore[arg-type]

    return forge


def _as_core(plan: Tensor) -> Tensor:
    decoded = ItemPlan.decode(plan)
    return replace(decoded, part="core", core=decoded.budget).encode()


FORGED: Mapping[str, Forge] = {
    **{f"word {at} = {value}": _with(at, value) for at in _WORDS for value in _ODD},
    "a core": _as_core,
    **{
        f"a delta of K_c = {core}": changed(part="delta", core=core) for core in (1, 8, 255, 10_000)
    },
    "empty": lambda plan: plan[:0],
    "short": lambda plan: plan[:3],
    "long": lambda plan: torch.cat([plan, torch.full((100_000,), 5)]),
    "ids out of range": lambda plan: torch.cat([plan[:-2], torch.tensor([10**9, -(10**9)])]),
    "zeros": torch.zeros_like,
    "minus one": lambda plan: torch.full_like(plan, -1),
    "random": lambda plan: torch.randint(-(2**62), 2**62, plan.shape),
    "two rows": lambda plan: torch.stack([plan, plan]),
    "a scalar": lambda plan: plan[0],
    "fractions": lambda plan: plan.double() + 0.5,
    "not finite": lambda plan: torch.full(plan.shape, float("nan")),
}
QUICK = tuple(f"word {at} = {value}" for at in _WORDS for value in (-1, 10_000)) + tuple(
    name for name in FORGED if not name.startswith("word")
)


def rendered(client: Client, *pictures: Picture, **more: object) -> dict[str, Any]:
    """A request for the endpoint for processed inputs, as rendered by vLLM."""
    body = {
        "model": client.server.model,
        "messages": [{"role": "user", "content": content(QUESTION, pictures)}],
        **more,
    }
    reply = client.send(RENDER, body)
    assert reply.status == 200, reply
    return {
        **reply.body,
        "sampling_params": {"temperature": 0, "max_tokens": 4, "logprobs": 20},
        "stream": False,
    }


def forged(request: Mapping[str, Any], forges: Sequence[Forge], number: int) -> dict[str, Any]:
    """The request with other plans and new identities; the last forge is for all further items."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        decode_mm_kwargs_item,
        encode_mm_kwargs_item,
    )

    body = copy.deepcopy(dict(request))
    features = body["features"]
    features["mm_metadata"] = None
    names = [f"{number:016x}{at:048x}" for at in range(len(features["mm_hashes"]["image"]))]
    features["mm_hashes"]["image"] = names
    items = []
    for at, packed in enumerate(features["kwargs_data"]["image"]):
        item = decode_mm_kwargs_item(packed)
        field = item[FIELD]
        assert isinstance(field.data, Tensor)
        plan = forges[min(at, len(forges) - 1)](field.data)
        if plan is None:
            del item[FIELD]
        else:
            field.data = plan
        items.append(encode_mm_kwargs_item(item))
    features["kwargs_data"]["image"] = items
    return body


def lives(client: Client) -> bool:
    return client.chat(QUESTION, Picture(0, 56, 56)).status == 200


def _forge_all(site: Site, names: Iterable[str]) -> Iterable[str]:
    request = rendered(site.client, _PICTURE)
    sound = site.client.send(GENERATE, forged(request, [same], 1 << 40))
    if sound.status != 200:
        yield f"the endpoint refuses a sound plan: {sound}"
        return
    statuses: dict[int, int] = {}
    for number, name in enumerate(names):
        reply = site.client.send(GENERATE, forged(request, [FORGED[name]], number))
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if not lives(site.client):
            yield f"plan with {name}: {reply}, and the engine is dead"
            return
    site.note(f"by status: {statuses}")
    if errors := sum(count for status, count in statuses.items() if not 0 < status < 500):
        yield f"{errors} of {sum(statuses.values())} forged plans are answered by a server error"


@attack("uncached")
def forged_plans(site: Site) -> Iterable[str]:
    """Invalid plans: out of range, too short, too long, of another type, missing."""
    yield from _forge_all(site, QUICK)


@attack("uncached", quick=False)
def forged_plans_of_every_kind(site: Site) -> Iterable[str]:
    """Every header field of a plan with every extreme value."""
    yield from _forge_all(site, FORGED)


@attack("uncached")
def forged_budgets_of_two_images(site: Site) -> Iterable[str]:
    """Two images whose plans are exchanged, so that rows and placeholders differ."""
    request = rendered(site.client, _PICTURE, Picture(17, 56, 56))
    features = request["features"]
    features["kwargs_data"]["image"].reverse()
    features["mm_metadata"] = None
    reply = site.client.send(GENERATE, forged(request, [same], 1 << 41))
    if not lives(site.client):
        yield f"exchanged plans: {reply}, and the engine is dead"


@attack("uncached", quick=False)
def plan_left_out(site: Site) -> Iterable[str]:
    """An image without a plan in place of a pruned one: no error that stock vLLM does not give.

    Stock vLLM gets the equivalent: fewer placeholders than the image needs.
    """
    body = forged(rendered(site.client, _PICTURE), [lambda plan: None], 1 << 45)
    reply = site.client.send(GENERATE, body)
    if lives(site.client):
        return
    stock = site.open_stock()
    request = rendered(stock, _PICTURE)
    request["features"]["mm_placeholders"]["image"][0]["length"] -= 1
    request["features"]["mm_metadata"] = None
    same = stock.send(GENERATE, request)
    if lives(stock):
        yield f"no plan: {reply}, and the engine is dead; stock answers {same.status} and lives"
    else:
        site.note("the engine is dead, and so is that of stock of a range that does not fit")
        site.restart()


@attack("uncached", quick=False)
def planted_key(site: Site) -> Iterable[str]:
    """A plan with the feature key of another client's image and different pixels."""
    victim, planted = Picture(30, *LARGE), Picture(31, *LARGE)
    theirs = rendered(site.client, victim)
    references = [site.ask(Picture(32, *LARGE)), site.ask(planted)]
    key = plans_of(theirs)[0].key

    body = forged(rendered(site.client, planted), [changed(key=key)], 1 << 44)
    yield from server_errors(site.client.send(GENERATE, body))
    answer = site.ask(victim)
    # The reference answer is requested last, with another salt and so another key.
    references[0] = site.ask(victim, cache_salt="alone")
    if nearest(answer.logprobs, [r.logprobs for r in references]) == 1:
        yield "an image is answered about the one that a peer sent under its key"


def plans_of(request: Mapping[str, Any]) -> list[ItemPlan]:
    """The plans of a rendered request."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    items = map(decode_mm_kwargs_item, request["features"]["kwargs_data"]["image"])
    return [ItemPlan.decode(item[FIELD].data) for item in items]


@attack("uncached")
def state_where_none_is_allowed(site: Site) -> Iterable[str]:
    """A state in a forged plan, on a server whose requests may set nothing."""
    from vllm_autoprune.serving.plan import encode_state
    from vllm_autoprune.tpdsl.loading import load_state

    request = rendered(site.client, _PICTURE)
    state = encode_state(load_state("visionzip"))

    refused = site.ask(_PICTURE, **entry(state="visionzip"))
    if refused.status != 400:
        yield f"a state by name: {refused}"
    own = site.client.send(GENERATE, forged(request, [same], 1 << 42))
    reply = site.client.send(GENERATE, forged(request, [changed(state=state)], 1 << 43))
    if not lives(site.client):
        yield f"a carried state: {reply}, and the engine is dead"
        return
    yield from unlike("a carried state", reply, own)
