"""The selftest: its checks on reports, its command on fake runs, selections on two devices."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_autoprune.backbones import read_config
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest import device as device_checks
from vllm_autoprune.selftest.backbones import TINY_MODELS, write_processor
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.device import (
    _SelectionResult,
    check_kernel,
    check_selections,
)
from vllm_autoprune.selftest.run import (
    REPORT_PREFIX,
    RUNNERS,
    SPLIT_QUESTION,
    Completion,
    Report,
    SelftestError,
    available_runners,
    run_backbone,
)
from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    PolicyParams,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.tokens import VisualTokens

CPU = torch.device("cpu")

# ---- checks pass on a correct report, and fail on reports with one change ----

IMAGE = 9
N = 12
KEPT = [1, 2, 5, 7, 11]
OTHERS = [0, 2, 5, 7, 11]
PARTS = [[0, 1, 2, 4, 6, 8, 9, 10, 11], [3, 5]]
RECALLED = [[7]]
"""Kept rows of a core, of the delta behind it, and of a later turn: the last one of the image."""

GRID = [(2, 2 + y, 2 + x) for y in range(3) for x in range(4)]
TEXT = [(6 + i,) * 3 for i in range(41)]
FULL = [list(axis) for axis in zip((0, 0, 0), (1, 1, 1), *GRID, *TEXT, strict=True)]
"""Positions of a grid of 3 x 4 after two words; one token is decoded and computed."""
WRONG = [list(range(60))] * 3


def completion(rows: list[int]) -> Completion:
    """Of an image of which these rows remain."""
    remaining = [0, 1, *(2 + row for row in rows), *range(2 + N, len(FULL[0]))]
    return Completion(
        prompt=[1, 2, *[IMAGE] * len(rows), *range(20, 60)],
        ids=[3, 4],
        logprob=-3.0,
        cached=0,
        positions=[[axis[i] for i in remaining] for axis in FULL],
    )


def good() -> Report:
    """A report that passes every check."""
    stock = completion([*range(N)])
    pruned = completion(KEPT)
    start = completion([row for part in PARTS for row in part])
    second = start.model_copy(update={"ids": [7, 8], "cached": 32})
    decoded = [
        [*axis[:-1], full[2 + RECALLED[0][0]], 90]
        for axis, full in zip(start.positions, FULL, strict=True)
    ]
    third = start.model_copy(
        update={"prompt": [*start.prompt, IMAGE, 61], "positions": decoded}
    )
    settings = {
        "stock": stock,
        "whole": stock,
        "again": pruned.model_copy(update={"cached": 32}),
        **dict.fromkeys(("pruned", "alone", "chunked", "preempted"), pruned),
    }
    split = {
        "first": start,
        "second": second,
        "further": second,
        "alone second": second,
        "third": third.model_copy(update={"cached": 32}),
        "alone third": third,
    }
    return Report(
        runner="v1",
        completions={
            **{
                setting: {SPLIT_QUESTION: completion}
                for setting, completion in settings.items()
            },
            "split": split,
            "cells": {
                "stock": stock,
                **dict.fromkeys(("left", "chunked left"), pruned),
            },
            "videos": dict.fromkeys(("few", "alone few"), pruned),
            "stock others": {"video": stock},
            "others": {"video": stock},
        },
        predicted={SPLIT_QUESTION: [N]},
        kept={SPLIT_QUESTION: [KEPT]},
        texts={SPLIT_QUESTION: [[]]},
        vision_runs=0,
        split_kept=PARTS,
        recalled=RECALLED,
        recall_refused=False,
        cells=KEPT,
        video=[KEPT],
        splittable=True,
        merger_error=0.02,
        placed=True,
        fallbacks=0,
        errors={},
    )


Change = Callable[[Report], Report]


def fields(**changes: object) -> Change:
    return lambda report: report.model_copy(update=changes)


def answer(setting: str, name: str = SPLIT_QUESTION, **changes: object) -> Change:
    """Change one completion, or leave it out."""

    def change(report: Report) -> Report:
        completions = dict(report[setting])
        changed = completions.pop(name).model_copy(update=changes)
        if changes:
            completions[name] = changed
        return report.model_copy(
            update={"completions": {**report.completions, setting: completions}}
        )

    return change


def in_tiles(pruned: list[int]) -> Change:
    """The image in two tiles of 6 tokens, with text before each; 2 rows of the first are kept."""
    steps = (
        answer("stock", prompt=[1, *[IMAGE] * 6, 2, *[IMAGE] * 6]),
        fields(kept={SPLIT_QUESTION: [[1, 2, 6, 7, 11]]}),
        answer("pruned", prompt=pruned),
    )
    return lambda report: steps[2](steps[1](steps[0](report)))


def with_text(places: list[int]) -> Change:
    """The same tiles, where the plugin embeds the text, behind these numbers of rows."""
    change = in_tiles([1, *[IMAGE] * 3, 2, *[IMAGE] * 2])
    return lambda report: change(report).model_copy(
        update={"texts": {SPLIT_QUESTION: [places]}}
    )


BROKEN: Sequence[tuple[str, Change]] = (
    ("answers_are_numbers", answer("chunked", logprob=math.nan)),
    ("whole_is_stock", answer("whole", logprob=-3.0000001)),
    (
        "prompts_shrink_as_predicted",
        answer("pruned", prompt=[1, *[IMAGE] * 5, *range(20, 60)]),
    ),
    *(
        ("kept_rows_are_the_model_s_own", fields(kept={SPLIT_QUESTION: images}))
        for images in (
            [[1, -1, 5, 7, 11]],
            [[1, 2, 5, 7, N]],
            [[2, 1, 5, 7, 11]],
            [[1, 1, 5, 7, 11]],
            [KEPT, KEPT],
        )
    ),
    (
        "kept_rows_stand_in_their_tiles",
        in_tiles([1, *[IMAGE] * 3, 2, *[IMAGE] * 2]),
    ),
    ("text_stands_between_the_tokens_that_it_did", with_text([0, 3])),
    ("small_steps_keep_the_same", answer("chunked", positions=FULL)),
    ("preempted_requests_go_on", answer("preempted", ids=[3, 5])),
    ("the_same_question_shares", answer("pruned", cached=32)),
    ("the_same_question_shares", answer("again", cached=0)),
    ("questions_stand_alone", answer("alone", logprob=-3.1)),
    ("images_are_seen_once", fields(vision_runs=1)),
    ("nothing_fell_back", fields(errors={"RuntimeError": 1})),
    ("nothing_fell_back", fields(fallbacks=1)),
    ("positions_are_a_gather", fields(kept={SPLIT_QUESTION: [OTHERS]})),
    ("questions_share_the_core", answer("split", "second", cached=0)),
    ("questions_share_the_core", answer("split", "first", cached=1)),
    ("later_turns_recall_other_tokens", fields(recalled=[[8]])),
    ("later_turns_recall_other_tokens", answer("split", "third", cached=0)),
    ("later_turns_recall_other_tokens", fields(splittable=False, recalled=[])),
    (
        "recalled_tokens_stand_in_their_image",
        answer("split", "alone third", positions=WRONG),
    ),
    ("parts_give_the_same_completions", answer("split", "alone second", logprob=-4.0)),
    ("parts_stand_on_one_grid", answer("split", "first", positions=FULL)),
    ("cells_are_left_out", fields(cells=OTHERS)),
    ("cells_are_left_out", fields(cells=None)),
    ("videos_keep_some_tokens", fields(video=[OTHERS])),
    ("videos_keep_some_tokens", answer("stock others", "video")),
    ("merger_input_is_that_of_transformers", fields(merger_error=math.nan)),
    ("videos_are_untouched", answer("others", "video", logprob=-3.01)),
    ("videos_are_untouched", answer("others", "video")),
)
"""Changes of the correct report, each with the check that reports it."""


def test_each_check_passes_a_correct_report_and_reports_what_is_wrong() -> None:
    assert {name: check(good()) for name, check in CHECKS.items()} == dict.fromkeys(
        CHECKS, ""
    )
    in_order = in_tiles([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE])
    assert CHECKS["kept_rows_stand_in_their_tiles"](in_order(good())) == ""
    for places in ([0, 2], [2], [0, 2, 5]):
        embedded = with_text(places)(good())
        assert CHECKS["text_stands_between_the_tokens_that_it_did"](embedded) == ""
        assert CHECKS["kept_rows_stand_in_their_tiles"](embedded) == ""
    # NaN survives JSON, so that a check can report it.
    for name, change in BROKEN:
        broken = Report.model_validate_json(change(good()).model_dump_json())
        assert CHECKS[name](broken), name
    assert {name for name, _ in BROKEN} == {*CHECKS}


def test_runners_agree_up_to_rounding() -> None:
    assert runners_agree(good(), answer("pruned", logprob=-3.15)(good())) == ""
    for change in (
        fields(kept={SPLIT_QUESTION: [OTHERS]}),
        answer("again", ids=[3, 5]),
        answer("chunked", positions=[[0]]),
        answer("pruned", logprob=math.nan),
    ):
        assert runners_agree(good(), change(good())) != ""
    linear = fields(
        hybrid=True
    )  # attention in bfloat16: few tokens may be others, all may not
    assert runners_agree(linear(good()), fields(kept={})(good())) == ""
    assert runners_agree(linear(good()), answer("whole", ids=[3, 5])(good())) != ""


# ---- the process of a backbone ----


@pytest.fixture
def run_as_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Makes a shell script what is run as Python's interpreter."""
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))

    def write_script(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write_script


def test_a_backbone_gives_a_report_or_an_error_with_its_last_output(
    run_as_python: Callable[[str], None], tmp_path: Path
) -> None:
    printed = tmp_path / "printed"
    report = f"{REPORT_PREFIX}{good().model_dump_json()}"
    printed.write_text(f"loading\n{report}\nshutting down\n")
    is_configured = '[ "$VLLM_USE_V2_MODEL_RUNNER$HF_HUB_OFFLINE" = 11 ]'
    run_as_python(f"{is_configured} && cat {printed}")
    assert run_backbone("gemma3", RUNNERS["v2"]) == good()
    run_as_python("seq 40; echo out of memory >&2; exit 3")
    with pytest.raises(SelftestError, match=r"ended with 3: .* 40 out of memory"):
        run_backbone("gemma3")
    run_as_python("exec sleep 60")
    with pytest.raises(SelftestError, match="gave no report in 1 s"):
        run_backbone("gemma3", timeout=1)


def test_the_second_runner_needs_triton(
    run_as_python: Callable[[str], None],
) -> None:
    for script, runners in (
        ("echo 'triton: True'", ("v1", "v2")),
        ("echo 'triton: False'", ("v1",)),
        ("echo 'no module vllm' >&2; exit 1", ("v1",)),
    ):
        run_as_python(script)
        assert available_runners() == runners


# ---- the command ----


Run = Callable[..., tuple[int, str, list[tuple[str, str]]]]
"""Exit status of the command, what it prints, and the runs of backbones."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on fake runs of backbones.

    ``broken`` has changes to a report that passes every check by backbone and runner, or None for
    no report; ``wrong`` is that of a selection on a GPU, for which the CPU stands in where there is
    a ``gpu``. Packages in ``absent`` are not installed.
    """
    find = importlib.util.find_spec

    def run_command(
        arguments: str,
        broken: Mapping[tuple[str, str], Mapping[str, object] | None] | None = None,
        available: tuple[str, ...] = ("v1", "v2"),
        absent: str = "",
        wrong: str = "",
        gpu: bool = True,
    ) -> tuple[int, str, list[tuple[str, str]]]:
        calls = []

        def run_backbone(
            name: str, environment: Mapping[str, str], timeout: float
        ) -> Report:
            (runner,) = (
                name for name, variables in RUNNERS.items() if variables == environment
            )
            calls.append((name, runner))
            changes = (broken or {}).get((name, runner), {})
            if changes is None:
                raise SelftestError.of(name, "ended with 1")
            return good().model_copy(update={"runner": runner, **changes})

        for name, replacement in {
            "run_backbone": run_backbone,
            "available_runners": lambda: available,
            "find_gpu": lambda: CPU if gpu else None,
            "check_kernel": lambda device: "",
            "check_selections": lambda device: [
                _SelectionResult("trim", 0.5, 0.002, wrong)
            ],
        }.items():
            monkeypatch.setattr(selftest, name, replacement)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: None if name == absent else find(name),
        )
        status = main(["selftest", *arguments.split()])
        printed = capsys.readouterr()
        return status, printed.out or printed.err, calls

    return run_command


def test_both_runners_are_run_where_there_are_two(run: Run) -> None:
    status, output, calls = run("qwen2_vl gemma3")
    assert (status, "All checks passed." in output) == (0, True)
    assert calls == [
        (name, runner) for name in ("qwen2_vl", "gemma3") for runner in ("v1", "v2")
    ]
    status, output, calls = run("gemma3", available=("v1",))
    assert (status, calls) == (0, [("gemma3", "v1")])
    assert "no Triton" in output
    status, output, _ = run(
        "gemma3 --runner v2", broken={("gemma3", "v2"): {"runner": "v1"}}
    )
    assert status == 1 and "vLLM used v1 instead" in output


def test_what_cannot_be_run_is_refused(run: Run) -> None:
    for arguments, refusal in (
        ("gemma3 --runner v2", "--runner: no model runner v2 here"),
        ("gpt", "gpt: no such backbone"),
        ("--gpu", "--gpu: no CUDA device here"),
    ):
        status, output, calls = run(arguments, available=("v1",), gpu=False)
        assert (status, calls) == (1, []) and refusal in output


def test_a_failed_check_is_reported_with_its_runner(run: Run) -> None:
    unserved = {("gemma3", "v2"): {"vision_runs": 3}, ("qwen2_vl", "v1"): None}
    status, output, _ = run("qwen2_vl gemma3", broken=unserved)
    assert status == 1
    assert (
        "FAIL qwen2_vl, v1: 0 of 1 checks hold: served: qwen2_vl ended with 1" in output
    )
    assert "checks hold: images_are_seen_once: it ran 3 times more" in output
    other_rows = {("gemma3", "v1"): {"kept": {SPLIT_QUESTION: [OTHERS]}}}
    status, output, _ = run("gemma3 --json", broken=other_rows)
    report = json.loads(output)
    assert (status, report["holds"], report["runners"]) == (1, False, ["v1", "v2"])
    verdicts = report["found"]["gemma3"]
    broken = {
        by: [check for check, wrong in verdicts[by].items() if wrong] for by in verdicts
    }
    assert broken == {
        "v1": ["positions_are_a_gather"],
        "v2": [],
        "both": ["runners_agree"],
    }


def test_a_backbone_without_its_package_is_left_out_unless_named(run: Run) -> None:
    machine: dict[str, Any] = {"available": ("v1",), "absent": "num2words"}
    machine["broken"] = {("smolvlm", "v1"): None}
    status, output, calls = run("--json", **machine)
    assert status == 0 and list(json.loads(output)["left_out"]) == ["smolvlm"]
    assert [name for name, _ in calls] == [
        name for name in TINY_MODELS if name != "smolvlm"
    ]
    assert run("smolvlm", **machine)[0] == 1


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_tiny_model_is_read_from_its_file_as_the_backbone_that_it_stands_for(
    name: str, tmp_path: Path
) -> None:
    """Without an engine, which would register vLLM's own configurations first."""
    config = read_config(str(write_processor(name, tmp_path, {})))
    assert require_served(config).name == name


# ---- on a GPU ----


def test_selections_and_two_backbones_on_a_gpu(run: Run) -> None:
    status, output, calls = run("--gpu")
    assert (status, calls) == (0, [(name, "v2") for name in selftest.GPU_BACKBONES])
    assert (
        "trim" in output
        and "2.00" in output
        and "All checks that were run passed." in output
    )
    status, output, _ = run("--gpu --json", wrong="unique: the same index twice")
    report = json.loads(output)
    assert (status, report["holds"]) == (1, False)
    assert report["selections"][0]["wrong"] == "unique: the same index twice"
    status, output, calls = run("--gpu", absent="vllm")
    assert (status, calls) == (0, [])
    assert "qwen3_vl: not served, vLLM is not installed" in output


def test_every_base_policy_and_shipped_state_is_selected_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is both; then a device that keeps other tokens, and one that waits."""
    monkeypatch.setattr(device_checks, "ROUNDS", 1)
    assert check_kernel(CPU) == "runs on a GPU only"
    results = list(check_selections(CPU))
    assert {result.name for result in results} == {*BASE_POLICIES, *shipped_states()}
    assert all(r.wrong == "" and r.share == 1 and r.seconds > 0 for r in results)
    calls = iter(range(10_000))

    def different(
        params: PolicyParams, tokens: VisualTokens, budget: int
    ) -> ReferenceSelection:
        start = 0 if next(calls) == 0 else tokens.count - budget
        return ReferenceSelection(
            torch.arange(start, start + budget).expand(tokens.batch, -1)
        )

    def failing(
        params: PolicyParams, tokens: VisualTokens, budget: int
    ) -> ReferenceSelection:
        raise RuntimeError("called a synchronizing CUDA operation")

    for name, function in {"cdpruner": different, "divprune": failing}.items():
        policy = dataclasses.replace(BASE_POLICIES[name], function=function)
        monkeypatch.setitem(BASE_POLICIES, name, policy)
    wrong = {result.name: result.wrong for result in check_selections(CPU)}
    assert "of the host's tokens are kept" in wrong["cdpruner"]
    assert wrong["divprune"] == "RuntimeError: called a synchronizing CUDA operation"
    assert wrong["trim"] == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_selections_on_a_gpu() -> None:
    assert check_kernel(torch.device("cuda")) == ""
    assert [r for r in check_selections(torch.device("cuda")) if r.wrong] == []
