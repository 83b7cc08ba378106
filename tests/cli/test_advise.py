"""advise: the table and the JSON, from flags, from a server's metrics and from a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.fake_server import fake_server
from tests.test_probe import PAGE, N, PrunedServer, running
from vllm_autoprune.cli.commands import advise
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import load_state

Captured = pytest.CaptureFixture[str]

FULL_DEPTH = [
    *("advise", "--questions", "16", "--tokens", "2928", "--budget", "320", "--core", "256"),
    *("--template", "3", "--prompt", "18", "--block-size", "32", "--tower-ms", "12424"),
    *("--selection-ms", "70", "--layers", "32", "--layer-ms", "2949=6570.9", "341=805.5"),
]


def as_record(call: list[str], capsys: Captured) -> dict[str, Any]:
    assert main([*call, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert isinstance(record, dict)
    return record


def test_the_table_and_the_record(capsys: Captured) -> None:
    assert main(FULL_DEPTH) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line[:1].isalpha() and "  " in line}
    assert "0.67x  up to 9.5 questions" in rows["question-reading"]
    assert "at any number of questions" in rows["question-free"]
    assert any(line.startswith("Pruning helps here") for line in lines)
    (stock,) = [line for line in lines if line.startswith("stock, first")]
    assert stock.split()[2:] == ["0%", "6%", "0%", "1%", "93%", "1%"]
    assert any("Prefill is linear" in line for line in lines)
    record = as_record(FULL_DEPTH, capsys)
    ways = record["ways"]
    assert list(ways) == ["stock", "question-reading", "split", "question-free", "resized"]
    assert ways["stock"]["cheaper_than_stock"] is None
    assert ways["question-free"]["cheaper_than_stock"] == {"from": 1.0, "to": None}
    assert ways["split"]["another_of_first"] == pytest.approx(0.20, abs=0.005)
    assert record["verdict"]["helps"] is True and record["assumptions"]


def test_an_operator_of_a_cpu_without_bfloat16_is_told_the_dtype(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_autoprune.cli.commands.advise.choose_dtype", lambda: "float32")
    assert any("--dtype float32" in note for note in as_record(FULL_DEPTH, capsys)["notes"])
    assert advise._is_local("http://localhost:8000/v1") and not advise._is_local("http://gpu:8000")


def test_one_layer_time_and_no_prefix_cache(capsys: Captured) -> None:
    call = "advise --questions 2 --tokens 100 --tower-ms 1 --layers 4 --layer-ms 200=10"
    record = as_record([*call.split(), "--no-prefix-caching", "--request-ms", "3"], capsys)
    assert record["seconds"]["prefill"] == pytest.approx(4 * 0.010 / 200)
    assert record["seconds"]["request"] == pytest.approx(0.003)
    assert record["traffic"]["block"] == 0


@pytest.fixture
def split(tmp_path: Path) -> str:
    """A state of N / 8 tokens, half of them core."""
    state = load_state("miniqwen").model_dump(mode="json", by_alias=True)
    path = tmp_path / "split.json"
    path.write_text(json.dumps({**state, "core": {"share": 0.5}}))
    return str(path)


@pytest.mark.parametrize(
    ("more", "budget", "core"),
    [("", 72, 36), ("--budget 64", 64, 32), ("--budget 64 --core 8", 64, 8)],
)
def test_budget_and_core_of_a_state(
    split: str, capsys: Captured, more: str, budget: int, core: int
) -> None:
    call = f"advise --questions 2 --tokens 576 --tower-ms 1 --prefill-ms-per-token 1 {more} --state"
    traffic = as_record([*call.split(), split], capsys)["traffic"]
    assert (traffic["budget"], traffic["core"]) == (budget, core)


def test_a_probe_and_a_state_that_has_its_budget_from_it(split: str, capsys: Captured) -> None:
    with running(PrunedServer()) as server:
        call = ["advise", "--server", server.url, "--questions", "3", "--probe", "64x48"]
        record = as_record([*call, "--state", split], capsys)
    assert (record["traffic"]["tokens"], record["traffic"]["budget"]) == (N, N // 8)
    assert record["traffic"]["core"] == N // 16
    assert any("Measured with images of 64 x 48" in note for note in record["notes"])
    assert not any("no --core" in note for note in record["notes"])


def test_the_metrics_of_a_server(capsys: Captured) -> None:
    with fake_server(pages={"/metrics": PAGE}) as server:
        call = ["advise", "--server", server.url, "--tower-ms", "2000"]
        record = as_record([*call, "--state", "miniqwen"], capsys)
        # Metrics alone do not tell tower from prefill.
        assert main(call[:3]) == 1
    traffic = record["traffic"]
    assert (traffic["questions"], traffic["tokens"], traffic["budget"]) == (4, 640, 80)
    assert record["seconds"]["prefill"] == pytest.approx(0.010)
    assert record["seconds"]["selection"] == pytest.approx(0.125)
    error = capsys.readouterr().err
    assert "--tower-ms" in error and "--prefill-ms-per-token" in error and "--probe" in error


ENOUGH = "--tokens 8 --tower-ms 1 --prefill-ms-per-token 1 --questions"


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        ("", ["4 problem(s)", "--questions: is not known"]),
        ("--probe 10x10", ["--probe: needs --server"]),
        ("--layer-ms 10=1", ["--layer-ms: needs --layers"]),
        ("--server http://127.0.0.1:1", ["does not answer"]),
        ("--server nonsense", ["is not the address of a server"]),
        ("--server http://[", ["does not answer"]),
        (f"{ENOUGH} 0.5", ["--questions: 0.5 is refused -> give a value that is greater than"]),
        (f"{ENOUGH} 1 --budget 9", ["--budget: is 9 -> give at most the value of --tokens, 8"]),
        (f"{ENOUGH} 1 --core 5 --budget 4", ["--core: is 5 -> give at most"]),
    ],
)
def test_unanswerable_questions(call: str, texts: list[str], capsys: Captured) -> None:
    assert main(["advise", *call.split()]) == 1
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error


@pytest.mark.parametrize(
    "flag", ["--probe 10", "--probe 0x5", "--layer-ms 10", "--layer-ms 0=1", "--tokens many"]
)
def test_values_that_cannot_be_read(flag: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["advise", *flag.split()])
    assert caught.value.code == 2
