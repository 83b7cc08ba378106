"""What a report says of the winner of a search: its gains, why it was chosen, what to serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from offline_search.candidates import BASE_PARENT
from offline_search.ledger import Comparison, WinnerRecord
from offline_search.settings import Settings
from vllm_autoprune.report import Cell, Row, Section, Table, Tone
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.loading import load_state

_TEST = "Questions that no candidate was chosen on."
_MME = (
    "MME total: accuracy, and accuracy+ (both answers of a pair right), in per cent, added over "
    "all categories."
)


@dataclass(frozen=True)
class WinnerReport:
    """The part of a report that is about the winner."""

    settings: Settings
    winner: WinnerRecord

    @property
    def tone(self) -> Tone:
        """Tone of a search: good if its winner beats the base policy and the default state."""
        winner = self.winner
        compared = [winner.test]
        if winner.less_default is not None:
            compared.append(winner.less_default)
        if any(comparison.gain.high < 0 for comparison in compared):
            return "bad"
        is_better = all(comparison.gain.low > 0 for comparison in compared)
        return "good" if is_better else "open"

    @property
    def answer(self) -> str:
        """Whether the winner is better than the base policy and the default state, and advice."""
        winner = self.winner
        settings = self.settings
        answer = (
            f"Candidate {winner.winner} won and on the test split "
            f"{self._describe_gain(winner.test, f'{settings.base_policy} alone')}"
        )
        if (less := winner.less_default) is not None:
            name = f"{settings.default_state}, the default state of this model"
            answer += f"; it {self._describe_gain(less, name)}"
        advice = f" {self.advice}." if self.advice else ""
        return f"{answer}.{advice}"

    @property
    def advice(self) -> str:
        """What to do where no gain over the base policy is shown: serve that alone if it is ahead.

        Empty if a gain is shown.
        """
        winner = self.winner
        settings = self.settings
        gains = {"the test split": winner.test.gain}
        if winner.winner in winner.gains:
            splits = "the search and validation splits together"
            gains[splits] = winner.gains[winner.winner]
        behind = [splits for splits, gain in gains.items() if gain.value < 0]
        name = settings.base_policy
        if not behind:
            if winner.test.gain.low > 0:
                return ""
            return f"No gain is shown: {name} alone may do as well"
        flags = f"--autoprune-state {name} --autoprune-budget {settings.budgets[0]}"
        if settings.positions != load_state(name).positions:
            flags += f" --autoprune-positions {settings.positions}"
        return (
            f"{name} alone was ahead on {' and on '.join(behind)}: serve it, by vllm serve "
            f"with {flags}"
        )

    def list_facts(self) -> Iterator[str]:
        """Facts for the head of a report."""
        settings = self.settings
        if self.winner.less_default is None and not settings.default_state:
            which = "models: none in common" if settings.models else "model: not known"
            yield f"default state of the served {which}"
        yield f"{self.winner.test.examples} test questions"
        yield f"digest {self.winner.digest[:12]}"

    def list_sections(
        self, scores: Mapping[str, float | None], leader: str
    ) -> Iterator[Section]:
        """Why the winner was chosen, and its scores on the test split.

        ``scores`` are objectives on the search split by candidate, over a candidate's own questions
        in a ledger without estimates; ``leader`` is the best on it.
        """
        yield self._describe_finalists(scores, leader)
        yield self._describe_test()
        if self.winner.test.models:
            yield self._describe_models()

    def _describe_gain(self, comparison: Comparison, rival: str) -> str:
        """Whether the winner is better than ``rival``, and by how much."""
        gain = comparison.gain
        verdict = "shows no difference to"
        if gain.low > 0:
            verdict = "is better than"
        elif gain.high < 0:
            verdict = "is worse than"
        value, low, high = self._format(gain.value, gain.low, gain.high)
        accuracy = comparison.accuracy
        return (
            f"{verdict} {rival}: objective {value} {self.settings.objective_unit} "
            f"({low} to {high}), accuracy {format_percent(accuracy)} % against "
            f"{format_percent(accuracy - comparison.accuracy_gain.value)} %"
        )

    def _format(self, *values: float | None) -> list[str]:
        """Format objectives with the decimals that the winner's interval supports."""
        return format_objectives(self.winner.test.objective, *values)

    def _describe_finalists(
        self, scores: Mapping[str, float | None], leader: str
    ) -> Section:
        """Objectives of the finalists and of the base policy on each split."""
        winner = self.winner
        scores = {**scores, **winner.searched}

        def cell(estimate: Estimate) -> Cell:
            value, low, high = self._format(estimate.value, estimate.low, estimate.high)
            return Cell(value, f"{low} to {high}")

        rows: list[Row] = []
        for name in sorted(winner.confirmed, key=lambda name: -winner.estimates[name]):
            won = name == winner.winner
            validation = winner.confirmed[name]
            search, both = self._format(scores[name], winner.estimates[name])
            test = cell(winner.test.objective) if won else Cell("not measured")
            title = Cell(name, "winner" if won else "", tone="good" if won else "")
            rows.append([title, search, cell(validation.objective), both, test])
        validation = winner.confirmed[winner.winner]
        base_value = validation.objective.value - validation.gain.value
        search, validated = self._format(scores[BASE_PARENT], base_value)
        rows.append(
            ["base policy", search, validated, "–", cell(winner.base.objective)]
        )
        head = ["candidate", "search", "validation", "search and validation", "test"]
        finalists = Table("Objectives of the finalists", head, rows, "lrrrr")
        why = (
            f"The {len(winner.confirmed)} best candidates of the search split were measured on the "
            "validation split, and their gains over the base policy estimated on the questions of "
            "both together: the search split alone favours candidates that were lucky on it. "
            f"{self._explain_choice()} Objectives on the search split are estimates for all "
            "its questions that were asked, corrected for which of them each candidate was asked."
        )
        luck = f"{winner.winner} was also the best on the search split."
        if leader != winner.winner:
            luck = f"On the search split alone {leader} was the best."
        return Section("Why this candidate", [why, luck], tables=[finalists])

    def _explain_choice(self) -> str:
        """Which rule chose the winner: the best lower bound, or simplicity among the tied."""
        winner = self.winner
        name = winner.winner
        if not winner.gains:
            return f"{name} was chosen."
        best = max(winner.gains, key=lambda rival: winner.gains[rival].low)
        (bound,) = self._format(winner.gains[best].low)
        if best == name:
            return f"{name} has the best lower bound of its gain, {bound}."
        (own_bound,) = self._format(winner.gains[name].low)
        reason = "is simpler: fewer atoms, or a smaller q_e"
        if winner.model_gains:
            least = [min(winner.model_gains[rival].values()) for rival in (name, best)]
            ours, theirs = self._format(*least)
            reason = (
                f"gains more on the model where it gains least, {ours} against {theirs}"
            )
        return (
            f"{best} has the best lower bound of its gain, {bound} ({name}: {own_bound}), but is "
            f"tied with {name}, which {reason}."
        )

    def _describe_test(self) -> Section:
        """Scores of the winner and of the base policy on the test split."""
        winner = self.winner
        test = winner.test
        base = winner.base
        rows: list[Row] = [
            [name, format_interval(scores.objective), format_percent(scores.accuracy)]
            for name, scores in (("winner", test), ("base policy", base))
        ]
        for title, comparison in (
            ("gain over the base policy, paired", test),
            ("gain over the default state, paired", winner.less_default),
        ):
            if comparison is not None:
                gain = format_interval(comparison.gain)
                accuracy = format_interval(comparison.accuracy_gain, 100.0)
                rows.append([title, gain, accuracy])
        head = ["", "objective", "accuracy %"]
        text = _TEST
        if self.settings.objective == "mme":
            head.append("MME total")
            totals = [test.mme_total, base.mme_total]
            cells = [f"{total:.1f}" for total in totals]
            cells.append(f"{test.mme_total - base.mme_total:+.1f}")
            pairs = zip_longest(rows, cells, fillvalue="")  # no total of the default
            rows = [[*row, cell] for row, cell in pairs]
            text = f"{_TEST} {_MME}"
        table = Table("Winner and base policy", head, rows, "lrrr"[: len(head)])
        return Section("Result on the test split", [text], tables=[table])

    def _describe_models(self) -> Section:
        """The winner's gains on each model on the test split, and those of finalists before it."""
        winner = self.winner
        tested: list[Row] = []
        for name, scores in winner.test.models.items():
            gain = format_interval(scores.gain)
            accuracy = format_interval(scores.accuracy_gain, 100.0)
            loss = f"{winner.losses[name]:.3f}"
            tested.append([name, loss, gain, format_percent(scores.accuracy), accuracy])
        head = ["model", "loss of the base policy, nats", "gain", "accuracy %"]
        head.append("accuracy gain, points")
        test = Table("Winner by model, test split", head, tested, "lrrrr")
        names = list(winner.test.models)
        rows: list[Row] = [
            [candidate, *(f"{gains[name]:+.3f}" for name in names)]
            for candidate, gains in winner.model_gains.items()
        ]
        columns = "l" + "r" * len(names)
        title = "Gains by model, search and validation"
        finalists = Table(title, ["candidate", *names], rows, columns)
        text = (
            "A gain is a share of what the base policy alone loses on the model: of +0.3, three "
            "tenths of the loss are won back. The objective is the mean over the models."
        )
        return Section("Each model", [text], tables=[test, finalists])


def format_objectives(interval: Estimate, *values: float | None) -> list[str]:
    """Format objectives with as many decimals as the width of ``interval`` supports."""
    digits = interval.count_decimals()
    return ["unknown" if value is None else f"{value:+.{digits}f}" for value in values]


def format_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A mean with its 95 % interval."""
    scaled = Estimate(
        *(scale * x for x in (estimate.value, estimate.low, estimate.high))
    )
    digits = scaled.count_decimals()
    return f"{scaled.value:+.{digits}f} ({scaled.low:+.{digits}f} to {scaled.high:+.{digits}f})"


def format_percent(share: float | None) -> str:
    """A share in per cent, or an empty string."""
    return "" if share is None else f"{100 * share:.1f}"
