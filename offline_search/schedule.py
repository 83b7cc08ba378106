"""Course of a search: its evaluation budget, what each round may spend, and plateaus."""

from __future__ import annotations

from dataclasses import dataclass

from offline_search.history import History
from offline_search.settings import MODEL_SHARE, RACED_PER_PLACE, Settings

RACING_STAGES = ((0.125, 3), (0.5, 2), (1.0, 1))
"""Shares of a round's questions after which a race drops candidates, and divisors: one candidate in
``divisor`` goes on. Of 15 candidates, five go on and then three, or fewer if some of them are
clearly worse than the best so far."""


RACING_ERRORS = 3.0
"""Standard errors for clearly worse; more than two, because a race tests a candidate repeatedly."""


def count_of_share(share: float, questions: int) -> int:
    """Number of questions that is ``share`` of a round's ``questions``, at least 1."""
    return max(1, round(share * questions))


_PLATEAU_SHARE = 0.5
"""Share of the budget that a search spends before a plateau may end it."""

_IDLE_ROUNDS = 4
"""Rounds in a row after which a search ends if no candidate leads by more than the resolution."""


@dataclass(frozen=True)
class EvaluationBudget:
    """Number of answers that the candidates of a search may take, at ``questions`` a round.

    A search with a fixed number of rounds counts rounds instead.
    """

    settings: Settings
    questions: int
    is_fresh: bool = False
    """Whether every round has new questions."""

    @property
    def per_candidate(self) -> int:
        """Number of answers of a candidate that is asked all questions of a round."""
        return self.questions * len(self.settings.budgets)

    @property
    def answers(self) -> int:
        """Number of answers of T x m candidates."""
        return self.settings.total_candidates * self.per_candidate

    def is_spent(self, spent: int) -> bool:
        """Whether no further round begins after ``spent`` answers."""
        return self.settings.has_fixed_evaluations and spent >= self.answers

    def share(self, number: int, spent: int) -> float:
        """Share of the search that is done after round ``number`` and ``spent`` answers."""
        if self.settings.has_fixed_evaluations:
            return min(1.0, spent / self.answers)
        return min(1.0, number / self.settings.rounds)

    def count_proposals(self, spent: int) -> int:
        """Number of candidates that are proposed in the next round."""
        count = self.settings.per_round
        if not self.settings.races:
            return count
        # The last round is smaller, so that a race hardly exceeds its budget.
        affordable = (self.answers - spent) // self.per_candidate
        return RACED_PER_PLACE * min(count, max(1, affordable))

    def is_last(self, number: int, spent: int) -> bool:
        """Whether round ``number`` is the last one if it spends all that it may."""
        if not self.settings.has_fixed_evaluations:
            return number == self.settings.rounds
        if number == self.settings.maximum_rounds:
            return True
        remaining = self.answers - spent
        return remaining <= self.settings.per_round * self.per_candidate

    def describe_round(self, number: int, spent: int, resolution: float) -> str:
        """Text for prompts: the round, a candidate's cost, and whether another round follows."""
        settings = self.settings
        round_text = f"Round {number} of {settings.rounds}."
        ending = "It is the last one."
        if settings.has_fixed_evaluations:
            usual = settings.per_round * self.per_candidate
            at = " at one K" if len(settings.budgets) > 1 else ""
            earlier = ""
            if self.is_fresh and number > 1:
                earlier = ", and more of earlier ones"
            round_text = (
                f"Round {number}. No round begins once {self.answers} answers are taken, each of "
                f"one candidate to one question{at}; {spent} are, those of base not counted, and a "
                f"full round takes about {usual}, of all its candidates together{earlier}."
            )
            if number < settings.maximum_rounds:
                ending = (
                    "It is the last one, unless it takes fewer than the "
                    f"{self.answers - spent} that remain."
                )
        if not self.is_last(number, spent):
            follows = "Another follows"
            if settings.has_fixed_evaluations:
                follows += " if answers are left"
            ending = f"{follows}."
            if resolution:  # without a resolution, no plateau ends a search
                spent_half = "half of the rounds"
                if settings.has_fixed_evaluations:
                    spent_half = "half of the answers"
                ending = (
                    f"{follows}, unless, past {spent_half}, {_IDLE_ROUNDS} rounds in a row "
                    "found nothing better by more than the resolution."
                )
            ending += self._describe_following(spent)
        return f"{round_text} {ending} {self._describe_cost(number, resolution)}."

    def _describe_following(self, spent: int) -> str:
        """Sentence on the candidates of the next round, if it is smaller; else empty."""
        usual = self.settings.per_round * self.per_candidate
        count = self.count_proposals(spent + usual)
        if count == self.count_proposals(spent):
            return ""
        written = int(MODEL_SHARE * count) or "none"
        which = f"{count} candidates, {written} of them yours"
        return f" If this round takes {usual}, the next has {which}."

    def _describe_cost(self, number: int, resolution: float) -> str:
        """Which questions a candidate of a round is asked, and when it is dropped."""
        settings = self.settings
        most = "at most " if settings.races else ""
        cost = f"A candidate is asked {most}{self.questions} questions in its round"
        if not self.is_fresh:
            cost += ", the same in every round"
        if self.is_fresh and number > 1:
            asked = "earlier candidates that lead"
            if settings.proposals_per_reply > 1:
                asked += " and of parents of its candidates"
            cost = (
                "The questions of this round, others than those of the round before, are asked "
                f"of {asked} too. {cost}"
            )
        if settings.models:
            cost += ", by each model in turn"
        if len(settings.budgets) > 1:
            cost += f", each at {len(settings.budgets)} budgets"
        if settings.races:
            cost += self._describe_race(resolution)
        return cost

    def _describe_race(self, resolution: float) -> str:
        """Description of the race: after how many questions which candidates are dropped."""
        stages = [(share, divisor) for share, divisor in RACING_STAGES if share < 1]
        counts = [str(count_of_share(share, self.questions)) for share, _ in stages]
        kept = [f"the best 1 in {divisor}" for _, divisor in stages]
        tied = ""
        if resolution:
            tied = (
                ", those tied with it, whose difference and whose two standard errors are each "
                "within the resolution"
            )
        return (
            f". After {' and after '.join(counts)} of them candidates are dropped: those behind "
            f"the leader before the round, by more than {RACING_ERRORS:g} standard errors{tied}; "
            f"and of the others those outranked, which are all but {', then '.join(kept)} by the "
            "mean of their answers, all of which are to the same questions"
        )


@dataclass
class Plateau:
    """Detects a plateau: rounds that improve on the leader by no more than the resolution.

    ``level`` 0: no plateau; 1: leaders are tied, so other structures are searched; 2: several
    rounds found nothing better, so the search ends. ``since`` is the round that set the level.
    """

    level: int = 0
    since: int = 0

    def update(self, history: History, number: int, share: float) -> None:
        """Update the level after round ``number``, when ``share`` of the search is done."""
        resolution = history.resolution
        if not resolution:
            return
        if number >= self.since + 2:
            leads = history.leads(number - 1, number)
            verdicts = {lead.verdict(resolution) for lead in leads}
            if "better" in verdicts:
                self.level = 0
            elif self.level == 0 and verdicts and verdicts <= {"same", "undecided"}:
                self.level = 1
                self.since = number
        leads = history.leads(number - _IDLE_ROUNDS + 1, number)
        is_idle = bool(leads) and max(lead.value for lead in leads) <= resolution
        if is_idle and share >= _PLATEAU_SHARE:
            self.level = 2
            self.since = number
