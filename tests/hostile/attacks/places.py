"""Images in unusual places: beside a video, in turns of other roles, in unusual formats."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from tests.hostile.attack import Site, attack
from tests.hostile.client import CHAT, Client
from tests.hostile.pictures import Picture

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
