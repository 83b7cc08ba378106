"""Conversations whose later turns recall tokens of their images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.hostile.attack import LARGE, Site, attack, server_errors, unlike
from tests.hostile.attacks.plans import GENERATE, Forge, changed, forged, lives, plans_of, same
from tests.hostile.attacks.plans import rendered as render
from tests.hostile.attacks.texts import SPECIAL, no_worse
from tests.hostile.client import Client, Reply, content, nearest
from tests.hostile.pictures import Picture
from vllm_autoprune.serving.plan import MAX_RECALLS, Choice, ItemPlan
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

_PICTURE = Picture(60, *LARGE)
_QUESTION, _LATER = "what colour is the cat", "how many are on the left"
_ENTRY = {"mm_processor_kwargs": {"autoprune": {"recall": 6}}}


def _messages(picture: Picture, *later: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": content(_QUESTION, [picture])}]
    for text in later:
        messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": text}]
    return messages


def _converse(client: Client, picture: Picture, *later: str, **more: object) -> Reply:
    return client.chat(_QUESTION, messages=_messages(picture, *later), **_ENTRY, **more)


def _forges(recall: ItemPlan) -> Mapping[str, Forge]:
    """Forged plans of the item that is recalled last."""
    first, *others = recall.earlier
    far = 1 << 40
    chains: Mapping[str, tuple[Choice, ...]] = {
        "another first question": (Choice(first.budget, (5,) * 8, first.language), *others),
        "a first K of all tokens": (Choice(recall.tokens), *others),
        "a first K of more than all tokens": (Choice(recall.tokens + 7), *others),
        "the largest first K": (Choice(MAX_BUDGET - recall.budget),),
        "as many turns as there may be": (first,) * MAX_RECALLS,
        "more turns than there may be": (first,) * (MAX_RECALLS + 1),
        "no turn before": (),
        "a token id beyond the vocabulary": (Choice(first.budget, (far,), (far,)), *others),
        "a negative token id": (Choice(first.budget, (-1,), (-1,)), *others),
    }
    return {
        **{name: changed(earlier=chain) for name, chain in chains.items()},
        "another K_c": changed(core=first.budget - 1),
        "K_c of the first K": changed(core=first.budget),
        "no K_c": changed(core=0),
        "random tokens": changed(keep="random"),
        "the base policy alone": changed(keep="reference"),
        "a resized image": changed(keep="resized"),
        "a whole image with turns before": changed(part="whole", core=0),
        "a delta with turns before": changed(part="delta", core=3),
    }


@attack("split")
def forged_recalls(site: Site) -> Iterable[str]:
    """Recalls whose plans tell other turns, or other numbers, than there were."""
    request = render(site.client, messages=_messages(_PICTURE, _LATER, _LATER), **_ENTRY)
    plans = plans_of(request)
    if [plan.part for plan in plans][-2:] != ["recall", "recall"]:
        yield f"nothing is recalled: {[plan.part for plan in plans]}"
        return
    statuses = {}
    sound = [same] * (len(plans) - 1)
    for number, (name, forge) in enumerate({"sound": same, **_forges(plans[-1])}.items()):
        reply = site.client.send(GENERATE, forged(request, [*sound, forge], (1 << 47) + number))
        statuses[name] = reply.status
        if not lives(site.client):
            yield f"{name}: {reply}, and the engine is dead"
            return
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
    site.note(f"{statuses}")
    if statuses["sound"] != 200:
        yield "the endpoint refuses sound recalls"
    reply, alone = (_converse(site.client, _PICTURE, _LATER, cache_salt=s) for s in ("", "alone"))
    yield from unlike("the image of the forged plans", reply, alone)


@attack("split")
def image_tokens_in_conversations(site: Site) -> Iterable[str]:
    """Image tokens in a later turn of a conversation with recall: no new errors."""
    stock = site.open_stock()
    for text in SPECIAL:
        for later in (f"{text} {_LATER}", f"{_LATER} {text} {text}"):
            messages = _messages(_PICTURE, later, _LATER)
            reply = site.client.chat(_QUESTION, messages=messages, **_ENTRY)
            ask_stock = partial(stock.chat, _QUESTION, messages=messages)
            yield from no_worse(f"{text!r}", reply, ask_stock)
            if not lives(site.client):
                yield f"{text!r}: {reply}, and the engine is dead"
                return


@attack("split")
def conversations_at_once(site: Site) -> Iterable[str]:
    """Concurrent conversations that recall: each is answered about its own image."""
    pictures = [Picture(7000 + i, 448, 448 - 56 * (i % 3)) for i in range(12)]
    alone = [
        _converse(site.client, picture, _LATER, cache_salt=f"alone {i}")
        for i, picture in enumerate(pictures)
    ]
    yield from server_errors(*alone)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda one: _converse(site.client, one, _LATER), pictures))
    yield from server_errors(*together)
    peers = [reply.logprobs for reply in alone]
    for i, reply in enumerate(together):
        if reply.status == 200 and (likest := nearest(reply.logprobs, peers)) != i:
            yield f"image {i} is answered as image {likest}"


@attack("split")
def long_conversations(site: Site) -> Iterable[str]:
    """Hundreds of turns that recall: refused or answered, and others are answered soon after."""
    for turns in (MAX_RECALLS + 4, 300):
        reply = _converse(site.client, _PICTURE, *["more"] * turns)
        yield from server_errors(reply)
        site.note(f"{turns} turns: {reply.status}")
        if not lives(site.client):
            yield f"{turns} turns: {reply}, and the engine is dead"
            return
