"""Verdicts of the overhead measurements on hand-written figures."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.report import MIB
from benchmarks.cost.__main__ import build_parser
from benchmarks.cost.overhead import memory, no_state_overhead, second_question, ttft
from benchmarks.cost.overhead.memory import BOUND, TOLERANCE, Memory
from benchmarks.cost.overhead.no_state_overhead import Measured
from benchmarks.cost.overhead.plugin_calls import Calls
from benchmarks.cost.overhead.ttft import Timing


def _arm(ttft_s: float, prompt: int = 93, cached: int = 0, rounds: int = 6) -> ttft.Arm:
    timings = [[Timing(ttft_s, ttft_s, prompt, cached)] for _ in range(rounds)]
    return ttft.Arm(timings, [{"queue": 0.0, "prefill": ttft_s - 0.01}] * rounds)


def test_a_request_within_five_percent_holds() -> None:
    run = ttft.Run("with text tower", {1: {"text": _arm(1.0), "seen": _arm(1.04)}}, 93)

    section = ttft.build_section(8, [run], {})

    assert [claim.verdict for claim in section.claims] == ["holds"]
    assert "+4.0 %" in section.claims[0].measured and "+40 ms" in section.claims[0].measured
    assert "8 of 32 layers" in section.setup[0]


def test_a_slower_request_does_not_hold() -> None:
    run = ttft.Run("x", {1: {"text": _arm(1.0), "seen": _arm(1.2)}}, 93)

    assert ttft.build_claims(run)[0].verdict == "does not hold"


def test_prompts_of_different_length_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="length"):
        ttft.check_prompts({1: {"text": _arm(1.0, 92), "seen": _arm(1.0, 93)}})


def test_the_unpruned_prompt_may_be_longer() -> None:
    assert ttft.check_prompts({1: {"text": _arm(1), "seen": _arm(1), "full": _arm(9, 605)}}) == 93


def test_prefix_cache_hits_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="prefix cache"):
        ttft.check_prompts({1: {"text": _arm(1), "seen": _arm(1, cached=32)}})


@pytest.mark.parametrize("quick", [True, False])
def test_kinds_alternate_and_pair_up(quick: bool) -> None:
    sent = list(ttft.plan_rounds(quick))
    for concurrency in (1, ttft.CROWD):
        both = [k for c, k in sent if c == concurrency and k in ("text", "seen")]
        pairs = list(zip(both[::2], both[1::2], strict=True))
        assert {frozenset(pair) for pair in pairs} == {frozenset(("text", "seen"))}
        assert all(pair == other[::-1] for pair, other in pairwise(pairs))


def test_no_body_is_ever_sent_twice() -> None:
    writer = ttft.BodyWriter("m")
    bodies = [body for _ in range(3) for kind in ttft.KINDS for body in writer.bodies(kind, 2)]

    assert len(set(bodies)) == len(bodies)


def _measured(plugin: float, processor: float, differing: list[str], calls: int) -> Measured:
    """Stock servers at 0.1 s, the other at ``plugin`` and at ``processor`` seconds."""
    steps = {1: 9, 2: 9, 3: 9}
    counted = {
        "no state": Calls(16, Counter({"register": calls} if calls else {}), steps),
        "state `divprune`": Calls(16, Counter({"select": 160}), steps),
    }

    def times(value: float) -> no_state_overhead.Times:
        return {
            kind: {
                name: [[value if name == "plugin" else 0.1]] * 9
                for name in no_state_overhead.SERVERS
            }
            for kind in no_state_overhead.REQUESTS
        }

    return Measured(times(plugin), times(processor), differing, 20, [], counted)


@pytest.mark.parametrize(
    ("plugin", "processor", "differing", "calls", "fails"),
    [
        (0.1, 0.1, [], 0, []),
        (0.098, 0.098, [], 0, []),
        (0.102, 0.1, [], 0, [2, 3, 4]),
        (0.1, 0.102, [], 0, [5, 6, 7]),
        (0.1, 0.1, ["text 0/1"], 0, [0]),
        (0.1, 0.1, [], 1, [1]),
    ],
)
def test_time_answers_and_calls_without_a_state_are_claims(
    plugin: float, processor: float, differing: list[str], calls: int, fails: list[int]
) -> None:
    claims = no_state_overhead.build_section(_measured(plugin, processor, differing, calls)).claims

    assert len(claims) == 2 + 2 * len(no_state_overhead.REQUESTS)
    assert [at for at, claim in enumerate(claims) if claim.verdict != "holds"] == fails


def _memory(ready: float, level: float, growth: float = 0.0) -> Memory:
    at = list(range(20, 2001, 20))
    return Memory(
        int(ready * MIB), at, [int((level + growth * (i - 1100) / 1800) * MIB) for i in at]
    )


@pytest.mark.parametrize(
    ("with_state", "verdicts"),
    [
        (_memory(1050, 1100 + BOUND / MIB), ["holds", "holds"]),
        (_memory(1050, 1100 + BOUND / MIB, 3 * TOLERANCE / MIB), ["does not hold", "holds"]),
        (_memory(1050, 1200), ["holds", "does not hold"]),
    ],
)
def test_growth_and_bound_are_separate_claims(with_state: Memory, verdicts: list[str]) -> None:
    section = memory.build_section(2000, _memory(1000, 1050), with_state)

    assert [claim.verdict for claim in section.claims] == verdicts


def test_questions_differ_and_images_come_twice_after_the_warm_up() -> None:
    first = {
        memory.build_numbered_request("m", i) for i in range(memory.WARM_UP, memory.WARM_UP + 4)
    }
    images = {json.loads(b)["messages"][0]["content"][0]["image_url"]["url"] for b in first}

    assert (len(first), len(images)) == (4, 2)


def test_further_vision_runs_and_an_exceeded_bound_do_not_hold() -> None:
    counted = {"first": 4, "later": 0, "held": 2_000_000, "limit": 2_147_483}

    assert [c.verdict for c in second_question.build_section(counted).claims] == ["holds"] * 2
    worse = second_question.build_section({**counted, "later": 1, "held": 3_000_000})
    assert [c.verdict for c in worse.claims] == ["does not hold"] * 2


@pytest.mark.parametrize("what", ["ttft", "inert", "memory", "second-question", "all"])
def test_each_measurement_can_be_chosen(what: str) -> None:
    parser = build_parser("overhead")
    assert parser.parse_args(["overhead", what, "--quick"]).what == what
    assert parser.parse_args(["overhead"]).what == "all"
