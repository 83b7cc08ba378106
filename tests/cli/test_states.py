"""list, show, diff, materialize, validate: text and JSON output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tpdsl.samples import edited, shipped, state
from vllm_autoprune import load_state
from vllm_autoprune.cli.commands.states import describe
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.state import required_inputs

Captured = pytest.CaptureFixture[str]


def run_command(capsys: Captured, *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    return capsys.readouterr().out


def test_the_list_says_what_a_choice_depends_on(capsys: Captured) -> None:
    lines = run_command(capsys, "list").splitlines()
    assert {line.split()[0] for line in lines[2:-2]} == set(shipped_states())
    listed = json.loads(run_command(capsys, "list", "--json"))
    records = {record["name"]: record for record in listed}
    assert records["autoprune"]["base_policy"] == "cdpruner"
    assert (records["autoprune"]["exchanges"], records["cdpruner"]["exchanges"]) == (2, 0)
    assert records["autoprune"]["reads_instruction"] is True
    assert records["visionzip"]["reads_instruction"] is False
    assert records["minillava-split"]["core"] > 0


RATIO = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64}
CORE = {"share": 0.75, "cover": 0.25}


@pytest.mark.parametrize(
    ("changes", "budget", "expected", "words"),
    [
        ({}, None, (32, 32), ["Keeps 32 visual tokens", "At most 2", "at least 30",
                              "two questions on one image"]),
        ({}, 64, (64, 64), ["Keeps 64 visual tokens", "at least 62"]),
        ({"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}}, None, (32, 32),
         ["the base policy alone chooses", "share its KV cache"]),
        ({"/budget": RATIO}, None, (8, 64), ["Keeps 8 to 64, by its size"]),
        ({"/budget": RATIO}, 20, (20, 20), ["Keeps 20 visual"]),
        ({"/core": CORE}, 64, (64, 64), [
            "48 of them are the core, chosen by divprune without the question",
            "questions on one image share the KV cache of its core"]),
        ({"/core": {"share": 1.0}, "/rank_at": "merger_in"}, 64, (64, 64),
         ["all chosen by divprune", "does not read the instruction", "before it merges them"]),
        ({"/rank_at": "merger_in"}, None, (32, 32), ["before it merges them"]),
    ],
)  # fmt: skip
def test_a_state_in_words(
    changes: dict[str, object], budget: int | None, expected: tuple[int, int], words: list[str]
) -> None:
    description = describe(state(changes), budget)
    text = " ".join(description["words"])
    assert description["budget"] == expected
    assert [part for part in words if part not in text] == []
    assert (" core" in text) == (changes.get("/core") == CORE)
    assert ("patch merger" in text) == ("/rank_at" in changes)


def test_show_lists_the_parts_of_a_state(capsys: Captured) -> None:
    output = run_command(capsys, "show", "autoprune")
    parts = ("Keeps 32 visual tokens", "cdpruner", "q_e = 2, r_min = 30", "42%", "pool_ratio",
             "instruction_guided_visual_relevance", "quality_pool_builder", "features, instruction",
             "anchor_weighted_residual", load_state("autoprune").digest[:12])  # fmt: skip
    assert [part for part in parts if part not in output] == []
    assert "K_c = 8, share = 0.5" in run_command(capsys, "show", "minillava-split")
    record = json.loads(run_command(capsys, "show", "autoprune", "--budget", "64", "--json"))
    assert (record["budget"], record["q_e"], record["r_min"]) == ([64, 64], 2, 62)
    assert record["base_policy"]["atom"] == "cdpruner"
    assert [part["atom"] for part in record["pool"]] == ["quality_pool_builder"]
    assert record["reads"] == ["instruction"]
    shares = [signal["share"] for signal in record["signals"]]
    assert len(shares) == 5 and sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(0.28 / 0.67)
    assert "weight" not in record["signals"][0]["parameters"]
    assert record["core"] is None and record["rank_at"] == "merger_out"
    weightless = state({f"/scoring/signals/{i}/weight": 0.0 for i in range(5)})
    assert [signal["share"] for signal in describe(weightless)["signals"]] == [0.0] * 5


def test_diff_points_at_what_differs(tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other.json"
    data = edited(shipped("autoprune"), {"/scoring/signals/0/weight": 0.5, "/name": "other"})
    other.write_text(json.dumps({**data, "provenance": shipped("autoprune")["provenance"]}))
    output = run_command(capsys, "diff", "autoprune", str(other))
    assert "digests differ" in output and "/scoring/signals/0/weight" in output
    record = json.loads(run_command(capsys, "diff", "autoprune", str(other), "--json"))
    assert not record["same_behaviour"]
    changes = {change["where"]: change["after"] for change in record["changes"]}
    assert changes == {"/name": "other", "/scoring/signals/0/weight": 0.5}
    output = run_command(capsys, "diff", "autoprune", "autoprune")
    assert "both keep the same tokens" in output and "no field differs" in output


def test_materialize_writes_a_state_and_its_changes(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "next.json"
    call = ("materialize", "autoprune", "--budget", "160", "--backbone", "llava-next-7b")
    output = run_command(capsys, *call, "-o", str(target))
    assert "/budget" in output and "32 + 32 + 32 + 32 + 32" in output and "valid" in output
    assert str(target) in output
    written = load_state(target)
    assert written.name == "autoprune-llava-next-7b-k160"
    assert run_command(capsys, "validate", str(target)).startswith(f"{target}: valid, K = 160")
    record = json.loads(run_command(capsys, *call, "--json"))
    assert record["valid"] and record["budget"] == 160
    assert load_state(json.dumps(record["state"])).digest == record["digest"] == written.digest
    assert all(change["why"] for change in record["changes"])
    # A failed write leaves no file.
    target = tmp_path / "no" / "such" / "folder.json"
    assert main([*call, "-o", str(target)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["next.json"]


def test_an_instruction_free_variant_reads_no_instruction(capsys: Captured) -> None:
    arguments = ("--instruction-free", "--budget", "64", "--json")
    record = json.loads(run_command(capsys, "materialize", "autoprune", *arguments))
    changed = {change["where"] for change in record["changes"]}
    assert {"/base_policy/name", "/budget/atom"} <= changed
    assert required_inputs(load_state(json.dumps(record["state"])), exchange=True) == frozenset()
    assert record["budget"] == 64


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "autoprone"],
        ["diff", "autoprune", "autoprone"],
        ["materialize", "autoprune", "--budget", "0"],
        ["materialize", "autoprune", "--backbone", "llava"],
        ["cost", "--backbone", "llava-next-7b", "--tokens", "0"],
    ],
)
def test_errors_are_one_line(arguments: list[str], capsys: Captured) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and " -> " in captured.err
    assert main([*arguments, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["error"].endswith("Error") and record["problems"][0]["fix"]


def test_validate_warns_of_evidence_that_resizing_wins(tmp_path: Path, capsys: Captured) -> None:
    lost = {"budget": 16, "less_resized": {"value": -4.0, "low": -7.0, "high": -1.0}}
    document = json.loads(load_state("visionzip").dumps())
    document["provenance"]["scores"] = {"rows": [lost]}
    file = str(tmp_path / "mine.json")
    Path(file).write_text(json.dumps(document))
    output = run_command(capsys, "validate", file)
    assert output.startswith(f"{file}: valid")
    assert "warn /provenance/scores/rows/0: resizing beats it at K = 16 by 4.0 points" in output
    assert "warn" not in run_command(capsys, "validate", "visionzip")
    (record,) = json.loads(run_command(capsys, "validate", file, "--json"))
    assert record["valid"] and len(record["warnings"]) == 1
    assert main(["validate", "visionzip", "--evidence", str(tmp_path / "none.json")]) == 1
    assert "give the report.json that vllm-autoprune eval wrote" in capsys.readouterr().err
