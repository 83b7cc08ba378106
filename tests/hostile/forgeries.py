"""Attacks of a peer: forged plans, cores and recalls, sent to the endpoint for processed inputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.generator import Json
from tests.hostile.attacks import QUESTIONS, RECALL, RECALLED, SPLIT, conversation
from tests.hostile.site import (
    LARGE,
    Picture,
    Site,
    attack,
)
from tests.serving.unit.samples import with_fields
from tests.tpdsl.samples import sample
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.plan import FIELD, MAX_RECALLS, Choice, ItemPlan
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

RENDER = f"{CHAT}/render"
GENERATE = "/inference/v1/generate"
_PICTURE = Picture(16, *LARGE)

Forge = Callable[[Tensor], Tensor | None]
"""A forged plan made of a sound one; None leaves the field out."""


def _same(plan: Tensor) -> Tensor:
    return plan


def changed(**values: object) -> Forge:
    """Other values of some of a plan's fields."""
    return lambda plan: replace(ItemPlan.decode(plan), **values).encode()  # type: ignore[arg-type]


def with_any(**values: object) -> Forge:
    """Fields of any name and value, which no plan may have."""
    return lambda plan: with_fields(plan, **values)


def _as_core(plan: Tensor) -> Tensor:
    decoded = ItemPlan.decode(plan)
    return replace(decoded, part="core", core=decoded.budget).encode()


_VALUES: Sequence[object] = (-1, 10_000, 2**62, "all", [], None)

FORGED: Mapping[str, Forge] = {
    **{
        f"{name} = {value}": with_any(**{name: value})
        for name in (*(field.name for field in fields(ItemPlan)), "more")
        for value in _VALUES
    },
    "a core": _as_core,
    **{
        f"a delta of K_c = {core}": changed(part="delta", core=core)
        for core in (1, 8, 255, 10_000)
    },
    "empty": lambda plan: plan[:0],
    "long": lambda plan: torch.cat([plan, plan.new_full((100_000,), 5)]),
    "a million bytes": lambda plan: plan.new_full((1_000_000,), 5),
    "ids out of range": with_any(instruction=[10**9, -(10**9)]),
    "random": lambda plan: torch.randint(0, 256, plan.shape, dtype=torch.uint8),
    "its version alone": lambda plan: plan[:1],
    "two rows": lambda plan: torch.stack([plan, plan]),
    "fractions": lambda plan: plan.double() + 0.5,
}


def _render(site: Site, *pictures: Picture, **more: Any) -> Json:
    """A request for the endpoint for processed inputs, as rendered by vLLM."""
    reply = site.send(RENDER, site.body(*pictures, **more))
    assert reply.status == 200, reply
    sampling = {"temperature": 0, "max_tokens": 4, "logprobs": 20}
    return {**reply.body, "sampling_params": sampling, "stream": False}


_identities = itertools.count(1 << 40)


def forge(request: Mapping[str, Any], *forges: Forge) -> Json:
    """The request with other plans and new identities; the last forge is for all further items."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        decode_mm_kwargs_item,
        encode_mm_kwargs_item,
    )

    body = copy.deepcopy(dict(request))
    features = body["features"]
    items = []
    features["mm_metadata"] = None
    features["mm_hashes"]["image"] = [
        f"{next(_identities):064x}" for _ in features["mm_hashes"]["image"]
    ]
    for number, packed in enumerate(features["kwargs_data"]["image"]):
        item = decode_mm_kwargs_item(packed)
        plan = forges[min(number, len(forges) - 1)](item[FIELD].data)
        if plan is None:
            del item[FIELD]
        else:
            item[FIELD].data = plan
        items.append(encode_mm_kwargs_item(item))
    features["kwargs_data"]["image"] = items
    return body


def _plans_of(request: Mapping[str, Any]) -> list[ItemPlan]:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        decode_mm_kwargs_item,
    )

    items = map(decode_mm_kwargs_item, request["features"]["kwargs_data"]["image"])
    return [ItemPlan.decode(item[FIELD].data) for item in items]


Forgery = tuple[str, Mapping[str, Any], Sequence[Forge]]
"""Its name, a rendered request, and what is made of the plans of its items."""


def _send_forgeries(site: Site, forgeries: Iterable[Forgery]) -> None:
    """No server error and no dead engine, and what is not forged is answered."""
    answered = False
    for name, request, forges in forgeries:
        if not answered:
            reply = site.send(GENERATE, forge(request, _same))
            answered = reply.status == 200
            assert answered, f"nothing forged: {reply}"
        reply = site.send(GENERATE, forge(request, *forges))
        assert not reply.failed and site.lives(), f"{name}: {reply}"


@attack("uncached", judge=_send_forgeries)
def forged_plans(site: Site) -> Iterable[Forgery]:
    """Invalid plans: out of range, too short, too long, of another type."""
    request = _render(site, _PICTURE)
    return [(name, request, [change]) for name, change in FORGED.items()]


def _other_parts(request: Json) -> Iterable[Forgery]:
    """Forged plans of the two items, core and delta, of one image."""
    core, delta = _plans_of(request)
    tokens = delta.tokens
    few = delta.budget
    as_whole = changed(part="whole", core=0)
    no_core = changed(state=encode_state(load_state("visionzip")))
    wide = {"share": 0.5, "cover": 0.9, "strength": 0.5}
    other = PruningState.model_validate({**sample(), "core": wide})
    other_core = changed(state=encode_state(other))
    random_tokens = changed(keep="random")
    late_core = changed(part="core", core=few)
    early_delta = changed(part="delta", core=few)
    sizes = (
        1,
        core.budget - 1,
        core.budget + 1,
        tokens - few - 1,
        tokens - few,
        tokens - few + 1,
    )
    forgeries: Mapping[str, tuple[Forge, Forge]] = {
        **{
            f"a delta of K_c = {size}": (_same, changed(core=size))
            for size in (
                *sizes,
                tokens - 1,
                tokens,
                tokens + 1,
                10_000,
                MAX_BUDGET - few,
            )
        },
        "two cores": (_same, late_core),
        "two deltas": (early_delta, _same),
        "the delta first": (early_delta, late_core),
        "a delta beside the whole": (as_whole, _same),
        "the whole beside a core": (_same, as_whole),
        "random tokens": (random_tokens, random_tokens),
        "a core with a question": (
            changed(instruction=(5,) * 64, language=(5,) * 64),
            _same,
        ),
        "a state without a core": (_same, no_core),
        "no state with a core": (no_core, no_core),
        "a delta of another core": (_same, other_core),
        "another core": (other_core, other_core),
    }
    return [(name, request, forges) for name, forges in forgeries.items()]


@attack("split")
def forged_parts(site: Site) -> None:
    """Cores and deltas that fit neither each other, nor their image, nor the server's state."""
    request = _render(site, SPLIT)
    assert [plan.part for plan in _plans_of(request)] == ["core", "delta"]
    two = _render(site, SPLIT, Picture(51, *LARGE))
    exchanged = copy.deepcopy(two)
    exchanged["features"]["kwargs_data"]["image"].reverse()
    bodies = {
        "a delta without its core": _repeat_item(request, 0, times=0),
        "a core without a delta": _repeat_item(request, 1, times=0),
        "two deltas of one core": _repeat_item(request, 1, times=2),
        "two equal cores": _repeat_item(request, 0, times=2),
        "one of two cores": _repeat_item(two, 0, times=0),
        "exchanged images": exchanged,
    }
    forgeries = [
        *_other_parts(request),
        *((name, body, [_same]) for name, body in bodies.items()),
    ]
    _send_forgeries(site, forgeries)
    # The forged plans' cores have the key of this image; another salt has none of them.
    for text in QUESTIONS:
        body = site.body(SPLIT, text=text)
        site.check("after the forged plans", body, {**body, "cache_salt": "alone"})


def _repeat_item(request: Mapping[str, Any], item: int, times: int) -> Json:
    """A rendered request with one of its items and its placeholders so many times."""
    body = copy.deepcopy(dict(request))
    features = body["features"]
    ids = body["token_ids"]
    features["mm_metadata"] = None
    places = features["mm_placeholders"]["image"]
    begin = places[item]["offset"]
    length = places[item]["length"]
    ids[begin : begin + length] = ids[begin : begin + length] * times
    for later in places[item + 1 :]:
        later["offset"] += length * (times - 1)
    places[item : item + 1] = [
        {**places[item], "offset": begin + copied * length} for copied in range(times)
    ]
    for name in ("mm_hashes", "kwargs_data"):
        features[name]["image"][item : item + 1] *= times
    return body


def _other_recalls(recall: ItemPlan) -> Mapping[str, Forge]:
    """Forged plans of the item that is recalled last."""
    initial, *later = recall.earlier
    far = 1 << 40
    chains: Mapping[str, tuple[Choice, ...]] = {
        "another first question": (
            Choice(initial.budget, (5,) * 8, initial.language),
            *later,
        ),
        "a first K of all tokens": (Choice(recall.tokens), *later),
        "a first K of more than all tokens": (Choice(recall.tokens + 7), *later),
        "the largest first K": (Choice(MAX_BUDGET - recall.budget),),
        "as many turns as there may be": (initial,) * MAX_RECALLS,
        "more turns than there may be": (initial,) * (MAX_RECALLS + 1),
        "no turn before": (),
        "a token id beyond the vocabulary": (
            Choice(initial.budget, (far,), (far,)),
            *later,
        ),
        "a negative token id": (Choice(initial.budget, (-1,), (-1,)), *later),
    }
    return {
        **{name: changed(earlier=chain) for name, chain in chains.items()},
        "another K_c": changed(core=initial.budget - 1),
        "K_c of the first K": changed(core=initial.budget),
        "no K_c": changed(core=0),
        "random tokens": changed(keep="random"),
        "the base policy alone": changed(keep="reference"),
        "a resized image": changed(keep="resized"),
        "a whole image with turns before": changed(part="whole", core=0),
        "a delta with turns before": changed(part="delta", core=3),
    }


@attack("split")
def forged_recalls(site: Site) -> None:
    """Recalls whose plans tell other turns, or other numbers, than there were."""
    talk = conversation(RECALLED, QUESTIONS[1], QUESTIONS[1])
    request = _render(site, messages=talk, **RECALL)
    plans = _plans_of(request)
    assert [plan.part for plan in plans][-2:] == ["recall", "recall"]
    sound = [_same] * (len(plans) - 1)
    forges = _other_recalls(plans[-1])
    _send_forgeries(
        site, [(name, request, [*sound, forged]) for name, forged in forges.items()]
    )
    body = site.body(messages=conversation(RECALLED, QUESTIONS[1]), **RECALL)
    site.check("after the forged plans", body, {**body, "cache_salt": "alone"})
