"""Verdicts of the selection measurements on hand-written times."""

from __future__ import annotations

import pytest

from benchmarks.common.report import Section
from benchmarks.cost.selection import memory, policies, refinement, share, speed
from benchmarks.cost.selection.images import LLAVA, Size, size_keeping
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def verdicts(section: Section) -> list[str]:
    return [claim.verdict for claim in section.claims]


def times(product: float, published: float, ours: float) -> dict[str, list[float]]:
    return {"product": [product] * 9, "published": [published] * 9, "ours": [ours] * 9}


def test_the_worst_size_decides() -> None:
    good, slow = times(1.0, 1.6, 1.2), times(1.0, 1.6, 1.7)
    assert verdicts(speed.build_section({size_keeping(576): good})) == ["holds", "holds"]
    both = speed.build_section({size_keeping(576): good, size_keeping(256): slow})
    assert verdicts(both) == ["does not hold", "does not hold"]
    assert "does not hold at 1 of 2 sizes, holds at 1 of 2 sizes" in both.claims[0].measured
    assert str(size_keeping(256)) in both.claims[0].measured


def test_the_product_is_a_bound_only_where_it_dominates() -> None:
    section = speed.build_section({size_keeping(64): times(0.4, 1.0, 0.9)})
    assert verdicts(section) == ["holds"]


def test_all_documented_sizes_are_measured() -> None:
    sizes = speed.sizes(quick=False)
    assert min(s.tokens for s in sizes) == 64 and max(s.tokens for s in sizes) == 2880
    assert {s.tiles for s in sizes} == {1, 5} and {s.batch for s in sizes} == {1, 2, 4, 8}
    assert Size(576, 1, 1, 64) in sizes and Size(576, 5, 8, 320) in sizes


@pytest.mark.parametrize(("selection", "verdict"), [(0.02, "holds"), (0.2, "does not hold")])
def test_a_prefill_is_32_layers(selection: float, verdict: str) -> None:
    times_by_size = {LLAVA[1]: {"selection": [selection] * 9, "layer": [0.1] * 9}}
    section = share.build_section("bfloat16", times_by_size)
    assert verdicts(section) == [verdict]
    assert section.tables[0].rows[0][-1] == "3.20"


@pytest.mark.parametrize(("selection", "verdict"), [(0.02, "holds"), (0.2, "does not hold")])
def test_every_policy_has_a_share_of_the_prefill(selection: float, verdict: str) -> None:
    layers = {policies.LAYER: [0.1] * 9, policies.FULL_LAYER: [0.5] * 9}
    own = {"divprune": [selection] * 9, "cdpruner": [0.01] * 9, "fastv": [0.01] * 9}
    section = policies.build_section({LLAVA[1]: own | layers})
    assert verdicts(section) == [verdict]
    assert "`divprune` is slowest" in section.claims[0].measured
    shares = {row[0]: row[-1] for row in section.tables[0].rows}
    # FastV runs one layer over all tokens: 0.51 of 3.2 seconds.
    assert shares == {
        "`cdpruner`": "0.31",
        "`divprune`": f"{selection / 0.032:.2f}",
        "`fastv`": "15.94",
    }


@pytest.mark.parametrize("name", sorted(BASE_POLICIES))
def test_every_policy_runs_on_the_measured_images(name: str) -> None:
    size = Size(16, 5, 1, 8)
    assert policies.select(name, policies.TokenSource(size), size.kept).picks.shape[0] == 1


@pytest.mark.parametrize(("full", "verdict"), [(1.09, "holds"), (1.11, "does not hold")])
def test_refinement_is_the_added_time(full: float, verdict: str) -> None:
    times_by_size = {LLAVA[1]: {refinement.FULL: [full] * 9, refinement.BASE: [1.0] * 9}}
    section = refinement.build_section(times_by_size, {"pools": [0.001] * 9})
    assert verdicts(section) == [verdict]
    assert section.tables[1].rows == [("pools", "1.0 (1.0–1.0)")]


@pytest.mark.parametrize(("together", "verdict"), [(3.9, "holds"), (4.1, "does not hold")])
def test_a_batch_must_be_faster_than_single_images(together: float, verdict: str) -> None:
    times_by_size = {Size(64, 1, 4, 8): {"together": [together] * 9, "one by one": [4.0] * 9}}
    assert verdicts(speed.build_batch_section(times_by_size)) == [verdict]


@pytest.mark.parametrize(("matrices", "verdict"), [(1.0, "holds"), (2.0, "does not hold")])
def test_memory_is_counted_in_matrices(matrices: float, verdict: str) -> None:
    of = Size(576, 5, 1, 320)
    empty = memory.Peak(0, 0, of)
    peak_bytes = int(matrices * empty.matrix) + max(empty.rows, empty.factors)
    peak = memory.Peak(peak_bytes, 2 * peak_bytes, of)
    assert peak.matrices == pytest.approx(matrices)
    assert verdicts(memory.build_section([peak])) == [verdict]
