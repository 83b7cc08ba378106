"""Commands about states: show, diff, materialize and validate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Captured, run, run_json
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, shipped, state
from vllm_autoprune import load_state, materialize
from vllm_autoprune.cli.description import describe_policy, list_parts
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord, Verdict
from vllm_autoprune.tpdsl.atoms.source import BudgetCall


@parametrize_from_file("changes", "budget", "parts")
def test_a_state_in_words(
    changes: dict[str, object], budget: Any, parts: list[str]
) -> None:
    core = {"share": 0.75, "cover": 0.25}
    rule = budget and BudgetCall.parse(budget)
    policy = materialize(state(changes), rule)
    text = " ".join(describe_policy(policy))
    assert [part for part in parts if part not in text] == []
    assert (" core" in text) == (changes.get("/core") == core)
    (base_policy,) = list_parts(policy)["base policy"]
    assert base_policy.decides != ("all chosen by" in text)


def test_show_has_what_a_search_measured_and_what_is_merged(
    tmp_path: Path, capsys: Captured
) -> None:
    gain = {"value": 0.08, "low": 0.05, "high": 0.11}
    splits = {
        name: {"accuracy": 0.625, "accuracy_gain": gain}
        for name in ("validation", "test")
    }
    document = json.loads(load_state("minillava-split").dumps())
    document["provenance"]["scores"] = {"search_objective": -0.5, **splits}
    (tmp_path / "s.json").write_text(json.dumps(document))
    text = run(capsys, "show", str(tmp_path / "s.json"))
    assert "less base policy alone\n" in text and "search_objective" not in text
    assert re.search(
        r"^test split of the search +16 +62.5 +\+8.0 \(\+5.0 to \+11.0\)$", text, re.M
    )
    assert "the base policy chooses, and what it drops is merged" in " ".join(
        text.split()
    )


def test_show_recommends_no_state_of_a_user_and_says_how_many_images_chose_it(
    tmp_path: Path, capsys: Captured
) -> None:
    document = json.loads(load_state("minillava").dumps())
    document["provenance"] |= {"chosen_by": "0123abcd 4567cdef"}
    for name, changes in (
        ("found", {}),
        ("cen_divprune", {"shares": "free"}),
    ):
        path = tmp_path / "s.json"
        path.write_text(json.dumps({**document, **changes, "name": name}))
        text = run(capsys, "show", str(path))
        assert text.startswith(f"{name}  (digest ")
        assert re.search(r"^chosen by +questions about 2 images, which", text, re.M)


@parametrize_from_file("name", "lines", "hidden")
def test_show_says_what_decides_and_leaves_the_rest_to_json(
    name: str, lines: list[str], hidden: list[str], capsys: Captured
) -> None:
    call = ("show", re.split("[, ]", name)[0])
    text = run(capsys, *call)
    assert text.startswith(name) and max(map(len, text.splitlines())) <= 100
    assert [line for line in lines if line not in text] == []
    assert [line for line in hidden if line in text.partition("\nfound by")[0]] == []
    weights = re.findall(r"^signal .* weight=([\d.]+)", text, re.MULTILINE)
    assert weights == sorted(weights, reverse=True)
    record = run_json(capsys, *call, "--budget", "64")
    assert (record["budget"], record["q_e"]) == ([64, 64], 64 - record["r_min"])
    assert run_json(capsys, *call, "--budget", "5%:8-64")["budget"] == [8, 64]
    assert {part["part"] for part in record["parts"]} > {
        "signal",
        "kernel",
        "partition",
        "safety",
    }


@parametrize_from_file("changes", "row")
def test_diff_puts_what_decides_side_by_side(
    changes: dict[str, object] | str,
    row: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    other = changes if isinstance(changes, str) else str(tmp_path / "other.json")
    if isinstance(changes, dict):
        Path(other).write_text(json.dumps(edited(shipped("autoprune"), changes)))
        record = run_json(capsys, "diff", "autoprune", other)
        assert {
            change["where"]: change["after"] for change in record["changes"]
        } == changes
        assert record["same_behaviour"] == (row[:4] == "both")
    assert row in " ".join(run(capsys, "diff", "autoprune", other).split())


def test_a_state_that_fails_its_safety_check_is_not_written(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SafetyRecord((Verdict("determinism", False, "two runs differ"),))
    monkeypatch.setattr(
        "vllm_autoprune.cli.commands.states.check_transfer", lambda *_: failed
    )
    call = ("materialize", "autoprune", "--budget", "16")
    output = run(capsys, *call, "-o", str(tmp_path / "next.json"), status=1)
    assert "safety check: fails; nothing is written" in output
    assert "FAIL determinism: two runs differ" in output
    assert not [*tmp_path.iterdir()]


def test_materialize_writes_a_state_and_its_changes(
    tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "next.json"
    call = (
        "materialize",
        "autoprune",
        "--budget",
        "160",
        "--backbone",
        "llava-next-7b",
    )
    output = run(capsys, *call, "-o", str(target))
    assert "fixed_budget@160" in output and f"wrote {target}" in output
    record = run_json(capsys, *call)
    assert record["valid"] and record["budget"] == 160
    assert load_state(json.dumps(record["state"])) == load_state(target)
    assert all(change["why"] for change in record["changes"])
    run(capsys, *call, "-o", str(tmp_path / "no" / "folder.json"), status=1)
    (tmp_path / "folder").mkdir()
    run(capsys, *call, "-o", str(tmp_path / "folder"), status=1)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "next.json"}
    shared = run_json(capsys, "materialize", "autoprune", "--budget", "1/3")
    policy = materialize(load_state(json.dumps(shared["state"])))
    assert (policy.state.name, policy.tokens_kept(144)) == ("autoprune-k1-3", 48)
    record = run_json(
        capsys, "materialize", "autoprune", "--instruction-free", "--budget", "64"
    )
    assert "/base_policy/name" in {change["where"] for change in record["changes"]}


def test_validate_reports_every_state(tmp_path: Path, capsys: Captured) -> None:
    (record,) = run_json(capsys, "validate", "cdpruner")
    assert record["valid"] and len(record["verdicts"]) == 5
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema": "autoprune-state/1", "name": "x"}')
    output = run(capsys, "validate", str(bad), "autoprune", status=1)
    assert (
        "/budget: required but missing: B: number of tokens kept per image -> add "
        '"budget": {"atom": "fixed_budget@32"}'
        in output
        and "autoprune: valid, K = 32" in output
    )


@parametrize_from_file("scores", "loss")
def test_validate_warns_of_scores_that_resizing_wins(
    scores: dict[str, object], loss: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps(edited(shipped("visionzip"), {"/provenance/scores": scores}))
    )
    output = run(capsys, "validate", str(file))
    place = f"warn /provenance/scores/rows/{loss} by 4.0 points (1.0 to 7.0) -> serve smaller"
    assert output.startswith(f"{file}: valid") and (place in output) == bool(loss)
    assert output.count("warn ") == int(bool(loss))
