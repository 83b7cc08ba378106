"""Images that are split into a core, which questions share, and a delta by each question."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.hostile.attack import LARGE, Site, attack, server_errors, unlike
from tests.hostile.attacks.places import compare
from tests.hostile.attacks.plans import GENERATE, Forge, changed, forged, lives, plans_of, same
from tests.hostile.attacks.plans import rendered as render
from tests.hostile.attacks.texts import SPECIAL, no_worse
from tests.hostile.attacks.uuids import ONE, OTHER, send_both_under_one_uuid
from tests.hostile.client import nearest
from tests.hostile.pictures import Picture
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.plan import ItemPlan, encode_state
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

_PICTURE = Picture(50, *LARGE)
_QUESTIONS = ("what colour is the cat", "how many are on the left", "which dog is blue")


def _forges(core: ItemPlan, delta: ItemPlan) -> Mapping[str, tuple[Forge, Forge]]:
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
    request = render(site.client, _PICTURE)
    plans = plans_of(request)
    if [plan.part for plan in plans] != ["core", "delta"]:
        yield "the image is not split"
        return
    two = render(site.client, _PICTURE, Picture(51, *LARGE))
    exchanged = copy.deepcopy(two)
    exchanged["features"]["kwargs_data"]["image"].reverse()
    bodies: dict[str, tuple[dict[str, Any], Sequence[Forge]]] = {
        "nothing forged": (request, (same,)),
        **{name: (request, forges) for name, forges in _forges(*plans).items()},
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
        reply = site.client.chat(question, _PICTURE)
        alone = site.client.chat(question, _PICTURE, cache_salt="alone")
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
            ask = partial(site.client.chat, words, _PICTURE)
            reply = ask()
            yield from no_worse(f"{text!r}", reply, partial(stock.chat, words, _PICTURE))
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
        part = copy.deepcopy(_PICTURE.part)
        part["image_url"] = {"url": _PICTURE.url, "detail": detail}
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
