"""Requests that are cheap to send and expensive to serve: costly states, long instructions."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.hostile.attack import LARGE, Site, attack, server_errors
from tests.hostile.client import entry
from tests.hostile.pictures import Picture
from tests.tpdsl.samples import shipped

_PICTURE = Picture(8, *LARGE)


def dear_state(variant: int = 0) -> dict[str, Any]:
    """A valid state of a few kilobytes whose selection takes thousands of times the usual time."""
    state = copy.deepcopy(shipped())
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
    usual = min(site.ask(_PICTURE).seconds for _ in range(3))
    for variant in range(2):
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(site.ask, _PICTURE, **entry(state=dear_state(variant)))
            time.sleep(0.1)
            beside = site.ask(Picture(9, *LARGE))
            dear = job.result()
        yield from server_errors(dear, beside)
        figures = f"{dear.seconds:.1f} s ({dear.status}), another client {beside.seconds:.1f} s"
        site.note(f"{figures}, usually {usual:.2f} s")
        if dear.status == 200:
            yield f"a dear state is served: {figures}"
        elif "cost" not in dear.message:
            yield f"refused for another reason than its cost: {dear}"
        elif beside.seconds > 1 + 5 * usual:
            yield f"others wait for it: {figures}"


# The vocabularies of these tiny models have no word of several tokens.
@attack(quick=False, backbones=("qwen2_5_vl", "llava_next"))
def long_instruction_of_many_images(site: Site) -> Iterable[str]:
    """100 images and a maximal instruction, which must be processed once, not once per image."""
    words = "which colour is the cat on the left " * 850
    pictures = [Picture(3000 + i, 28, 28) for i in range(100)]
    how = entry(budget=2)
    site.client.chat("what", *pictures, **how)
    few = site.ask(*pictures, **how)
    one = site.client.chat(words, _PICTURE, **how)
    many = site.client.chat(words, *pictures, **how)
    yield from server_errors(few, one, many)
    figures = f"{many.seconds:.1f} s, with one image {one.seconds:.1f} s"
    site.note(f"{figures}, with few words {few.seconds:.1f} s ({many.status})")
    if many.seconds > 3 * (one.seconds + few.seconds):
        yield f"100 images with {len(words.split())} words: {figures}"
