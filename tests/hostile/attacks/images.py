"""Images: names of them, sizes, places in a conversation, bursts, aborted requests."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.hostile.attack import (
    CHAT,
    LARGE,
    SMALL,
    Client,
    Picture,
    Reply,
    Site,
    attack,
    entry,
    nearest,
    server_errors,
    unlike,
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


_SIDES = (28, 56, 84, 112, 168, 224, 336, 448)


@attack(quick=False)
def mixed_sizes_in_one_step(site: Site) -> Iterable[str]:
    """Concurrent images of mixed sizes: each request is answered about its own image."""
    pictures = [
        Picture(1000 + i, _SIDES[i % len(_SIDES)], _SIDES[(i * 5 + 3) % len(_SIDES)])
        for i in range(32)
    ]
    how = [entry(budget=(4, 8, 32)[i % 3]) for i in range(len(pictures))]
    alone = [site.ask(p, **more) for p, more in zip(pictures, how, strict=True)]
    yield from server_errors(*alone)
    # Other questions first, so that only the feature cache has these images.
    with ThreadPoolExecutor(16) as pool:
        jobs = [
            pool.submit(site.ask, p, **more, cache_salt="at once")
            for p, more in zip(pictures, how, strict=True)
        ]
        together = [job.result() for job in jobs]
    yield from server_errors(*together)
    yield from _mixed_up(alone, together, 3)


def _mixed_up(alone: Sequence[Reply], together: Sequence[Reply], budgets: int) -> Iterable[str]:
    """A problem for each answer nearer to that of another image of the same budget."""
    for i, reply in enumerate(together):
        if reply.status != 200:
            continue
        peers = [j for j in range(len(alone)) if j % budgets == i % budgets]
        likest = peers[nearest(reply.logprobs, [alone[j].logprobs for j in peers])]
        if likest != i:
            yield f"image {i} is answered as image {likest}"


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
    picture = Picture(6, 448, 448)
    for budgets in ([4, 32], [32, 4], [1, 4096], [4096, 1]):
        honest = site.ask(picture, Picture(7, 448, 448), **entry(budget=budgets))
        yield from server_errors(honest, site.ask(picture, picture, **entry(budget=budgets)))


@attack()
def odd_sizes(site: Site) -> Iterable[str]:
    """Images of one pixel, row or column: no error that stock vLLM does not give."""
    stock = site.open_stock()
    for width, height in ((1, 1), (2, 3), (1, 300), (3000, 1), (29, 4000), (4000, 29)):
        picture = Picture(18, width, height)
        for more in ({}, entry(budget=1), entry(budget=4096)):
            reply = site.ask(picture, **more)
            same = stock.chat(site.words, picture)
            if (reply.status >= 500 or reply.status == 0) and same.status < 500:
                yield f"{width} x {height}: {reply}, and stock answers {same.status}"


@attack()
def abandoned_requests(site: Site) -> Iterable[str]:
    """Aborted requests: during image processing, encoding and decoding."""
    for i in range(24):
        picture = Picture(4000 + i % 8, _SIDES[i % 8], _SIDES[(i // 8) % 8])
        site.client.abandon(
            site.client.chat_body(
                site.words, picture, max_tokens=200, stream=True, **entry(budget=4)
            ),
            after=(0.0, 0.02, 0.1)[i % 3],
        )
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
    picture, stock = Picture(19, 448, 448), site.open_stock()
    for kwargs in _TRUSTED:
        replies = []
        for entry_fields in ({}, {"budget": 4}, {"budget": 4096}):
            more = {"mm_processor_kwargs": {**kwargs, "autoprune": entry_fields}}
            replies.append(site.ask(picture, **more))
        if all(0 < reply.status < 500 for reply in replies):
            continue
        same = stock.chat(site.words, picture, mm_processor_kwargs=kwargs)
        wrong = next(reply for reply in replies if not 0 < reply.status < 500)
        if 0 < same.status < 500:
            yield f"{kwargs}: {wrong}, and stock answers {same.status}"
        else:
            site.note(f"{kwargs}: {wrong.status}, on stock {same.status}")
        if site.ask(Picture(0, 56, 56)).status == 200:
            continue
        if stock.chat(site.words, Picture(0, 56, 56)).status == 200:
            yield f"{kwargs}: the engine is dead, on stock the answer is {same}"
            return
        site.note(f"{kwargs}: the engine is dead, and so is that of stock")
        stock = site.restart()


@attack()
def flat_first_image(site: Site) -> Iterable[str]:
    """Constant first images: one client must not make a state fail for all others."""
    name = "autoprune_unsafe_states_total"
    before, made = site.client.metric(name), 0
    for i, budget in enumerate((1, 2, 3, 8, 32)):
        for shade in (0, 255):
            state = sample()
            made += 1
            state["scoring"]["signals"][0]["weight"] = 0.4 + made / 1000  # a new digest
            flat = Picture(shade, 448, 448 - 28 * i, flat=True)
            yield from server_errors(site.ask(flat, **entry(state=state, budget=budget)))
    if blamed := site.client.metric(name) - before:
        yield f"{blamed:.0f} of {made} sound states are replaced by their base policy"
        for line in site.client.server.logged().splitlines():
            if "FAILS ITS SAFETY CHECK" in line:
                yield line.partition("FAILS ITS SAFETY CHECK")[2][:200]


_IMAGE = Picture(20, 448, 448)


@attack(backbones=("qwen2_5_vl",))
def video_beside_image(site: Site) -> Iterable[str]:
    """A video and an image with the same uuid: no error that stock vLLM does not give."""
    stock = site.open_stock()
    # The tiny model's chat template writes no videos.
    words = f"<|vision_start|><|video_pad|><|vision_end|> {site.words}"
    frames = ",".join(Picture(21 + i, 56, 84).url.partition(",")[2] for i in range(4))
    for uuids in ((None, None), ("same", "same"), ("same", "other"), ("other", "same")):
        video: dict[str, object] = {
            "type": "video_url",
            "video_url": {"url": f"data:video/jpeg;base64,{frames}"},
        }
        if uuids[1] is not None:
            video["uuid"] = uuids[1]
        shown = _IMAGE if uuids[0] is None else _IMAGE.named(uuids[0])
        body = site.client.chat_body(site.words, shown)
        body["messages"] = [
            {"role": "user", "content": [shown.part, video, {"type": "text", "text": words}]}
        ]
        yield from compare(site, stock, f"uuids {uuids}", body)


def compare(site: Site, stock: Client, name: str, body: Mapping[str, object]) -> Iterable[str]:
    """A problem for a server error that stock vLLM does not give."""
    reply = site.client.send(CHAT, body)
    if reply.status != 200:
        site.note(f"{name}: {reply}")
    if not 0 < reply.status < 500:
        same = stock.send(CHAT, {**body, "model": stock.server.model})
        if 0 < same.status < 500:
            yield f"{name}: {reply}, and stock answers {same.status}"


@attack()
def images_of_every_role(site: Site) -> Iterable[str]:
    """Images in system, assistant and tool turns: no error that stock vLLM does not give."""
    stock, image = site.open_stock(), _IMAGE.part
    words = {"type": "text", "text": site.words}
    user_turn = {"role": "user", "content": [image, words]}
    tool = {"role": "tool", "tool_call_id": "1", "content": [image]}
    talks: Mapping[str, list[dict[str, Any]]] = {
        "system": [{"role": "system", "content": [image]}, user_turn],
        "assistant": [user_turn, {"role": "assistant", "content": [image, words]}, user_turn],
        "tool": [user_turn, tool, user_turn],
        "assistant last": [user_turn, {"role": "assistant", "content": [image]}],
        "no text": [{"role": "user", "content": [image]}],
        "no user": [{"role": "assistant", "content": [image]}],
        "text between": [{"role": "user", "content": [words, image, words, image, words]}],
        "a thousand turns": [user_turn, *[{"role": "user", "content": "red"}] * 1000],
        "no type": [{"role": "user", "content": [{"image_url": image["image_url"]}, words]}],
        "a bare text": [{"role": "user", "content": ["red", image]}],
    }
    for name, messages in talks.items():
        body = {**site.client.chat_body(site.words), "messages": messages}
        yield from compare(site, stock, name, body)


@attack()
def odd_arguments_of_media(site: Site) -> Iterable[str]:
    """Media loading arguments of clients: no error that stock vLLM does not give."""
    stock = site.open_stock()
    plain = site.client.chat_body(site.words, _IMAGE)
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
        body = {**copy.deepcopy(plain), "media_io_kwargs": kwargs}
        yield from compare(site, stock, str(kwargs), body)
