"""Forged plans, cores and recalls, sent through the endpoint for processed inputs, and the like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    entry,
    nearest,
    server_errors,
    unlike,
    user_turn,
)
from tests.hostile.attacks.images import ONE, OTHER, send_both_under_one_uuid
from tests.hostile.attacks.requests import SPECIAL
from tests.tpdsl.samples import sample
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.plan import FIELD, MAX_RECALLS, Choice, ItemPlan, encode_state
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

RENDER, GENERATE = f"{CHAT}/render", "/inference/v1/generate"
_PICTURE = Picture(16, *LARGE)

Json = dict[str, Any]
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


def rendered(client: Client, *pictures: Picture, **more: object) -> Json:
    """A request for the endpoint for processed inputs, as rendered by vLLM."""
    body = {"model": client.server.model, "messages": [user_turn(QUESTION, *pictures)], **more}
    reply = client.send(RENDER, body)
    assert reply.status == 200, reply
    sampling = {"temperature": 0, "max_tokens": 4, "logprobs": 20}
    return {**reply.body, "sampling_params": sampling, "stream": False}


def forged(request: Mapping[str, Any], forges: Sequence[Forge], number: int) -> Json:
    """The request with other plans and new identities; the last forge is for all further items."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        decode_mm_kwargs_item,
        encode_mm_kwargs_item,
    )

    body = copy.deepcopy(dict(request))
    features, items = body["features"], []
    features["mm_metadata"] = None
    names = [f"{number:016x}{at:048x}" for at in range(len(features["mm_hashes"]["image"]))]
    features["mm_hashes"]["image"] = names
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


def _plans_of(request: Mapping[str, Any]) -> list[ItemPlan]:
    """The plans of a rendered request."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    items = map(decode_mm_kwargs_item, request["features"]["kwargs_data"]["image"])
    return [ItemPlan.decode(item[FIELD].data) for item in items]


def _lives(client: Client) -> bool:
    return client.chat(QUESTION, Picture(0, 56, 56)).status == 200


SOUND = "nothing forged"

Forgeries = Mapping[str, tuple[Mapping[str, Any], Sequence[Forge]]]
"""Rendered requests, and what is made of the plans of their items; the first is sound as it is."""


def _send_forged(site: Site, forgeries: Forgeries, number: int) -> Iterable[str]:
    """A problem for each server error, a dead engine, and a refusal of what is not forged."""
    statuses: dict[str, int] = {}
    sound = next(iter(forgeries.values()))[0], [same]
    for name, (request, forges) in {SOUND: sound, **forgeries}.items():
        reply = site.client.send(GENERATE, forged(request, forges, number + len(statuses)))
        statuses[name] = reply.status
        if not _lives(site.client):
            yield f"{name}: {reply}, and the engine is dead"
            return
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
    site.note(f"{statuses}")
    if statuses[SOUND] != 200:
        yield "the endpoint refuses what is not forged"


@attack("uncached")
def forged_plans(site: Site) -> Iterable[str]:
    """Invalid plans: out of range, too short, too long, of another type, missing."""
    request = rendered(site.client, _PICTURE)
    yield from _send_forged(site, {name: (request, [FORGED[name]]) for name in QUICK}, 0)


@attack("uncached", quick=False)
def forged_plans_of_every_kind(site: Site) -> Iterable[str]:
    """Every header field of a plan with every extreme value."""
    request = rendered(site.client, _PICTURE)
    yield from _send_forged(site, {name: (request, [FORGED[name]]) for name in FORGED}, 1 << 40)


@attack("uncached")
def forged_budgets_of_two_images(site: Site) -> Iterable[str]:
    """Two images whose plans are exchanged, so that rows and placeholders differ."""
    request = rendered(site.client, _PICTURE, Picture(17, 56, 56))
    request["features"]["kwargs_data"]["image"].reverse()
    reply = site.client.send(GENERATE, forged(request, [same], 1 << 41))
    if not _lives(site.client):
        yield f"exchanged plans: {reply}, and the engine is dead"


@attack("uncached", quick=False)
def plan_left_out(site: Site) -> Iterable[str]:
    """An image without a plan in place of a pruned one: no error that stock vLLM does not give.

    Stock vLLM gets the equivalent: fewer placeholders than the image needs.
    """
    body = forged(rendered(site.client, _PICTURE), [lambda plan: None], 1 << 45)
    reply = site.client.send(GENERATE, body)
    if _lives(site.client):
        return
    stock = site.open_stock()
    request = rendered(stock, _PICTURE)
    request["features"]["mm_placeholders"]["image"][0]["length"] -= 1
    request["features"]["mm_metadata"] = None
    other = stock.send(GENERATE, request)
    if _lives(stock):
        yield f"no plan: {reply}, and the engine is dead; stock answers {other.status} and lives"
    else:
        site.note("the engine is dead, and so is that of stock of a range that does not fit")
        site.restart()


@attack("uncached", quick=False)
def planted_key(site: Site) -> Iterable[str]:
    """A plan with the feature key of another client's image and different pixels."""
    victim, planted = Picture(30, *LARGE), Picture(31, *LARGE)
    key = _plans_of(rendered(site.client, victim))[0].key
    about_planted = site.ask(planted)
    body = forged(rendered(site.client, planted), [changed(key=key)], 1 << 44)
    yield from server_errors(site.client.send(GENERATE, body))
    answer = site.ask(victim)
    # The reference answer is requested last, with another salt and so another key.
    references = [site.ask(victim, cache_salt="alone").logprobs, about_planted.logprobs]
    if nearest(answer.logprobs, references) == 1:
        yield "an image is answered about the one that a peer sent under its key"


@attack("uncached")
def state_where_none_is_allowed(site: Site) -> Iterable[str]:
    """A state in a forged plan, on a server whose requests may set nothing."""
    request = rendered(site.client, _PICTURE)
    state = encode_state(load_state("visionzip"))
    refused = site.ask(_PICTURE, **entry(state="visionzip"))
    if refused.status != 400:
        yield f"a state by name: {refused}"
    sound = site.client.send(GENERATE, forged(request, [same], 1 << 42))
    reply = site.client.send(GENERATE, forged(request, [changed(state=state)], 1 << 43))
    if not _lives(site.client):
        yield f"a carried state: {reply}, and the engine is dead"
        return
    yield from unlike("a carried state", reply, sound)


# ---- cores and deltas ----

_SPLIT = Picture(50, *LARGE)
_QUESTIONS = ("what colour is the cat", "how many are on the left", "which dog is blue")


def _forges_of_parts(core: ItemPlan, delta: ItemPlan) -> Mapping[str, tuple[Forge, Forge]]:
    """Forged plans of the two items of one image."""
    tokens, few = delta.tokens, delta.budget
    as_whole = changed(part="whole", core=0)
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
        "a delta beside the whole": (as_whole, same),
        "the whole beside a core": (same, as_whole),
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
    plans = _plans_of(request)
    if [plan.part for plan in plans] != ["core", "delta"]:
        yield "the image is not split"
        return
    two = rendered(site.client, _SPLIT, Picture(51, *LARGE))
    exchanged = copy.deepcopy(two)
    exchanged["features"]["kwargs_data"]["image"].reverse()
    forgeries: Forgeries = {
        **{name: (request, forges) for name, forges in _forges_of_parts(*plans).items()},
        "a delta without its core": (_repeated(request, 0, times=0), (same,)),
        "a core without a delta": (_repeated(request, 1, times=0), (same,)),
        "two deltas of one core": (_repeated(request, 1, times=2), (same,)),
        "two equal cores": (_repeated(request, 0, times=2), (same,)),
        "one of two cores": (_repeated(two, 0, times=0), (same,)),
        "exchanged images": (exchanged, (same,)),
    }
    yield from _send_forged(site, forgeries, 1 << 46)
    # The forged plans' cores have the key of this image; another salt has none of them.
    for question in _QUESTIONS:
        reply = site.client.chat(question, _SPLIT)
        alone = site.client.chat(question, _SPLIT, cache_salt="alone")
        yield from unlike("the image of the forged plans", reply, alone)


def _repeated(request: Mapping[str, Any], item: int, times: int) -> Json:
    """A rendered request with one of its items and its placeholders so many times."""
    body = copy.deepcopy(dict(request))
    features, ids = body["features"], body["token_ids"]
    features["mm_metadata"] = None
    places = features["mm_placeholders"]["image"]
    begin, length = places[item]["offset"], places[item]["length"]
    ids[begin : begin + length] = ids[begin : begin + length] * times
    for later in places[item + 1 :]:
        later["offset"] += length * (times - 1)
    places[item : item + 1] = [
        {**places[item], "offset": begin + copied * length} for copied in range(times)
    ]
    for name in ("mm_hashes", "kwargs_data"):
        features[name]["image"][item : item + 1] *= times
    return body


@attack("split")
def image_tokens_beside_split_images(site: Site) -> Iterable[str]:
    """Image tokens in the text of a request whose image is split: no new errors, same answers."""
    for number, text in enumerate(SPECIAL):
        for words in (f"{text} {site.words}", f"{site.words} {text} {text}"):
            yield from site.compare(f"{text!r}", site.client.chat_body(words, _SPLIT))
            reply = site.client.chat(words, _SPLIT)
            if reply.status == 200:
                salt = f"alone {number} {len(words)}"
                fresh = site.client.chat(words, _SPLIT, cache_salt=salt)
                yield from unlike(f"{text!r} with a cached core", fresh, reply)
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

    def ask(question: str, picture: Picture, salt: str) -> Reply:
        return site.client.chat(question, picture, cache_salt=salt)

    requests: list[Callable[[str], Reply]] = [partial(ask, *each) for each in asked]
    yield from site.compare_at_once(requests, [question for question, _ in asked])


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

    fresh, again = (cached(question, cache_salt="first tenant") for question in _QUESTIONS[:2])
    site.note(f"cached tokens within one salt: {fresh}, then {again}")
    if fresh or not again:
        yield f"the first question finds {fresh} cached tokens, the second {again}"
    hits = site.client.metric(name)
    for salt in ({"cache_salt": "second tenant"}, {}):
        if shared := cached(_QUESTIONS[2], **salt):
            yield f"a request with {salt} finds {shared} cached tokens of another tenant"
    if site.client.metric(name) != hits:
        yield "a request of another cache_salt hits the features of the first"


@attack("split")
def odd_details(site: Site) -> Iterable[str]:
    """Values of ``image_url.detail`` on a server that has budgets for them: no new errors."""
    tokens = {}
    details: Iterable[object] = ("low", "auto", "high", "", "LOW", "ü", "x" * 10_000, 1, None, {})
    for detail in details:
        turn = user_turn(site.words, _SPLIT)
        turn["content"][0]["image_url"]["detail"] = detail
        body = site.client.chat_body(site.words, messages=[turn])
        yield from site.compare(f"detail {str(detail)[:20]!r}", body)
        reply = site.client.send(CHAT, body)
        if reply.status == 200:
            tokens[str(detail)] = reply.body["usage"]["prompt_tokens"]
    site.note(f"prompt tokens: {tokens}")
    if not tokens["low"] < tokens["auto"] < tokens["high"]:
        yield f"the detail does not set the number of tokens: {tokens}"


# ---- later turns that recall ----

_RECALLED = Picture(60, *LARGE)
_QUESTION, _LATER = "what colour is the cat", "how many are on the left"
_ENTRY = entry(recall=6)


def _messages(picture: Picture, *later: str) -> list[Json]:
    messages = [user_turn(_QUESTION, picture)]
    for text in later:
        messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": text}]
    return messages


def _converse(client: Client, picture: Picture, *later: str, **more: object) -> Reply:
    return client.chat(_QUESTION, messages=_messages(picture, *later), **_ENTRY, **more)


def _forges_of_recall(recall: ItemPlan) -> Mapping[str, Forge]:
    """Forged plans of the item that is recalled last."""
    initial, *others = recall.earlier
    far = 1 << 40
    chains: Mapping[str, tuple[Choice, ...]] = {
        "another first question": (Choice(initial.budget, (5,) * 8, initial.language), *others),
        "a first K of all tokens": (Choice(recall.tokens), *others),
        "a first K of more than all tokens": (Choice(recall.tokens + 7), *others),
        "the largest first K": (Choice(MAX_BUDGET - recall.budget),),
        "as many turns as there may be": (initial,) * MAX_RECALLS,
        "more turns than there may be": (initial,) * (MAX_RECALLS + 1),
        "no turn before": (),
        "a token id beyond the vocabulary": (Choice(initial.budget, (far,), (far,)), *others),
        "a negative token id": (Choice(initial.budget, (-1,), (-1,)), *others),
    }
    return {
        **{name: changed(earlier=chain) for name, chain in chains.items()},
        "another K_c": changed(core=initial.budget - 1),
        "K_c of the first K": changed(core=initial.budget),
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
    plans = _plans_of(request)
    if [plan.part for plan in plans][-2:] != ["recall", "recall"]:
        yield f"nothing is recalled: {[plan.part for plan in plans]}"
        return
    sound = [same] * (len(plans) - 1)
    forges = _forges_of_recall(plans[-1]).items()
    yield from _send_forged(
        site, {name: (request, [*sound, forge]) for name, forge in forges}, 1 << 47
    )
    reply, alone = (_converse(site.client, _RECALLED, _LATER, cache_salt=s) for s in ("", "alone"))
    yield from unlike("the image of the forged plans", reply, alone)


@attack("split")
def image_tokens_in_conversations(site: Site) -> Iterable[str]:
    """Image tokens in a later turn of a conversation with recall: no new errors."""
    for text in SPECIAL:
        for later in (f"{text} {_LATER}", f"{_LATER} {text} {text}"):
            messages = _messages(_RECALLED, later, _LATER)
            body = site.client.chat_body(_QUESTION, messages=messages)
            yield from site.compare(f"{text!r}", {**body, **_ENTRY}, body)
            if not _lives(site.client):
                yield f"{text!r}: the engine is dead"
                return


@attack("split")
def conversations_at_once(site: Site) -> Iterable[str]:
    """Concurrent conversations that recall: each is answered about its own image."""
    pictures = [Picture(7000 + i, 448, 448 - 56 * (i % 3)) for i in range(12)]

    def ask(picture: Picture, salt: str) -> Reply:
        return _converse(site.client, picture, _LATER, cache_salt=salt)

    requests: list[Callable[[str], Reply]] = [partial(ask, picture) for picture in pictures]
    yield from site.compare_at_once(requests, [0] * len(pictures))


@attack("split")
def long_conversations(site: Site) -> Iterable[str]:
    """Hundreds of turns that recall: refused or answered, and others are answered soon after."""
    for turns in (MAX_RECALLS + 4, 300):
        reply = _converse(site.client, _RECALLED, *["more"] * turns)
        yield from server_errors(reply)
        site.note(f"{turns} turns: {reply.status}")
        if not _lives(site.client):
            yield f"{turns} turns: {reply}, and the engine is dead"
            return
