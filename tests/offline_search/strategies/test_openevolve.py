from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import Dataset
from offline_search.history import History, Trial
from offline_search.ledger import Ledger, ProgramRecord, ProposalRecord, TrialRecord, read_ledger
from offline_search.programs import run_program
from offline_search.replay import replay
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.openevolve import _apply_change, _build_database
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator
from vllm_autoprune.errors import ConfigError

SETTINGS = Settings(
    strategy="openevolve-states", rounds=3, per_round=3, budgets=(8,), proposer="scripted"
)


def change(body: str) -> str:
    """A reply that puts a statement at the beginning of any parent."""
    head = "def policy(budget):\n"
    return f"<<<<<<< SEARCH\n{head}=======\n{head}    {body}\n>>>>>>> REPLACE\n"


REPLIES = [
    *(
        f"Better:\n{change(f'import json; return json.loads({text!r})')}"
        for text in valid_replies(6)
    ),
    change("return open('/etc/passwd').read()"),
    "I cannot help with that.",
    None,
]  # fmt: skip


async def run_search(path: Path, data: Dataset) -> tuple[ScriptedProposer, str]:
    evaluator, proposer = SyntheticEvaluator(data), ScriptedProposer(REPLIES)
    settings = SETTINGS.model_copy(update={"evaluator": evaluator.name})
    with Ledger(path) as ledger:
        await Search(settings, ledger, evaluator, proposer).run()
        return proposer, ledger.digest()


async def test_programs_are_evolved_and_evaluated(data: Dataset, tmp_path: Path) -> None:
    before = random.getstate()
    proposer, _ = await run_search(tmp_path / "l", data)
    assert random.getstate() == before, "the state of the global generator is restored"
    records = read_ledger(tmp_path / "l")
    proposed = [record for record in records if isinstance(record, ProposalRecord)]
    first, *children = proposed
    assert first.origin == "initial" and json.loads((await run_program(first.program, 8)).text)
    names = {one.name for one in proposed}
    assert all(child.origin == "openevolve" and set(child.parents) <= names for child in children)
    programs = {f"{r.round}.{r.index}": r for r in records if isinstance(r, ProgramRecord)}
    results = {f"{r.round}.{r.index}": r for r in records if isinstance(r, TrialRecord)}
    for child in children:
        if child.state is None:
            assert results[child.name].status == "invalid"
        else:
            scoring = json.loads(programs[child.name].output)["scoring"]["signals"]
            signals = child.state["scoring"]["signals"]  # type: ignore[index, call-overload]
            assert [s["atom"] for s in signals] == [s["atom"] for s in scoring]  # type: ignore[union-attr, call-overload, index]
    assert any(child.state is not None for child in children)
    asked = [messages[1]["content"] for messages in proposer.requests]
    assert any("def policy(budget)" in text and "combined_score" in text for text in asked)
    assert all("quality_topk_selector" in messages[0]["content"] for messages in proposer.requests)


async def test_every_slot_of_every_round_is_a_candidate_on_one_of_five_islands(
    data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", data)
    proposed = [r for r in read_ledger(tmp_path / "l") if isinstance(r, ProposalRecord)]
    assert len(proposed) == SETTINGS.total_candidates
    trials = [
        Trial(one, TrialRecord(round=one.round, index=one.index, status="invalid"))
        for one in proposed
    ]
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-1.0)
    database = _build_database(History(base, np.zeros(1), trials), [])
    assert len(database.islands) == 5
    programs = {one.name: number for number, one in enumerate(proposed) if one.program}
    for number, island in enumerate(database.islands):
        assert all(programs[name] % 5 == number for name in island if name in programs)


def test_a_reply_that_leaves_its_parent_unchanged_is_no_candidate() -> None:
    parent = "def policy(budget):\n    return {}\n"
    assert _apply_change(parent, change("return 1")).startswith("def policy(budget):\n    return 1")
    same = "<<<<<<< SEARCH\n    return {}\n=======\n    return {}\n>>>>>>> REPLACE\n"
    for reply in (same, "```python\n" + parent + "```", change("x").replace("budget", "b")):
        with pytest.raises(ValueError, match=r"SEARCH|does not change"):
            _apply_change(parent, reply)


async def test_openevolve_resumes_and_replays(data: Dataset, tmp_path: Path) -> None:
    _, digest = await run_search(tmp_path / "whole", data)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "half").write_bytes(b"".join(lines[: len(lines) // 2]))
    assert (await run_search(tmp_path / "half", data))[1] == digest
    _, before, after = await replay(tmp_path / "whole", tmp_path / "again", data)
    assert before == after == digest


def test_parents_do_not_depend_on_hash_seeds(data: Dataset, tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-m", "tests.offline_search.strategies.test_openevolve",
             str(data.folder), str(tmp_path / seed)],
            capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        digests.add(process.stdout)
    assert len(digests) == 1


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openevolve.database", None)
    with pytest.raises(ConfigError, match="search-openevolve"):
        STRATEGIES["openevolve-states"](SETTINGS)


if __name__ == "__main__":
    import asyncio

    from offline_search.dataset import read_dataset

    folder, ledger = map(Path, sys.argv[1:])
    print(asyncio.run(run_search(ledger, read_dataset(folder)))[1])
