"""A search from its first round to its winner: Algorithm 2 of the paper, on a ledger.

Knows nothing about endpoints, servers or terminals.

    strategy ─ proposer ─> drafts ─> load ─> safety ─> behaviour ─> evaluator ─> trials
        ^                                                                          │
        └────────────────────── summary H_t <── history <──────────────────────────┘

Every step is a record. A search that is run again on its ledger takes the same steps, and finds
those it has done: that is all there is to resuming and to replaying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from offline_search.choosing import Choosing
from offline_search.evaluators.protocol import Evaluator
from offline_search.history import History
from offline_search.ledger import Ledger
from offline_search.measuring import Measuring
from offline_search.menu import Menu
from offline_search.prompt import Messages
from offline_search.proposal import Draft
from offline_search.proposers.asking import Asking, Limits
from offline_search.proposers.protocol import Proposer
from offline_search.records import Chosen, Opened, Summarized
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.protocol import Ask, Round
from offline_search.strategies.starts import base_state
from offline_search.summary import summarize
from offline_search.trying import Trying
from offline_search.watch import Silent, Watch
from vllm_autoprune.errors import SearchError

_LONGEST = 4
"""A search that goes on until its evaluations are spent has at most so many times T rounds."""


@dataclass(frozen=True)
class Search:
    """Everything that a search needs; ``limits`` bound what its proposer may cost."""

    settings: Settings
    ledger: Ledger
    evaluator: Evaluator
    proposer: Proposer
    limits: Limits = field(default_factory=Limits)
    watch: Watch = field(default_factory=Silent)

    async def run(self) -> Chosen:
        """Run, or go on with, the search; raises :class:`SearchError` where it cannot."""
        settings, ledger = self.settings, self.ledger
        require_same(ledger, settings)
        ledger.put(Opened(settings=settings))
        strategy = STRATEGIES[settings.strategy](settings)
        measuring = Measuring(ledger, self.evaluator)
        examples = self.evaluator.dataset.of("search")
        trying = Trying(settings, ledger, measuring, examples, self.evaluator.probes())
        asking = Asking(settings, ledger, self.proposer, self.limits)
        base = base_state(settings)
        history = await trying.begin(base)
        self.watch.began(history, len(examples))
        whole = settings.candidates * len(examples) * len(settings.budgets)
        until_spent = settings.equal_evaluations or strategy.races
        summary = summarize(history)
        for number in range(1, settings.rounds * (_LONGEST if until_spent else 1) + 1):
            spent = _spent(history)
            if until_spent and spent >= whole:
                break
            this = Round(
                number,
                settings.per_round,
                history,
                summary,
                Random(f"{settings.seed} {number}"),
                _ask(asking, number),
            )
            drafts = await strategy.propose(this)
            trials = await trying.round(drafts, number, history, strategy.races)
            history.trials += trials
            summary = summarize(history)
            ledger.put(Summarized(round=number, text=summary))
            rounds = number / settings.rounds
            share = _spent(history) / whole if until_spent else rounds
            self.watch.round(number, trials, history, min(1.0, share), asking.spent())
        choosing = Choosing(settings, measuring, self.evaluator.dataset)
        chosen = ledger.put(await choosing.choose(history, base))
        self.watch.chosen(chosen)
        return chosen


def require_same(ledger: Ledger, settings: Settings) -> None:
    """Refuse to go on with a ledger of another search, and say what differs."""
    known = ledger.find(Opened, "opened")
    if known is None or known.settings == settings:
        return
    before, now = known.settings.model_dump(), settings.model_dump()
    differing = [
        f"{name} is {now[name]!r}, was {before[name]!r}"
        for name in before
        if before[name] != now[name]
    ]
    raise SearchError(
        f"ledger {ledger.path} belongs to another search ({'; '.join(differing)}) -> give the "
        "same settings again, or another ledger"
    )


def _spent(history: History) -> int:
    return sum(trial.tried.examples for trial in history.trials)


def _ask(asking: Asking, number: int) -> Ask:
    async def ask(
        index: int,
        messages: Messages,
        origin: str,
        parents: tuple[str, ...],
        code_in: Callable[[str], str] | None = None,
        menu: Menu | None = None,
    ) -> Draft:
        return await asking.draft((number, index), messages, origin, parents, code_in, menu)

    return ask
