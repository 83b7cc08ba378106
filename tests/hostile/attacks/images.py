"""Images: bursts of mixed sizes, extreme shapes, constant images, aborted requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.hostile.attack import Site, attack, server_errors
from tests.hostile.client import Reply, entry, nearest
from tests.hostile.pictures import Picture
from tests.tpdsl.samples import sample

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
