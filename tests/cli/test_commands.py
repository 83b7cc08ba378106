"""Commands that need no server: their help, text, JSON and refusals, and the page about them.

Mistakes and their answers are typed by ``tests/docs``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.yardsticks.examples import CHECKPOINTS
from tests.cli.commands import Captured, run, run_json
from tests.tables import parametrize_from_file
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.commands import SUMMARIES
from vllm_autoprune.cli.main import main, parser
from vllm_autoprune.cli.output import format_definitions, format_table
from vllm_autoprune.tpdsl.loading import shipped_states

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", SUMMARIES)
def test_help_states_json_output_and_the_defaults(
    command: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--json" in text
    (commands,) = (
        a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    for action in commands.choices[command]._actions:
        unset = action.default in (None, False, argparse.SUPPRESS, (), [])
        if action.option_strings and not unset:
            flag = action.option_strings[-1]
            assert "default" in text.rpartition(f"{flag} ")[2].partition(" --")[0], flag


def test_the_page_names_every_command_and_shows_what_is_printed(
    capsys: Captured,
) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in SUMMARIES if f"`{name}" not in page] == []
    assert main(["cost", "--backbone", "zzz", "--tokens", "8"]) == 1
    error = capsys.readouterr().err
    assert [name for name in BACKBONE_SHAPES if name not in error] == [], "as it says"
    (call,) = re.findall(r"```sh\nvllm-autoprune (cost .*?)```", page, flags=re.DOTALL)
    assert f"```text\n{run(capsys, *shlex.split(call))}```" in page


def test_a_closed_pipe_is_no_error() -> None:
    call = f"{sys.executable} -m vllm_autoprune atoms --schema | head -c 10"
    ran = subprocess.run(call, shell=True, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr) == ('{\n  "$defs"'[:10], "")


@pytest.mark.parametrize(
    "words", ["--help", "--version", "atoms --prompt", "show --help", "show x --json"]
)
def test_a_full_disk_is_told_in_one_line(words: str) -> None:
    ran = subprocess.run(
        f"{sys.executable} -m vllm_autoprune {words} > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    line = "standard output: cannot be written (No space left on device) -> make room"
    assert ran.stderr.count(line) == 1


@parametrize_from_file("words")
def test_every_command_takes_every_shipped_state(words: str, capsys: Captured) -> None:
    for name in shipped_states():
        assert run(capsys, *words.replace("STATE", name).split())


def test_tables_and_definitions_are_aligned_and_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[list[object]] = [["a", 1], ["bcdefg", 22], ["", True]]
    lines = format_table(["name", "n"], rows, "<>").splitlines()
    assert lines == [
        "name      n",
        "------  ---",
        "a         1",
        "bcdefg   22",
        "        yes",
    ]
    words = "word " * 30
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        table = format_table(
            ["key", "a", "b"], [["x", words, "short"], ["y", "1", words]], wrap=True
        )
        for text in (table, format_definitions([("x", words), ("", words)])):
            assert width - 8 <= max(map(len, text.splitlines())) <= width
            assert text.count("word") == 60


@parametrize_from_file("call", "kind", "where", "message")
def test_an_error_is_one_line_or_a_record(
    call: str, kind: str, where: str, message: str, capsys: Captured
) -> None:
    def status(*words: str) -> object:
        try:
            return main(words)
        except SystemExit as ended:
            return ended.code

    typed = kind == "ConfigError" and not where.startswith("--")
    assert status(*call.split()) == (2 if typed else 1)
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1 and message in printed.err
    assert status(*call.split(), "--json") == (2 if typed else 1)
    record = json.loads(capsys.readouterr().out)
    (problem,) = record["problems"]
    assert record["error"] == kind and problem.keys() == {"where", "what", "fix"}
    assert (
        problem["where"] == (f"vllm-autoprune{where}" if typed else where)
        and problem["fix"]
    )
    assert printed.err.endswith(f"{record['message'].removeprefix('arguments: ')}\n")


def test_the_lists_say_what_a_choice_depends_on(capsys: Captured) -> None:
    records = {record["name"]: record for record in run_json(capsys, "list")}
    assert set(records) == set(shipped_states())
    short = run(capsys, "list")
    full = run(capsys, "list", "--all")
    names, more = (
        [line.split()[0] for line in text.partition("\n\n")[0].splitlines()[2:]]
        for text in (short, full)
    )
    # What to try comes first: recommended, then the best on both; what is left out comes last.
    best = (
        "pivoted_qr-searched-free pivoted_qr-searched pivoted_qr-relevance pivoted_qr"
    )
    assert (
        names[:4] == best.split()
        and more == list(records)
        and more[: len(names)] == names
    )
    folded = Counter(name.partition("-")[0] for name in more[len(names) :])
    assert folded == {"autoprune": 11, "ablation": 7} and "Left out" not in full
    kinds = "7 ablations, 11 forms of autoprune for one backbone and K"
    assert f"Left out: {kinds}. All {len(more)}: vllm-autoprune list" in short
    for row in (
        r"minillava-split +if you measure +16 +50% of K +89.1 +61.2",
        r"miniqwen +if you measure +1/8:4-640 +yes +69.0 +71.1",
        r"pivoted_qr-searched-free +by default +1/8 +no +90.9 +66.1",
        r"cen_divprune +if you measure +32 +no +88.0 +57.9",
        r"divprune +- +32 +no +85.3 +50.1",
        r"visionzip +- +32 +no +59.1 +-",
    ):
        assert re.search(f"^{row}", short, re.MULTILINE), row
    columns = ("base_policy", "budget", "exchanges", "reads_instruction", "core")
    for name, expected in (
        ("autoprune", ["cdpruner", "32", 2, True, 0]),
        ("minillava-split", ["cdpruner", "16", 0, True, 8]),
    ):
        assert [records[name][column] for column in columns] == expected


def test_atoms_are_listed_by_group_and_as_a_schema(capsys: Captured) -> None:
    checks = run_json(capsys, "atoms", "--group", "safety_checks")
    assert {atom["group"] for atom in checks} == {"safety_checks"}
    listed = run(capsys, "atoms")
    assert "local_contrast_saliency" in listed
    assert "131 of the paper's 131 atoms, of which it names 50" in listed
    assert "definitions of the other 81 are" in listed
    assert "constraints" in json.loads(run(capsys, "atoms", "--schema"))["properties"]


def test_a_model_s_cost_is_that_of_the_image_it_is_asked_for(capsys: Captured) -> None:
    call = f"cost --backbone {CHECKPOINTS['miniqwen']} --image"
    record = run_json(capsys, call, "96x64")
    wide = run_json(capsys, call, "192x64")
    assert [record["rows"][0]["tokens"], wide["rows"][0]["tokens"]] == [6, 14]
