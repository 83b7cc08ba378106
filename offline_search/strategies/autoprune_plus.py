"""`autoprune+`: a language model proposes structure, a sampler turns its numbers, races save both.

Knows nothing about endpoints or servers. The first round is warm starts. After it the first half of
a search looks for structures, and the second half works on the best of them as well; each slot of a
round goes to one of its origins, drawn by how often each has improved on the best so far:

    llm     a structure from the language model, which is poor at numbers
    wide    a whole state, structure and numbers, by TPE over all whole states measured so far
    tune    the numbers of one of the best structures, by TPE within it
    near    one of the best with a few numbers moved a little, where TPE has too little to go by
    graft   one of the best with one component of another of them, or of a random state

"The best" are of different structures: variants of one would crowd out what it has to learn from.

Without a proposer the first origin falls away: the ablation that tells what a model is worth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from pydantic import JsonValue

from offline_search.history import History, Trial, structure
from offline_search.menu import offered
from offline_search.prompt import propose
from offline_search.proposal import COMPONENTS, Draft, JsonObject, assembled
from offline_search.settings import Settings
from offline_search.space import Chooser, Dice, composed, read_choices, read_knobs, turned
from offline_search.strategies.protocol import Round
from offline_search.strategies.sampler import Study
from offline_search.strategies.starts import paper_state, warm_starts
from vllm_autoprune.tpdsl.states.state import PruningState

_BEST = 5
"""Structures that further candidates are made from, each by its best trial."""

_ENOUGH = 4
"""Measured settings of a structure before TPE is asked about it."""

_STEP = 0.15
"""Width of a small move, as a share of a number's range."""

_RANDOM = 5
"""Candidates whose whole structure is random, before TPE is asked about structures."""

_ORIGINS = ("llm", "wide", "tune", "graft")
_LOOKING = ("llm", "wide")
"""Origins of whole states; the others work on what these found, and would soon be all of it."""

_WHOLE = (*_LOOKING, "warm start", "random")
"""Origins that TPE is told of."""


class AutoPrunePlus:
    """Structure from the language model and from grafts, numbers from TPE."""

    races = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.asks = bool(settings.proposer)

    async def propose(self, this: Round) -> list[Draft]:
        """Warm starts first; then every slot by the success of its origin."""
        if this.number == 1:
            starts = warm_starts(self._settings)[: this.count]
            return [Draft("warm start", state) for state in starts]
        ranked = _different(this.history.ranked())
        if not ranked and self.asks:
            return list(await asyncio.gather(*(self._asked(this, i) for i in range(this.count))))
        if not ranked:
            return [self._composed("random", Dice(this.dice)) for _ in range(this.count)]
        credit = _credit(this.history)
        if not self.asks:
            del credit["llm"]
        if 2 * this.number <= self._settings.rounds:
            credit = {origin: credit[origin] for origin in _LOOKING if origin in credit}
        origins = [_drawn(credit, this.dice) for _ in range(this.count)]
        drafts: dict[int, Draft] = {}
        wide = self._told(this) if "wide" in origins else None
        for index, origin in enumerate(origins):
            if origin == "tune":
                drafts[index] = self._tuned(ranked, this.history, this.dice)
            elif origin == "graft":
                drafts[index] = self._grafted(ranked, this.dice)
            elif origin == "wide":
                assert wide is not None
                drafts[index] = self._composed("wide", wide.suggest())
        waiting = [index for index in range(this.count) if index not in drafts]
        replies = await asyncio.gather(*(self._asked(this, index) for index in waiting))
        drafts |= dict(zip(waiting, replies, strict=True))
        return [drafts[index] for index in range(this.count)]

    async def _asked(self, this: Round, index: int) -> Draft:
        best = this.history.best()
        shown = paper_state(self._settings) if best is None or best.state is None else best.state
        menu = offered(self._settings, this.dice, [shown])
        messages = propose(self._settings, this.summary, shown, index, this.count, menu)
        parents = () if best is None else (best.name,)
        return await this.ask(index, messages, "llm", parents, menu=menu)

    def _composed(self, origin: str, choose: Chooser) -> Draft:
        body = composed(choose, self._settings.source_budget)
        return Draft(origin, assembled(body, self._settings, "candidate"))

    def _told(self, this: Round) -> Study:
        """TPE over the whole space, told of every whole state that was measured, whoever made it.

        It is not told of small steps: variants of one state would be all that it takes for good.
        """
        budget = self._settings.source_budget
        made = sum(trial.proposed.origin == "wide" for trial in this.history.trials)
        measured = [
            (trial.state, trial.tried.objective)
            for trial in this.history.trials
            if trial.state is not None
            and trial.tried.objective is not None
            and trial.proposed.origin in _WHOLE
        ]
        startup = len(measured) + _RANDOM - made
        study = Study(this.dice.randrange(2**31), startup)
        for state, objective in measured:
            told = study.enqueue(read_choices(state, budget))
            composed(told, budget)
            study.tell(told, objective)
        return study

    def _tuned(self, ranked: Sequence[Trial], history: History, dice: Random) -> Draft:
        parent, state = _parent(ranked, dice)
        alike = [
            trial
            for trial in history.trials
            if trial.state is not None
            and trial.tried.objective is not None
            and structure(trial.state) == structure(state)
        ]
        budget = self._settings.source_budget
        if len(alike) < _ENOUGH:
            return self._draft("near", turned(state, _Near(state, budget, dice), budget), parent)
        study = Study(dice.randrange(2**31), startup=0)
        for trial in alike:
            assert trial.state is not None
            told = study.enqueue(read_knobs(trial.state, budget))
            turned(trial.state, told, budget)
            study.tell(told, trial.tried.objective)
        return self._draft("tune", turned(state, study.suggest(), budget), parent)

    def _grafted(self, ranked: Sequence[Trial], dice: Random) -> Draft:
        parent, state = _parent(ranked, dice)
        others = [trial.state for trial in ranked[:_BEST] if trial.state not in (None, state)]
        lent = dice.choice(others) if others and dice.random() < 0.5 else None
        other = composed(Dice(dice), self._settings.source_budget) if lent is None else _alpha(lent)
        body = _alpha(state)
        dice.choice(_GRAFTS)(body, other, dice)
        return self._draft("graft", body, parent)

    def _draft(self, origin: str, body: JsonObject, parent: Trial) -> Draft:
        state = assembled(body, self._settings, "candidate")
        return Draft(origin, state, (), (parent.name,))


class _Near:
    """Choices close to those of a state; half of them stay."""

    def __init__(self, state: PruningState, budget: int, dice: Random) -> None:
        self._now = read_knobs(state, budget)
        self._dice = dice

    def option(self, name: str, options: Sequence[str]) -> str:
        """The same, or its neighbour."""
        place = list(options).index(str(self._now[name]))
        place += self._dice.choice((-1, 0, 0, 1))
        return options[min(max(place, 0), len(options) - 1)]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The same, or one a small step away within the range."""
        now = float(self._now[name])
        if self._dice.random() < 0.5:
            return now
        moved = min(high, max(low, self._dice.gauss(now, _STEP * (high - low))))
        return round(moved) if integer else round(moved, 4)


def _alpha(state: PruningState) -> JsonObject:
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS))
    return body


def _different(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trial of each structure, in their order."""
    found: dict[object, Trial] = {}
    for trial in ranked:
        assert trial.state is not None
        found.setdefault(structure(trial.state), trial)
    return list(found.values())


def _credit(history: History) -> dict[str, float]:
    """How often each origin has improved on the best so far; a success and a failure are lent."""
    wins, tries = dict.fromkeys(_ORIGINS, 1.0), dict.fromkeys(_ORIGINS, 2.0)
    best = history.base.objective or 0.0
    for trial in history.trials:
        origin = "tune" if trial.proposed.origin == "near" else trial.proposed.origin
        improves = trial.objective is not None and trial.objective > best
        best = max(best, trial.objective) if trial.objective is not None else best
        if origin in tries:
            tries[origin] += 1
            wins[origin] += improves
    return {origin: wins[origin] / tries[origin] for origin in _ORIGINS}


def _drawn(weights: dict[str, float], dice: Random) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]


def _parent(ranked: Sequence[Trial], dice: Random) -> tuple[Trial, PruningState]:
    """One of the best, a better one likelier by its rank."""
    best = ranked[:_BEST]
    parent = dice.choices(best, [1 / (1 + rank) for rank in range(len(best))])[0]
    assert parent.state is not None
    return parent, parent.state


def _take(component: str, field: str | None = None) -> Callable[..., None]:
    """Graft a whole component, or one field of it."""

    def graft(body: JsonObject, other: JsonObject, dice: Random) -> None:
        if field is None:
            body[component] = other[component]
            return
        here, there = _object(body[component]), _object(other[component])
        here[field] = there[field]

    return graft


def _add_signal(body: JsonObject, other: JsonObject, dice: Random) -> None:
    here, there = _signals(body), _signals(other)
    has = {_object(signal)["atom"] for signal in here}
    fresh = [signal for signal in there if _object(signal)["atom"] not in has]
    if fresh:
        here.append(dice.choice(fresh))


def _drop_signal(body: JsonObject, other: JsonObject, dice: Random) -> None:
    here = _signals(body)
    if len(here) > 1:
        here.pop(dice.randrange(len(here)))


_GRAFTS: tuple[Callable[[JsonObject, JsonObject, Random], None], ...] = (
    _add_signal,
    _drop_signal,
    _take("scoring", "fusion"),
    _take("scoring", "kernel"),
    _take("constraints", "pool"),
    _take("constraints", "selector"),
    _take("reassembly"),
)


def _signals(body: JsonObject) -> list[JsonValue]:
    signals = _object(body["scoring"])["signals"]
    assert isinstance(signals, list)
    return signals


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict)
    return value
