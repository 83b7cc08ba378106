"""Whether states that win in nats also answer more questions correctly.

The search maximizes the mean log-probability of the reference answers, because it tells candidates
apart with fewer questions than the share of right answers does. What a user sees is right answers.
The two are compared on recorded searches: on the new questions of a folder's confirmed winners, and
on the search questions of a ledger's candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.search.results import BASE, quantile_of_t, read_confirmed
from offline_search.ledger import EvaluationRecord, read_ledger
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Floats, correlate_ranks

_RECORDED = Path(__file__).parent / "recorded"
_HALVES = 400
"""Number of random halves of a ledger's questions."""


def list_recorded() -> list[Path]:
    """Folders and ledgers of the repository."""
    folders = sorted(path.parent for path in _RECORDED.rglob("confirmation.json"))
    return [*folders, *sorted(_RECORDED.rglob("proposed/*.jsonl"))]


@dataclass(frozen=True)
class _State:
    """Scores of one state; ``parts`` has its objective on each question, or block of questions."""

    objective: float
    accuracy: float
    parts: Floats

    def leads(self, other: _State) -> bool:
        """Whether the state is ahead in nats, and the 95 % interval over parts excludes 0."""
        gaps = self.parts - other.parts
        if len(gaps) < 2:
            return False
        width = quantile_of_t(len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
        return bool(self.objective - other.objective > width)


@dataclass
class _Wins:
    """Wins in nats, by what they are in right answers."""

    more: int = 0
    equal: int = 0
    fewer: int = 0

    def add(self, winner: _State, loser: _State) -> None:
        """Count one win in nats."""
        self.more += winner.accuracy > loser.accuracy
        self.equal += winner.accuracy == loser.accuracy
        self.fewer += winner.accuracy < loser.accuracy

    def __str__(self) -> str:
        count = self.more + self.equal + self.fewer
        if not count:
            return "-"
        return f"{self.more} of {count} ({100 * self.more / count:.1f} %), {self.fewer} fewer"


def _read_folder(folder: Path) -> tuple[list[_State], _State | None]:
    """Different states of a folder on its new questions, and the base policy."""
    states: dict[str, _State] = {}
    base = None
    for name, score in read_confirmed(folder).items():
        parts = np.array(score.blocks)
        state = _State(score.objective, score.accuracy, parts)
        if name == BASE:
            base = state
        states.setdefault(score.digest, state)
    return [*states.values()], base


@dataclass(frozen=True)
class _Answers:
    """Answers of S candidates to M questions, ``(S, M)``, the base policy first."""

    logprob: Floats
    right: Floats

    @classmethod
    def read(cls, path: Path) -> _Answers:
        """Those of a ledger's candidates that were asked its whole search split."""
        logprobs: dict[str, list[float]] = {}
        rights: dict[str, list[int]] = {}
        for record in read_ledger(path):
            if isinstance(record, EvaluationRecord) and record.split == "search":
                logprobs.setdefault(record.digest, []).extend(record.logprob)
                rights.setdefault(record.digest, []).extend(map(int, record.right))
        count = len(logprobs.pop("full"))
        complete = [digest for digest in logprobs if len(logprobs[digest]) == count]
        return cls(
            np.array([logprobs[digest] for digest in complete]),
            np.array([rights[digest] for digest in complete], dtype=np.float64),
        )

    def states(self) -> list[_State]:
        """The candidates, each question a part."""
        pairs = zip(self.logprob, self.right, strict=True)
        return [_State(float(a.mean()), float(b.mean()), a) for a, b in pairs]

    def predict(self) -> tuple[float, float]:
        """Rank correlation with the right answers on one half of the questions, on average.

        First that of the objective on the other half, then that of its right answers.
        """
        generator = np.random.default_rng(0)
        correlations = []
        for _ in range(_HALVES):
            order = generator.permutation(self.right.shape[1])
            asked, new = np.array_split(order, 2)
            truth = self.right[:, new].mean(1)
            correlations.append(
                [
                    float(correlate_ranks(figures[:, asked].mean(1), truth))
                    for figures in (self.logprob, self.right)
                ]
            )
        nats, points = np.mean(correlations, axis=0)
        return float(nats), float(points)


def format_agreement(paths: Sequence[Path]) -> str:
    """A row for each folder or ledger, in Markdown, with all different states of it.

    *Told apart*: pairs of states whose difference in nats has an interval over questions that does
    not contain 0. The last two columns are of ledgers: how well a score on half of the questions
    ranks states by right answers to the other half.
    """
    rows = []
    for path in paths:
        if path.is_dir():
            states, base = _read_folder(path)
            correlations = ["-", "-"]
        else:
            answers = _Answers.read(path)
            states = answers.states()
            base = states[0]
            correlations = [f"{value:.2f}" for value in answers.predict()]
        over_base = _Wins()
        for state in states:
            if base is not None and state.objective > base.objective:
                over_base.add(state, base)
        every = _Wins()
        clear = _Wins()
        for pair in combinations(states, 2):
            loser, winner = sorted(pair, key=lambda state: state.objective)
            every.add(winner, loser)
            if winner.leads(loser):
                clear.add(winner, loser)
        name = f"{path.parent.name}/{path.stem}"
        rows.append([name, len(states), over_base, every, clear, *correlations])
    head = ["searches", "states", "ahead of the base policy", "all pairs"]
    head += ["pairs told apart", "by nats", "by right answers"]
    cells = [[str(cell) for cell in row] for row in rows]
    return Table("", head, cells, "lrrrrrr").markdown()
