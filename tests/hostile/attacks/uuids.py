"""Client-chosen image uuids: one for two images, and uuids in vLLM's internal format."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.hostile.attack import LARGE, SMALL, Site, attack, server_errors, unlike
from tests.hostile.client import entry, nearest
from tests.hostile.pictures import Picture

ONE, OTHER = Picture(1, *SMALL), Picture(2, *LARGE)


@attack()
def one_uuid_in_one_request(site: Site) -> Iterable[str]:
    """Two images of different size with the same uuid in one request."""
    yield from send_both_under_one_uuid(site)


@attack("uncached")
def one_uuid_in_one_request_uncached(site: Site) -> Iterable[str]:
    """Two images of different size with the same uuid in one request, without vLLM's caches."""
    yield from send_both_under_one_uuid(site)


def send_both_under_one_uuid(site: Site) -> Iterable[str]:
    """A problem where two images under one uuid are answered as neither of them."""
    for first, second in ((ONE, OTHER), (OTHER, ONE)):
        uuid = f"one-request-{first.seed}"
        honest = site.ask(first, second)
        doubled = site.ask(first, first), site.ask(second, second)
        reply = site.ask(first.named(uuid), second.named(uuid))
        # vLLM trusts a uuid, so either image may be used for both.
        yield from unlike("two images under one uuid", reply, honest, *doubled)
        if reply.status in (0, 500):
            return


@attack()
def one_uuid_in_two_requests(site: Site) -> Iterable[str]:
    """Two images of different size with the same uuid in alternating requests."""
    references = site.ask(ONE), site.ask(OTHER)
    for order in ((0, 1, 0), (1, 0, 1)):
        for budget in (None, 8):
            more = {} if budget is None else entry(budget=budget)
            expected = references
            if budget is not None:
                expected = site.ask(ONE, **more), site.ask(OTHER, **more)
            for i in order:
                picture = (ONE, OTHER)[i].named(f"two-requests-{order}-{budget}")
                reply = site.ask(picture, **more)
                yield from unlike("a reused uuid", reply, *expected)
                if reply.status in (0, 500):
                    return


@attack("uncached")
def one_uuid_in_two_requests_uncached(site: Site) -> Iterable[str]:
    """Two images with the same uuid in two requests, without vLLM's caches."""
    references = [site.ask(ONE), site.ask(OTHER)]
    for i in (0, 1, 0, 1):
        reply = site.ask((ONE, OTHER)[i].named("two-requests"))
        yield from server_errors(reply)
        if reply.status in (0, 500):
            return
        if reply.status == 200 and nearest(reply.logprobs, [r.logprobs for r in references]) != i:
            yield f"image {i} under a reused uuid is answered about image {1 - i}"


@attack("uncached")
def planted_names(site: Site) -> Iterable[str]:
    """Uuids that anticipate vLLM's own numbering of images."""
    victim, planted = Picture(3, *LARGE), Picture(4, *LARGE)
    mine, theirs = site.ask(victim), site.ask(planted)
    # Request numbers are not in answers, but there are few enough to try all.
    seen = int(site.client.metric("vllm:request_success_total")) + 40
    names = [f"renderer0-mm-{number}-image-0" for number in range(1, 2 * seen + 40)]
    for start in range(0, len(names), 8):
        some = [planted.named(name) for name in names[start : start + 8]]
        yield from server_errors(site.ask(*some))
    wrong = 0
    for _ in range(6):
        reply = site.ask(victim)
        yield from server_errors(reply)
        wrong += nearest(reply.logprobs, [mine.logprobs, theirs.logprobs]) == 1
    if wrong:
        yield f"{wrong} of 6 requests without a uuid are answered about the planted image"


@attack()
def uuid_alone(site: Site) -> Iterable[str]:
    """Images referenced by uuid only: small, large, with other budgets, unknown."""
    stock = site.open_stock()
    unknown = Picture(0, 1, 1, "never-sent", sent=False)
    allowed = stock.chat(site.words, unknown).status
    replies = [site.ask(unknown)]
    for picture in (ONE, OTHER):
        named = picture.named(f"alone-{picture.seed}")
        alone = Picture(0, 1, 1, named.uuid, sent=False)
        first = site.ask(named)
        yield from server_errors(first)
        for more in ({}, entry(budget=8), entry(enabled=False), entry(budget=4096)):
            reply = site.ask(alone, **more)
            replies.append(reply)
            if reply.status == 200:
                yield from unlike("by uuid alone", reply, first, site.ask(picture, **more))
    site.note(f"{[reply.status for reply in replies]}; stock answers an unknown uuid by {allowed}")
    for reply in replies:
        # Stock vLLM gives a server error for a uuid that is in none of its caches.
        if reply.status == 0 or reply.status >= 500 > allowed:
            yield f"by uuid alone: {reply}, and stock answers {allowed}"


@attack()
def odd_uuids(site: Site) -> Iterable[str]:
    """Uuids that resemble cache identities, are very long, or are not strings."""
    identity = "0" * 64
    reference = site.ask(OTHER)
    stock = site.open_stock()
    odd = ("", " ", "a" * 100_000, f"{identity}-ap-{identity[:32]}", identity, "\n\0", "ü🦙", "0x1")
    for uuid in odd:
        reply = site.ask(OTHER.named(uuid))
        if reply.status >= 500 and stock.chat(site.words, OTHER.named(uuid)).status < 500:
            yield f"uuid {uuid[:20]!r}: {reply}"
        elif reply.status == 200:
            yield from unlike(f"uuid {uuid[:20]!r}", reply, reference)


@attack()
def random_keep_by_uuid(site: Site) -> Iterable[str]:
    """A random keep with client-chosen uuids: the draw must not depend on the uuid."""
    picture = Picture(5, *LARGE)
    how = entry(keep="random", budget=8)
    replies = [site.ask(picture.named(f"draw-{i}"), **how) for i in range(4)]
    yield from server_errors(*replies)
    for i, reply in enumerate(replies[1:], 1):
        yield from unlike(f"random keep under uuid {i}", reply, replies[0])


@attack()
def cache_salt(site: Site) -> Iterable[str]:
    """The feature cache must not reveal that a tenant with another salt sent an image."""
    picture = Picture(int(site.client.metric("vllm:request_success_total")) + 100, *LARGE)
    name = "autoprune_feature_cache_hits_total"

    def hits(salt: str, question: str) -> float:
        before = site.client.metric(name)
        reply = site.client.chat(question, picture, cache_salt=salt)
        assert reply.status == 200, reply
        return site.client.metric(name) - before

    hits("first tenant", "what is the shape")
    own = hits("first tenant", "which dog is blue")
    site.note(f"hits within one salt: {own:.0f}")
    if hits("second tenant", "how many are there"):
        yield "a request of another cache_salt hits the features of the first"


@attack("uncached")
def identities_are_hexadecimal(site: Site) -> Iterable[str]:
    """Cache identities must be hexadecimal numbers, as cache connectors require."""
    body = site.client.chat_body(site.words, OTHER)
    reply = site.client.send("/v1/chat/completions/render", body)
    assert reply.status == 200, reply
    for identity in reply.body["features"]["mm_hashes"]["image"]:
        if not re.fullmatch(r"[0-9a-f]{64}", identity):
            yield f"identity {identity!r}"
