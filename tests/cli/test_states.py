"""list, show, diff, materialize, validate: text and JSON output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tpdsl.samples import edited, shipped, state
from vllm_autoprune import BudgetError, load_state
from vllm_autoprune.cli.commands.states import describe
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.state import required_inputs


def test_every_shipped_state_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[2:-2]} == set(shipped_states())


def test_the_list_says_what_a_choice_depends_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["autoprune"]["base_policy"] == "cdpruner"
    assert (records["autoprune"]["exchanges"], records["cdpruner"]["exchanges"]) == (2, 0)
    assert records["autoprune"]["reads_instruction"] is True
    assert records["visionzip"]["reads_instruction"] is False
    assert records["minillava-split"]["core"] > 0


def test_description_of_the_shipped_state() -> None:
    description = describe(state())
    assert (description["budget"], description["q_e"], description["r_min"]) == ((32, 32), 2, 30)
    assert description["base_policy"]["atom"] == "cdpruner"
    assert [part["atom"] for part in description["pool"]] == [
        "quality_pool_builder",
        "diversity_pool_builder",
    ]
    assert description["pool"][1]["parameters"] == {"pool_ratio": 0.5}
    assert description["reads"] == ["cls_attention", "instruction"]
    assert sum(signal["share"] for signal in description["signals"]) == pytest.approx(1)
    assert description["signals"][0]["share"] == pytest.approx(0.4)
    assert "weight" not in description["signals"][0]["parameters"]
    text = " ".join(description["words"])
    assert "Keeps 32 visual tokens" in text and "At most 2" in text and "at least 30" in text
    assert "two questions on one image" in text


def test_another_budget() -> None:
    description = describe(state(), 64)
    assert (description["budget"], description["r_min"]) == ((64, 64), 62)
    with pytest.raises(BudgetError):
        describe(state(), 0)


def test_a_base_policy_alone() -> None:
    alone = state({"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}})
    description = describe(alone)
    assert description["reads"] == []
    assert "the base policy alone chooses" in description["words"][1]
    assert "share its KV cache" in description["words"][2]


def test_weightless_signals_have_no_share() -> None:
    none = state({f"/scoring/signals/{i}/weight": 0.0 for i in range(5)})
    assert [signal["share"] for signal in describe(none)["signals"]] == [0.0] * 5


def test_a_budget_that_follows_the_image() -> None:
    ratio = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64}
    description = describe(state({"/budget": ratio}))
    assert description["budget"] == (8, 64)
    assert "Keeps 8 to 64, by its size" in description["words"][0]
    assert describe(state({"/budget": ratio}), 20)["budget"] == (20, 20)


def test_a_core_is_described_with_the_number_of_its_tokens() -> None:
    split = state({"/core": {"share": 0.75, "cover": 0.25}})
    description = describe(split, 64)
    assert description["core"] is not None
    assert (description["core"]["tokens"], description["core"]["policy"]["atom"]) == (
        48,
        "divprune",
    )
    words = " ".join(description["words"])
    assert "48 of them are the core, chosen by divprune without the question" in words
    assert "questions on one image share the KV cache of its core" in words
    assert describe(state())["core"] is None
    assert "core" not in " ".join(describe(state())["words"])


def test_a_state_that_is_all_core_is_described_as_one_that_reads_no_question() -> None:
    words = " ".join(describe(state({"/core": {"share": 1.0}}), 64)["words"])
    assert "all chosen by divprune" in words and "does not read the instruction" in words


def test_a_state_that_ranks_before_the_merger_says_so() -> None:
    assert describe(state())["rank_at"] == "merger_out"
    assert "patch merger" not in " ".join(describe(state())["words"])
    for more in ({}, {"/core": {"share": 1.0}}):
        before = describe(state({"/rank_at": "merger_in", **more}))
        assert before["rank_at"] == "merger_in"
        assert "before it merges them" in " ".join(before["words"])


Captured = pytest.CaptureFixture[str]


def run_command(capsys: Captured, *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    return capsys.readouterr().out


def test_show_lists_the_parts_of_a_state(capsys: Captured) -> None:
    output = run_command(capsys, "show", "autoprune")
    for part in (
        "Keeps 32 visual tokens",
        "cdpruner",
        "q_e = 2, r_min = 30",
        "instruction_guided_visual_relevance",
        "42%",
        "quality_pool_builder",
        "anchor_weighted_residual",
        "features, instruction",
        load_state("autoprune").digest[:12],
    ):
        assert part in output
    record = json.loads(run_command(capsys, "show", "autoprune", "--budget", "64", "--json"))
    assert (record["budget"], record["r_min"], len(record["signals"])) == ([64, 64], 62, 5)


def test_diff_points_at_what_differs(tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other.json"
    data = edited(shipped("autoprune"), {"/scoring/signals/0/weight": 0.5, "/name": "other"})
    other.write_text(json.dumps({**data, "provenance": shipped("autoprune")["provenance"]}))
    output = run_command(capsys, "diff", "autoprune", str(other))
    assert "digests differ" in output and "/scoring/signals/0/weight" in output
    record = json.loads(run_command(capsys, "diff", "autoprune", str(other), "--json"))
    assert not record["same_behaviour"]
    assert {c["where"]: c["after"] for c in record["changes"]} == {
        "/name": "other",
        "/scoring/signals/0/weight": 0.5,
    }


def test_diff_of_a_state_with_itself(capsys: Captured) -> None:
    output = run_command(capsys, "diff", "autoprune", "autoprune")
    assert "both keep the same tokens" in output and "no field differs" in output


def test_materialize_writes_a_state_and_its_changes(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "next.json"
    output = run_command(
        capsys,
        *("materialize", "autoprune", "--budget", "160", "--backbone", "llava-next-7b"),
        *("-o", str(target)),
    )
    assert "/budget" in output and "32 + 32 + 32 + 32 + 32" in output and "valid" in output
    assert str(target) in output
    written = load_state(target)
    assert written.name == "autoprune-llava-next-7b-k160"
    assert run_command(capsys, "validate", str(target)).startswith(f"{target}: valid, K = 160")


def test_an_instruction_free_variant_reads_no_instruction(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "free.json"
    arguments = ("--instruction-free", "--budget", "64", "-o", str(target), "--json")
    record = json.loads(run_command(capsys, "materialize", "autoprune", *arguments))
    changed = {change["where"] for change in record["changes"]}
    assert {"/base_policy/name", "/budget/atom"} <= changed
    new_state = load_state(target)
    assert required_inputs(new_state, exchange=True) == frozenset()
    assert record["budget"] == 64 and new_state.digest == record["digest"]


def test_materialize_as_json_holds_the_state(capsys: Captured) -> None:
    record = json.loads(run_command(capsys, "materialize", "autoprune", "--budget", "64", "--json"))
    assert record["valid"] and record["budget"] == 64
    assert load_state(json.dumps(record["state"])).digest == record["digest"]
    assert all(change["why"] for change in record["changes"])


def test_failed_write_leaves_no_file(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "no" / "such" / "folder.json"
    assert main(["materialize", "autoprune", "--budget", "64", "-o", str(target)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document))
    output = run_command(capsys, "validate", str(file))
    assert output.startswith(f"{file}: valid")
    assert "warn /provenance/scores/rows/0: resizing beats it at K = 16 by 4.0 points" in output
    assert "warn" not in run_command(capsys, "validate", "visionzip")
    (record,) = json.loads(run_command(capsys, "validate", str(file), "--json"))
    assert record["valid"] and len(record["warnings"]) == 1
    assert main(["validate", "visionzip", "--evidence", str(tmp_path / "none.json")]) == 1
    assert "give the report.json that vllm-autoprune eval wrote" in capsys.readouterr().err
