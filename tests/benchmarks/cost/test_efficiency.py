"""The published efficiency table, and the one that is measured."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cost import efficiency
from benchmarks.cost.__main__ import main
from benchmarks.server import ServerDied
from tests.fake_server import Body, FakeServer, Reply, fake_server
from tests.tables import parametrize_from_file
from vllm_autoprune.backbones import BACKBONE_SHAPES


@parametrize_from_file("backbone", "tokens", "teraflops", "kv_mib")
def test_the_published_efficiency_table_is_recomputed(
    backbone: str, tokens: int, teraflops: float | None, kv_mib: float
) -> None:
    cost = BACKBONE_SHAPES[backbone].estimate_cost(tokens)
    assert teraflops is None or cost.teraflops == pytest.approx(teraflops, abs=6e-4)
    assert cost.kv_mib == kv_mib


@pytest.mark.parametrize(
    ("arm", "times_fewer"),
    [("cdpruner", 9.9), ("AutoPrune", 9.9), ("fastv", 7.6), ("pyramiddrop", 2.9),
     ("sparsevlm", 6.1), ("dart", 6.1)],
)  # fmt: skip
def test_layers_that_rank_all_tokens_are_counted(arm: str, times_fewer: float) -> None:
    model = efficiency.ServedModel(
        "llava-next-7b", Path(), BACKBONE_SHAPES["llava-next-7b"], ""
    )
    cost, full = (model.compute_cost(name, 320, None) for name in (arm, "full"))
    assert round(full.flops / cost.flops, 1) == times_fewer
    assert (full.tokens, cost.tokens) == (2880, 320)


@contextlib.contextmanager
def serve(model: Path, *flags: str, log: Path, **_: object) -> Iterator[FakeServer]:
    """Its first question takes 0.5 s of prefill stock, 0.1 s pruned; FastV's does not start."""
    state = (
        flags[flags.index("--autoprune-state") + 1]
        if "--autoprune-state" in flags
        else ""
    )
    log.write_text("ValueError: no attention\n")
    if state == "fastv":
        raise ServerDied.diagnose(log)
    seconds = 0.1 if state else 0.5
    sent = list[Body]()

    def metrics() -> str:
        count = len(sent)
        lines = [f"vllm:request_prefill_time_seconds_sum {seconds * count}"]
        lines.append(f"vllm:request_prefill_time_seconds_count {count}")
        lines.append(f"vllm:request_decode_time_seconds_sum {0.15 * count}")
        if state:
            lines.append(f"autoprune_images_total {count}")
            lines.append(f'autoprune_visual_tokens_total{{stage="after"}} {16 * count}')
        return "\n".join(lines) + "\n"

    def call_worker(path: str, call: Body) -> tuple[int, Body]:
        assert path == "/collective_rpc"
        peak = {"peak": 9 << 20, "weights": 4 << 20, "cache": 2 << 20}
        return 200, {"results": [peak if "read" in call["method"] else None]}

    def reply(body: Body) -> Reply:
        sent.append(body)
        return Reply(ttft=0.002, gaps=(0.001,))

    with fake_server(reply, model=None, pages={"/metrics": metrics}) as server:
        server.get = lambda path: metrics()  # type: ignore[attr-defined]
        server.post = call_worker  # type: ignore[attr-defined]
        yield server


def test_every_arm_is_served_and_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficiency, "serve", serve)
    command = ["efficiency", "--policies", "fastv,divprune", "--requests", "2"]
    command += ["--users", "1,2"]
    assert main([*command, "--out", str(tmp_path)]) == 1  # an arm was not served
    text = capsys.readouterr().out
    assert "mini-llava, 6 language layers served, K = 16; 2 requests a row\n" in text
    assert "K = 16; 10 requests a row, 2 at once\n" in text
    lines = [line.strip("| ").split(" | ") for line in text.split("\n") if "| " in line]
    rows, several = (lines[start + 2 : start + 6] for start in (0, 6))
    assert [row[0] for row in rows] == ["full", "divprune", "AutoPrune", "fastv"]
    assert [row[0] for row in several] == [row[0] for row in rows]
    assert rows[0][1] == "144" and rows[0][6] == "10.0 (10.0–10.0)"
    assert rows[0][3:5] == ["500.0 (500.0–500.0)", "1.00 (1.00–1.00)"]
    assert rows[3][1] == "not served: ValueError: no attention"
    assert rows[1][1] == "16" and rows[1][9] == "3"
    assert rows[1][3:5] == ["100.0 (100.0–100.0)", "5.00 (5.00–5.00)"]
    assert text.strip() == (tmp_path / "mini-llava.md").read_text().strip()
    table = csv.DictReader((tmp_path / "mini-llava.csv").read_text().splitlines())
    intervals = {(r["what"], r["setting"].rpartition("; ")[2]): r["low"] for r in table}
    record = json.loads((tmp_path / "mini-llava.json").read_text())
    by_arm = {(row["arm"], row["users"]): row for row in record["rows"]}
    assert len(by_arm) == 6 and len(by_arm["divprune", 2]["ttft"]) == 10
    assert by_arm["divprune", 2]["prefill"] == pytest.approx([0.1] * 5)
    assert by_arm["divprune", 2]["prefill_times_as_fast"]["value"] == pytest.approx(5)
    assert "score is left out" in text
    times = ("prefill", "ttft", "decode", "prefill, times as fast as full")
    assert all(intervals[what, "divprune"] for what in times)
