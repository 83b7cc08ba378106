"""Forged plans, cores and recalls, sent through the endpoint for processed inputs, and the like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.hostile.attack import (
    LARGE,
    QUESTION,
    Client,
    Picture,
    Reply,
    Site,
    attack,
    content,
    entry,
    nearest,
    server_errors,
    unlike,
)
from tests.hostile.attacks.images import ONE, OTHER, compare, send_both_under_one_uuid
from tests.hostile.attacks.requests import SPECIAL, no_worse
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.plan import FIELD, MAX_RECALLS, Choice, ItemPlan, encode_state
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

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


_SPLIT = Picture(50, *LARGE)
_QUESTIONS = ("what colour is the cat", "how many are on the left", "which dog is blue")


def _forges_of_parts(core: ItemPlan, delta: ItemPlan) -> Mapping[str, tuple[Forge, Forge]]:
    """Forged plans of the two items of one image."""
    tokens, few = delta.tokens, delta.budget
    whole = changed(part="whole", core=0)
    no_core = encode_state(load_state("visionzip"))
    wide = {"share": 0.5, "cover": 0.9, "strength": 0.5}
    other_core = encode_state(PruningState.model_validate({**sample(), "core": wide}))
    sizes = (1, core.budget - 1, core.budget + 1, tokens - few - 1, tokens - few, tokens - few + 1)
    return {
        **{
            f"a delta of K_c = {size}": (same, changed(core=size))
            for size in (*sizes, tokens - 1, tokens, tokens + 1, 10_000, MAX_BUDGET - few)
        },
        "two cores": (same, changed(part="core", core=few)),
        "two deltas": (changed(part="delta", core=few), same),
        "the delta first": (changed(part="delta", core=few), changed(part="core", core=few)),
        "a delta beside the whole": (whole, same),
        "the whole beside a core": (same, whole),
        "random tokens": (changed(keep="random"), changed(keep="random")),
        "a core with a question": (changed(instruction=(5,) * 64, language=(5,) * 64), same),
        "a state without a core": (same, changed(state=no_core)),
        "no state with a core": (changed(state=no_core), changed(state=no_core)),
        "a delta of another core": (same, changed(state=other_core)),
        "another core": (changed(state=other_core), changed(state=other_core)),
    }


@attack("split")
def forged_parts(site: Site) -> Iterable[str]:
    """Cores and deltas that fit neither each other, nor their image, nor the server's state."""
    request = rendered(site.client, _SPLIT)
    plans = plans_of(request)
    if [plan.part for plan in plans] != ["core", "delta"]:
        yield "the image is not split"
        return
    two = rendered(site.client, _SPLIT, Picture(51, *LARGE))
    exchanged = copy.deepcopy(two)
    exchanged["features"]["kwargs_data"]["image"].reverse()
    bodies: dict[str, tuple[dict[str, Any], Sequence[Forge]]] = {
        "nothing forged": (request, (same,)),
        **{name: (request, forges) for name, forges in _forges_of_parts(*plans).items()},
        "a delta without its core": (_without(request, 0), (same,)),
        "a core without a delta": (_without(request, 1), (same,)),
        "two deltas of one core": (_repeated(request, 1), (same,)),
        "two equal cores": (_repeated(request, 0), (same,)),
        "one of two cores": (_without(two, 0), (same,)),
        "exchanged images": (exchanged, (same,)),
    }
    statuses = {}
    for number, (name, (body, forges)) in enumerate(bodies.items()):
        reply = site.client.send(GENERATE, forged(body, forges, (1 << 46) + number))
        statuses[name] = reply.status
        if not lives(site.client):
            yield f"{name}: {reply}, and the engine is dead"
            return
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
    site.note(f"{statuses}")
    if statuses["nothing forged"] != 200:
        yield "the endpoint refuses sound parts"
    # The forged plans' cores have the key of this image; another salt has none of them.
    for question in _QUESTIONS:
        reply = site.client.chat(question, _SPLIT)
        alone = site.client.chat(question, _SPLIT, cache_salt="alone")
        yield from unlike("the image of the forged plans", reply, alone)


def _without(request: Mapping[str, Any], item: int) -> dict[str, Any]:
    """A rendered request without one of its items and its placeholders."""
    body = copy.deepcopy(dict(request))
    features = body["features"]
    place = features["mm_placeholders"]["image"].pop(item)
    for name in ("mm_hashes", "kwargs_data"):
        features[name]["image"].pop(item)
    features["mm_metadata"] = None
    del body["token_ids"][place["offset"] : place["offset"] + place["length"]]
    for later in features["mm_placeholders"]["image"][item:]:
        later["offset"] -= place["length"]
    return body


def _repeated(request: Mapping[str, Any], item: int) -> dict[str, Any]:
    """A rendered request with one of its items twice."""
    body = copy.deepcopy(dict(request))
    features, ids = body["features"], body["token_ids"]
    places = features["mm_placeholders"]["image"]
    begin, length = places[item]["offset"], places[item]["length"]
    end = begin + length
    ids[end:end] = ids[begin:end]
    for later in places[item + 1 :]:
        later["offset"] += length
    places.insert(item + 1, {**places[item], "offset": end})
    for name in ("mm_hashes", "kwargs_data"):
        features[name]["image"].insert(item, features[name]["image"][item])
    features["mm_metadata"] = None
    return body


@attack("split")
def image_tokens_beside_split_images(site: Site) -> Iterable[str]:
    """Image tokens in the text of a request whose image is split: no new errors, same answers."""
    stock = site.open_stock()
    for number, text in enumerate(SPECIAL):
        for words in (f"{text} {site.words}", f"{site.words} {text} {text}"):
            ask = partial(site.client.chat, words, _SPLIT)
            reply = ask()
            yield from no_worse(f"{text!r}", reply, partial(stock.chat, words, _SPLIT))
            if reply.status == 200:
                fresh = ask(cache_salt=f"alone {number} {len(words)}")
                yield from server_errors(fresh)
                yield from unlike(f"{text!r} with a cached core", reply, fresh)
                if fresh.status != 200:
                    yield f"{text!r} under a salt: {fresh}"


@attack("split")
def one_uuid_of_split_images(site: Site) -> Iterable[str]:
    """Two split images of different size with the same uuid, in one request and in several."""
    yield from send_both_under_one_uuid(site)
    for question in _QUESTIONS:
        expected = [site.client.chat(question, picture) for picture in (ONE, OTHER)]
        for i in (0, 1, 0, 1):
            reply = site.client.chat(question, (ONE, OTHER)[i].named("split"))
            yield from unlike(f"image {i} under a reused uuid", reply, *expected)
            alone = site.client.chat(question, Picture(0, 1, 1, "split", sent=False))
            if alone.status == 200:
                yield from unlike("a split image by uuid alone", alone, *expected)


@attack("split")
def questions_about_split_images_at_once(site: Site) -> Iterable[str]:
    """Concurrent questions that share cores: each is answered about its own image and question."""
    pictures = [Picture(5000 + i, 448, 448 - 56 * (i % 3)) for i in range(12)]
    asked = [(question, picture) for question in _QUESTIONS for picture in pictures]
    alone = [
        site.client.chat(question, picture, cache_salt=f"alone {i}")
        for i, (question, picture) in enumerate(asked)
    ]
    yield from server_errors(*alone)
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: site.client.chat(*one), asked))
    yield from server_errors(*together)
    for i, reply in enumerate(together):
        if reply.status != 200:
            continue
        first = i // len(pictures) * len(pictures)
        peers = [reference.logprobs for reference in alone[first : first + len(pictures)]]
        if (likest := nearest(reply.logprobs, peers)) != i - first:
            yield f"image {i - first} is answered as image {likest}"


@attack("split")
def cache_salt_of_cores(site: Site) -> Iterable[str]:
    """The core of an image must not be shared with a tenant of another salt."""
    picture = Picture(int(site.client.metric("vllm:request_success_total")) + 6000, *LARGE)
    name = "autoprune_feature_cache_hits_total"

    def cached(question: str, **salt: object) -> int:
        reply = site.client.chat(question, picture, **salt)
        assert reply.status == 200, reply
        details = reply.body["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    first, second, third = _QUESTIONS
    fresh = cached(first, cache_salt="first tenant"), cached(second, cache_salt="first tenant")
    site.note(f"cached tokens within one salt: {fresh[0]}, then {fresh[1]}")
    if fresh[0] or not fresh[1]:
        yield f"the first question finds {fresh[0]} cached tokens, the second {fresh[1]}"
    hits = site.client.metric(name)
    for salt in ({"cache_salt": "second tenant"}, {}):
        if shared := cached(third, **salt):
            yield f"a request with {salt} finds {shared} cached tokens of another tenant"
    if site.client.metric(name) != hits:
        yield "a request of another cache_salt hits the features of the first"


@attack("split")
def odd_details(site: Site) -> Iterable[str]:
    """Values of ``image_url.detail`` on a server that has budgets for them: no new errors."""
    stock, tokens = site.open_stock(), {}
    details: Iterable[object] = ("low", "auto", "high", "", "LOW", "ü", "x" * 10_000, 1, None, {})
    for detail in details:
        part = copy.deepcopy(_SPLIT.part)
        part["image_url"] = {"url": _SPLIT.url, "detail": detail}
        body = site.client.chat_body(site.words)
        words = {"type": "text", "text": site.words}
        body["messages"] = [{"role": "user", "content": [part, words]}]
        yield from compare(site, stock, f"detail {str(detail)[:20]!r}", body)
        reply = site.client.send("/v1/chat/completions", body)
        if reply.status == 200:
            tokens[str(detail)] = reply.body["usage"]["prompt_tokens"]
    site.note(f"prompt tokens: {tokens}")
    if not tokens["low"] < tokens["auto"] < tokens["high"]:
        yield f"the detail does not set the number of tokens: {tokens}"


_RECALLED = Picture(60, *LARGE)
_QUESTION, _LATER = "what colour is the cat", "how many are on the left"
_ENTRY = {"mm_processor_kwargs": {"autoprune": {"recall": 6}}}


def _messages(picture: Picture, *later: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": content(_QUESTION, [picture])}]
    for text in later:
        messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": text}]
    return messages


def _converse(client: Client, picture: Picture, *later: str, **more: object) -> Reply:
    return client.chat(_QUESTION, messages=_messages(picture, *later), **_ENTRY, **more)


def _forges_of_recall(recall: ItemPlan) -> Mapping[str, Forge]:
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
    request = rendered(site.client, messages=_messages(_RECALLED, _LATER, _LATER), **_ENTRY)
    plans = plans_of(request)
    if [plan.part for plan in plans][-2:] != ["recall", "recall"]:
        yield f"nothing is recalled: {[plan.part for plan in plans]}"
        return
    statuses = {}
    sound = [same] * (len(plans) - 1)
    for number, (name, forge) in enumerate({"sound": same, **_forges_of_recall(plans[-1])}.items()):
        reply = site.client.send(GENERATE, forged(request, [*sound, forge], (1 << 47) + number))
        statuses[name] = reply.status
        if not lives(site.client):
            yield f"{name}: {reply}, and the engine is dead"
            return
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
    site.note(f"{statuses}")
    if statuses["sound"] != 200:
        yield "the endpoint refuses sound recalls"
    reply, alone = (_converse(site.client, _RECALLED, _LATER, cache_salt=s) for s in ("", "alone"))
    yield from unlike("the image of the forged plans", reply, alone)


@attack("split")
def image_tokens_in_conversations(site: Site) -> Iterable[str]:
    """Image tokens in a later turn of a conversation with recall: no new errors."""
    stock = site.open_stock()
    for text in SPECIAL:
        for later in (f"{text} {_LATER}", f"{_LATER} {text} {text}"):
            messages = _messages(_RECALLED, later, _LATER)
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
        reply = _converse(site.client, _RECALLED, *["more"] * turns)
        yield from server_errors(reply)
        site.note(f"{turns} turns: {reply.status}")
        if not lives(site.client):
            yield f"{turns} turns: {reply}, and the engine is dead"
            return
