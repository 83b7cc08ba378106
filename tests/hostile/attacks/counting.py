"""Metrics and token counts must only count served requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tests.hostile.attack import LARGE, Site, attack
from tests.hostile.client import Reply, entry
from tests.hostile.pictures import Picture
from tests.serving.paths import CLIP
from vllm_autoprune.serving.api.endpoint import PATH

_COUNTERS = ("autoprune_requests_total", "autoprune_images_total", "autoprune_visual_tokens_total")
_LONG = "the sky is blue on the right " * 2000


def _counts(site: Site) -> list[float]:
    return [site.client.metric(name) for name in _COUNTERS]


@attack()
def counted_though_not_served(site: Site) -> Iterable[str]:
    """Token-count requests and late refusals must not appear in the metrics."""
    picture = Picture(11, *LARGE)
    parts = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": picture.url.partition(",")[2],
            },
        },
        {"type": "text", "text": site.words},
    ]
    body = {"model": site.client.server.model, "max_tokens": 4}
    anthropic = {**body, "messages": [{"role": "user", "content": parts}]}
    chat = site.client.chat_body(site.words, picture)
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
        if reply.status >= 500 or reply.status == 0:
            yield f"{name}: {reply}"
        site.note(f"{name}: {reply.status}")
        if _counts(site) != before:
            yield f"{name} ({reply.status}) is counted as served"


@attack()
def several_answers(site: Site) -> Iterable[str]:
    """A request with ``n > 1`` is counted once, and all its answers see its image."""
    picture = Picture(12, *LARGE)
    one = site.ask(picture)
    before = site.client.metric("autoprune_images_total")
    reply = site.ask(picture, n=3, temperature=1, top_k=1)
    if reply.status != 200:
        yield str(reply)
        return
    if (counted := site.client.metric("autoprune_images_total") - before) != 1:
        yield f"three answers about one image are counted as {counted:.0f} images"
    answers = {choice["message"]["content"] for choice in reply.body["choices"]}
    if answers != {one.body["choices"][0]["message"]["content"]}:
        yield f"answers of one request differ from the one alone: {answers}"
    refused = site.ask(picture, n=10**6, temperature=1)
    if refused.status in (0, 200) or refused.status >= 500:
        yield f"a million answers: {refused}"


@attack(backbones=("llava",))
def paths_of_the_server(site: Site) -> Iterable[str]:
    """The endpoint describing the served state must not contain paths of the server."""
    body = site.client.server.get(PATH)
    if str(CLIP) in body:
        yield f"{PATH} shows {CLIP}"
