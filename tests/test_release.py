"""What a release is made by: workflows, forms, fragments of the changelog, and equal bytes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hatchling.builders.sdist import SdistBuilder

from scripts.release import require_equal
from vllm_autoprune.cli.commands import SUMMARIES

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml"))
FRAGMENTS = ROOT / "docs/changes"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists_by_pinned_actions_and_few_rights(
    path: Path,
) -> None:
    text = path.read_text(encoding="utf-8")
    workflow = read(path)
    jobs = workflow["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert workflow["permissions"] == {} and all(job["permissions"] for job in jobs)
    assert all(job["timeout-minutes"] <= 90 for job in jobs)
    for used in (step["uses"] for step in steps if "uses" in step):
        assert re.search(rf"{used} # v\d+\.\d+\.\d+$", text, re.MULTILINE), used
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", used)
    typed = "\n".join(step.get("run", "") for step in steps)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"\bmake ([\w-]+)", typed)} <= {*targets}
    assert all((ROOT / name).is_file() for name in re.findall(r"\.ci/\w+", typed))
    assert "${{" not in typed  # a branch's name would be run by the shell


def test_workflows_run_the_tests_the_release_and_the_newest_vllm() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in WORKFLOWS}
    assert "run: .ci/run" in texts["test"] and "run: make release" in texts["test"]
    assert "schedule:" in texts["newest-vllm"]
    assert "make test-next NEXT=" in texts["newest-vllm"]
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    publishers = [
        name for name, job in jobs.items() if "id-token" in job["permissions"]
    ]
    assert publishers == ["publish"] and jobs["publish"]["environment"] == "pypi"
    assert not any("checkout" in str(step) for step in jobs["publish"]["steps"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_what_the_command_has(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(names) == len(set(names)) and any(
        field.get("validations", {}).get("required") for field in fields
    )
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"vllm-autoprune ([a-z]+)", text)} <= SUMMARIES.keys()


def test_a_fault_is_reported_with_what_doctor_says() -> None:
    (field,) = (f for f in read(FORMS[0])["body"] if f.get("id") == "doctor")
    assert "doctor MODEL --json" in field["attributes"]["description"]
    assert field["validations"]["required"]


def test_fragments_of_the_changelog_are_well_formed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    assert ROOT / settings["directory"] == FRAGMENTS
    assert settings["start_string"] in (ROOT / "CHANGELOG.md").read_text()
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    for path in FRAGMENTS.glob("*"):  # the folder goes with the last one, at a release
        # Without the plus, towncrier takes the name for an issue's number.
        assert re.fullmatch(rf"\+[a-z0-9-]+\.({kinds})\.md", path.name), path.name
        text = path.read_text(encoding="utf-8")
        assert "\n\n" not in text and text[0] not in "-#" and text.endswith(".\n")
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist")
def test_the_sdist_has_every_file_that_git_has() -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    packed = {
        file.distribution_path
        for file in SdistBuilder(str(ROOT)).recurse_included_files()
    }
    always = {"LICENSE", "README.md", "pyproject.toml", ".gitignore"}
    assert tracked - packed - always == set()


def test_two_builds_that_differ_are_refused(tmp_path: Path) -> None:
    builds = []
    for folder in ("first", "second", "other"):
        path = tmp_path / folder / "a.whl"
        path.parent.mkdir()
        path.write_bytes(b"other" if folder == "other" else b"same")
        builds.append({path.name: path})
    require_equal(builds[0], builds[1])
    with pytest.raises(SystemExit, match=r"a\.whl: differs between builds"):
        require_equal(builds[0], builds[2])
    with pytest.raises(SystemExit, match=r"a\.whl: differs"):
        require_equal(builds[0], {})
