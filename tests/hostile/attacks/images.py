"""Images: names of them, sizes, places in a conversation, bursts, aborted requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.hostile.attack import (
    LARGE,
    SMALL,
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
from tests.tpdsl.samples import sample

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
    for image, other in ((ONE, OTHER), (OTHER, ONE)):
        uuid = f"one-request-{image.seed}"
        honest = site.ask(image, other)
        doubled = site.ask(image, image), site.ask(other, other)
        reply = site.ask(image.named(uuid), other.named(uuid))
        # vLLM trusts a uuid, so either image may be used for both.
        yield from unlike("two images under one uuid", reply, honest, *doubled)
        if reply.failed:
            return


@attack()
def one_uuid_in_two_requests(site: Site) -> Iterable[str]:
    """Two images of different size with the same uuid in alternating requests."""
    for order in ((0, 1, 0), (1, 0, 1)):
        for more in ({}, entry(budget=8)):
            expected = site.ask(ONE, **more), site.ask(OTHER, **more)
            for i in order:
                picture = (ONE, OTHER)[i].named(f"two-requests-{order}-{more}")
                reply = site.ask(picture, **more)
                yield from unlike("a reused uuid", reply, *expected)
                if reply.failed:
                    return


@attack("uncached")
def one_uuid_in_two_requests_uncached(site: Site) -> Iterable[str]:
    """Two images with the same uuid in two requests, without vLLM's caches."""
    references = [site.ask(ONE).logprobs, site.ask(OTHER).logprobs]
    for i in (0, 1, 0, 1):
        reply = site.ask((ONE, OTHER)[i].named("two-requests"))
        yield from server_errors(reply)
        if reply.failed:
            return
        if reply.status == 200 and nearest(reply.logprobs, references) != i:
            yield f"image {i} under a reused uuid is answered about image {1 - i}"


@attack("uncached")
def planted_names(site: Site) -> Iterable[str]:
    """Uuids that anticipate vLLM's own numbering of images."""
    victim, planted = Picture(3, *LARGE), Picture(4, *LARGE)
    references = [site.ask(victim).logprobs, site.ask(planted).logprobs]
    # Request numbers are not in answers, but there are few enough to try all.
    seen = int(site.client.metric("vllm:request_success_total")) + 40
    names = [f"renderer0-mm-{number}-image-0" for number in range(1, 2 * seen + 40)]
    for start in range(0, len(names), 8):
        some = [planted.named(name) for name in names[start : start + 8]]
        yield from server_errors(site.ask(*some))
    replies = [site.ask(victim) for _ in range(6)]
    yield from server_errors(*replies)
    if wrong := sum(nearest(reply.logprobs, references) for reply in replies):
        yield f"{wrong} of 6 requests without a uuid are answered about the planted image"


@attack()
def uuid_alone(site: Site) -> Iterable[str]:
    """Images referenced by uuid only: small, large, with other budgets, unknown."""
    unknown = Picture(0, 1, 1, "never-sent", sent=False)
    allowed = site.open_stock().chat(site.words, unknown).status
    replies = [site.ask(unknown)]
    for picture in (ONE, OTHER):
        named = picture.named(f"alone-{picture.seed}")
        alone = Picture(0, 1, 1, named.uuid, sent=False)
        shown = site.ask(named)
        yield from server_errors(shown)
        for more in ({}, entry(budget=8), entry(enabled=False), entry(budget=4096)):
            reply = site.ask(alone, **more)
            replies.append(reply)
            if reply.status == 200:
                yield from unlike("by uuid alone", reply, shown, site.ask(picture, **more))
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
    odd = ("", " ", "a" * 100_000, f"{identity}-ap-{identity[:32]}", identity, "\n\0", "ü🦙", "0x1")
    for uuid in odd:
        picture, name = OTHER.named(uuid), f"uuid {uuid[:20]!r}"
        yield from site.compare(name, site.client.chat_body(site.words, picture))
        if (reply := site.ask(picture)).status == 200:
            yield from unlike(name, reply, reference)


@attack()
def random_keep_by_uuid(site: Site) -> Iterable[str]:
    """A random keep with client-chosen uuids: the draw must not depend on the uuid."""
    picture = Picture(5, *LARGE)
    how = entry(keep="random", budget=8)
    reference, *replies = [site.ask(picture.named(f"draw-{i}"), **how) for i in range(4)]
    yield from server_errors(reference)
    for i, reply in enumerate(replies, 1):
        yield from unlike(f"random keep under uuid {i}", reply, reference)


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
    again = hits("first tenant", "which dog is blue")
    site.note(f"hits within one salt: {again:.0f}")
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


_SIDES = (28, 56, 84, 112, 168, 224, 336, 448)


@attack(quick=False)
def mixed_sizes_in_one_step(site: Site) -> Iterable[str]:
    """Concurrent images of mixed sizes: each request is answered about its own image."""
    budgets = [(4, 8, 32)[i % 3] for i in range(32)]

    def ask(i: int, salt: str) -> Reply:
        picture = Picture(1000 + i, _SIDES[i % 8], _SIDES[(i * 5 + 3) % 8])
        return site.ask(picture, cache_salt=salt, **entry(budget=budgets[i]))

    requests: list[Callable[[str], Reply]] = [partial(ask, i) for i in range(len(budgets))]
    yield from site.compare_at_once(requests, budgets)


@attack(quick=False)
def many_images_in_one_request(site: Site) -> Iterable[str]:
    """As many images as one request may hold, of mixed sizes, at one token each."""
    pictures = [Picture(2000 + i, _SIDES[i % 8], _SIDES[(i // 8) % 8]) for i in range(64)]
    reply = site.ask(*pictures, **entry(budget=1))
    yield from server_errors(reply)
    site.note(f"{reply.status} in {reply.seconds:.1f} s")


@attack()
def budgets_of_each_image(site: Site) -> Iterable[str]:
    """One image twice in a request, with different budgets."""
    picture, other = Picture(6, *LARGE), Picture(7, *LARGE)
    for budgets in ([4, 32], [32, 4], [1, 4096], [4096, 1]):
        honest = site.ask(picture, other, **entry(budget=budgets))
        yield from server_errors(honest, site.ask(picture, picture, **entry(budget=budgets)))


@attack()
def odd_sizes(site: Site) -> Iterable[str]:
    """Images of one pixel, row or column: no error that stock vLLM does not give."""
    for width, height in ((1, 1), (2, 3), (1, 300), (3000, 1), (29, 4000), (4000, 29)):
        body = site.client.chat_body(site.words, Picture(18, width, height))
        for more in ({}, entry(budget=1), entry(budget=4096)):
            yield from site.compare(f"{width} x {height}", {**body, **more}, body)


@attack()
def abandoned_requests(site: Site) -> Iterable[str]:
    """Aborted requests: during image processing, encoding and decoding."""
    for i in range(24):
        picture = Picture(4000 + i % 8, _SIDES[i % 8], _SIDES[(i // 8) % 8])
        long = {"max_tokens": 200, "stream": True, **entry(budget=4)}
        body = site.client.chat_body(site.words, picture, **long)
        site.client.abandon(body, after=(0.0, 0.02, 0.1)[i % 3])
    yield from server_errors(site.ask(Picture(4000, *_SIDES[:2])))


_TRUSTED: Sequence[Mapping[str, object]] = (
    {"max_pixels": 28 * 28},
    {"min_pixels": 512 * 512, "max_pixels": 512 * 512},
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}},
    {"size": {"height": 28, "width": 28}},
    {"do_resize": False},
    {"merge_size": 1},
    {"merge_size": 4},
    {"patch_size": 7},
    {"temporal_patch_size": 1},
    {"image_grid_pinpoints": [[56, 56]]},
    {"image_grid_pinpoints": [[560, 560], [56, 560]]},
    {"crop_size": {"height": 28, "width": 28}},
    {"do_center_crop": False, "do_resize": False},
    {"num_additional_image_tokens": 7},
    {"vision_feature_select_strategy": "full"},
)


@attack("trusting", quick=False)
def trusted_arguments(site: Site) -> Iterable[str]:
    """Processor arguments of clients that change N: no error that stock vLLM does not give."""
    picture, small = Picture(19, *LARGE), Picture(0, *SMALL)
    for kwargs in _TRUSTED:
        body = site.client.chat_body(site.words, picture, mm_processor_kwargs=kwargs)
        for fields in ({}, {"budget": 4}, {"budget": 4096}):
            pruned = {**body, "mm_processor_kwargs": {**kwargs, "autoprune": fields}}
            yield from site.compare(f"{kwargs}", pruned, body)
        if site.ask(small).status == 200:
            continue
        if site.open_stock().chat(site.words, small).status == 200:
            yield f"{kwargs}: the engine is dead, and that of stock is not"
            return
        site.note(f"{kwargs}: the engine is dead, and so is that of stock")
        site.restart()


@attack()
def flat_first_image(site: Site) -> Iterable[str]:
    """Constant first images: one client must not make a state fail for all others."""
    name = "autoprune_unsafe_states_total"
    before, states = site.client.metric(name), 0
    for i, budget in enumerate((1, 2, 3, 8, 32)):
        for shade in (0, 255):
            state = sample()
            states += 1
            state["scoring"]["signals"][0]["weight"] = 0.4 + states / 1000  # a new digest
            flat = Picture(shade, 448, 448 - 28 * i, flat=True)
            yield from server_errors(site.ask(flat, **entry(state=state, budget=budget)))
    if blamed := site.client.metric(name) - before:
        yield f"{blamed:.0f} of {states} sound states are replaced by their base policy"
        for line in site.client.server.logged().splitlines():
            if "FAILS ITS SAFETY CHECK" in line:
                yield line.partition("FAILS ITS SAFETY CHECK")[2][:200]


_IMAGE = Picture(20, *LARGE)


@attack(backbones=("qwen2_5_vl",))
def video_beside_image(site: Site) -> Iterable[str]:
    """A video and an image with the same uuid: no error that stock vLLM does not give."""
    # The tiny model's chat template writes no videos.
    words = f"<|vision_start|><|video_pad|><|vision_end|> {site.words}"
    frames = ",".join(Picture(21 + i, 56, 84).url.partition(",")[2] for i in range(4))
    video = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    for uuids in ((None, None), ("same", "same"), ("same", "other"), ("other", "same")):
        image, film = (
            {**part, "uuid": uuid} if uuid else part
            for part, uuid in zip((_IMAGE.part, video), uuids, strict=True)
        )
        turn = {"role": "user", "content": [image, film, {"type": "text", "text": words}]}
        body = site.client.chat_body(site.words, messages=[turn])
        yield from site.compare(f"uuids {uuids}", body)


@attack()
def images_of_every_role(site: Site) -> Iterable[str]:
    """Images in system, assistant and tool turns: no error that stock vLLM does not give."""
    image, words = _IMAGE.part, {"type": "text", "text": site.words}
    user = user_turn(site.words, _IMAGE)
    tool = {"role": "tool", "tool_call_id": "1", "content": [image]}
    talks: Mapping[str, list[dict[str, Any]]] = {
        "system": [{"role": "system", "content": [image]}, user],
        "assistant": [user, {"role": "assistant", "content": [image, words]}, user],
        "tool": [user, tool, user],
        "assistant last": [user, {"role": "assistant", "content": [image]}],
        "no text": [{"role": "user", "content": [image]}],
        "no user": [{"role": "assistant", "content": [image]}],
        "text between": [{"role": "user", "content": [words, image, words, image, words]}],
        "a thousand turns": [user, *[{"role": "user", "content": "red"}] * 1000],
        "no type": [{"role": "user", "content": [{"image_url": image["image_url"]}, words]}],
        "a bare text": [{"role": "user", "content": ["red", image]}],
    }
    for name, messages in talks.items():
        yield from site.compare(name, site.client.chat_body(site.words, messages=messages))


@attack()
def odd_arguments_of_media(site: Site) -> Iterable[str]:
    """Media loading arguments of clients: no error that stock vLLM does not give."""
    odd: tuple[dict[str, object], ...] = (
        {"image": {"image_mode": "L"}},
        {"image": {"image_mode": "RGBA"}},
        {"image": {"image_mode": "I;16"}},
        {"image": {"rgba_background_color": [0, 0, 0]}},
        {"image": {"autoprune": {}}},
        {"image": 1},
        {"autoprune": {"budget": 8}},
    )
    for kwargs in odd:
        body = site.client.chat_body(site.words, _IMAGE, media_io_kwargs=kwargs)
        yield from site.compare(str(kwargs), body)
