"""Attacks by requests and images: names, sizes, places in a conversation, odd fields, cost.

Most yield odd requests, each with those as one of which it may be answered (``check_each``).
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence

import httpx
from PIL import Image

from benchmarks.common.requests import draw_picture
from tests.fuzz.generator import SPECIAL_TOKENS, Json
from tests.hostile.site import (
    HTTP,
    LARGE,
    PATIENCE,
    QUESTION,
    SMALL,
    OddRequests,
    Picture,
    Site,
    assert_no_error,
    attack,
    user_turn,
)
from tests.serving.http import entry
from tests.tpdsl.samples import sample
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.plan import MAX_RECALLS

ONE = Picture(1, *SMALL)
OTHER = Picture(2, *LARGE)
IMAGE = Picture(20, *LARGE)
SPLIT = Picture(50, *LARGE)
RECALLED = Picture(60, *LARGE)
QUESTIONS = ("what colour is the cat", "how many are on the left", "which dog is blue")
RECALL = entry(recall=6)
SIDES = (28, 56, 84, 112, 168, 224, 336, 448)


def conversation(picture: Picture, *later: str) -> list[Json]:
    """Messages about a picture, and later turns."""
    messages = [user_turn(QUESTIONS[0], picture)]
    for text in later:
        messages += [
            {"role": "assistant", "content": "blue"},
            {"role": "user", "content": text},
        ]
    return messages


# ---- no error that stock vLLM does not give ----


@attack("default", "split", judge=Site.check_each)
def special_tokens(site: Site) -> OddRequests:
    """In the text about an image, which may be split, of no image, and of a later turn."""
    for number, text in enumerate(SPECIAL_TOKENS):
        for words in (f"{text} {QUESTION}", f"{QUESTION} {text} {text}"):
            cached = site.body(SPLIT, text=words)
            yield f"{text!r}", cached
            yield (
                f"{text!r} under a salt",
                {**cached, "cache_salt": f"alone {number}"},
                cached,
            )
            yield f"{text!r} without an image", site.body(text=words)
            talk = conversation(RECALLED, words, QUESTION)
            yield f"{text!r} in a later turn", site.body(messages=talk, **RECALL)


@attack(judge=Site.check_each)
def odd_sizes(site: Site) -> OddRequests:
    """Images of one pixel, row or column."""
    for size in ((1, 1), (2, 3), (1, 300), (3000, 1), (29, 4000), (4000, 29)):
        for more in ({}, entry(budget=1), entry(budget=4096)):
            yield f"{size}", site.body(Picture(18, *size), **more)


@attack()
def odd_images(site: Site) -> None:
    """Broken images and those of other modes: refused or answered as by stock vLLM."""

    def encode(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
        content = io.BytesIO()
        image.save(content, form, **options)
        return content.getvalue()

    scene = draw_picture(70, *LARGE)
    other = draw_picture(71, *LARGE)
    sound = encode(scene)
    stock = site.stock()
    for name, images in {
        "truncated": [sound[:-200]],
        "nothing": [b""],
        "transparent": [encode(scene.convert("RGBA"))],
        "sixteen bits": [encode(Image.new("I;16", (40, 40), 40_000))],
        "animated": [encode(scene, "GIF", save_all=True, append_images=[other])],
        "one of two broken": [sound, sound[:-200]],
    }.items():
        urls = (
            "data:image/png;base64," + base64.b64encode(image).decode()
            for image in images
        )
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
        reply, expected = (server.ask(messages=[turn]) for server in (site, stock))
        assert reply.status == expected.status < 500, (name, reply, expected)


@attack(backbones=("qwen2_5_vl",), judge=Site.check_each)
def video_beside_image(site: Site) -> OddRequests:
    """A video and an image with the same uuid."""
    # The tiny model's chat template writes no videos.
    words = {
        "type": "text",
        "text": f"<|vision_start|><|video_pad|><|vision_end|> {QUESTION}",
    }
    frames = ",".join(Picture(21 + i, 56, 84).url.partition(",")[2] for i in range(4))
    film: Json = {
        "type": "video_url",
        "video_url": {"url": f"data:video/jpeg;base64,{frames}"},
    }
    for uuids in ((None, None), ("same", "same"), ("same", "other"), ("other", "same")):
        pair = zip((IMAGE.part, film), uuids, strict=True)
        named = [{**part, "uuid": uuid} if uuid else part for part, uuid in pair]
        talk = [{"role": "user", "content": [*named, words]}]
        yield f"uuids {uuids}", site.body(messages=talk)


@attack(judge=Site.check_each)
def images_of_every_role(site: Site) -> OddRequests:
    """Images in system, assistant and tool turns."""
    image = IMAGE.part
    words = {"type": "text", "text": QUESTION}
    user = user_turn(QUESTION, IMAGE)
    tool = {"role": "tool", "tool_call_id": "1", "content": [image]}
    talks: Mapping[str, list[Json]] = {
        "system": [{"role": "system", "content": [image]}, user],
        "assistant": [user, {"role": "assistant", "content": [image, words]}, user],
        "tool": [user, tool, user],
        "assistant last": [user, {"role": "assistant", "content": [image]}],
        "no text": [{"role": "user", "content": [image]}],
        "no user": [{"role": "assistant", "content": [image]}],
        "text between": [
            {"role": "user", "content": [words, image, words, image, words]}
        ],
        "a thousand turns": [user, *[{"role": "user", "content": "red"}] * 1000],
        "no type": [
            {"role": "user", "content": [{"image_url": image["image_url"]}, words]}
        ],
        "a bare text": [{"role": "user", "content": ["red", image]}],
    }
    yield from (
        (name, site.body(messages=messages)) for name, messages in talks.items()
    )


@attack("split")
def odd_details(site: Site) -> None:
    """Values of ``image_url.detail`` on a server that has budgets for them."""
    details: Sequence[object] = (
        "low",
        "auto",
        "high",
        "",
        "LOW",
        "ü",
        "x" * 10_000,
        1,
        None,
        {},
    )
    tokens = {}
    for detail in details:
        turn = user_turn(QUESTION, SPLIT)
        turn["content"][0]["image_url"]["detail"] = detail
        reply = site.check(f"{str(detail)[:20]!r}", site.body(messages=[turn]))
        if reply.status == 200:
            tokens[str(detail)] = reply.body["usage"]["prompt_tokens"]
    assert tokens["low"] < tokens["auto"] < tokens["high"]


@attack()
def truncated_prompts(site: Site) -> None:
    """Prompts cut by ``truncate_prompt_tokens``, also within an image."""
    # Single replies are not comparable: other prompts fit, and vLLM 0.32 answers 500 for an image
    # of a previously refused prompt.
    cuts: Sequence[Json] = [
        {"truncate_prompt_tokens": count, "truncation_side": side}
        for count in (1, 2, 5, 20, 33, 200, 300, 2000, -1, 2**62)
        for side in ("left", "right")
    ]
    pruned, stock = (
        [client.ask(Picture(15, *LARGE), **cut).status for cut in cuts]
        for client in (site, site.stock())
    )
    assert sum(status >= 500 for status in pruned) <= sum(
        status >= 500 for status in stock
    )


# ---- names of images: each answer is about the image that was sent ----


@attack("default", "uncached", "split", judge=Site.check_each)
def one_uuid_in_one_request(site: Site) -> OddRequests:
    """Two images of different size with the same uuid in one request."""
    for image, other in ((ONE, OTHER), (OTHER, ONE)):
        uuid = f"one-request-{image.seed}"
        # vLLM trusts a uuid, so either image may be used for both.
        honest = ((image, other), (image, image), (other, other))
        named = site.body(image.named(uuid), other.named(uuid))
        yield "two images under one uuid", named, *(site.body(*pair) for pair in honest)


@attack("default", "uncached", "split", judge=Site.check_each)
def one_uuid_in_two_requests(site: Site) -> OddRequests:
    """Two images of different size with the same uuid in alternating requests."""
    for order in ((0, 1, 0), (1, 0, 1)):
        for text in QUESTIONS[:2]:
            honest = [site.body(picture, text=text) for picture in (ONE, OTHER)]
            for i in order:
                picture = (ONE, OTHER)[i].named(f"two-requests-{order}-{text}")
                accepted = honest if site.profile != "uncached" else [honest[i]]
                yield "a reused uuid", site.body(picture, text=text), *accepted


@attack("default", "split", judge=Site.check_each)
def uuid_alone(site: Site) -> OddRequests:
    """Images referenced by uuid only: small, large, with other budgets, unknown."""
    yield "an unknown uuid", site.body(Picture(0, 1, 1, "never-sent", sent=False))
    for picture in (ONE, OTHER):
        named = picture.named(f"alone-{picture.seed}")
        yield "a new uuid", site.body(named), site.body(picture)
        unsent = Picture(0, 1, 1, named.uuid, sent=False)
        for more in ({}, entry(budget=8), entry(enabled=False), entry(budget=4096)):
            accepted = site.body(named), site.body(picture, **more)
            yield "by uuid alone", site.body(unsent, **more), *accepted


@attack(judge=Site.check_each)
def odd_uuids(site: Site) -> OddRequests:
    """Uuids that resemble cache identities, are very long, or are not strings."""
    identity = "0" * 64
    odd = (
        "",
        " ",
        "a" * 100_000,
        f"{identity}-ap-{identity[:32]}",
        identity,
        "\n\0",
        "ü🦙",
        "0x1",
    )
    for uuid in odd:
        yield f"uuid {uuid[:20]!r}", site.body(OTHER.named(uuid)), site.body(OTHER)


@attack("uncached", judge=Site.check_each)
def planted_names(site: Site) -> OddRequests:
    """Uuids that anticipate vLLM's own numbering of images."""
    victim = site.body(Picture(3, *LARGE))
    yield "before", victim, victim
    # Request numbers are not in answers, but there are few enough to try all.
    seen = int(site.metric("vllm:request_success_total")) + 40
    for start in range(1, 2 * seen + 40, 8):
        names = (f"renderer0-mm-{number}-image-0" for number in range(start, start + 8))
        yield (
            "planted names",
            site.body(*(Picture(4, *LARGE).named(name) for name in names)),
        )
    yield from (("the victim's image", victim, victim) for _ in range(6))


@attack(judge=Site.check_each)
def random_keep_by_uuid(site: Site) -> OddRequests:
    """A random keep with client-chosen uuids: the draw must not depend on the uuid."""
    picture = Picture(5, *LARGE)
    how = entry(keep="random", budget=8)
    for name in ("draw-1", "draw-2", "draw-3"):
        reference = site.body(picture.named("draw-0"), **how)
        yield "a random keep", site.body(picture.named(name), **how), reference


# ---- tenants ----

_HITS = "autoprune_feature_cache_hits_total"


@attack("default", "split")
def cache_salt(site: Site) -> None:
    """Neither features nor the core of an image are shared with a tenant of another salt."""
    picture = Picture(int(site.metric("vllm:request_success_total")) + 6000, *LARGE)
    cached = []
    hits = [site.metric(_HITS)]
    salts: Sequence[Json] = (
        {"cache_salt": "first"},
        {"cache_salt": "first"},
        {"cache_salt": "second"},
        {},
    )
    for salt, question in zip(salts, (*QUESTIONS, QUESTIONS[2]), strict=True):
        reply = site.ask(picture, text=question, **salt)
        assert reply.status == 200, reply
        details = reply.body["usage"].get("prompt_tokens_details") or {}
        cached.append(details.get("cached_tokens") or 0)
        hits.append(site.metric(_HITS))
    assert hits[4] == hits[2], "the features of another tenant are used"
    if site.profile == "split":
        assert [count > 0 for count in cached] == [False, True, False, False]


@attack()
def flat_images(site: Site) -> None:
    """Constant images, of which all tokens are alike: no state breaks its bounds."""
    for number in range(10):
        state = sample()
        state["scoring"]["signals"][0]["weight"] = (
            0.4 + (1 + number) / 1000
        )  # a new digest
        flat = Picture(255 * (number % 2), 448, 448 - 28 * (number // 2), flat=True)
        budget = (1, 2, 3, 8, 32)[number // 2]
        assert_no_error(site.ask(flat, **entry(state=state, budget=budget)))
    assert site.metric("autoprune_fallbacks_total", reason="unsafe") == 0, (
        "sound states fail"
    )


# ---- many turns, images and clients ----


@attack("split", judge=Site.check_each)
def long_conversations(site: Site) -> OddRequests:
    """Hundreds of turns that recall: refused or answered, and others are answered soon after."""
    for turns in (MAX_RECALLS + 4, 300):
        talk = conversation(RECALLED, *["more"] * turns)
        yield f"{turns} turns", site.body(messages=talk, **RECALL)


@attack(judge=Site.check_each)
def budgets_of_each_image(site: Site) -> OddRequests:
    """One image twice in a request, with different budgets, and 64 images at one token each."""
    picture = Picture(6, *LARGE)
    other = Picture(7, *LARGE)
    for budgets in ([4, 32], [32, 4], [1, 4096], [4096, 1]):
        for pair in ((picture, other), (picture, picture)):
            yield f"{budgets}", site.body(*pair, **entry(budget=budgets))
    many = [Picture(2000 + i, SIDES[i % 8], SIDES[i // 8]) for i in range(64)]
    yield "64 images", site.body(*many, **entry(budget=1))


@attack()
def abandoned_requests(site: Site) -> None:
    """Clients hang up during image processing, encoding and decoding."""
    for i in range(24):
        picture = Picture(4000 + i % 8, SIDES[i % 8], SIDES[(i // 8) % 8])
        body = site.body(picture, max_tokens=200, stream=True, **entry(budget=4))
        timeout = httpx.Timeout(PATIENCE, read=(0.0, 0.02, 0.1)[i % 3])
        with contextlib.suppress(httpx.HTTPError):
            HTTP.post(site.server.url + CHAT, json=body, timeout=timeout)
    assert_no_error(site.ask(Picture(4000, *SIDES[:2])))


# ---- odd to read, or counted though not served ----

_MARK = "forged-line-of-a-log"


@attack()
def control_characters(site: Site) -> None:
    """Control characters in keys and values must not be repeated in messages or the log."""
    for control in ("\n", "\r", "\x1b[2J", "\0", "\u2028", "\u202e", "\x85"):
        text = f"a{control}{_MARK}"
        for kwargs in (
            {"autoprune": {text: 8}},
            {"autoprune": {"state": text}},
            {"autoprune": {"state": {text: 1}}},
            {"autoprune": {"state": {"scoring": {"fusion": {"atom": text}}}}},
            {"autoprune": {"keep": text}},
            {"autoprune": {"budget": {text: 1}}},
            {text: 1, "autoprune": {}},
        ):
            reply = site.ask(Picture(13, *LARGE), mm_processor_kwargs=kwargs)
            assert not reply.failed and reply.status != 200, kwargs
            # Only for the plugin's own entry; other keys are refused by vLLM's messages.
            assert len(kwargs) > 1 or f"{control}{_MARK}" not in reply.message, kwargs
    assert not any(line.startswith(_MARK) for line in site.server.logged().splitlines())


@attack()
def counted_though_not_served(site: Site) -> None:
    """Token-count requests and late refusals must not appear in the metrics."""
    picture = Picture(11, *LARGE)
    chat = site.body(picture)
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": picture.url.partition(",")[2],
    }
    parts = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    turns = [{"role": "user", "content": parts}]
    anthropic = {"model": chat["model"], "max_tokens": 4, "messages": turns}
    too_long = user_turn("the sky is blue on the right " * 2000, picture)
    counters = [
        f"autoprune_{name}_total" for name in ("requests", "images", "visual_tokens")
    ]
    for path, body in (
        ("/v1/messages/count_tokens", anthropic),
        ("/tokenize", chat),
        (CHAT, {**chat, "messages": [too_long]}),
        (CHAT, {**chat, "max_tokens": 10**6}),
        (CHAT, {**chat, **entry(budget=0)}),
    ):
        counts = [site.metric(counter) for counter in counters]
        reply = site.send(path, body)
        assert_no_error(reply)
        assert [site.metric(counter) for counter in counters] == counts, (path, reply)
