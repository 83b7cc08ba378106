"""What a request may say and where; which K, state and control its images get."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.unit.bounded_server import N, resolve, resolve_images, server
from tests.serving.unit.configurations import refusal, vllm_config
from tests.serving.unit.samples import served
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import (
    PruningPolicy,
    RequestError,
    SafetyRecord,
    load_state,
    materialize,
)
from vllm_autoprune.serving import request_states, state_safety
from vllm_autoprune.serving.api import request as request_module
from vllm_autoprune.serving.api.budgets import check_fields
from vllm_autoprune.serving.api.headers import (
    HEADERS,
    KeepHeaders,
    current_headers,
    join_headers,
)
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.api.request_checks import refuse_misplaced
from vllm_autoprune.serving.plan import KWARGS, NO_KEY
from vllm_autoprune.serving.request_rules import LEVELS, DetailBudgets
from vllm_autoprune.serving.request_states import load_request_state
from vllm_autoprune.serving.served_state import NEEDS, Capabilities, ServedState
from vllm_autoprune.serving.startup import _resolve_settings
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.tpdsl.atoms.safety import Verdict
from vllm_autoprune.tpdsl.atoms.source import BudgetCall


def test_many_problems_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an answer repeats of keys and values: the attack ``control_characters``."""
    monkeypatch.setattr(
        request_module, "escape_unprintable", lambda *_: pytest.fail("a message")
    )
    fields = {f"x{i}": 1 for i in range(257)}
    for entry in (fields, {"details": ["x"] * 257}, {"recall_turns": [fields]}):
        with pytest.raises(RequestError, match=r"has 25\d problems"):
            PruningRequest.parse(entry)
    with pytest.raises(RequestError, match="keys that are no text"):
        PruningRequest.parse({3: 1})


# ---- fields in the wrong place ----

ENTRY = {"budget": 16}


@parametrize_from_file("fields", "where")
def test_a_field_is_refused_at_any_depth_where_nothing_reads_it(
    fields: dict[str, object], where: str | None
) -> None:
    refuse_misplaced({"user_id": 1}, {"autoprune": ENTRY, "size": {"height": 1}})
    if where is None:
        refuse_misplaced(fields, {})
        return
    with pytest.raises(RequestError) as caught:
        refuse_misplaced(fields, {})
    (problem,) = caught.value.problems
    assert problem.where == where
    assert KWARGS in problem.fix


# ---- headers ----

BUDGET = "x-autoprune-budget"
STATE = "x-autoprune-state"
ENABLED = "x-autoprune-enabled"


@parametrize_from_file("text", "budget")
def test_a_header_says_what_the_entry_says_and_agrees_with_it(
    text: str, budget: object
) -> None:
    fields: dict[str, object] = {"budget": budget, "state": "visionzip"}
    headers = [(BUDGET, text), (STATE, "visionzip")]
    for agreeing in (
        None,
        {"budget": None},
        {"budget": budget},
        {"state": "visionzip"},
    ):
        assert join_headers(agreeing, headers) == fields
    assert join_headers({"keep": "state"}, headers) == {"keep": "state", **fields}
    assert join_headers({"budget": "50%"}, [(BUDGET, "1/2")]) == {"budget": "1/2"}
    for malformed in ([(BUDGET, "9" * 5000)], [(BUDGET, "[" * 5000)], [headers[0]] * 2):
        with pytest.raises(RequestError) as caught:
            join_headers({}, malformed)
        (problem,) = caught.value.problems
        assert problem.fix and len(str(problem)) < 200


def test_headers_turn_pruning_off_and_set_the_budget_of_videos() -> None:
    video = "x-autoprune-video-budget"
    for headers, fields in (
        ([(ENABLED, "false")], {"enabled": False}),
        ([(ENABLED, "true"), (video, "16")], {"enabled": True, "video_budget": 16}),
        ([(video, "tokens_per_frame:16")], {"video_budget": "tokens_per_frame:16"}),
        ([(video, "1/8")], {"video_budget": "1/8"}),
    ):
        assert join_headers(None, headers) == join_headers(fields, headers) == fields
    for entry, header, text, problem in (
        ({"enabled": True}, ENABLED, "false", "contradicts the body"),
        ({"video_budget": 8}, video, "16", "contradicts the body"),
        ({}, ENABLED, "False", 'is \'False\' -> give "true" or "false"'),
        ({}, ENABLED, "0", 'give "true"'),
        ({}, video, "[16]", "tokens_per_frame:16"),
        (
            {},
            "x-autoprune-video_budget",
            "16",
            f"is not a known header -> send {BUDGET} or ",
        ),
    ):
        with pytest.raises(RequestError) as caught:
            join_headers(entry, [(header, text)])
        assert f"header {header}: " in str(caught.value) and problem in str(
            caught.value
        )
    request = PruningRequest.parse(join_headers({"budget": 8}, [(ENABLED, "false")]))
    with pytest.raises(
        RequestError, match="keeps every token, but 'budget' is given as well"
    ):
        check_fields(server(), request)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        *((name, True) for name in HEADERS),
        *((name.replace("-", "_"), True) for name in HEADERS),
        ("x-auto-prune-budget", True),
        ("autoprune-budget", True),
        ("x-autorpune", True),
        ("x-autotune-budget", False),
        ("x-request-id", False),
    ],
)
async def test_a_header_that_is_nearly_ours_is_answered_and_not_ignored(
    name: str, is_ours: bool
) -> None:
    """Such as one of which a proxy has made underscores."""
    seen: list[Any] = []

    async def app(scope: Any) -> None:
        seen.extend(current_headers())

    await KeepHeaders(app)({"type": "http", "headers": [(name.encode(), b"?")]})
    assert [header for header, _ in seen] == [name] * is_ours
    if is_ours and name not in HEADERS:
        with pytest.raises(
            RequestError, match=f"header {name}: is not a known header -> send x-"
        ):
            join_headers(None, seen)


# ---- K, state and control of each image ----

LARGE = edited(sample(), {"/budget": {"atom": "fixed_budget@192"}})
DETAIL = DetailBudgets.model_validate({"low": 4, "high": 32})


BOUNDED = server(minimum=8, maximum=64)
DETAILED = server(detail=DETAIL)
SHARES = DetailBudgets.model_validate({"low": "1/16", "high": "1/4:1-64"})
BY_DETAIL = [server(level, detail=DETAIL) for level in LEVELS]
LOW_HIGH = {"details": ["low", "high"]}
POOR = server(
    capabilities=Capabilities(unavailable=(("language", "--enable-lora: because"),))
)
VISIONZIP = load_state("visionzip").budget.range()[1]


@pytest.mark.parametrize(
    ("on", "entry", "sizes", "budgets"),
    [
        *((server(level), None, (N, 5), [8, 5]) for level in LEVELS),
        (server(), {"budget": [16, 4]}, (N, N), [16, 4]),
        (server(), {"budget": {"shared": 33}}, (10, N), [10, 23]),
        (server(), {"enabled": False}, (N, 5), [N, 5]),
        (
            BOUNDED,
            {"enabled": False},
            (64, 5),
            [64, 5],
        ),  # 8 is the least that is kept of more
        (BOUNDED, {"budget": [8, 64]}, (N, N), [8, 64]),
        # Shares, of which MIN and MAX bound what an image gets.
        (BOUNDED, {"budget": "1/8"}, (N, 64, 512), [18, 8, 64]),
        (BOUNDED, {"budget": ["12.5%:8-64", "1/3", "64"]}, (2880, N, 20), [64, 48, 20]),
        (server(), {"budget": {"shared": "1/4"}}, (20, N), [20, 21]),
        (server(budget=BudgetCall.parse("1/8:4-16")), None, (N, 8, 64), [16, 4, 8]),
        (server("none", detail=SHARES), LOW_HIGH, (N, 576), [9, 64]),
        # What all keep together has a bound, below which nothing changes.
        (server(total=21), None, (N, N, 5), [8, 8, 5]),
        (server(total=20), None, (N, N, 5), [8, 7, 5]),
        (server(total=3, minimum=4), {"state": "visionzip"}, (N, N, N), [1, 1, 1]),
        (server(total=33), {"budget": [16, 17]}, (N, N), [16, 17]),
        # Neither the server's own budget nor what is recalled has a least one.
        (server(minimum=16, maximum=64), None, (N,), [8]),
        *(
            (server("budget", 16, 64), {"recall": tokens}, (N,), [8])
            for tokens in (0, 1, 64)
        ),
        # What keeps everything reads nothing.
        (POOR, {"state": "fastv", "budget": N}, (N,), [N]),
        # Details count at every level, where the operator gave them and the request sets nothing.
        *(
            (on, {"details": ["low", None, "high"]}, (N, N, 20), [4, 8, 20])
            for on in BY_DETAIL
        ),
        (
            server(detail=DetailBudgets.model_validate({"low": 4})),
            LOW_HIGH,
            (N, N),
            [4, 8],
        ),
        (DETAILED, {**LOW_HIGH, "budget": {"shared": 9}}, (N, N), [5, 4]),
        (
            DETAILED,
            {"state": "visionzip", "details": ["low", None]},
            (N, N),
            [4, VISIONZIP],
        ),
        (DETAILED, {"details": ["low"]}, (N, N), [8, 8]),
        # The operator gave range and details; start-up has checked their end.
        (
            server(minimum=16, maximum=64, detail=DETAIL),
            {"details": ["low"]},
            (N,),
            [4],
        ),
    ],
)
def test_each_image_keeps_k_of_its_tokens(
    on: ServedState, entry: object, sizes: tuple[int, ...], budgets: list[int]
) -> None:
    plans = resolve(entry, *sizes, on=on)
    expected = [
        (budget, size, NO_KEY) for budget, size in zip(budgets, sizes, strict=True)
    ]
    assert [(plan.budget, plan.tokens, plan.key) for plan in plans] == expected


@parametrize_from_file("entry", "where")
def test_what_a_request_asks_for_beyond_the_bound_is_refused(
    entry: object, where: str
) -> None:
    images = 41 if where == "messages" else 3
    with pytest.raises(RequestError, match="a request has 40 for them") as caught:
        resolve(entry, *[N] * images, on=server(total=40))
    assert caught.value.problems[0].where.endswith(where)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"budget": 7}, "budget: K = 7, and requests may ask for 8 to 64"),
        ({"budget": [65, 8]}, "budget: K = 65, and requests may ask for 8 to 64"),
        ({"state": LARGE}, "state: K = 192, and requests may ask for 8 to 64"),
        ({"enabled": False}, "enabled: false keeps all 144 tokens of an image"),
    ],
)
def test_k_outside_the_range_of_requests_is_refused(
    entry: object, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        resolve(entry, N, N, on=BOUNDED)


def test_a_budget_may_follow_the_tiles() -> None:
    images = [TokenCount(N, tiles=3), TokenCount(N, tiles=1)]
    tiled = edited(sample(), {"/budget": {"atom": "per_tile_budget", "k": 10}})
    plans = resolve_images({"state": tiled}, images, server())
    assert [plan.budget for plan in plans] == [30, 10]
    with pytest.raises(RequestError, match="K = 30"):
        resolve_images({"state": tiled}, images, server(maximum=20))


def test_a_plan_carries_the_state_of_its_request_and_reads_what_that_reads() -> None:
    (served_plan,) = resolve(None)
    (brought,) = resolve({"state": "visionzip", "budget": 7})
    assert (served_plan.state, served_plan.keep) == (b"", "state")
    assert decode_state(brought.state).digest == load_state("visionzip").digest
    assert "instruction" in server().find_needs(served_plan)
    assert "instruction" not in server().find_needs(brought)
    assert "language" in server().find_needs(*resolve({"state": "fastv", "budget": 8}))
    for entry in (
        {"keep": "random"},
        {"keep": "resized"},
        {"budget": N},
        {"enabled": False},
    ):
        assert server().find_needs(*resolve(entry)) == frozenset()


def test_a_server_makes_what_any_request_may_read() -> None:
    assert server("budget").needs == served().needs
    assert server("shipped-states").needs == set(NEEDS)
    assert POOR.needs == set(NEEDS) - {"language"}
    # r_min = K leaves nothing to exchange at the default budget, but at a larger one.
    fixed = served(
        {"/base_policy": {"name": "divprune"}, "/constraints/selector/r_min": 8}
    )
    assert materialize(fixed.state, fixed.budget).needs == frozenset()
    assert fixed.needs == materialize(fixed.state, 16).needs
    assert fixed.needs == {"cls_attention", "instruction"}


# ---- states in requests ----


def refused(value: Any, **bounds: float) -> str:
    with pytest.raises(RequestError) as caught:
        load_request_state(value, **bounds)
    for problem in caught.value.problems:
        assert problem.where.startswith("mm_processor_kwargs/autoprune/state")
        assert problem.what and problem.fix
    assert len(str(caught.value)) < 10_000
    return str(caught.value)


def test_a_shipped_name_or_a_whole_state_is_loaded_and_a_name_is_never_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_request_state("visionzip").digest == load_state("visionzip").digest
    assert load_request_state(sample()).digest == state().digest
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(sample()))
    monkeypatch.chdir(tmp_path)
    for name in (
        str(file),
        "mine.json",
        "mine",
        "../policies/autoprune.json",
        "/etc/passwd",
        "~",
    ):
        assert "ships with this server" in refused(name)


def test_a_state_with_mistakes_is_pointed_at_and_no_value_is_too_odd() -> None:
    mistakes = {"/scoring/fusion/atom": "no", "/constraints/selector/q_e": -1}
    assert all(
        f"state{pointer}" in refused(edited(sample(), mistakes)) for pointer in mistakes
    )
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for junk in (
        {},
        {"a": 1},
        deep,
        {"schema": float("nan")},
        {"x": object()},
        {1: {2: 3}},
    ):
        refused(junk)


def test_a_large_or_costly_state_is_refused_before_it_is_parsed_or_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        state_safety, "safety_check", lambda policy: pytest.fail("it was run")
    )
    signal = {
        "atom": "cluster_centroid_representativeness",
        "clusters": 64,
        "weight": 0.5,
    }
    source = {"atom": "diversity_pool_builder", "pool_ratio": 8.0}
    pool = {
        "atom": "multi_source_pool_builder",
        "pool_ratio": 8.0,
        "sources": [source] * 8,
    }
    dear = {"/scoring/signals": [signal] * 32, "/constraints/pool": [pool] * 8}
    said = refused(edited(sample(), dear))
    assert "ms of one CPU core" in said and "may take 200" in said
    assert "32 x cluster_centroid_repre" in said and "--autoprune-request-cost" in said
    assert "may take 20" in refused(
        edited(sample(), {"/constraints/selector/q_e": 5}), cost=20.0
    )
    monkeypatch.setattr(
        request_states, "_load", lambda text: pytest.fail("it was parsed")
    )
    huge = edited(sample(), {"/provenance": {"notes": "n" * 10_000_000}})
    assert "a request may bring 65536" in refused(huge)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[PruningPolicy]:
    """Make every state fail its safety check; the policies that were checked."""
    policies: list[PruningPolicy] = []

    def fail(policy: PruningPolicy) -> SafetyRecord:
        policies.append(policy)
        return SafetyRecord((Verdict("shapes", False, "made to fail"),))

    monkeypatch.setattr(state_safety, "safety_check", fail)
    monkeypatch.setattr(state_safety, "_warnings", itertools.count(1))
    return policies


UNSAFE = edited(sample(), {"/constraints/selector/q_e": 7})
"""A state that is served as its base policy where it fails its safety check."""

STRICT = edited(UNSAFE, {"/safety": ["preserve_budget"]})
"""One that is then refused."""


def test_an_unsafe_state_of_a_request_is_its_base_policy_or_refused(
    checked: list[PruningPolicy], logged: pytest.LogCaptureFixture
) -> None:
    """By its digest, and it is checked once."""
    expected = state({"/constraints/selector/q_e": 7}).without_exchange().digest
    for _ in range(3):
        assert load_request_state(UNSAFE).digest == expected
        assert "made to fail" in refused(STRICT)
    assert len(checked) == 2
    assert [record.levelname for record in logged.records] == ["WARNING"]
    assert "made to fail" in logged.messages[0]


def test_an_unsafe_state_of_the_server_is_its_base_policy_or_refused(
    checked: list[PruningPolicy], logged: pytest.LogCaptureFixture
) -> None:
    served_state = _resolve_settings({"state": UNSAFE}, vllm_config())
    expected = state({"/constraints/selector/q_e": 7}).without_exchange().digest
    assert served_state.state.digest == expected
    assert not materialize(served_state.state, served_state.budget).refines
    assert "made to fail" in logged.messages[-1]
    (problem,) = refusal({"state": STRICT})
    assert problem.where == "state#/safety" and "made to fail" in problem.what
    assert "fallback_to_selection" in problem.fix
    assert len(checked) == 2


def test_clients_cannot_fill_the_log_with_unsafe_states(
    checked: list[PruningPolicy], logged: pytest.LogCaptureFixture
) -> None:
    for quota in range(20, 50):
        load_request_state(edited(sample(), {"/constraints/selector/q_e": quota}))
    assert ["not logged" in line for line in logged.messages] == [False] * 15 + [True]
    assert len(checked) == 30


def test_a_state_is_checked_at_its_own_budget_up_to_the_largest_quota(
    checked: list[PruningPolicy],
) -> None:
    for budget in (16, 320, 4096):
        _resolve_settings({"state": "autoprune", "budget": budget}, vllm_config())
    large = {"/budget/atom": "fixed_budget@512", "/constraints/selector/r_min": 512}
    _resolve_settings({"state": edited(sample(), large), "budget": 4096}, vllm_config())
    assert [policy.budget for policy in checked] == [16, 320, 640, 640]
    # A request's at 64, where 512 tokens that stay would make it wait for seconds.
    assert (
        load_request_state(edited(sample(), large)).constraints.selector.explicit_r_min
        is None
    )
    strict = edited(sample(), {**large, "/safety": ["preserve_budget"]})
    assert "made to fail" in refused(strict)
    assert [policy.budget for policy in checked[4:]] == [64, 64]


def test_a_state_of_a_request_keeps_its_r_min_when_it_is_checked_at_fewer_tokens() -> (
    None
):
    large = {"/budget/atom": "fixed_budget@512", "/constraints/selector/r_min": 500}
    document = edited(sample(), large)
    assert (
        load_request_state(document).digest == load_state(json.dumps(document)).digest
    )
