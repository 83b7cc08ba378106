"""A soak of a fake server: equal counts on both sides, and every fault and leak detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import httpx
import pytest

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.cost import soak
from tests.serving.unit.samples import served
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.layout import TokenCount, align_core, choose_recalls
from vllm_autoprune.serving.api.planner import resolve_plans, state_label
from vllm_autoprune.serving.api.request import RecallTurn, parse_request
from vllm_autoprune.serving.settings import RequestRules
from vllm_autoprune.tpdsl.loading import load_state

MIB, START, TEXT = 1 << 20, 5, 20
"""Tokens of a prompt in front of its image, and besides it."""
RULES = RequestRules("states", 1, 65536, recall=soak._RECALL)
SERVED = replace(served(budget=soak._BUDGET), state=load_state(soak._STATE), rules=RULES)
ENDED, SHORT = "vllm:request_success_total", "vllm:request_generation_tokens_bucket 5.0"


def plan(body: Body, counts: Counter[str]) -> int:
    """Prompt tokens of a request, planned and counted by the plugin's own code."""
    kwargs = body.get("mm_processor_kwargs")
    request = parse_request(kwargs["autoprune"] if isinstance(kwargs, dict) else None)
    images = json.dumps(body["messages"]).count('"type": "image_url"')
    plans = resolve_plans(SERVED, request, [TokenCount(soak._TOKENS)] * images)
    later = [turn for turn in body["messages"][1:] if turn["role"] == "user"]
    turns = [RecallTurn(images=images, text=turn["content"]) for turn in later]
    recall = soak._RECALL if request.recall is None else request.recall
    contents = [str(image) for image in range(images)]
    recalled = sum(part.budget for part in choose_recalls(turns, recall, plans, contents))
    kept = sum(plan.budget for plan in plans) + recalled
    before = images * soak._TOKENS
    counts[f'autoprune_requests_total{{state="{state_label(SERVED, request)}"}}'] += 1
    counts[f'autoprune_images_total{{chooser="{request.keep}"}}'] += images
    counts['autoprune_visual_tokens_total{stage="before"}'] += before
    counts['autoprune_visual_tokens_total{stage="after"}'] += kept
    counts["autoprune_core_tokens_total"] += sum(
        align_core(START, plan.budget, core, soak._BLOCK)
        for plan in plans
        if not plan.keeps_all and (core := SERVED.policy_for_plan(plan).core)
    )
    counts["autoprune_recalled_tokens_total"] += recalled
    counts["autoprune_kv_bytes_saved_total"] += (before - kept) * soak._KV_BYTES
    return TEXT + kept


@contextmanager
def planned(fault: str = "") -> Iterator[str]:
    """The URL of a server with the plugin's planning; every third request has the fault."""
    counts, requests = Counter[str](), Counter[str]()

    def reply(body: Body) -> Reply:
        requests["all"] += 1
        due = fault if requests["all"] % 3 == 0 else ""
        if due in ("failed", "broken"):
            return Reply(status=500) if due == "failed" else Reply(drop=True)
        counting = Counter[str]() if due == "forgotten" else counts
        try:
            prompt = plan(body, counting)
        except AutopruneError as error:
            counting["autoprune_requests_refused_total"] += 1
            return Reply(status=400, error=str(error))
        if not body.get("stream"):  # its client hangs up
            counting['vllm:request_success_total{engine="0",finished_reason="length"}'] += 1
            counting['vllm:request_generation_tokens_bucket{engine="0",le="5.0"}'] += 1
        counting['vllm:prompt_tokens_total{engine="0"}'] += prompt
        counting['vllm:generation_tokens_total{engine="0"}'] += int(body["max_tokens"])
        if due == "fallen":
            counting['autoprune_fallbacks_total{fallback="uniform",reason="scores"}'] += 1
        usage = {"prompt_tokens": prompt, "completion_tokens": int(body["max_tokens"])}
        return Reply(ttft=0.01, usage=usage)

    def metrics() -> str:
        return "".join(f"{name} {float(count)}\n" for name, count in sorted(counts.items()))

    with fake_server(reply, model=None, pages={"/metrics": metrics}) as server:
        yield server.url


def read(url: str) -> Counter[str]:
    return soak._read_counters(httpx.get(f"{url}/metrics").text)


def judge(url: str, seconds: float = 1.5) -> tuple[str, list[str]]:
    before = read(url)
    tally, samples = soak._keep_busy(url, os.getpid(), START, users=4, seconds=seconds)
    assert samples
    counts = soak._compare_counts(before, read(url), tally)
    return soak._format_report(seconds / 60, tally, counts, {})


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("", None),
        ("failed", "requests failed"),
        ("broken", "requests failed"),
        ("forgotten", "vllm:prompt_tokens_total: "),
        ("fallen", "autoprune_fallbacks_total: "),
    ],
)
def test_a_soak_is_passed_but_for_a_fault(fault: str, problem: str | None) -> None:
    with planned(fault) as url:
        if not fault:
            judge(url)  # metrics do not begin at zero
        text, wrong = judge(url, 2.5 if fault == "broken" else 1.5)
    assert "answered" in text
    assert f"The soak is {'not ' if fault else ''}passed." in text
    assert any(problem in line for line in wrong) if problem else wrong == []


def test_a_server_that_is_down_is_a_problem() -> None:
    with planned() as url:
        pass
    tally, _ = soak._keep_busy(url, os.getpid(), START, users=2, seconds=1.0)
    assert tally.outcomes == {"failed": 2}  # of each user one
    assert "nothing was answered" in soak._format_report(1.0, tally, {}, {})[1]


def test_every_kind_of_request_is_answered_as_planned() -> None:
    random, kinds, models, bodies = Random(3), set(), set(), set()
    with planned() as url, soak._connect(url) as client:
        for _ in range(200):
            request, tally = soak._draw_request(random, START), soak._Tally()
            kinds.add(request.kind)
            bodies.add(request.body)
            models.add(json.loads(request.body)["model"])
            assert soak._send(client, request, tally) and tally.faults == []
            if request.kind != "bad":
                after = tally.counts["autoprune_visual_tokens_total after"]
                assert tally.counts["vllm:prompt_tokens_total"] == TEXT + after
    assert kinds == set(soak._KINDS) and len(models) == 3
    assert len(bodies) > 100, "pictures vary"


def test_a_client_that_hangs_up_is_counted_by_what_it_has_read() -> None:
    request, tally = soak._draw_request(Random(5), START, stream=True), soak._Tally()
    with planned() as url, soak._connect(url) as client:
        soak._send(client, request, tally, deltas=3)
        counts = soak._compare_counts({}, read(url), tally)
    assert tally.outcomes == {"hung up": 1}
    assert counts["vllm:generation_tokens_total"] == (3, soak._LONG_ANSWER, soak._LONG_ANSWER)
    assert soak._format_report(1.0, tally, counts, {})[1] == ["nothing was answered"]


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        ({ENDED: 5, SHORT: 5}, ""),
        # An answer that ended after its client hung up is long.
        ({ENDED: 7, SHORT: 5}, ""),
        ({ENDED: 8, SHORT: 5}, f"{ENDED}: 8 by the server, 5 by its client"),
        ({ENDED: 6, SHORT: 6}, f"{SHORT}: 6 by the server, 5 by its client"),
        ({ENDED: 5, SHORT: 4}, f"{SHORT}: 4 by the server, 5 by its client"),
        # What only the server counts must be 0.
        ({ENDED: 5, SHORT: 5, "autoprune_requests_total mine": 2},
         "autoprune_requests_total mine: 2 by the server, 0 by its client"),
    ],
)  # fmt: skip
def test_both_sides_have_to_count_the_same(after: dict[str, int], wrong: str) -> None:
    tally = soak._Tally(outcomes=Counter({"answered": 5, "hung up": 2}))
    counts = soak._compare_counts({}, after, tally)
    assert soak._format_report(1.0, tally, counts, {})[1] == ([wrong] if wrong else [])


def test_counters_are_summed_over_engines() -> None:
    text = "".join(f'vllm:prompt_tokens_total{{engine="{i}"}} 3.0\n' for i in range(2))
    counters = soak._read_counters(text + "vllm:other_total 5.0\n")
    assert counters == {"vllm:prompt_tokens_total": 6}


@pytest.mark.parametrize(
    ("resident", "problem"),
    [
        (lambda i: 1000 * MIB, ""),
        (lambda i: (1000 if i >= 20 else 200) * MIB, ""),  # warm-up
        (lambda i: (3000 if i == 50 else 1000) * MIB, ""),  # a spike
        (lambda i: (1000 + 19 * (i >= 60)) * MIB, ""),
        (lambda i: (1000 + 21 * (i >= 60)) * MIB, "it grew"),
        (lambda i: 1000 * MIB + i * MIB, "it grew"),  # a leak
        (lambda i: (1000 if i < 60 else 500) * MIB, ""),  # it shrank
        (lambda i: 10 * MIB + i * soak._SLACK // 100, ""),  # more than 2 %, and next to nothing
        (lambda i: 10 * MIB + 2 * i * soak._SLACK // 100, "it grew"),
    ],
    ids=["constant", "warm-up", "spike", "1.9 %", "2.1 %", "leak", "shrinking", "slack", "more"],
)
def test_growth_beyond_the_tolerance_is_a_problem(
    resident: Callable[[int], int], problem: str
) -> None:
    rows = soak._judge_memory([{"7 worker": resident(i)} for i in range(100)])
    assert {name: row[2] for name, row in rows.items()} == {"7 worker": problem, "all": problem}
    tally = soak._Tally(outcomes=Counter(answered=1))
    assert len(soak._format_report(1.0, tally, {}, rows)[1]) == (2 if problem else 0)


def test_a_process_that_starts_or_ends_after_the_warm_up_is_a_problem() -> None:
    samples = [*[{"7 worker": MIB, "6 starter": MIB}] * 10, *[{"7 worker": MIB}] * 60]
    assert not any(problem for _, _, problem in soak._judge_memory(samples).values())
    ended = soak._judge_memory([*samples, *[{"8 worker": MIB}] * 30])
    assert [name for name, row in ended.items() if row[2]] == ["7 worker", "8 worker"]
    assert soak._judge_memory(samples[:4])["all"][2] == "too few samples"


def test_memory_of_a_process_and_its_children_is_read_without_files() -> None:
    code = "import time; held = bytearray(50_000_000); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        resident = soak._read_resident(os.getpid())
        child.kill()
    by_pid = {name.split()[0]: size for name, size in resident.items()}
    # Python's own files are shared, so that little more than the array is left.
    assert 50_000_000 < by_pid[str(child.pid)] < 65_000_000 and str(os.getpid()) in by_pid
    assert soak._read_resident(child.pid) == {}
