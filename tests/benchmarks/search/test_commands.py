from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.accuracy.yardsticks.yardstick import Yardstick
from benchmarks.search import __main__ as commands
from benchmarks.search import yardstick_evaluator
from benchmarks.search.__main__ import main
from benchmarks.search.confirmation import read_confirmation
from benchmarks.search.results import add_result
from offline_search.dataset import Dataset, Split
from offline_search.settings import Settings
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, run_search


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


async def _add_search(folder: Path, data: Dataset, seed: int, base_policy: str) -> None:
    settings = Settings(
        strategy="random", rounds=1, per_round=2, budgets=(8,), seed=seed, base_policy=base_policy
    )
    await run_search(folder / f"random-{seed}.jsonl", settings, SyntheticEvaluator(data))
    add_result(folder, "random", seed)


def test_winners_are_confirmed_on_the_base_policy_of_their_search(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def evaluator(
        yardstick: Yardstick, images: dict[Split, int], *, each: int, base_policy: str
    ) -> SyntheticEvaluator:
        given.append(base_policy)
        return SyntheticEvaluator(data)

    monkeypatch.setattr(commands, "open_yardstick", lambda name, checkpoint: None)
    monkeypatch.setattr(yardstick_evaluator, "YardstickEvaluator", evaluator)
    asyncio.run(_add_search(tmp_path, data, 0, "divprune"))
    assert main(["confirm", "--out", str(tmp_path), "--strategies", "random"]) == 0
    assert given == ["divprune"] and set(read_confirmation(tmp_path)) == {"random-0"}


def test_a_folder_of_several_base_policies_is_refused(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, base_policy in enumerate(("divprune", "visionzip")):
        asyncio.run(_add_search(tmp_path, data, seed, base_policy))
    assert main(["confirm", "--out", str(tmp_path)]) == 1
    assert "2 base policies (divprune, visionzip) ->" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "study"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--proposals-per-reply", "5"], "no language model writes -> give --proposer-url"),
        (["--strategies", "tpe", "autoprune"], "some ask a language model -> give --proposer-url"),
        (["--proposer-url", "http://localhost:1/v1"], "give --proposer-model"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    command: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
