"""The published comparison: every strategy on one yardstick and K, and its winners confirmed.

All arms of a comparison share evaluator, data, base policy and number of evaluations. Each
yardstick and K has its own folder, so a study can be resumed, extended by strategies, and printed
again, for which its results are enough, without the ledgers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.yardsticks.catalogue import open_yardstick
from benchmarks.search import confirmation
from benchmarks.search.comparison import (
    WITHOUT_MODEL,
    CachingEvaluator,
    needs_proposer,
    run_comparison,
    space_of,
)
from benchmarks.search.comparison_table import as_markdown
from benchmarks.search.results import read_results, results_of
from benchmarks.search.yardstick_evaluator import YardstickEvaluator
from offline_search.candidates import base_state, paper_state
from offline_search.dataset import Split
from offline_search.evaluator import Evaluator
from offline_search.proposer import Proposer
from offline_search.settings import Settings

WITHOUT_PROPOSER = ("random", "tpe", f"autoprune+{WITHOUT_MODEL}")
"""Strategies that ask no language model."""

ARMS = (
    *WITHOUT_PROPOSER,
    "autoprune+",
    "autoprune",
    "evoprompting-states",
    "openevolve-states",
    "evoprompting-code",
    "openevolve-code",
)

REFERENCES = ("tpe", f"autoprune+{WITHOUT_MODEL}")
"""The strategies that the others are compared with, where they are among them."""

ABLATIONS = tuple(
    f"autoprune+{WITHOUT_MODEL}@{space}"
    for space in ("released", "without-diversity", "without-fusion", "without-anchoring")
)
"""The searches of the component table: the full policy, and each smaller space."""

PER_ROUND = 5

BASE_POLICIES = {"minillava": "visionzip", "miniqwen": "divprune"}
"""Base policy of each yardstick: one that does not read the question, which leaves much to find."""

RELEASED = {"minillava": ("cdpruner", 16), "miniqwen": ("divprune", 8)}
"""Base policy and K of searches around the released policy, which refines CDPruner; mini-Qwen3-VL
has no CLIP for that."""

_IMAGES: dict[Split, int] = {"search": 128, "validation": 128, "test": 128}
_CONFIRMING_IMAGES: dict[Split, int] = {"search": 1, "validation": 1, "test": 600}
"""Images of the test split that winners are confirmed on, each with one question.

The first of them are those of :data:`_IMAGES`."""


@dataclass(frozen=True)
class Study:
    """One study: its folder, arms and seeds, and the evaluations of a search in rounds of five.

    ``concurrency`` searches run together. ``base_policy`` takes the place of the yardstick's own.
    With ``quotas``, the released policy is measured with each of these q_e.
    """

    folder: Path
    arms: Sequence[str]
    seeds: Sequence[int]
    rounds: int
    proposer: str = ""
    proposals_per_reply: int = 1
    concurrency: int = 1
    base_policy: str = ""
    quotas: Sequence[int] = ()

    def needs_proposer(self, names: Sequence[str], budgets: Sequence[int]) -> bool:
        """Whether a search that asks a language model has not ended on these yardsticks and K."""
        arms = {
            arm
            for name in names
            for budget in budgets
            for arm in self._unfinished_arms(name, budget)
        }
        return needs_proposer(sorted(arms), self._settings(1, BASE_POLICIES["minillava"]))

    def run(self, name: str, budget: int, connect: Callable[[], Proposer] | None) -> str:
        """Run what is missing on one yardstick at one K; the tables in Markdown.

        ``connect`` opens the proposer, once for each comparison, because each has its event loop.
        """
        folder = self._cell(name, budget)
        folder.mkdir(parents=True, exist_ok=True)
        yardstick, base = open_yardstick(name), self.base_policy or BASE_POLICIES[name]
        own = YardstickEvaluator(yardstick, _IMAGES, each=1, base_policy=base)
        settings = self._settings(budget, base)
        asyncio.run(self._compare(folder, settings, CachingEvaluator(own), connect))
        confirming = YardstickEvaluator(yardstick, _CONFIRMING_IMAGES, each=1, base_policy=base)
        swept = {f"q_e = {q}": paper_state(settings, q) for q in self.quotas if q <= budget}
        states = {confirmation.BASE: base_state(settings), **swept}
        confirmation.confirm(folder, CachingEvaluator(confirming), states)
        tables = format_tables(folder, self.arms, self.seeds)
        if swept:
            tables += f"\n{confirmation.states_as_markdown(folder, swept)}"
        return f"## {yardstick.name}, K = {budget}\n\n{tables}"

    async def _compare(
        self,
        folder: Path,
        settings: Settings,
        evaluator: Evaluator,
        connect: Callable[[], Proposer] | None,
    ) -> None:
        proposer = None if connect is None else connect()
        try:
            await run_comparison(
                folder, self.arms, self.seeds, settings, evaluator, proposer, self.concurrency
            )
        finally:
            if proposer is not None:
                await proposer.close()

    def _cell(self, name: str, budget: int) -> Path:
        """Folder of one yardstick and K."""
        return self.folder / f"{name}-k{budget}"

    def _unfinished_arms(self, name: str, budget: int) -> list[str]:
        known = read_results(self._cell(name, budget))
        return [a for a in self.arms if len(results_of(known, a, self.seeds)) < len(self.seeds)]

    def _settings(self, budget: int, base_policy: str) -> Settings:
        return Settings(
            rounds=self.rounds,
            per_round=PER_ROUND,
            base_policy=base_policy,
            budgets=(budget,),
            proposer=self.proposer,
            proposals_per_reply=self.proposals_per_reply,
        )


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """The searches of a folder in Markdown; their winners beside each of :data:`REFERENCES`.

    Winners that were not confirmed are left out. Spaces are compared by strategy, each with the
    largest.
    """
    tables = [as_markdown(folder, arms, seeds)]
    groups = {arm: list(arms) for arm in REFERENCES if arm in arms} or {arms[0]: list(arms)}
    if any(space_of(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{space_of(arm)}"), []).append(arm)
        groups = {group[0]: group for group in strategies.values()}
    if confirmation.read_confirmation(folder):
        tables += [confirmation.as_markdown(folder, g, seeds, arm) for arm, g in groups.items()]
    return "\n".join(tables)
