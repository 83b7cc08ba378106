"""Selection with its fallbacks, the first image's check, cached features, metrics."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, materialize
from vllm_autoprune.ops.rowwise import evenly_spaced
from vllm_autoprune.serving.worker import selection
from vllm_autoprune.serving.worker.features import (
    FeatureCache,
    ImageFeatures,
    Region,
    Signals,
)
from vllm_autoprune.serving.worker.metrics import SELECTION, Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    FirstImageCheck,
    select_with_fallback,
)
from vllm_autoprune.tpdsl import safety
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord, Verdict
from vllm_autoprune.tpdsl.refine import keep_reference

# ---- selection with its fallbacks, the check on the first image, and the cache of features ----


@pytest.fixture
def policy() -> PruningPolicy:
    return materialize(state(), 8)


def failing(*names: str) -> Any:
    def fail(*_: object) -> Any:
        raise RuntimeError(f"broken: {names}")

    return fail


def test_exception_falls_back_to_the_reference(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, tokens = FallbackReporter(), images()
    monkeypatch.setattr(selection, "select_tokens", failing("refine"))
    result = select_with_fallback(policy, tokens, reporter)
    assert torch.equal(result.indices, keep_reference(policy, tokens).indices)
    assert reporter.meter.counts() == {"none": 0, "reference": 2, "uniform": 0}
    assert reporter.meter.errors == {"RuntimeError": 1}


def test_failing_base_policy_gives_evenly_spaced_tokens(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, tokens = FallbackReporter(), images()
    monkeypatch.setattr(selection, "select_tokens", failing("refine"))
    monkeypatch.setattr(selection, "keep_reference", failing("base"))
    result = select_with_fallback(policy, tokens, reporter)
    assert torch.equal(result.indices, evenly_spaced(2, tokens.count, 8, tokens.features.device))
    assert reporter.meter.counts() == {"none": 0, "reference": 0, "uniform": 2}
    assert reporter.meter.errors == {"RuntimeError": 2}


def test_meter_adds_up_and_each_kind_is_logged_once(logged: pytest.LogCaptureFixture) -> None:
    reporter = FallbackReporter()
    assert reporter.meter.counts() == {"none": 0, "reference": 0, "uniform": 0}
    for codes in ([0, 0], [1, 0], [1, 1], [0], [2], [2], [1], [0]):
        reporter.report(torch.tensor(codes, dtype=torch.uint8))
    assert reporter.meter.counts() == {"none": 5, "reference": 4, "uniform": 2}
    messages = [record.getMessage() for record in logged.records]
    assert [("reference" in line, "uniform" in line) for line in messages] == [
        (True, False),
        (False, True),
    ]


def test_errors_are_logged_once_a_type_with_their_traceback(
    logged: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        reporter.report_error(error)
    assert reporter.meter.errors == {"ValueError": 2, "KeyError": 1}
    assert [r.exc_info[0] for r in logged.records if r.exc_info] == [ValueError, KeyError]


# ---- the check on the first image ----


@pytest.fixture
def refining() -> PruningPolicy:
    return materialize(state({"/constraints/selector/q_e": 4}), 8)


def test_safe_state_is_checked_once(
    refining: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = FirstImageCheck()
    assert check.replace_unsafe(refining, images()) is refining
    monkeypatch.setattr(selection, "safety_check", None)
    assert check.replace_unsafe(refining, images()) is refining
    assert check.unsafe == 0


def test_non_finite_images_fail_no_state(
    refining: PruningPolicy, logged: pytest.LogCaptureFixture
) -> None:
    check, tokens = FirstImageCheck(), images()
    spoilt = VisualTokens(
        tokens.features * float("nan"), tokens.grid, tokens.cls_attention, tokens.instruction
    )
    assert check.replace_unsafe(refining, spoilt) is refining
    assert (check.unsafe, logged.records) == (0, [])
    assert check.replace_unsafe(refining, tokens) is refining
    assert check.unsafe == 0


def fails_at(monkeypatch: pytest.MonkeyPatch, budget: int) -> list[int]:
    """Make every state fail its safety check at one budget; return the list of checked budgets."""
    checked: list[int] = []
    stock = safety.safety_check

    def at_one_budget(refining: PruningPolicy, probes: list[VisualTokens]) -> SafetyRecord:
        checked.append(refining.budget)
        if refining.budget == budget:
            return SafetyRecord((Verdict("shapes", False, "made to fail"),))
        return stock(refining, probes)

    monkeypatch.setattr(selection, "safety_check", at_one_budget)
    return checked


@pytest.mark.parametrize("budgets", [(8, 5), (5, 8)])
def test_verdict_applies_to_one_budget(
    refining: PruningPolicy, monkeypatch: pytest.MonkeyPatch, budgets: tuple[int, int]
) -> None:
    """In either order, the verdict at one budget does not affect the other."""
    checked = fails_at(monkeypatch, 5)
    check, tokens = FirstImageCheck(), images()
    for _ in range(2):
        for budget in budgets:
            requested = materialize(refining.state, budget)
            replacement = check.replace_unsafe(requested, tokens)
            assert (replacement is requested) == (budget != 5)
            assert replacement.quota == (0 if budget == 5 else requested.quota)
    assert checked == list(budgets)
    assert check.unsafe == 1


def test_verdict_applies_to_one_number_of_tiles(
    refining: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fails_at(monkeypatch, 0)
    check, square = FirstImageCheck(), images()
    grid = square.grid
    tiled = replace(square, grid=Grid(grid.height // 2, grid.width, 2))
    for tokens in (square, tiled, square, tiled):
        check.replace_unsafe(refining, tokens)
    assert len(checked) == 2


# ---- the cache of features ----


def sized(units: int) -> ImageFeatures:
    """Features of ``16 * units`` bytes."""
    signals: Signals = {"encoder": torch.zeros(units, 2, dtype=torch.bfloat16)}
    return ImageFeatures((Region(Grid(1, units), torch.zeros(units, 3), signals),))


@given(st.integers(0, 10), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=60))
def test_cache_never_exceeds_its_bound(limit: int, puts: list[tuple[int, int]]) -> None:
    cache = FeatureCache(16 * limit)
    for key, units in puts:
        cache.put((key, 0), sized(units))
        assert cache.used_bytes <= cache.limit
        inside = [features for k in range(9) if (features := cache.get((k, 0))) is not None]
        assert cache.used_bytes == sum(features.nbytes for features in inside)
        assert len(cache) == len(inside)


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache = FeatureCache(3 * 16)
    for key in (1, 2, 3):
        cache.put((key, 0), sized(1))
    cache.get((1, 0))
    cache.put((4, 0), sized(1))
    assert [cache.get((key, 0)) is not None for key in (1, 2, 3, 4)] == [True, False, True, True]
    cache.put((5, 0), sized(2))  # evicts as many as needed
    assert [cache.get((key, 0)) is not None for key in (1, 3, 4, 5)] == [False, False, True, True]


def test_profiling_reserves_the_bound_where_memory_is_measured() -> None:
    assert FeatureCache(64).reserve(torch.device("cpu")) is None
    buffer = FeatureCache(64).reserve(torch.device("meta"))
    assert buffer is not None
    assert buffer.nbytes == 64


# ---- metrics of workers, shown by api servers ----


def shown(folder: Path) -> dict[str, float]:
    """Metrics that an API server exports from a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_seconds_fall_into_buckets(tmp_path: Path) -> None:
    with closing(WorkerMetrics(str(tmp_path))) as worker:
        worker.add_selections([0.0005, 0.001, 0.3])
        worker.add_selections([99.0])
    metrics = shown(tmp_path)
    edges = {f'{SELECTION}_bucket{{le="{edge}"}}': n for edge, n in
             (("0.001", 2), ("0.25", 2), ("0.5", 3), ("2.5", 3), ("+Inf", 4))}  # fmt: skip
    assert {name: metrics[name] for name in edges} == edges
    assert metrics[f"{SELECTION}_sum"] == pytest.approx(99.3015)


def test_workers_add_up_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, hits in ((10, 3), (11, 4)):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        with closing(WorkerMetrics(str(tmp_path))) as worker:
            worker.set_counter("autoprune_feature_cache_hits", hits)
    assert shown(tmp_path)["autoprune_feature_cache_hits_total"] == 7


def test_missing_folder_is_logged_once(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    """The API server is on another machine."""
    worker = WorkerMetrics(str(tmp_path / "elsewhere"))
    for _ in range(3):
        worker.set_counter("autoprune_feature_cache_hits", 1)
    (record,) = logged.records
    assert "elsewhere" in record.getMessage()


# ---- the folder of metrics ----


# ---- times ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collect_does_not_wait_for_the_gpu() -> None:
    watch = Stopwatch(torch.device("cuda"))
    with watch.measure():
        torch.cuda._sleep(200_000_000)
    assert watch.collect() == []
    torch.cuda.synchronize()
    (seconds,) = watch.collect()
    assert seconds > 0.01
