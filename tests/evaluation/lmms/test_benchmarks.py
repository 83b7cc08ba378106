"""Arguments: `--suite lmms:…`, `--include-path` and `--arm`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.lmms import TASK, write_task
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import MME, RESIZED
from vllm_autoprune.evaluation.lmms.output import (
    BENCHMARKS,
    COLUMN_SETS,
    PINNED,
    find_tasks,
    select_benchmarks,
)
from vllm_autoprune.evaluation.lmms.suite import parse_servers
from vllm_autoprune.evaluation.published import read_published


def test_the_paper_s_benchmarks_are_named_as_its_columns() -> None:
    assert len(BENCHMARKS) == 14
    columns = {name for table in read_published().tables for name in table.benchmarks}
    assert columns < set(COLUMN_SETS["paper"])
    by_backbone = {table.backbone: table.benchmarks for table in read_published().tables}
    assert COLUMN_SETS["paper-llava"] == by_backbone["llava-1.5-7b"]
    assert set(COLUMN_SETS["paper-qwen"]) == set(by_backbone["qwen2.5-vl-7b"])


def test_the_extra_installs_the_supported_version() -> None:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["lmms"] == [f"lmms-eval=={PINNED}"]


def test_columns_tasks_and_sets_may_be_mixed() -> None:
    assert [one.name for one in select_benchmarks("POPE,gqa,mme")] == ["GQA", "POPE", "MME"]
    assert len(select_benchmarks("paper-llava,ocrbench")) == 11


def test_cognition_is_added_to_mme_on_request() -> None:
    (perception,), (both,) = select_benchmarks("mme"), select_benchmarks("mme", cognition=True)
    assert perception.name == both.name == MME
    assert len(perception.metrics) == 1 and len(both.metrics) == 2


@pytest.mark.parametrize("names", ["", "gqa,foo"])
def test_unknown_names_are_refused_with_the_options(names: str) -> None:
    with pytest.raises(ConfigError, match=r"use: paper, .*ocrbench"):
        select_benchmarks(names)


def test_tasks_of_a_folder_come_after_the_paper_s(tmp_path: Path) -> None:
    write_task(tmp_path, "test", draw_examples("test", 1))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.yaml").write_text("dataset_path: x\ntask: 'mine-2'\n")
    own = find_tasks(tmp_path)
    assert [one.task for one in own] == [TASK, "mine-2"]
    assert [one.name for one in select_benchmarks("mine-2,minillava,gqa", own=own)] == [
        "GQA",
        TASK,
        "mine-2",
    ]
    with pytest.raises(ConfigError, match=r"foo.*needs --include-path"):
        select_benchmarks("foo")


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("group: x\n  task: nested\n")
    with pytest.raises(ConfigError, match="declares no task"):
        find_tasks(tmp_path)


def test_arms_are_parsed_into_cases_and_addresses() -> None:
    servers = parse_servers(
        ["full=http://a:1/v1/", "trim@64=https://b", "trim+autoprune@64=http://c"]
    )
    assert [one.url for one in servers] == ["http://a:1", "https://b", "http://c"]
    full, base, ours = (one.case for one in servers)
    assert (full.arm, base.arm, ours.arm) == ("full", "base", "autoprune")
    assert ours.base == base.name and ours.budget == base.budget == 64


def test_a_stock_server_of_smaller_images_is_the_resize_control() -> None:
    (control,) = (one.case for one in parse_servers(["resized@64=http://a"]))
    assert (control.name, control.arm, control.budget) == ("resized@64", "resized", 64)
    assert control.label == RESIZED


def test_every_wrong_arm_is_reported() -> None:
    wrong = ["full", "nobody@64=http://a", "full=http://a", "full=http://b"]
    with pytest.raises(ConfigError) as caught:
        parse_servers([*wrong, "resized+autoprune@64=http://a", "resized=http://a"])
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="is missing"):
        parse_servers([])
