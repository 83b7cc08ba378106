"""Cells that leave the tower, before an engine: counts, identities, keys, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig

from tests.serving.engine import built
from tests.serving.unit.samples import PLAN, element, feature, served
from tests.serving.unit.sender import LARGE, OTHER, SMALL, Sender
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.foreign_items import check_features
from vllm_autoprune.serving.plan import ItemPlan, TowerCut
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.served_state import Capabilities

pytestmark = pytest.mark.compat

RULE = "1/2@1/3"
"""Of 49 cells of a large picture 24 stay."""


@pytest.fixture(scope="module")
def sender() -> Sender:
    return Sender(built("qwen3_vl"), budget=8)


def test_how_many_cells_stay_follows_from_their_number(sender: Sender) -> None:
    sent = sender.send([LARGE, OTHER], tower=RULE)
    assert sent.lengths == [8, 8]
    assert [plan.tokens for plan in sent.plans] == [24, 24]
    assert {plan.tower for plan in sent.plans} == {TowerCut(49, 1 / 3)}
    assert all(sent.sent) and sent.data == sender.send([LARGE, OTHER]).data


@pytest.mark.parametrize("budget", [24, 40, 1000, "100%"])
def test_an_image_that_keeps_what_the_tower_would_leave_passes_whole(
    sender: Sender, budget: int | str
) -> None:
    """So that K is what was asked for, and all of N is stock."""
    plain = sender.send([LARGE], budget=budget)
    assert sender.send([LARGE], budget=budget, tower=RULE) == plain
    assert sender.send([SMALL], budget=1, tower="90%:9-9@1/2") == sender.send(
        [SMALL], budget=1
    )


def test_identities_and_keys_hold_share_depth_and_criterion(sender: Sender) -> None:
    rules = (None, "none", RULE, "1/2@1/2", "3/4@1/3", "24@1/3")
    sent = [sender.send([LARGE], tower=rule) for rule in rules]
    identities = [request.identities[0] for request in sent]
    keys = [request.plans[0].key for request in sent]
    # 24 of 49 are half of them, however that is said.
    assert identities[2] == identities[5] and keys[2] == keys[5]
    for names in (identities, keys):
        assert names[0] == names[1] and len(set(names)) == 4
    cores = [
        sender.send([LARGE], tower=rule, history="1:4").identities
        for rule in rules[1:4]
    ]
    assert len({repr(names) for names in cores}) == 3


def test_controls_draw_among_what_is_left_or_pass_the_tower_whole(
    sender: Sender,
) -> None:
    (random,) = sender.send([LARGE], keep="random", tower=RULE).plans
    (resized,) = sender.send([LARGE], keep="resized", tower=RULE).plans
    (off,) = sender.send([LARGE], enabled=False).plans
    assert random.tower is not None and random.tokens == 24
    assert resized.tower is None and off.tower is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen2_5_vl", "attend within windows"),
        ("internvl", "takes no list of sequences"),
        ("glm4v", "was not tested"),
    ],
)
def test_models_that_pass_all_cells_refuse_rules(name: str, reason: str) -> None:
    """At start: ``test_startup_rules.py``."""
    sender = Sender(built(name), budget=1, placeholder="")
    with pytest.raises(RequestError, match=f"no cell can leave the tower: .*{reason}"):
        sender.send([OTHER], tower=RULE)


# ---- plans that another process, or a client, has made ----


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 64},
        {"tokens": 65},
        {"tokens": 0},
        {"keep": "resized"},
        {"frames": 2},
        {"tower": TowerCut(0, 0.5)},
        {"tower": TowerCut(64, 0.0)},
        {"tower": TowerCut(64, 1.0)},
        {"tower": TowerCut(64, float("nan"))},
        {"tower": TowerCut(64, 0.5, "size")},  # type: ignore[arg-type]
    ],
)
def test_forged_cuts_are_refused(changes: dict[str, Any]) -> None:
    plan = replace(PLAN, tokens=32, tower=TowerCut(64, 0.5))
    assert ItemPlan.decode(plan.encode()) == plan
    with pytest.raises(RequestError):
        ItemPlan.decode(replace(plan, **changes).encode())


@pytest.mark.parametrize(
    ("cells", "whole_tower", "problem"),
    [
        (64, "", ""),
        (63, "", "has N = 63, and its item has 64"),
        (64, "has windows", "drops cells inside the tower, and all of"),
    ],
)
def test_cuts_in_a_request_from_elsewhere_are_checked(
    cells: int, whole_tower: str, problem: str
) -> None:
    """Its key is that of the pixels and the cut, whatever the client says."""
    keys = []
    for depth in (0.5, 0.25):
        plan = replace(PLAN, tokens=32, tower=TowerCut(cells, depth))
        item = feature(plan.encode())
        item.data |= {
            "image_grid_thw": element(torch.tensor([1, 16, 16]), keep_on_cpu=True),
            "pixel_values": element(torch.zeros(256, 12)),
        }
        capabilities = Capabilities(whole_tower=whole_tower)
        rules = PlanRules(replace(served(), capabilities=capabilities), 100)
        with pytest.raises(RequestError, match=problem) if problem else nullcontext():
            check_features(rules, [item], "", MultiModalConfig())
        keys.append(ItemPlan.decode(item.data["autoprune_plan"].data).key)
    assert problem or keys[0] != keys[1]


def test_a_depth_is_a_layer_that_has_layers_before_and_after_it() -> None:
    layers = [
        [TowerCut(64, depth).find_layer(count) for depth in (0.01, 1 / 3, 0.5, 0.99)]
        for count in (1, 2, 5, 27)
    ]
    assert layers == [[0, 0, 0, 0], [1, 1, 1, 1], [1, 2, 2, 4], [1, 9, 14, 26]]
