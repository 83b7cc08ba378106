"""The journal of an evaluation: an append-only JSONL file, from which it can be resumed.

It records the set-up, the cases, and questions, answers and totals, one a line; all tables are
computed from it. A killed process loses only answers that were not written yet; the next one asks
the questions that are still unanswered. Failed answers count as unanswered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.record_file import FrozenModel, RecordFile
from vllm_autoprune.tpdsl.atoms.source import BudgetCall

JOURNAL = "samples.jsonl"

MME = "MME"
"""Name of the benchmark MME, which has yes/no pairs by category and is scored in points."""

PAIRS = "yes/no pairs"
"""Name of pairs in other data, which are scored like MME's but in per cent."""

RESIZED = "resize control"
FEWER_FRAMES = "fewer frames"
"""Names, in tables, of the alternatives without a plugin: one for images, one for videos."""

EVENLY = "opencv"
"""vLLM's video loader with evenly spaced frames; some models' loaders take a fixed frame rate."""

Arm = Literal["full", "random", "norm", "resized", "base", "autoprune", "found"]
"""How tokens are selected: ``full`` keeps all, ``random`` a random set, ``norm`` the largest norms;
``resized`` shrinks the image; ``base`` is a base policy alone, ``autoprune`` adds the shipped
residual to one, and ``found`` is another state that the user named."""


class EvaluationError(AutopruneError):
    """An evaluation cannot start or continue; the message says why and how to fix it.

    Everything recorded until then is kept. A single failed request is recorded, not raised.
    """


class Setup(FrozenModel):
    """The first record: what is measured. Only runs with the same set-up may share a journal."""

    kind: Literal["setup"] = "setup"
    suite: str
    model: str
    """The served model, with its digest if it has one."""
    data: str
    """The questions, with their digest if they have one."""
    scorer: str
    """The scorer of answers, with its version."""
    score: Literal["right", "agrees"] = "right"
    """Meaning of a score of 1: the answer is right, or it agrees with the unpruned model's."""
    mme_divisor: float = 1.0
    """Divisor that turns MME's points into per cent for *Acc.*"""
    left_out: int = 0
    """Number of questions of the data that are not asked because they chose a state."""
    chosen: tuple[str, ...] = ()
    """Names of these states."""

    @property
    def left_out_text(self) -> str:
        """Text on the questions that are left out; empty if there are none."""
        if not self.left_out:
            return ""
        text = (
            f"{self.left_out:,} further questions are left out, because a search chose "
        )
        return f"{text}{', '.join(self.chosen)} by their images (--all-questions keeps them)"


class Case(FrozenModel):
    """One way to serve the questions; ``name`` is unique within an evaluation."""

    kind: Literal["case"] = "case"
    name: str
    arm: Arm
    label: str
    """Its name in tables."""
    budget: int | str = 0
    """K as the user wrote it; 0 means all tokens."""
    base: str = ""
    """Name of the case that it is compared with besides ``full``; empty for none."""
    digest: str = ""
    """Digest of the served state."""
    pruning: dict[str, JsonValue] = Field(default_factory=dict)
    """Value of the plugin's field in every request."""
    frames: int = 0
    """Number of frames that are sampled of a video; 0 if the questions are about pictures."""
    refused: str = ""
    """Reason why the case cannot be served; empty if it can."""
    served: bool = False
    """Whether its state is the server's own."""
    named: int = 0
    """Place of its state among those that the user named, from 1; 0 for controls and for a base
    policy that a state is compared with."""
    chosen: int = 0
    """Number of the asked questions by whose images a search chose its state."""

    @property
    def budget_order(self) -> tuple[int, str]:
        """Sort key: K for an image, or a frame, of 576 tokens."""
        tiles = max(self.frames, 1)
        call = BudgetCall.parse(self.budget, video=True) if self.budget else None
        return call.tokens_kept(576 * tiles, tiles) if call else 0, str(self.budget)

    @property
    def fields(self) -> dict[str, JsonValue]:
        """Fields that the case adds to a chat request."""
        fields: dict[str, JsonValue] = {
            "mm_processor_kwargs": {"autoprune": self.pruning}
        }
        if self.frames:
            sampling: JsonValue = {"num_frames": self.frames, "video_backend": EVENLY}
            fields["media_io_kwargs"] = {"video": sampling}
        return fields

    @property
    def title(self) -> str:
        """Name in tables, marked as the server's own, and with the questions that chose it."""
        title = f"{self.label} (the server's own)" if self.served else self.label
        return f"{title} ({self.chosen_text})" if self.chosen else title

    @property
    def chosen_text(self) -> str:
        """Text on the asked questions by which the state was chosen."""
        return f"chosen by {self.chosen:,} of these questions, which flatter it"


class Question(FrozenModel):
    """One question. Only those in pairs of a "yes" and a "no" have ``category`` and ``pair``."""

    kind: Literal["question"] = "question"
    id: str
    benchmark: str
    image: str
    """Questions about one image are resampled together."""
    text: str = ""
    """Text of the question, if a page may show it."""
    category: str = ""
    pair: str = ""

    @property
    def topic(self) -> str:
        """The kind of question as the data names it; in a pair it is the category."""
        return self.category or self.benchmark


class Answer(FrozenModel):
    """The answer to one question in one case; a failed request has neither score nor text.

    The reference answer is the question's own, or the ``text`` of the case ``full``.
    """

    kind: Literal["answer"] = "answer"
    case: str
    question: str
    score: float | None = None
    """Accuracy of the answer, 0 to 1; None if only the total of a benchmark is scored."""
    logprob: float | None = None
    """ln p of the reference answer."""
    tokens: int | None = None
    """Number of tokens of the unpruned model's answer."""
    same: int | None = None
    """Number of them before the first that greedy decoding does not give."""
    matching: int | None = None
    """Number of them that greedy decoding gives after the tokens before them."""
    agrees: bool | None = None
    """Whether greedy decoding gives all of them and then ends as the unpruned model does."""
    prompt_tokens: int | None = None
    text: str | None = None
    """The greedy answer, of at most 64 tokens, or the reference answer if that is given first; None
    after a failed request."""
    cut: bool = False
    """Whether the text ends because it reached the maximum length."""
    failure: str | None = None

    @property
    def per_token(self) -> float | None:
        """ln p of the unpruned model's answer, divided by its number of tokens."""
        return self.by_token(self.logprob)

    def by_token(self, figure: float | None) -> float | None:
        """``figure`` divided by the number of tokens of the unpruned model's answer."""
        return figure / self.tokens if figure is not None and self.tokens else None


class Total(FrozenModel):
    """The score that a benchmark's own scorer gives to a case, in the benchmark's unit."""

    kind: Literal["total"] = "total"
    case: str
    benchmark: str
    metric: str
    value: float
    count: int
    """Number of answers scored."""


Record = Annotated[
    Setup | Case | Question | Answer | Total, Field(discriminator="kind")
]


class Contents:
    """The records of a journal by kind and name; the last of several with one name counts."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.setups: dict[str, Setup] = {}
        """The set-up under an empty name; empty before it is recorded."""
        self.cases: dict[str, Case] = {}
        self.questions: dict[str, Question] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        """Answers by case and question."""
        self.totals: dict[str, dict[str, Total]] = {}
        """Totals by case and benchmark."""
        for record in records:
            siblings, name = self.siblings(record)
            siblings[name] = record

    def siblings(self, record: Record) -> tuple[dict[str, Any], str]:
        """The dictionary that ``record`` belongs to, and the key of the record in it."""
        match record:
            case Setup():
                return self.setups, ""
            case Case():
                return self.cases, record.name
            case Question():
                return self.questions, record.id
            case Answer():
                return self.answers.setdefault(record.case, {}), record.question
        return self.totals.setdefault(record.case, {}), record.benchmark

    def is_answered(self, case: str, question: str) -> bool:
        """Whether a question has an answer that did not fail."""
        answer = self.answers.get(case, {}).get(question)
        return answer is not None and answer.failure is None

    def has_text(self, case: str, question: str) -> bool:
        """Whether a question has an answer that did not fail, and whose text is recorded."""
        answer = self.answers.get(case, {}).get(question)
        return answer is not None and answer.failure is None and answer.text is not None

    def find_reasons(self) -> Iterator[str]:
        """Why the evaluation is not valid: failed or missing answers, no full model, no pruning."""
        total = len(self.questions)
        if not total:
            yield "there are no questions"
            return
        if "full" not in self.cases:
            yield "the full model is not among the cases: there is nothing to compare with"
        full = self.answers.get("full", {})
        for name, case in self.cases.items():
            if case.refused:
                continue
            answers = self.answers.get(name, {})
            failures = [
                answer.failure
                for answer in answers.values()
                if answer.failure is not None
            ]
            if failures:
                yield f"{name}: {len(failures)} of {total:,} requests failed: {failures[0]}"
            if len(answers) < total:
                missing = [
                    q.benchmark for id, q in self.questions.items() if id not in answers
                ]
                where = ", ".join(dict.fromkeys(missing))
                yield f"{name}: {len(answers):,} of {total:,} answers; {where} is incomplete"
            lengths = [
                (answer.prompt_tokens, full[id].prompt_tokens)
                for id, answer in answers.items()
                if case.budget and id in full
            ]
            counted = [
                (pruned, unpruned)
                for pruned, unpruned in lengths
                if pruned and unpruned
            ]
            if counted and all(pruned >= unpruned for pruned, unpruned in counted):
                yield f"{name}: no prompt is shorter than unpruned: K keeps every token"


class Journal(RecordFile[Record]):
    """A file of records to which one process at a time can append."""

    adapter = TypeAdapter(Record)
    error_type = EvaluationError

    def __init__(self, path: Path) -> None:
        """Open or create the file; an incomplete last line is removed.

        Raises :class:`EvaluationError` if the file is not a journal, is in use, or cannot be
        written.
        """
        super().__init__(path)
        self.contents = Contents(self.records)

    def append(self, records: Sequence[Record]) -> None:
        """Append those of ``records`` that are new or changed, in one write.

        Raises :class:`EvaluationError` if the set-up, a case or a question differs from the earlier
        record of the same name, or if the file cannot be written. ``refused``, ``served`` and
        ``named`` of a case may differ, because the server may have been started anew, and the user
        may name states in another order.
        """
        new = []
        for record in records:
            siblings, name = self.contents.siblings(record)
            earlier = siblings.get(name)
            if earlier is not None and not isinstance(record, Answer | Total):
                differ = sorted(
                    key for key, value in record if dict(earlier)[key] != value
                )
                if not {"refused", "served", "named"}.issuperset(differ):
                    what = f"contains another evaluation ({record.kind} {name}: "
                    what += f"{', '.join(differ)} differ)"
                    fix = "name another folder with -o"
                    raise EvaluationError.of(str(self.path), what, fix)
            if earlier != record:
                new.append(record)
        super().append(new)
        for record in new:
            siblings, name = self.contents.siblings(record)
            siblings[name] = record
