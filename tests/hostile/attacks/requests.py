"""Requests that are odd to read, cheap to send and dear to serve, or counted though not served."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.hostile.attack import LARGE, Picture, Reply, Site, attack, entry, server_errors
from tests.serving.engine import CLIP
from tests.tpdsl.samples import sample
from vllm_autoprune.serving.api.endpoint import PATH

_MARK = "forged-line-of-a-log"
_CONTROL = ("\n", "\r", "\x1b[2J", "\0", "\u2028", "\u202e", "\x85")
SPECIAL = (
    *("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    *("</s>", "<s>", "<pad>", "<|vision_start|><|image_pad|><|vision_end|>"),
)


@attack()
def control_characters(site: Site) -> Iterable[str]:
    """Control characters in keys and values must not be repeated in messages or the log."""
    picture, repeated = Picture(13, *LARGE), set[str]()
    for control in _CONTROL:
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
            reply = site.ask(picture, mm_processor_kwargs=kwargs)
            yield from server_errors(reply)
            if reply.status == 200:
                yield f"{kwargs} is served"
            # Only for the plugin's own entry; other keys are refused by vLLM's messages.
            if len(kwargs) == 1 and f"{control}{_MARK}" in reply.message:
                repeated.add(control)
    if repeated:
        yield f"{sorted(repeated)} are repeated in messages as they are"
    for line in site.client.server.logged().splitlines():
        if line.startswith(_MARK):
            yield "a client writes a line of the log"
            break


@attack()
def special_tokens(site: Site) -> Iterable[str]:
    """Special tokens in user text: no error that stock vLLM does not give."""
    for text in SPECIAL:
        for words in (f"{text} {site.words}", f"{site.words} {text} {text}"):
            for pictures in ([Picture(14, *LARGE)], []):
                name = f"{text!r} with {len(pictures)} images"
                yield from site.compare(name, site.client.chat_body(words, *pictures))


@attack()
def truncated_prompts(site: Site) -> Iterable[str]:
    """Prompts cut by ``truncate_prompt_tokens``, also within an image: no new errors."""
    picture = Picture(15, *LARGE)
    pruned, unpruned = (
        [
            client.chat(site.words, picture, truncate_prompt_tokens=count, truncation_side=side)
            for count in (1, 2, 5, 20, 33, 200, 300, 2000, -1, 2**62)
            for side in ("left", "right")
        ]
        for client in (site.client, site.open_stock())
    )
    # Single replies are not comparable: other prompts fit, and vLLM 0.32 answers 500 for an image
    # of a previously refused prompt.
    errors, stock = ([r for r in replies if r.status >= 500] for replies in (pruned, unpruned))
    site.note(f"server errors: {len(errors)}, on stock {len(stock)}")
    if len(errors) > len(stock):
        yield f"{len(errors)} server errors, and {len(stock)} on stock; the last is {errors[-1]}"


_PICTURE = Picture(8, *LARGE)

_ROUNDS, _SLOWER = 4, 3
"""Measurements of another client's wait, and how much longer it may be beside a dear state."""


def dear_state(variant: int = 0) -> dict[str, Any]:
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
def dear_states(site: Site) -> Iterable[str]:
    """A valid, costly state of one client must not delay other clients."""
    beside_dear, beside_usual = list[float](), list[float]()
    for variant in range(_ROUNDS):
        # In turns, so that whatever else the machine does delays both.
        usual, beside = _ask_at_once(site)
        beside_usual.append(beside.seconds)
        yield from server_errors(usual, beside)
        dear, beside = _ask_at_once(site, **entry(state=dear_state(variant)))
        beside_dear.append(beside.seconds)
        yield from server_errors(dear, beside)
        if dear.status == 200:
            yield f"a dear state is served, in {dear.seconds:.1f} s"
        elif "cost" not in dear.message:
            yield f"refused for another reason than its cost: {dear}"
    seconds = f"{_format(beside_dear)} s beside a dear state, {_format(beside_usual)} s without"
    site.note(f"another client waits {seconds}")
    # Each state is new to the server: were they dear to refuse, every round would be slow.
    if min(beside_dear) > _SLOWER * max(beside_usual):
        yield f"others wait for a dear state: {seconds}"


def _ask_at_once(site: Site, **more: object) -> tuple[Reply, Reply]:
    """Two clients' answers: of one that sends these fields, and of one that asks beside it."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(site.ask, _PICTURE, **more)
        time.sleep(0.1)
        beside = site.ask(Picture(9, *LARGE))
        return job.result(), beside


def _format(seconds: Iterable[float]) -> str:
    return ", ".join(f"{second:.2f}" for second in seconds)


# The vocabularies of these tiny models have no word of several tokens.
@attack(quick=False, backbones=("qwen2_5_vl", "llava_next"))
def long_instruction_of_many_images(site: Site) -> Iterable[str]:
    """100 images and a maximal instruction, which must be processed once, not once per image."""
    words = "which colour is the cat on the left " * 850
    pictures = [Picture(3000 + i, 28, 28) for i in range(100)]
    how = entry(budget=2)
    site.client.chat("what", *pictures, **how)
    few_words = site.ask(*pictures, **how)
    one_image = site.client.chat(words, _PICTURE, **how)
    many = site.client.chat(words, *pictures, **how)
    yield from server_errors(few_words, one_image, many)
    figures = f"{many.seconds:.1f} s, with one image {one_image.seconds:.1f} s"
    site.note(f"{figures}, with few words {few_words.seconds:.1f} s ({many.status})")
    if many.seconds > 3 * (one_image.seconds + few_words.seconds):
        yield f"100 images with {len(words.split())} words: {figures}"


_COUNTERS = ("autoprune_requests_total", "autoprune_images_total", "autoprune_visual_tokens_total")
_LONG = "the sky is blue on the right " * 2000


def _counts(site: Site) -> list[float]:
    return [site.client.metric(name) for name in _COUNTERS]


@attack()
def counted_though_not_served(site: Site) -> Iterable[str]:
    """Token-count requests and late refusals must not appear in the metrics."""
    picture = Picture(11, *LARGE)
    data = picture.url.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": site.words}]
    chat = site.client.chat_body(site.words, picture)
    anthropic = {
        "model": site.client.server.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": parts}],
    }
    requests: Mapping[str, Callable[[], Reply]] = {
        "count_tokens": lambda: site.client.send("/v1/messages/count_tokens", anthropic),
        "tokenize": lambda: site.client.send("/tokenize", chat),
        "a prompt that is too long": lambda: site.client.chat(_LONG, picture),
        "max_tokens that do not fit": lambda: site.ask(picture, max_tokens=10**6),
        "a refused budget": lambda: site.ask(picture, **entry(budget=0)),
    }
    for name, send in requests.items():
        before = _counts(site)
        reply = send()
        yield from (f"{name}: {problem}" for problem in server_errors(reply))
        site.note(f"{name}: {reply.status}")
        if _counts(site) != before:
            yield f"{name} ({reply.status}) is counted as served"


@attack()
def several_answers(site: Site) -> Iterable[str]:
    """A request with ``n > 1`` is counted once, and all its answers see its image."""
    picture = Picture(12, *LARGE)
    alone = site.ask(picture)
    before = site.client.metric("autoprune_images_total")
    reply = site.ask(picture, n=3, temperature=1, top_k=1)
    if reply.status != 200:
        yield str(reply)
        return
    if (counted := site.client.metric("autoprune_images_total") - before) != 1:
        yield f"three answers about one image are counted as {counted:.0f} images"
    answers = {choice["message"]["content"] for choice in reply.body["choices"]}
    if answers != {alone.body["choices"][0]["message"]["content"]}:
        yield f"answers of one request differ from the one alone: {answers}"
    refused = site.ask(picture, n=10**6, temperature=1)
    if refused.failed or refused.status == 200:
        yield f"a million answers: {refused}"


@attack(backbones=("llava",))
def paths_of_the_server(site: Site) -> Iterable[str]:
    """The endpoint describing the served state must not contain paths of the server."""
    body = site.client.server.get(PATH)
    if str(CLIP) in body:
        yield f"{PATH} shows {CLIP}"
