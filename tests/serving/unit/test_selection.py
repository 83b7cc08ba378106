"""Selection with its fallbacks, the first image's check, cached features, metrics."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, TensorCache
from vllm_autoprune.serving.worker.metrics import SELECTION, Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    FirstImageCheck,
    select_with_fallback,
)
from vllm_autoprune.tpdsl import safety
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord, Verdict
from vllm_autoprune.tpdsl.refine import keep_reference

POLICY = materialize(state({"/constraints/selector/q_e": 4}), 8)


# ---- fallbacks ----


def fail(*_: object) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize("kind", ["reference", "uniform"])
def test_an_exception_falls_back_to_the_reference_and_then_to_evenly_spaced_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, tokens = FallbackReporter(), images()
    expected = keep_reference(POLICY, tokens).indices
    monkeypatch.setattr(selection, "select_tokens", fail)
    if kind == "uniform":
        monkeypatch.setattr(selection, "keep_reference", fail)
        expected = evenly_spaced(2, tokens.count, 8, tokens.features.device)
    result = select_with_fallback(POLICY, tokens, reporter)
    assert torch.equal(result.indices, expected)
    assert {key: n for key, n in reporter.counts().items() if n} == {(kind, "error"): 2}
    assert reporter.errors == {"RuntimeError": 1 + (kind == "uniform")}


def test_fallbacks_and_errors_add_up_and_each_kind_is_logged_once(
    logged: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    assert set(reporter.counts().values()) == {0}
    for codes in ([0, 0], [1, 0], [1, 1], [0], [2], [2], [1], [0]):
        reporter.report(torch.tensor(codes, dtype=torch.uint8))
    kinds = "none", "reference", "uniform"
    assert [reporter.counts()[kind, "scores"] for kind in kinds] == [5, 4, 2]
    lines = [record.getMessage() for record in logged.records]
    assert [[kind in line for kind in kinds[1:]] for line in lines] == [
        [True, False],
        [False, True],
    ]
    logged.clear()
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        reporter.report_error(error)
    assert reporter.errors == {"ValueError": 2, "KeyError": 1}
    assert [r.exc_info[0] for r in logged.records if r.exc_info] == [ValueError, KeyError]


# ---- the check on the first image ----


def test_non_finite_images_fail_no_state(logged: pytest.LogCaptureFixture) -> None:
    check, tokens = FirstImageCheck(), images()
    spoilt = replace(tokens, features=tokens.features * float("nan"))
    for image in (spoilt, tokens):
        assert check.replace_unsafe(POLICY, image) is POLICY
    assert (check.unsafe, logged.records) == (0, [])


def fail_at(monkeypatch: pytest.MonkeyPatch, budget: int) -> list[int]:
    """Make every state fail its safety check at one budget; return the list of checked budgets."""
    checked: list[int] = []
    stock = safety.safety_check

    def check(policy: PruningPolicy, probes: list[VisualTokens]) -> SafetyRecord:
        checked.append(policy.budget)
        if policy.budget == budget:
            return SafetyRecord((Verdict("shapes", False, "made to fail"),))
        return stock(policy, probes)

    monkeypatch.setattr(selection, "safety_check", check)
    return checked


@pytest.mark.parametrize("budgets", [(8, 5), (5, 8)])
def test_a_verdict_is_of_one_budget_and_is_reached_once(
    monkeypatch: pytest.MonkeyPatch, budgets: tuple[int, int], logged: pytest.LogCaptureFixture
) -> None:
    """In either order, the verdict at one budget does not affect the other."""
    checked = fail_at(monkeypatch, 5)
    check, tokens = FirstImageCheck(), images()
    for _ in range(2):
        for budget in budgets:
            requested = materialize(POLICY.state, budget)
            replacement = check.replace_unsafe(requested, tokens)
            assert (replacement is requested) == (budget != 5)
            assert replacement.quota == (0 if budget == 5 else requested.quota)
    assert (checked, check.unsafe) == (list(budgets), 1)
    (record,) = logged.records
    assert "K = 5: shapes: made to fail" in record.getMessage()


def test_a_verdict_is_of_one_number_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = fail_at(monkeypatch, 0)
    check, square = FirstImageCheck(), images()
    tiled = replace(square, grid=Grid(square.grid.height // 2, square.grid.width, 2))
    for tokens in (square, tiled, square, tiled):
        check.replace_unsafe(POLICY, tokens)
    assert len(checked) == 2


# ---- the cache of features ----


def sized(units: int) -> ImageFeatures:
    """Features of ``16 * units`` bytes."""
    encoder = torch.zeros(units, 2, dtype=torch.bfloat16)
    region = Region(Grid(1, units), torch.zeros(units, 3), {"encoder": encoder})
    return ImageFeatures((region,))


@given(st.integers(0, 10), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=60))
def test_cache_never_exceeds_its_bound(limit: int, puts: list[tuple[int, int]]) -> None:
    cache = TensorCache[ImageFeatures](16 * limit)
    for key, units in puts:
        cache.put(key, sized(units))
        inside = [features for k in range(9) if (features := cache.get(k)) is not None]
        assert cache.used_bytes == sum(features.nbytes for features in inside) <= cache.limit
        assert len(cache) == len(inside)


def test_profiling_reserves_the_bound_where_memory_is_measured() -> None:
    cache = TensorCache[ImageFeatures](64)
    assert cache.reserve(torch.device("cpu")) is None
    buffer = cache.reserve(torch.device("meta"), more=32)
    assert buffer is not None and buffer.nbytes == 96


# ---- metrics of workers, shown by API servers ----


def publish(worker: WorkerMetrics, seconds: tuple[float, ...] = (), hits: int = 0) -> None:
    watch: Any = SimpleNamespace(collect=lambda: seconds)
    cache = TensorCache[ImageFeatures](64)
    cache.hits = hits
    worker.publish(watch, FallbackReporter(), cache, 0)


def read_metrics(folder: Path) -> dict[str, float]:
    """Metrics that an API server exports from a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_seconds_fall_into_buckets(tmp_path: Path) -> None:
    with closing(WorkerMetrics(str(tmp_path))) as worker:
        publish(worker, (0.0005, 0.001, 0.3))
        publish(worker, (99.0,))
    metrics = read_metrics(tmp_path)
    buckets = {"0.001": 2, "0.25": 2, "0.5": 3, "2.5": 3, "+Inf": 4}
    assert {edge: metrics[f'{SELECTION}_bucket{{le="{edge}"}}'] for edge in buckets} == buckets
    assert metrics[f"{SELECTION}_sum"] == pytest.approx(99.3015)


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
