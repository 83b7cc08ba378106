"""Attacks by requests and images: names, sizes, places in a conversation, odd fields, cost.

They yield odd requests, each with those as one of which it may be answered (``check_each``),
requests of several clients (``check_at_once``), or the problems that they find.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.fuzz.generator import SPECIAL_TOKENS, Json
from tests.hostile.site import (
    LARGE,
    QUESTION,
    SMALL,
    AtOnce,
    OddRequests,
    Picture,
    Problems,
    Reply,
    Site,
    attack,
    server_errors,
    user_turn,
)
from tests.serving.engine import CLIP
from tests.serving.http import entry
from tests.tpdsl.samples import sample
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.endpoint import PATH
from vllm_autoprune.serving.plan import MAX_RECALLS

ONE, OTHER = Picture(1, *SMALL), Picture(2, *LARGE)
IMAGE, SPLIT, RECALLED = Picture(20, *LARGE), Picture(50, *LARGE), Picture(60, *LARGE)
QUESTIONS = ("what colour is the cat", "how many are on the left", "which dog is blue")
RECALL = entry(recall=6)
SIDES = (28, 56, 84, 112, 168, 224, 336, 448)


def conversation(picture: Picture, *later: str) -> list[Json]:
    """Messages about a picture, and later turns."""
    messages = [user_turn(QUESTIONS[0], picture)]
    for text in later:
        messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": text}]
    return messages


# ---- no error that stock vLLM does not give ----


@attack(judge=Site.check_each)
def special_tokens(site: Site) -> OddRequests:
    """Special tokens in user text: no error that stock vLLM does not give."""
    for text in SPECIAL_TOKENS:
        for words in (f"{text} {QUESTION}", f"{QUESTION} {text} {text}"):
            for pictures in ([Picture(14, *LARGE)], []):
                yield f"{text!r}, {len(pictures)} images", site.body(*pictures, text=words)


@attack(judge=Site.check_each)
def odd_sizes(site: Site) -> OddRequests:
    """Images of one pixel, row or column: no error that stock vLLM does not give."""
    for size in ((1, 1), (2, 3), (1, 300), (3000, 1), (29, 4000), (4000, 29)):
        for more in ({}, entry(budget=1), entry(budget=4096)):
            yield f"{size}", site.body(Picture(18, *size), **more)


@attack(backbones=("qwen2_5_vl",), judge=Site.check_each)
def video_beside_image(site: Site) -> OddRequests:
    """A video and an image with the same uuid: no error that stock vLLM does not give."""
    # The tiny model's chat template writes no videos.
    words = {"type": "text", "text": f"<|vision_start|><|video_pad|><|vision_end|> {QUESTION}"}
    frames = ",".join(Picture(21 + i, 56, 84).url.partition(",")[2] for i in range(4))
    film: Json = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    for uuids in ((None, None), ("same", "same"), ("same", "other"), ("other", "same")):
        pair = zip((IMAGE.part, film), uuids, strict=True)
        named = [{**part, "uuid": uuid} if uuid else part for part, uuid in pair]
        talk = [{"role": "user", "content": [*named, words]}]
        yield f"uuids {uuids}", site.body(messages=talk)


@attack(judge=Site.check_each)
def images_of_every_role(site: Site) -> OddRequests:
    """Images in system, assistant and tool turns: no error that stock vLLM does not give."""
    image, words = IMAGE.part, {"type": "text", "text": QUESTION}
    user = user_turn(QUESTION, IMAGE)
    tool = {"role": "tool", "tool_call_id": "1", "content": [image]}
    talks: Mapping[str, list[Json]] = {
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
    yield from ((name, site.body(messages=messages)) for name, messages in talks.items())


@attack(judge=Site.check_each)
def odd_arguments_of_media(site: Site) -> OddRequests:
    """Media loading arguments of clients: no error that stock vLLM does not give."""
    for arguments in (
        *({"image_mode": mode} for mode in ("L", "RGBA", "I;16")),
        *({"rgba_background_color": [0, 0, 0]}, {"autoprune": {}}, 1),
    ):
        yield f"{arguments}", site.body(IMAGE, media_io_kwargs={"image": arguments})
    yield "of no medium", site.body(IMAGE, media_io_kwargs={"autoprune": {"budget": 8}})


@attack("split")
def odd_details(site: Site) -> Problems:
    """Values of ``image_url.detail`` on a server that has budgets for them: no new errors."""
    tokens = {}
    details: Iterable[object] = ("low", "auto", "high", "", "LOW", "ü", "x" * 10_000, 1, None, {})
    for detail in details:
        turn = user_turn(QUESTION, SPLIT)
        turn["content"][0]["image_url"]["detail"] = detail
        reply = yield from site.check(f"{str(detail)[:20]!r}", site.body(messages=[turn]))
        if reply.status == 200:
            tokens[str(detail)] = reply.body["usage"]["prompt_tokens"]
    site.notes.append(f"prompt tokens: {tokens}")
    if not tokens["low"] < tokens["auto"] < tokens["high"]:
        yield f"the detail does not set the number of tokens: {tokens}"


@attack()
def truncated_prompts(site: Site) -> Problems:
    """Prompts cut by ``truncate_prompt_tokens``, also within an image: no new errors."""
    # Single replies are not comparable: other prompts fit, and vLLM 0.32 answers 500 for an image
    # of a previously refused prompt.
    counts = (1, 2, 5, 20, 33, 200, 300, 2000, -1, 2**62)
    cuts: Sequence[Json] = [
        {"truncate_prompt_tokens": count, "truncation_side": side}
        for count in counts
        for side in ("left", "right")
    ]
    pruned, stock = (
        [client.ask(Picture(15, *LARGE), **cut).status for cut in cuts]
        for client in (site, site.stock())
    )
    site.notes.append(f"{pruned}, by stock {stock}")
    if sum(status >= 500 for status in pruned) > sum(status >= 500 for status in stock):
        yield f"more server errors than on stock: {pruned} and {stock}"


@attack("trusting", quick=False)
def trusted_arguments(site: Site) -> Problems:
    """Processor arguments of clients that change N: no error that stock vLLM does not give."""
    for kwargs in (
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
    ):
        for fields in ({}, {"budget": 4}, {"budget": 4096}):
            arguments = {**kwargs, "autoprune": fields}
            body = site.body(Picture(19, *LARGE), mm_processor_kwargs=arguments)
            yield from site.check(f"{kwargs}", body)
        if not site.lives():
            if site.stock().lives():
                yield f"{kwargs}: the engine is dead, and that of stock is not"
                return
            site.notes.append(f"{kwargs}: the engine is dead, and so is that of stock")
            site.restart()


# ---- names of images: each answer is about the image that was sent ----


@attack(judge=Site.check_each)
def one_uuid_in_one_request(site: Site) -> OddRequests:
    """Two images of different size with the same uuid in one request."""
    for image, other in ((ONE, OTHER), (OTHER, ONE)):
        uuid = f"one-request-{image.seed}"
        # vLLM trusts a uuid, so either image may be used for both.
        honest = ((image, other), (image, image), (other, other))
        named = site.body(image.named(uuid), other.named(uuid))
        yield "two images under one uuid", named, *(site.body(*pair) for pair in honest)


@attack("uncached", judge=Site.check_each)
def one_uuid_in_one_request_uncached(site: Site) -> OddRequests:
    """Two images of different size with the same uuid in one request, without vLLM's caches."""
    yield from one_uuid_in_one_request(site)


@attack(judge=Site.check_each)
def one_uuid_in_two_requests(site: Site) -> OddRequests:
    """Two images of different size with the same uuid in alternating requests."""
    for order in ((0, 1, 0), (1, 0, 1)):
        for more in ({}, entry(budget=8)):
            honest = [site.body(picture, **more) for picture in (ONE, OTHER)]
            for i in order:
                picture = (ONE, OTHER)[i].named(f"two-requests-{order}-{more}")
                yield "a reused uuid", site.body(picture, **more), *honest


@attack("uncached", judge=Site.check_each)
def one_uuid_in_two_requests_uncached(site: Site) -> OddRequests:
    """Two images with the same uuid in two requests, without vLLM's caches."""
    for picture in (ONE, OTHER, ONE, OTHER):
        yield "a reused uuid", site.body(picture.named("two-requests")), site.body(picture)


@attack("split", judge=Site.check_each)
def one_uuid_of_split_images(site: Site) -> OddRequests:
    """Two split images of different size with the same uuid, in one request and in several."""
    yield from one_uuid_in_one_request(site)
    for text in QUESTIONS:
        honest = [site.body(picture, text=text) for picture in (ONE, OTHER)]
        for picture in (ONE, OTHER, ONE, OTHER):
            yield "a reused uuid", site.body(picture.named("split"), text=text), *honest
            unsent = Picture(0, 1, 1, "split", sent=False)
            yield "by uuid alone", site.body(unsent, text=text), *honest


@attack(judge=Site.check_each)
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
    odd = ("", " ", "a" * 100_000, f"{identity}-ap-{identity[:32]}", identity, "\n\0", "ü🦙", "0x1")
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
        yield "planted names", site.body(*(Picture(4, *LARGE).named(name) for name in names))
    yield from (("the victim's image", victim, victim) for _ in range(6))


@attack(judge=Site.check_each)
def random_keep_by_uuid(site: Site) -> OddRequests:
    """A random keep with client-chosen uuids: the draw must not depend on the uuid."""
    picture, how = Picture(5, *LARGE), entry(keep="random", budget=8)
    for name in ("draw-1", "draw-2", "draw-3"):
        reference = site.body(picture.named("draw-0"), **how)
        yield "a random keep", site.body(picture.named(name), **how), reference


@attack("split", judge=Site.check_each)
def image_tokens_beside_split_images(site: Site) -> OddRequests:
    """Image tokens in the text of a request whose image is split: no new errors, same answers."""
    for number, text in enumerate(SPECIAL_TOKENS):
        for words in (f"{text} {QUESTION}", f"{QUESTION} {text} {text}"):
            cached = site.body(SPLIT, text=words)
            yield f"{text!r}", cached
            yield f"{text!r} under a salt", {**cached, "cache_salt": f"alone {number}"}, cached


@attack("split", judge=Site.check_each)
def image_tokens_in_conversations(site: Site) -> OddRequests:
    """Image tokens in a later turn of a conversation with recall: no new errors."""
    for text in SPECIAL_TOKENS:
        for later in (f"{text} {QUESTION}", f"{QUESTION} {text} {text}"):
            talk = conversation(RECALLED, later, QUESTION)
            yield f"{text!r}", site.body(messages=talk, **RECALL)


# ---- tenants ----

_HITS = "autoprune_feature_cache_hits_total"


def _new_picture(site: Site) -> Picture:
    return Picture(int(site.metric("vllm:request_success_total")) + 6000, *LARGE)


@attack()
def cache_salt(site: Site) -> Problems:
    """The feature cache must not reveal that a tenant with another salt sent an image."""
    picture, hits = _new_picture(site), [site.metric(_HITS)]
    for salt, question in zip(("first", "first", "second"), QUESTIONS, strict=True):
        reply = site.ask(picture, text=question, cache_salt=salt)
        assert reply.status == 200, reply
        hits.append(site.metric(_HITS))
    site.notes.append(f"hits before and after each request: {hits}")
    if hits[3] != hits[2]:
        yield "a request of another cache_salt hits the features of the first"


@attack("split")
def cache_salt_of_cores(site: Site) -> Problems:
    """The core of an image must not be shared with a tenant of another salt."""
    picture, cached, hits = _new_picture(site), [], []
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
    site.notes.append(f"cached tokens: {cached}, hits {hits}")
    if [count > 0 for count in cached] != [False, True, False, False]:
        yield f"two questions under one salt, and two under others find {cached} cached tokens"
    if hits[3] != hits[1]:
        yield "a request of another cache_salt hits the features of the first"


@attack("uncached")
def identities_are_hexadecimal(site: Site) -> Problems:
    """Cache identities must be hexadecimal numbers, as cache connectors require."""
    reply = site.send(f"{CHAT}/render", site.body(OTHER))
    assert reply.status == 200, reply
    for identity in reply.body["features"]["mm_hashes"]["image"]:
        if not re.fullmatch(r"[0-9a-f]{64}", identity):
            yield f"identity {identity!r}"


@attack()
def flat_first_image(site: Site) -> Problems:
    """Constant first images: one client must not make a state fail for all others."""
    before = site.metric("autoprune_unsafe_states_total")
    for number in range(10):
        state = sample()
        state["scoring"]["signals"][0]["weight"] = 0.4 + (1 + number) / 1000  # a new digest
        flat = Picture(255 * (number % 2), 448, 448 - 28 * (number // 2), flat=True)
        budget = (1, 2, 3, 8, 32)[number // 2]
        yield from server_errors(site.ask(flat, **entry(state=state, budget=budget)))
    if blamed := site.metric("autoprune_unsafe_states_total") - before:
        lines = [line for line in site.server.logged().splitlines() if "SAFETY CHECK" in line]
        yield f"{blamed:.0f} of 10 sound states are replaced by their base policy: {lines}"


@attack(backbones=("llava",))
def paths_of_the_server(site: Site) -> Problems:
    """The endpoint describing the served state must not contain paths of the server."""
    if str(CLIP) in site.server.get(PATH):
        yield f"{PATH} shows {CLIP}"


# ---- many at once ----


@attack(quick=False, judge=Site.check_at_once)
def mixed_sizes_in_one_step(site: Site) -> AtOnce:
    """Concurrent images of mixed sizes: each request is answered about its own image."""
    for i in range(32):
        picture, budget = Picture(1000 + i, SIDES[i % 8], SIDES[(i * 5 + 3) % 8]), (4, 8, 32)[i % 3]
        yield budget, site.body(picture, **entry(budget=budget))


@attack("split", judge=Site.check_at_once)
def questions_about_split_images_at_once(site: Site) -> AtOnce:
    """Concurrent questions that share cores: each is answered about its own image and question."""
    for text in QUESTIONS:
        for i in range(12):
            yield text, site.body(Picture(5000 + i, 448, 448 - 56 * (i % 3)), text=text)


@attack("split", judge=Site.check_at_once)
def conversations_at_once(site: Site) -> AtOnce:
    """Concurrent conversations that recall: each is answered about its own image."""
    for i in range(12):
        talk = conversation(Picture(7000 + i, 448, 448 - 56 * (i % 3)), QUESTIONS[1])
        yield "", site.body(messages=talk, **RECALL)


@attack("split", judge=Site.check_each)
def long_conversations(site: Site) -> OddRequests:
    """Hundreds of turns that recall: refused or answered, and others are answered soon after."""
    for turns in (MAX_RECALLS + 4, 300):
        talk = conversation(RECALLED, *["more"] * turns)
        yield f"{turns} turns", site.body(messages=talk, **RECALL)


@attack(quick=False, judge=Site.check_each)
def many_images_in_one_request(site: Site) -> OddRequests:
    """As many images as one request may hold, of mixed sizes, at one token each."""
    pictures = [Picture(2000 + i, SIDES[i % 8], SIDES[(i // 8) % 8]) for i in range(64)]
    yield "64 images", site.body(*pictures, **entry(budget=1))


@attack(judge=Site.check_each)
def budgets_of_each_image(site: Site) -> OddRequests:
    """One image twice in a request, with different budgets."""
    picture, other = Picture(6, *LARGE), Picture(7, *LARGE)
    for budgets in ([4, 32], [32, 4], [1, 4096], [4096, 1]):
        for pair in ((picture, other), (picture, picture)):
            yield f"{budgets}", site.body(*pair, **entry(budget=budgets))


@attack()
def abandoned_requests(site: Site) -> Problems:
    """Aborted requests: during image processing, encoding and decoding."""
    for i in range(24):
        picture = Picture(4000 + i % 8, SIDES[i % 8], SIDES[(i // 8) % 8])
        body = site.body(picture, max_tokens=200, stream=True, **entry(budget=4))
        site.abandon(body, after=(0.0, 0.02, 0.1)[i % 3])
    yield from server_errors(site.ask(Picture(4000, *SIDES[:2])))


# ---- odd to read, dear to serve, or counted though not served ----

_MARK = "forged-line-of-a-log"


@attack()
def control_characters(site: Site) -> Problems:
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
            if reply.failed or reply.status == 200:
                yield f"{kwargs}: {reply}"
            # Only for the plugin's own entry; other keys are refused by vLLM's messages.
            if len(kwargs) == 1 and f"{control}{_MARK}" in reply.message:
                yield f"{control!r} is repeated as it is in {reply}"
    if any(line.startswith(_MARK) for line in site.server.logged().splitlines()):
        yield "a client writes a line of the log"


_ROUNDS, _SLOWER = 4, 3
"""Measurements of another client's wait, and how much longer it may be beside a dear state."""


def _dear_state(variant: int) -> dict[str, Any]:
    """A valid state of a few kilobytes whose selection takes thousands of times the usual time."""
    state = copy.deepcopy(sample())
    signal = {"atom": "cluster_centroid_representativeness", "clusters": 64}
    state["scoring"]["signals"] = [
        {**signal, "weight": 0.1 + i / 100 + variant / 10_000} for i in range(32)
    ]
    state["source"]["priors"] = [
        {"atom": "external_policy", "policy": ("divprune", "cdpruner")[i % 2]} for i in range(8)
    ]
    sources = [{"atom": "diversity_pool_builder", "pool_ratio": 8.0} for _ in range(8)]
    pool = {"atom": "multi_source_pool_builder", "pool_ratio": 8.0, "sources": sources}
    state["constraints"]["pool"] = [pool] * 8
    return state


@attack()
def dear_states(site: Site) -> Problems:
    """A valid, costly state of one client must not delay other clients."""
    waits: dict[str, list[float]] = {"usual": [], "dear": []}

    def ask_beside(kind: str, **more: Any) -> tuple[Reply, Reply]:
        """Answers of a client that sends these fields, and of another one beside it."""
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(site.ask, Picture(8, *LARGE), **more)
            time.sleep(0.1)
            beside = site.ask(Picture(9, *LARGE))
            waits[kind].append(round(beside.seconds, 2))
            return job.result(), beside

    for variant in range(_ROUNDS):
        # In turns, so that whatever else the machine does delays both.
        yield from server_errors(*ask_beside("usual"))
        dear, beside = ask_beside("dear", **entry(state=_dear_state(variant)))
        yield from server_errors(dear, beside)
        if dear.status == 200 or "cost" not in dear.message:
            yield f"not refused for its cost: {dear}"
    site.notes.append(f"seconds that another client waits: {waits}")
    # Each state is new to the server: were they dear to refuse, every round would be slow.
    if min(waits["dear"]) > _SLOWER * max(waits["usual"]):
        yield f"others wait for a dear state: {waits}"


# The vocabularies of these tiny models have no word of several tokens.
@attack(quick=False, backbones=("qwen2_5_vl", "llava_next"))
def long_instruction_of_many_images(site: Site) -> Problems:
    """100 images and a maximal instruction, which must be processed once, not once per image."""
    words = "which colour is the cat on the left " * 850
    pictures = [Picture(3000 + i, 28, 28) for i in range(100)]
    how = entry(budget=2)
    site.ask(*pictures, text="what", **how)
    few_words = site.ask(*pictures, **how)
    one_image = site.ask(Picture(8, *LARGE), text=words, **how)
    many = site.ask(*pictures, text=words, **how)
    yield from server_errors(few_words, one_image, many)
    figures = [round(reply.seconds, 1) for reply in (many, one_image, few_words)]
    site.notes.append(f"{many.status} in {figures[0]} s; with one image, with few words: {figures}")
    if many.seconds > 3 * (one_image.seconds + few_words.seconds):
        yield f"100 images with {len(words.split())} words, one image, few words: {figures} s"


@attack()
def counted_though_not_served(site: Site) -> Problems:
    """Token-count requests and late refusals must not appear in the metrics."""
    picture = Picture(11, *LARGE)
    chat = site.body(picture)
    source = {"type": "base64", "media_type": "image/png", "data": picture.url.partition(",")[2]}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    turns = [{"role": "user", "content": parts}]
    anthropic = {"model": chat["model"], "max_tokens": 4, "messages": turns}
    too_long = user_turn("the sky is blue on the right " * 2000, picture)
    for name, path, body in (
        ("count_tokens", "/v1/messages/count_tokens", anthropic),
        ("tokenize", "/tokenize", chat),
        ("a prompt that is too long", CHAT, {**chat, "messages": [too_long]}),
        ("max_tokens that do not fit", CHAT, {**chat, "max_tokens": 10**6}),
        ("a refused budget", CHAT, {**chat, **entry(budget=0)}),
    ):
        names = [
            f"autoprune_{counted}_total" for counted in ("requests", "images", "visual_tokens")
        ]
        before = [site.metric(counter) for counter in names]
        reply = site.send(path, body)
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
        site.notes.append(f"{name}: {reply.status}")
        if [site.metric(counter) for counter in names] != before:
            yield f"{name} ({reply.status}) is counted as served"


@attack()
def several_answers(site: Site) -> Problems:
    """A request with ``n > 1`` is counted once, and all its answers see its image."""
    picture = Picture(12, *LARGE)
    alone, before = site.ask(picture), site.metric("autoprune_images_total")
    reply = site.ask(picture, n=3, temperature=1, top_k=1)
    if reply.status != 200:
        yield str(reply)
        return
    if (counted := site.metric("autoprune_images_total") - before) != 1:
        yield f"three answers about one image are counted as {counted:.0f} images"
    answers = {choice["message"]["content"] for choice in reply.body["choices"]}
    if answers != {alone.body["choices"][0]["message"]["content"]}:
        yield f"answers of one request differ from the one alone: {answers}"
    refused = site.ask(picture, n=10**6, temperature=1)
    if refused.failed or refused.status == 200:
        yield f"a million answers: {refused}"
