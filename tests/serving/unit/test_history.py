"""History mode: which images of a request keep their core alone, and what of its prefix stays."""

from __future__ import annotations

from itertools import pairwise, takewhile
from typing import Any

import numpy
import pytest

from tests.serving.engine import built
from tests.serving.unit.sender import LARGE, OTHER, SMALL, Processed, Sender, picture
from tests.tables import parametrize_from_file
from vllm_autoprune import RequestError
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.serving.api.engine_requests import _RECOMPUTED_TOKENS
from vllm_autoprune.serving.history import History
from vllm_autoprune.serving.request_rules import RequestRules

K = 16
CORE = 4
SHOTS = [picture(224, 224, seed) for seed in range(1, 8)]
"""Screenshots of a conversation, of N = 64 tokens each."""

FREE: dict[str, Any] = {
    "base_policy": {"name": "divprune"},
    "constraints/selector/q_e": 0,
}
"""A state that reads no question, without a core."""


def serve(
    folder: Any, rule: str | None, budget: int | str = K, **changes: Any
) -> Sender:
    """A server of a question-free state, whose prompts have text between the images."""
    history = None if rule is None else History.parse(rule, "")
    rules = RequestRules("states", explicit=True, history=history)
    placeholder = "<|image_pad|> what"
    return Sender(folder, budget, rules, placeholder, **{**FREE, **changes})


def parts(sent: Processed) -> list[str]:
    return [f"{plan.part} {plan.budget}" for plan in sent.plans]


def key_tokens(sender: Sender, sent: Processed) -> list[object]:
    """What vLLM's prefix cache compares: token ids, or item and row of a placeholder."""
    rows = iter(
        (identity, row)
        for identity, length in zip(sent.identities, sent.lengths, strict=True)
        for row in range(length)
    )
    token = sender._processor._placeholders.token(sender.info)
    return [next(rows) if id_ == token else id_ for id_ in sent.prompt]


@parametrize_from_file("rule", "images", "expected")
def test_the_newest_images_keep_k_and_older_ones_their_core(
    folder: Any, rule: str, images: int, expected: list[str]
) -> None:
    """Of N = 64 tokens, K = 16, where the first is asked about by a state with no core."""
    assert parts(serve(folder, rule).send(SHOTS[:images])) == expected


@pytest.mark.parametrize("rule", ["1:4", "2:4", "1:4,every=2", "2:4,every=4", "1:100%"])
@pytest.mark.parametrize("budget", [K, "100%"])
def test_a_turn_keeps_its_prefix_up_to_the_first_core_that_loses_its_delta(
    folder: Any, rule: str, budget: int | str
) -> None:
    """All of the turn before, where it retires none; what is computed again is counted."""
    history = History.parse(rule, "")
    sender = serve(folder, rule, budget)
    turns = []
    counted = []
    for end in range(1, len(SHOTS) + 1):
        total = _RECOMPUTED_TOKENS._value.get()
        turns.append(sender.send(SHOTS[:end]))
        counted.append(_RECOMPUTED_TOKENS._value.get() - total)
    for count, (sent, later) in enumerate(pairwise(turns), 1):
        before = key_tokens(sender, sent)
        after = key_tokens(sender, later)
        pairs = zip(before, after, strict=False)
        common = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        recomputed = 0
        expected = len(before) - 1  # up to the question
        retired = history.count_retired(count)
        if history.count_retired(count + 1) > retired and rule != "1:100%":
            cores = [i for i, plan in enumerate(sent.plans) if plan.part == "core"]
            core = cores[retired]
            expected = before.index((sent.identities[core], CORE - 1)) + 1
            recomputed = after.index((later.identities[-2], 0)) - expected
        assert (common, counted[count]) == (expected, recomputed)


def test_a_retired_image_is_the_same_in_every_conversation(folder: Any) -> None:
    """Whatever stands beside it, whatever K and the question; but not under another core."""
    sender = serve(folder, "1:4")
    retired = sender.send([LARGE, OTHER])
    again = sender.send([SMALL, LARGE, OTHER, SMALL], budget=12)
    asked = sender.send([LARGE], instructions=["where is it"])
    assert retired.identities[0] == again.identities[1] == asked.identities[0]
    assert retired.plans[0] == again.plans[1] == asked.plans[0]
    other = sender.send([LARGE, OTHER], history="1:5")
    assert other.identities[0] != retired.identities[0]
    assert other.identities[1:] != retired.identities[1:]


def test_the_newest_may_be_whole(folder: Any) -> None:
    """Then its delta has all other tokens, which no question chooses among."""
    sender = serve(folder, "1:4", "100%", base_policy={"name": "mmtok"})
    sent = sender.send([LARGE, OTHER])
    assert parts(sent) == ["core 4", "core 4", "delta 60"]
    assert not sent.plans[2].read[0] and sent.plans[2].key == sent.plans[1].key
    stock = sender.send([LARGE, OTHER], history="none")
    assert parts(stock) == ["whole 64"] * 2
    assert stock.identities == sender.send([LARGE, OTHER], enabled=False).identities


def test_images_of_a_turn_have_their_cores_first(folder: Any) -> None:
    rules = RequestRules(history=History.parse("3:4", ""))
    sent = Sender(folder, K, rules, **FREE).send(SHOTS[:3])
    assert parts(sent) == ["core 4"] * 3 + ["delta 12"] * 3


def test_an_image_that_is_one_item_is_retired_to_a_smaller_one(folder: Any) -> None:
    """By a policy that needs the question, a control, beside a video, on some backbones."""
    reader = serve(folder, "1:4", base_policy={"name": "cdpruner"})
    smaller = reader.send(SHOTS[:1], budget=4, history="none")
    assert reader.send(SHOTS[:2]).identities[0] == smaller.identities[0]
    sender = serve(folder, "1:4")
    for keep in ("random", "resized"):
        assert parts(sender.send(SHOTS[:2], keep=keep)) == ["whole 4", "whole 16"]
    clip = numpy.zeros((4, 56, 56, 3), numpy.uint8), {"total_num_frames": 4}
    made = sender.process([clip], modality="video", beside=SHOTS[:2])
    images = made["mm_placeholders"]["image"]
    assert [image.get_num_embeds() for image in images] == [4, 16]
    rules = RequestRules(history=History.parse("1:4", ""))
    internvl = Sender(built("internvl"), K, rules, "", **FREE)
    older, newest = internvl.send([SMALL, OTHER]).plans
    assert (older.part, older.budget, newest.part) == ("whole", 4, "whole")


def test_later_turns_recall_from_retired_images(folder: Any) -> None:
    sender = serve(folder, "1:4")
    turns = [{"images": 2, "text": "and now?"}]
    sent = sender.send(SHOTS[:2], recall=8, recall_turns=turns)
    assert parts(sent) == ["core 4", "core 4", "delta 12", "recall 4", "recall 4"]
    retired = sent.plans[3]
    assert [item.budget for item in retired.items_before() if item.budget] == [4]
    assert (retired.kept_before, sent.plans[4].kept_before) == (4, K)


def test_a_rule_without_a_core_needs_a_state_with_one(folder: Any) -> None:
    sender = serve(folder, None, core={"share": 0.5})
    assert parts(sender.send(SHOTS[:2], history="1"))[0] == "core 8"
    with pytest.raises(RequestError, match=r"has no core -> .* 1:1/8"):
        sender.send(SHOTS[:2], history="1", state="divprune")
    assert parts(sender.send(SHOTS[:2], history="1:2", state="divprune"))[0] == "core 2"


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation"
)  # of GLM's image processor
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_backbone_retires_images(name: str) -> None:
    rules = RequestRules(history=History.parse("1:2", ""))
    sender: Any = Sender(built(name), 3, rules, "", **FREE)
    sent = sender.send([OTHER, LARGE])
    assert sent.plans[0].budget == 2
    assert sum(sent.lengths) >= 5
