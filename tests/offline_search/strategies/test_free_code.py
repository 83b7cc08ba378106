from __future__ import annotations

from pathlib import Path

import pytest

from offline_search.components import SelectionProgram
from offline_search.dataset import Dataset
from offline_search.ledger import Ledger, ProposalRecord, TrialRecord, VerdictRecord, WinnerRecord
from offline_search.prompt import INITIAL_PROGRAM, extract_program
from offline_search.replay import replay
from offline_search.search import Search
from offline_search.settings import Settings, Strategy
from tests.offline_search.synthetic import (
    ScriptedProposer,
    SyntheticEvaluator,
    records_of_kind,
)

HEAD = "def select(features, signals, K):\n"
BODIES = (
    "return range(K)",
    "return range(1, K + 1)",
    "return sorted(signals['relevance'].argsort()[-K:])",
    "return signals['attention'].argsort()[-K:]",
    "return [0] * K",
    "import os; return os.listdir('/')",
)
PROGRAMS = [f"Here it is:\n```python\n{HEAD}    {body}\n```\nDone." for body in BODIES]
CHANGES = [
    f"<<<<<<< SEARCH\n    return kept\n=======\n    {body}\n>>>>>>> REPLACE\n" for body in BODIES
]
REPLIES: dict[str, list[str | None]] = {
    "evoprompting-code": [*PROGRAMS, "No."],
    "openevolve-code": [*CHANGES, "No.", None],
}


async def run_search(path: Path, data: Dataset, strategy: Strategy) -> tuple[WinnerRecord, str]:
    evaluator = SyntheticEvaluator(data)
    settings = Settings(
        strategy=strategy, rounds=4, per_round=4, budgets=(8,), proposer="scripted",
        evaluator=evaluator.name,
    )  # fmt: skip
    with Ledger(path) as ledger:
        proposer = ScriptedProposer(REPLIES[strategy])
        winner = await Search(settings, ledger, evaluator, proposer).run()
        return winner, ledger.digest()


@pytest.mark.parametrize("strategy", REPLIES)
async def test_programs_are_candidates(strategy: Strategy, data: Dataset, tmp_path: Path) -> None:
    winner, digest = await run_search(tmp_path / "l", data, strategy)
    assert winner.state is None and SelectionProgram(winner.program).digest == winner.digest
    proposals = records_of_kind(tmp_path / "l", ProposalRecord)
    assert all(one.state is None for one in proposals)
    assert winner.program in {one.program for one in proposals}
    statuses = [trial.status for trial in records_of_kind(tmp_path / "l", TrialRecord)]
    assert {"evaluated", "unsafe", "invalid"} <= set(statuses)
    problems = " ".join(
        problem
        for one in records_of_kind(tmp_path / "l", VerdictRecord)
        for problem in one.problems
    )
    assert "1 different indices" in problems or "Permission" in problems
    # A resumed search makes the same records, and a replay runs no program.
    lines = (tmp_path / "l").read_bytes().splitlines(keepends=True)
    (tmp_path / "half").write_bytes(b"".join(lines[: len(lines) // 2]))
    assert (await run_search(tmp_path / "half", data, strategy))[1] == digest
    _, before, after = await replay(tmp_path / "l", tmp_path / "again", data)
    assert before == after == digest


def test_a_program_is_taken_from_its_fence() -> None:
    assert extract_program(f"Sure:\n```python\n{INITIAL_PROGRAM}```\nbye") == INITIAL_PROGRAM
    assert extract_program(f"```\nx = 1\n```\n```py\n{INITIAL_PROGRAM}") == INITIAL_PROGRAM
    assert extract_program(INITIAL_PROGRAM) == INITIAL_PROGRAM
    for reply in ("", "```python\nx = 1\n```", "{}"):
        with pytest.raises(ValueError, match="defines no function select"):
            extract_program(reply)
