"""H: everything that was tried, and what can be read from it.

Knows nothing about who reads it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from offline_search.answers import Floats
from offline_search.objectives import depths
from offline_search.records import Proposed, Tried
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.states.state import PruningState


@dataclass(frozen=True)
class Trial:
    """One candidate and what became of it; values are its relative log-probabilities ``(M,)``."""

    proposed: Proposed
    tried: Tried
    state: PruningState | None = None
    values: Floats | None = None

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposed.name

    @property
    def objective(self) -> float | None:
        """The objective where the whole search split was answered."""
        return self.tried.objective if self.tried.status == "evaluated" else None


@dataclass
class History:
    """Trials in the order they were proposed, and the base policy that they are held against."""

    base: Tried
    base_values: Floats
    trials: list[Trial] = field(default_factory=list)

    def ranked(self) -> list[Trial]:
        """Trials that were evaluated to the end, best first; the earlier first among equals.

        With several objectives those of the Pareto front come first, then those of the next.
        """
        whole = [trial for trial in self.trials if trial.objective is not None]
        depth = depths([trial.tried.axes for trial in whole])
        order = sorted(range(len(whole)), key=lambda i: (depth[i], -(whole[i].objective or 0.0)))
        return [whole[place] for place in order]

    def front(self) -> list[Trial]:
        """The Pareto front; with one objective all trials that were evaluated."""
        ranked = self.ranked()
        depth = depths([trial.tried.axes for trial in ranked])
        return [trial for trial, at in zip(ranked, depth, strict=True) if at == 0]

    def best(self) -> Trial | None:
        """The argmax of the objective so far."""
        whole = [trial for trial in self.trials if trial.objective is not None]
        return max(whole, key=lambda trial: trial.objective or 0.0, default=None)

    def objective_of(self, name: str) -> float | None:
        """A trial's objective, or that of the one that it behaves as."""
        if name == "base":
            return self.base.objective
        trial = next((trial for trial in self.trials if trial.name == name), None)
        if trial is None:
            return None
        if trial.tried.status == "same":
            return self.objective_of(trial.tried.same_as)
        return trial.tried.objective

    def rival(self) -> Floats:
        """Values of the best so far, or of the base policy where that is better."""
        best, base = self.best(), self.base.objective or 0.0
        if best is None or best.values is None or (best.objective or 0.0) <= base:
            return self.base_values
        return best.values

    def failures(self) -> Counter[str]:
        """How often each reason kept a candidate from being evaluated."""
        reasons: Counter[str] = Counter()
        for trial in self.trials:
            if trial.tried.status in ("invalid", "unsafe", "unevaluated"):
                reasons.update(trial.proposed.problems or (trial.tried.reason,))
        return reasons

    def trend(self) -> list[tuple[int, float, float]]:
        """(round, mean, best) of the objective of each round in which anything was evaluated."""
        rounds: dict[int, list[float]] = {}
        for trial in self.trials:
            if trial.objective is not None:
                rounds.setdefault(trial.proposed.round, []).append(trial.objective)
        return [(number, sum(f) / len(f), max(f)) for number, f in sorted(rounds.items())]

    def effects(self) -> list[tuple[str, float, int]]:
        """(atom, mean objective with it less the mean without it, trials with it), best first.

        Only of atoms that some evaluated trials have and some have not.
        """
        scored = [(parts(t.state), t.objective) for t in self.trials if t.state and t.objective]
        found = []
        for name in sorted({name for names, _ in scored for name in names}):
            having = [value for names, value in scored if name in names and value is not None]
            lacking = [value for names, value in scored if name not in names and value is not None]
            if having and lacking:
                gap = sum(having) / len(having) - sum(lacking) / len(lacking)
                found.append((name, gap, len(having)))
        return sorted(found, key=lambda effect: -effect[1])


def calls(state: PruningState) -> list[AtomCall]:
    """The atoms that a proposer chose, in the order of a state."""
    scoring, constraints = state.scoring, state.constraints
    return [
        *scoring.signals,
        scoring.kernel,
        scoring.fusion,
        *constraints.pool,
        constraints.partition,
        constraints.selector,
        state.reassembly,
    ]


def parts(state: PruningState) -> frozenset[str]:
    """Names of the atoms that a proposer chose, the quota among them."""
    allowed = quota(state)
    names = {call.atom for call in calls(state)}
    return frozenset(names if allowed is None else names | {f"q_e={allowed}"})


def quota(state: PruningState) -> int | None:
    """q_e of the selector; some have none."""
    found = state.constraints.selector.model_dump().get("q_e")
    return found if isinstance(found, int) else None


def structure(state: PruningState) -> tuple[str, ...]:
    """Which atoms a state is made of, in order: all of it but its numbers."""
    return tuple(call.atom for call in calls(state))
