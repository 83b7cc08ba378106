"""Ledger records: one immutable model for every step of Algorithm 2.

``clock`` holds what differs between two runs of the same search (start and duration); all other
fields are compared on replay.

Replies, verdicts and evaluations are *external records*: they depend on a server or the machine,
and are never recomputed. All other records follow from the settings and the external records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, JsonValue, TypeAdapter

from offline_search.candidates import Hypothesis
from offline_search.dataset import Split
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.record_file import FrozenModel, RecordFile
from vllm_autoprune.statistics import Estimate

ALL_TOKENS = "full"
"""Stands for the unpruned model in place of a state's digest."""


class Clock(FrozenModel):
    """Start (seconds since 1970) and duration of a step."""

    at: float = 0.0
    seconds: float = 0.0


class Cost(FrozenModel):
    """Cost of proposer replies: tokens counted by the endpoint, money in the price's currency."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @classmethod
    def at(
        cls, price: tuple[float, float], prompt_tokens: int, completion_tokens: int
    ) -> Cost:
        """Cost of tokens at the price of a million prompt and of a million completion tokens."""
        money = round(
            (prompt_tokens * price[0] + completion_tokens * price[1]) / 1e6, 9
        )
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            money=money,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            money=round(self.money + other.money, 9),
        )


class _Record(FrozenModel):
    key_format: ClassVar[str] = "{kind}"
    """Format of the record's key by its fields; a ledger holds one record for each key."""
    clock: Clock = Clock()

    @property
    def key(self) -> str:
        """Key in the ledger."""
        return self.key_format.format_map(dict(self))


class _CandidateRecord(_Record):
    """A record about the candidate ``index`` of a round."""

    kind: str  # declared here so that records keep the order of their fields, as digests need
    key_format: ClassVar[str] = "{kind}/{round}/{index}"
    round: int
    index: int

    @property
    def name(self) -> str:
        """``round.index``, the candidate's name."""
        return f"{self.round}.{self.index}"


class SettingsRecord(_Record):
    """First record of a ledger: the settings of its search."""

    kind: Literal["opened"] = "opened"
    settings: Settings


Attempt = Literal["first", "repair"]
"""What a reply answers: the request (``first``), or the problems of its first reply."""


class ReplyRecord(_CandidateRecord):
    """The proposer's reply to one request; ``text`` is None if all attempts failed."""

    kind: Literal["reply"] = "reply"
    key_format: ClassVar[str] = "{kind}/{round}/{index}/{attempt}"
    attempt: Attempt = "first"
    request: str = Field(description="SHA-256 of the messages")
    text: str | None = None
    failure: str = ""
    cost: Cost = Cost()
    cut: bool = Field(
        default=False,
        exclude_if=lambda cut: not cut,
        description="it ended at the maximum length",
    )


class ProposalRecord(_CandidateRecord):
    """A proposed candidate, or the problems that make it invalid."""

    kind: Literal["proposal"] = "proposal"
    origin: str = Field(description="source of the proposal: llm, tpe, warm start, ...")
    parents: tuple[str, ...] = ()
    state: dict[str, JsonValue] | None = None
    digest: str = ""
    problems: tuple[str, ...] = ()
    hypothesis: Hypothesis | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="of a proposal in a list",
    )


class Exchange(FrozenModel):
    """What a state exchanges on the probes of one model, on average."""

    tokens: float = Field(description="tokens that differ from the base policy's")
    quality: tuple[float, float] | None = Field(
        default=None,
        exclude_if=lambda bounds: bounds is None,
        description="lowest of the base policy's picks, and highest of the other tokens",
    )


class VerdictRecord(_Record):
    """Result of a state's safety check; ``behaviour`` is a digest of its selections on probes."""

    kind: Literal["verdict"] = "verdict"
    key_format: ClassVar[str] = "{kind}/{digest}"
    digest: str
    valid: bool
    quota: int = 0
    r_min: int = 0
    problems: tuple[str, ...] = ()
    behaviour: str = ""
    exchanges: dict[str, Exchange] = Field(
        default={},
        exclude_if=lambda exchanges: not exchanges,
        description="by model, of a search with one model by the empty name",
    )


class EvaluationRecord(_Record):
    """Answers of one state at one budget to examples ``start`` to ``stop`` of a split.

    ``logprob`` has the log-probability of each reference answer; ``right`` has a ``1`` for every
    example for which greedy decoding gives the reference answer. Both are empty after a failure.
    """

    kind: Literal["evaluation"] = "evaluation"
    key_format: ClassVar[str] = "{kind}/{split}/{digest}/{budget}/{start}-{stop}"
    split: Split
    digest: str
    budget: int | str
    start: int
    stop: int
    logprob: tuple[float, ...] = ()
    right: str = ""
    failure: str = ""


Status = Literal["evaluated", "dropped", "same", "invalid", "unsafe", "unevaluated"]
"""Outcome of a candidate; ``dropped``: stopped early, ``same``: duplicate of an earlier one."""


class TrialRecord(_CandidateRecord):
    """Result of one candidate: its status, and its scores relative to the unpruned model."""

    kind: Literal["trial"] = "trial"
    status: Status
    same_as: str = ""
    rival: str = Field(
        default="",
        exclude_if=lambda name: not name,
        description="the better candidate of the race that dropped this one",
    )
    reason: str = ""
    examples: int = Field(
        default=0, description="number of answers evaluated, over all budgets"
    )
    objective: float | None = None
    accuracy: float | None = None

    @property
    def score(self) -> float | None:
        """The objective, if the whole search split was evaluated."""
        return self.objective if self.status == "evaluated" else None

    @property
    def failed(self) -> bool:
        """Whether the candidate could not be measured."""
        return self.status in ("invalid", "unsafe", "unevaluated")


class Standing(FrozenModel):
    """The leader after a round, by all questions asked so far, and the trials tied with it."""

    best: str
    objective: float
    gain: float = Field(description="objective less the base policy's")
    error: float = Field(description="standard error of the gain")
    tied: tuple[str, ...] = Field(
        description="the best of other structures, not known to be worse"
    )
    resolution: float
    answers: int = Field(
        description="that candidates took so far, leaders asked again among them"
    )
    plateaus: int = Field(
        description="0, 1: other structures are searched, 2: the search stops"
    )

    @property
    def low(self) -> float:
        """The objective minus two standard errors of the gain."""
        return self.objective - 2 * self.error


class SummaryRecord(_Record):
    """Summary H_t of all rounds so far, as it appears in prompts."""

    kind: Literal["summary"] = "summary"
    key_format: ClassVar[str] = "{kind}/{round}"
    round: int
    text: str
    standing: Standing | None = Field(
        default=None, exclude_if=lambda value: value is None
    )


class ModelComparison(FrozenModel):
    """Scores of a state on one of several models, and paired differences as in a comparison."""

    accuracy: float
    gain: Estimate
    accuracy_gain: Estimate


class Comparison(FrozenModel):
    """Scores of a state on a held-out split, and paired differences from the base policy."""

    split: Split
    examples: int
    accuracy: float
    mme_total: float = Field(
        description="accuracy and accuracy+ of each category, summed"
    )
    objective: Estimate
    gain: Estimate = Field(
        description="objective less the base policy's, on the same examples"
    )
    accuracy_gain: Estimate
    models: dict[str, ModelComparison] = Field(
        default={},
        exclude_if=lambda models: not models,
        description="the same on each model, where a search has several",
    )


class WinnerRecord(_Record):
    """The winner among the confirmed candidates, with its scores on the test split."""

    kind: Literal["chosen"] = "chosen"
    winner: str
    digest: str
    state: dict[str, JsonValue]
    confirmed: dict[str, Comparison] = Field(
        description="by proposal: scores on the validation split"
    )
    estimates: dict[str, float] = Field(
        description="by proposal: objective on search and validation examples"
    )
    searched: dict[str, float] = Field(
        default={},
        exclude_if=lambda scores: not scores,
        description="by proposal that was measured in full, and of the base policy: estimate for "
        "all questions of the search split that were asked",
    )
    gains: dict[str, Estimate] = Field(
        default={},
        exclude_if=lambda gains: not gains,
        description="by proposal: paired gain over the base policy on both splits, with two "
        "standard errors either way; the lower bound decides",
    )
    model_gains: dict[str, dict[str, float]] = Field(
        default={},
        exclude_if=lambda gains: not gains,
        description="by proposal and model, where a search has several: as gains",
    )
    losses: dict[str, float] = Field(
        default={},
        exclude_if=lambda losses: not losses,
        description="by model, where a search has several: mean loss of the base policy in nats, "
        "the unit of its values",
    )
    test: Comparison
    base: Comparison
    less_default: Comparison | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="as test, with paired differences from the default state",
    )


Record = Annotated[
    SettingsRecord
    | ReplyRecord
    | ProposalRecord
    | VerdictRecord
    | EvaluationRecord
    | TrialRecord
    | SummaryRecord
    | WinnerRecord,
    Field(discriminator="kind"),
]

_EXTERNAL_RECORDS = (ReplyRecord, VerdictRecord, EvaluationRecord)

R = TypeVar("R", bound=Record)


class Ledger(RecordFile[Record]):
    """Records of one search by key, in order of writing; one process at a time may write."""

    adapter = TypeAdapter(Record)
    error_type = SearchError

    def __init__(self, path: Path, recording: Iterable[Record] = ()) -> None:
        """Open or create a ledger; missing external records are copied from ``recording``.

        ``recording`` has the records that :func:`read_ledger` returns. An incomplete last line of
        ``path`` is removed. Raises :class:`SearchError` for a file that is not a ledger, is locked,
        or cannot be written.
        """
        super().__init__(path)
        self._recorded = {
            record.key: record
            for record in recording
            if isinstance(record, _EXTERNAL_RECORDS)
        }
        self._by_key = {record.key: record for record in self.records}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_key.values())

    def find(self, kind: type[R], key: str) -> R | None:
        """The record with ``key`` in this ledger, or in the recording that is replayed."""
        record = self._by_key.get(key)
        if record is None and key in self._recorded:
            record = self.put(self._recorded[key])
        return record if isinstance(record, kind) else None

    def put(self, record: R) -> R:
        """Append a record unless the ledger has it, up to its clock; returns the recorded one.

        Raises :class:`SearchError` if the ledger has another record with this key, because it is of
        another search or version, or if the record cannot be written.
        """
        recorded = self._by_key.get(record.key)
        if recorded is None:
            self.append([record])
            self._by_key[record.key] = record
        elif _dump_without_clock(recorded) != _dump_without_clock(record):
            raise SearchError.of(
                f"ledger {self.path}",
                f"{record.key} does not follow from what is recorded",
                "resume with the version and the data that began it, or begin a new ledger",
            )
        return record


def read_ledger(path: Path) -> list[Record]:
    """Read the complete records of a ledger without changing it; another process may write it."""
    return Ledger.read(path, "name the ledger of a search that has begun")


def select_records(records: Iterable[Record], kind: type[R]) -> list[R]:
    """The records of one kind, in order."""
    return [record for record in records if isinstance(record, kind)]


def digest_records(records: Iterable[Record]) -> str:
    """SHA-256 of the records of a ledger, independent of their order and clocks."""
    by_key = {record.key: record for record in records}
    lines = sorted(
        f"{key} {_dump_without_clock(record)}" for key, record in by_key.items()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _dump_without_clock(record: Record) -> str:
    return Ledger.adapter.dump_json(record, exclude={"clock"}).decode()
