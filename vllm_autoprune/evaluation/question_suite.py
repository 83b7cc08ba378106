"""Suite that asks a running server the questions of a file, once for each case."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tqdm import tqdm

from vllm_autoprune import __version__
from vllm_autoprune.errors import ConfigError, EvaluationFailed, Problem
from vllm_autoprune.evaluation.cases import FULL
from vllm_autoprune.evaluation.chosen_by import select_chosen
from vllm_autoprune.evaluation.journal import (
    Answer,
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.pictures import encode
from vllm_autoprune.evaluation.questions import PreparedQuestion
from vllm_autoprune.evaluation.report import (
    NOTHING_RIGHT,
    WRITE_AS_THE_MODEL,
)
from vllm_autoprune.evaluation.run import Server
from vllm_autoprune.evaluation.scoring_request import (
    MAX_TOKENS,
    AnswerChanged,
    generate_answer,
    score_answer,
)
from vllm_autoprune.http_client import AsyncServerClient, ServerLost

_DIGITS = 5
"""Decimals of log-probabilities; bfloat16 has less precision."""
_WRITE_EVERY = 64
"""Number of answers that are written together; a killed process loses at most this many."""
_CHECKED = 50
"""Number of questions that the unpruned model is asked first. A model that is right in 10 % of all
questions has no right answer among them in one of 200 evaluations."""
_SERVE_TEMPLATE = (
    "serve it with a chat template that ends with the answer that it is given"
)
_THUMBNAIL = 160
"""Longer side of a picture in a page, in pixels."""

_Pair = tuple[Case, PreparedQuestion]


@dataclass
class QuestionSuite:
    """Questions of a file; each request has the pruning options of its case.

    If every question has a single exact answer, it is scored as part of the prompt. Otherwise the
    unpruned model's greedy answer is the reference of every case. A case's own answer is generated
    only if it differs from that; it is recorded, compared with labels or shown on the page.
    """

    server: Server
    cases: Sequence[Case]
    questions: Sequence[PreparedQuestion]
    name: str
    """The name of the questions in the report."""
    unpruned: bool = False
    """Whether the unpruned model's greedy answer is the reference."""
    left_out: int = 0
    """Number of questions that are not asked because they chose a state."""
    chosen: tuple[str, ...] = ()
    """Names of these states."""

    @classmethod
    def without_chosen(
        cls,
        server: Server,
        cases: Sequence[Case],
        questions: Sequence[PreparedQuestion],
        name: str,
        chosen_by: Mapping[int, str],
        *,
        unpruned: bool = False,
        keep: bool = False,
    ) -> QuestionSuite:
        """A suite that leaves out questions by whose images a search chose one of the states.

        ``chosen_by`` has the images of states by their place among those that the user named.
        ``keep``: ask these questions too, and mark the cases of the states. Raises
        :class:`ConfigError` if no question is left.
        """
        chosen = {
            place: select_chosen(questions, images)
            for place, images in chosen_by.items()
        }
        chosen = {place: members for place, members in chosen.items() if members}
        if keep:
            cases = [
                case.model_copy(update={"chosen": len(chosen.get(case.named, ()))})
                for case in cases
            ]
            return cls(server, cases, questions, name, unpruned)
        ids = {q.record.id for members in chosen.values() for q in members}
        asked = [question for question in questions if question.record.id not in ids]
        labels = [case.label for case in cases if case.named in chosen and case.budget]
        if not asked:
            what = f"has no question by whose image a search did not choose {labels[0]}"
            fix = "give the .test.jsonl beside the state, other questions, or --all-questions"
            raise ConfigError.of(name, what, fix, subject="eval")
        names = tuple(dict.fromkeys(labels))
        return cls(server, cases, asked, name, unpruned, len(ids), names)

    @property
    def has_labels(self) -> bool:
        """Whether the data has an answer to every question."""
        return all(question.answers for question in self.questions)

    @property
    def decodes(self) -> bool:
        """Whether answers are decoded; otherwise known answers are scored in the prompt."""
        return self.unpruned or not all(
            question.is_exact for question in self.questions
        )

    @property
    def setup(self) -> Setup:
        """The set-up, with a digest of the questions and their images."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.digest}\n{question.answers}\n".encode())
        count = len(self.questions)
        scorer = "greedy decoding gives the reference answer"
        if self.decodes:
            scorer = f"greedy decoding of at most {MAX_TOKENS} tokens gives "
            scorer += (
                "an answer of the data"
                if self.has_labels
                else "the unpruned model's answer"
            )
        return Setup(
            suite="data",
            model=self.server.model or "the first model of the server",
            data=f"{self.name}, {count} questions, {digest.hexdigest()[:12]}",
            scorer=f"vllm-autoprune {__version__}: {scorer}",
            score="right" if self.has_labels else "agrees",
            left_out=self.left_out,
            chosen=self.chosen,
        )

    def plan(self) -> str:
        """The number of requests."""
        cases = sum(not case.refused for case in self.cases)
        questions = len(self.questions)
        more = "and another that decodes it for every answer that differs"
        return f"{cases} cases x {questions} questions: {cases * questions:,} requests, {more}"

    def picture(self, id: str) -> str:
        """Data URL of a question's picture, made small; empty if it is missing or has changed."""
        buffer = io.BytesIO()
        pictures = next(q.pictures for q in self.questions if q.record.id == id)
        with contextlib.suppress(EvaluationError, IndexError):
            image = pictures[0].image()
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            image.save(buffer, "JPEG")
            return encode("image/jpeg", [buffer.getvalue()])
        return ""

    def measure(self, journal: Journal) -> None:
        """Score the unanswered questions."""
        contents = journal.contents
        journal.append(
            [q.record.model_copy(update={"text": q.text}) for q in self.questions]
        )
        pairs = [
            (case, question)
            for question in self.questions
            for case in self.cases
            if not (case.refused or contents.has_text(case.name, question.record.id))
        ]
        if pairs:
            model, names = self.server.check(self.cases, journal)
            pairs = [pair for pair in pairs if pair[0].name in names]
            asyncio.run(self._ask(model, pairs, journal))

    async def _ask(
        self,
        model: str,
        pairs: Sequence[_Pair],
        journal: Journal,
    ) -> None:
        """Score all pairs; a new evaluation first asks the unpruned model a few, as a check.

        Raises :class:`ConfigError` if the check gives no score, and :class:`EvaluationError` if the
        server has stopped answering.
        """
        url, connection, _, max_in_flight = self.server
        server = AsyncServerClient(url, max_in_flight, connection)
        progress = tqdm(total=len(pairs), unit="answer", mininterval=5)
        scoring = _Scoring(self, [server], model, journal, progress)
        try:
            if not journal.contents.answers:
                unpruned = [pair for pair in pairs if pair[0].name == FULL.name]
                step = max(1, len(unpruned) // _CHECKED)
                checked = unpruned[::step][:_CHECKED]
                await scoring.score_all(checked)
                scoring.require_scores()
                ids = {question.record.id for _, question in checked}
                pairs = [
                    (case, question)
                    for case, question in pairs
                    if case.name != FULL.name or question.record.id not in ids
                ]
            await scoring.score_all(pairs)
        finally:
            progress.close()
            await server.close()


@dataclass
class _Scoring:
    """Scores pairs of a case and a question concurrently, and records the answers."""

    suite: QuestionSuite
    servers: Sequence[AsyncServerClient]
    model: str
    journal: Journal
    progress: tqdm[NoReturn]
    unwritten: list[Answer] = field(default_factory=list)
    unpruned: dict[str, asyncio.Future[Answer]] = field(default_factory=dict)
    """Answers of the unpruned model by question; other cases wait for them."""
    failures: list[Problem] = field(default_factory=list)
    """Problems of failed requests, in order of failure."""

    async def score_all(self, pairs: Sequence[_Pair]) -> None:
        """Score pairs, which are started in order; answers are written even after an error.

        The unpruned model's pair of a question has to come before its other pairs. Raises
        :class:`EvaluationError` if the server has stopped answering.
        """
        loop = asyncio.get_running_loop()
        for case, question in pairs:
            if case.name == FULL.name:
                self.unpruned[question.record.id] = loop.create_future()
        # One queue for all workers, so that requests about one image stay close to each other.
        queue = iter(pairs)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.suite.server.max_in_flight):
                    group.create_task(self._work(queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._write()

    async def _work(self, queue: Iterator[_Pair]) -> None:
        for case, question in queue:
            id = question.record.id
            try:
                answer = await self._score(case, question)
            except EvaluationFailed as error:
                self.failures += error.problems
                answer = Answer(case=case.name, question=id, failure=error.reason)
            except ServerLost as error:
                raise EvaluationError(error.subject, error.problems) from None
            if case.name == FULL.name:
                self.unpruned[id].set_result(answer)
            self.unwritten.append(answer)
            self.progress.update()
            if len(self.unwritten) >= _WRITE_EVERY:
                self._write()

    def _write(self) -> None:
        self.journal.append(self.unwritten)
        self.unwritten.clear()

    async def _score(self, case: Case, question: PreparedQuestion) -> Answer:
        """The answer to one question in one case.

        Raises :class:`EvaluationFailed`, and :class:`ServerLost`.
        """
        if not self.suite.decodes:
            return await self._score_known(case, question)
        request = (self.servers, self.model, question.messages(case.frames))
        answer = Answer(case=case.name, question=question.record.id)
        update: dict[str, object] = {}
        if case.name == FULL.name:
            text, cut = await generate_answer(*request, case.fields)
            reference = answer = answer.model_copy(update={"text": text, "cut": cut})
        elif answer.question in self.unpruned:
            reference = await self.unpruned[answer.question]
        else:
            reference = self.journal.contents.answers[FULL.name][answer.question]
        if reference.failure is not None:
            what = f"the unpruned model: {reference.failure}"
            raise EvaluationFailed.of(case.name, what)
        agrees = False
        if reference.text:
            with contextlib.suppress(AnswerChanged):
                scored = await score_answer(*request, reference.text, case.fields)
                # Agreement includes the end of the answer, unless the maximum length cut it.
                agrees = scored.right and (
                    reference.cut or not scored.following.strip()
                )
                update = {
                    "agrees": agrees,
                    "score": float(agrees),
                    "logprob": round(scored.logprob, _DIGITS),
                    "tokens": scored.tokens,
                    "same": scored.same,
                    "matching": scored.matching,
                    "prompt_tokens": scored.prompt_tokens,
                }
        decoded = reference.text if agrees else answer.text
        cut = reference.cut
        if decoded is None:
            try:
                decoded, cut = await generate_answer(*request, case.fields)
            except EvaluationFailed:
                # Without labels, it is scored already.
                if self.suite.has_labels:
                    raise
                cut = False
        if self.suite.has_labels and decoded is not None:
            update["score"] = question.score_text(decoded)
        return answer.model_copy(update={**update, "text": decoded, "cut": cut})

    async def _score_known(self, case: Case, question: PreparedQuestion) -> Answer:
        """The score of the data's answer in the prompt; a wrong answer is decoded in addition."""
        request = (self.servers, self.model, question.messages(case.frames))
        known = question.answers[0]
        scored = await score_answer(*request, known, case.fields)
        # An answer is right only if greedy decoding does not continue its last word.
        is_right = scored.right and not scored.following[:1].isalnum()
        text: str | None = known
        cut = False
        if not is_right:
            text = None
            with contextlib.suppress(EvaluationFailed):  # it is scored already
                text, cut = await generate_answer(*request, case.fields)
        return Answer(
            case=case.name,
            question=question.record.id,
            score=float(is_right),
            logprob=round(scored.logprob, _DIGITS),
            prompt_tokens=scored.prompt_tokens,
            text=text,
            cut=cut,
        )

    def require_scores(self) -> None:
        """Raise :class:`ConfigError` if no answer so far has a score, as later ones would not."""
        where = self.servers[0].url
        answers = self.journal.contents.answers[FULL.name].values()
        texts = [answer.text for answer in answers if answer.failure is None]
        if not texts:
            what = self.failures[0].what
            fix = self.failures[0].fix or _SERVE_TEMPLATE
        elif all(answer.score is None for answer in answers):
            what = f"gives no answer whose tokens can be scored, such as {texts[0]!r}"
            fix = f"ask what it answers in {MAX_TOKENS} tokens, without thoughts"
        elif self.suite.has_labels and not any(answer.score for answer in answers):
            where = self.suite.name
            what = f"{NOTHING_RIGHT}, of the {len(answers)} asked first"
            fix = WRITE_AS_THE_MODEL
        else:
            return
        raise ConfigError.of(where, what, fix, subject="eval")
