"""Every golden case, and that a difference is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.__main__ import main
from tests.golden.case import DATA, load, names, read
from tests.golden.compare import Demand, demand
from tests.golden.generator import uniform
from tests.golden.replay import METHODS, released_state, released_tokens, replay
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine


def test_input_hash_is_portable() -> None:
    assert uniform(11, "feat", (3,)).tolist() == uniform(11, "feat", (5,)).tolist()[:3]
    assert uniform(11, "feat", (1,)).item() != uniform(12, "feat", (1,)).item()


def changed(name: str, folder: Path, **recipe: object) -> Path:
    """A copy of a case with another recipe, the recorded digests as they were."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    arrays["spec"] = np.array(json.dumps({**json.loads(str(arrays["spec"])), **recipe}))
    path = folder / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


def test_inputs_with_other_digests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not make the recorded inputs: attn_last_row"):
        read(changed("fastv/case_01", tmp_path, seed=999))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_case_in_half_precision_is_rounded_to_nearest_even(tmp_path: Path, name: str) -> None:
    case = read(changed("divprune/case_01", tmp_path, dtype=name))
    rounded = case.given("features")
    assert (
        rounded.dtype == case.dtype == {"float16": torch.float16, "bfloat16": torch.bfloat16}[name]
    )
    assert torch.equal(rounded, case.inputs["features"].to(rounded.dtype))
    assert case.given("features", cast=False).dtype == torch.float32


@pytest.mark.parametrize("name", [name for method in METHODS for name in names(method)])
def test_output_equals_the_published_one(name: str) -> None:
    assert replay(load(name)) == []


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("cdpruner/case_00", "order", "order: 1 of 32 differ"),
        ("divprune/case_00", "order", "order: 1 of 32 differ"),
        ("visionzip/case_00", "dominant_idx", "dominant: "),
        ("visionzip/case_00", "features", "rows: "),
        ("prumerge/case_01", "idx", "idx: 1 of 57 differ"),
        ("prumerge_budget/case_02", "features", "rows: "),
        ("trim/case_01", "keep", "keep: 1 of 15 differ"),
        ("trim/case_03", "features_fp16", "rows: "),
        ("dart/case_02", "keep", "order: 1 of 20 differ"),
        ("fastv/case_01", "order", "order: 1 of 16 differ"),
        ("fastv/case_01", "keep_seq", "keep_seq: 1 of 71 differ"),
        ("pdrop/case_02", "keep", "order: 1 of 72 differ"),
        ("sparsevlm/case_04", "raters", "raters: 1 of 9 differ"),
        ("sparsevlm/case_04", "merged", "rows: "),
        ("cen_divprune/case_00", "order", "order: 1 of 64 differ"),
        ("cen_cdpruner/case_04", "order", "order: 1 of 160 differ"),
        ("cen_cdpruner/case_07", "order", "order: 1 of 64 differ"),
        ("scope/case_01", "order", "order: 1 of 192 differ"),
        ("mmtok/case_06", "order", "order: 1 of 64 differ"),
        ("mmtok/case_08", "order", "order: 1 of 64 differ"),
        ("prunesid/case_00", "order", "order: 1 of 63 differ"),
        ("prunesid/case_05", "groups", "groups: 1 of 345 differ"),
        ("prunesid/case_07", "take", "take: 1 of 16 differ"),
        ("holov/case_07", "order", "set: "),
        ("holov/case_04", "take", "take: 1 of 15 differ"),
        ("fsr/case_03", "order", "order: 1 of 160 differ"),
        ("fsr/case_07", "features", "rows: "),
        ("idpruner/case_05", "order", "order: 1 of 64 differ"),
        ("next_order/case_00", "sequence", "sequence: 1 of 160 differ"),
        ("clip_chunk/case_02", "pooled_pos", "pooled_pos: 1 of 2 differ"),
        ("autoprune_released/case_04", "keep", "keep: 1 of 32 differ"),
        ("autoprune_released/case_07", "features", "rows: "),
        ("autoprune_released/case_07", "quality", "rows: "),
    ],
)
def test_differing_output_is_reported(name: str, array: str, message: str) -> None:
    case = load(name)
    wrong = case.expected[array].copy()
    wrong.flat[3 if wrong.size > 3 else 0] += 1
    actual = replay(replace(case, expected={**case.expected, array: wrong}))
    assert any(problem.startswith(message) for problem in actual), actual


class TestReleasedPolicy:
    """The golden cases of ``autoprune`` beyond the golden comparison."""

    NAMES = names("autoprune_released")

    @pytest.mark.parametrize("name", NAMES)
    def test_in_bfloat16_the_same_number_is_exchanged(self, name: str) -> None:
        case = load(name)
        policy, tokens = materialize(released_state(case)), released_tokens(case)
        refined = refine(policy, replace(tokens, features=tokens.features.bfloat16()))
        assert refined.exchanged.tolist() == [policy.quota] * tokens.batch
        assert refined.features.dtype == torch.bfloat16 and not refined.fallback.any()

    def test_keep_weight_changes_no_pick(self) -> None:
        case = load("autoprune_released/case_04")
        heavy = replace(case, recipe=case.recipe | {"keep_weight": 0.8})
        assert replay(heavy) == []


class TestDemands:
    """Notes and flags relax the comparison exactly as far as they state."""

    @pytest.mark.parametrize(
        ("recipe", "wanted"),
        [
            ({}, Demand.ORDER),
            ({"note": "", "stable_order": True, "stable_set": True}, Demand.ORDER),
            ({"note": "", "stable_order": False, "stable_set": True}, Demand.SET),
            ({"note": "K=N", "stable_order": True, "stable_set": True}, Demand.SET),
            ({"note": "constant", "stable_order": False, "stable_set": False}, Demand.SOUND),
        ],
    )
    def test_strictness_of_each_case(self, recipe: dict[str, object], wanted: Demand) -> None:
        assert demand(replace(load("fastv/case_00"), recipe=recipe)) is wanted

    @pytest.mark.parametrize("name", ["cdpruner/case_08", "divprune/case_07"])
    def test_a_degenerate_case_still_demands_its_first_picks(self, name: str) -> None:
        case = load(name)
        wrong = case.expected["order"].copy()
        # A token that is not among the first picks, nor a duplicate of one of those.
        wrong.flat[2] = wrong.flat[9]
        actual = replay(replace(case, expected={**case.expected, "order": wrong}))
        assert len(actual) == 1 and "the first" in actual[0]


class TestCommand:
    """``python -m tests.golden DIR``."""

    def test_all_cases_here(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        count = len(list(DATA.rglob("*.npz")))
        assert capsys.readouterr().out == f"{count} passed, 0 failed\n"

    def test_each_failure_is_one_line_and_all_cases_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for folder in ("fastv", "telepathy", "dart"):
            (tmp_path / folder).mkdir()
        shutil.copy(DATA / "fastv" / "case_00.npz", tmp_path / "fastv")
        shutil.copy(DATA / "fastv" / "case_00.npz", tmp_path / "telepathy")
        (tmp_path / "fastv" / "broken.npz").write_bytes(b"not an archive")
        np.savez(tmp_path / "dart" / "empty.npz", nothing=np.zeros(1))
        changed("fastv/case_01", tmp_path, seed=3)
        assert main([str(tmp_path)]) == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == "1 passed, 4 failed"
        assert [line.split(":")[0] for line in lines] == [
            "dart/empty.npz",
            "fastv/broken.npz",
            "fastv/case_01.npz",
            "telepathy/case_00.npz",
        ]
        assert lines[3].endswith("no method of the name 'telepathy' is known")
        assert all(line.split(": ", 1)[1] for line in lines)

    def test_a_folder_without_cases_is_a_failure(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(tmp_path)]) == 1
        assert capsys.readouterr().out == "0 passed, 0 failed\n"
        assert main([str(tmp_path / "nowhere")]) == 1
        *_, last = capsys.readouterr().out.splitlines()
        assert last == "0 passed, 1 failed"
