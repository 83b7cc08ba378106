"""Requests that are cheap to send and expensive to serve: costly states, long instructions."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.hostile.attack import LARGE, Site, attack, server_errors
from tests.hostile.client import Reply, entry
from tests.hostile.pictures import Picture
from tests.tpdsl.samples import sample

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
    return ", ".join(f"{one:.2f}" for one in seconds)


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
