"""The questions of a file, asked of a running server in every case."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tqdm import tqdm

from vllm_autoprune import __version__
from vllm_autoprune.errors import ConfigError, EvaluationFailed, Problem
from vllm_autoprune.evaluation.journal import (
    Answer,
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.questions import PreparedQuestion
from vllm_autoprune.evaluation.report import NOTHING_RIGHT, choose_examples
from vllm_autoprune.evaluation.run import FULL, Server
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
"""Answers that are written together; a killed process loses at most as many."""
_CHECKED = 50
"""Questions that the unpruned model is asked first: of none of them is it right by chance in one of
200 evaluations where it is right in a tenth."""
_SERVE_TEMPLATE = (
    "serve it with a chat template that ends with the answer that it is given"
)
_THUMBNAIL = 160
"""Pixels of a picture's longer side in a page."""


@dataclass
class QuestionSuite:
    """Questions of a file, each request with the pruning options of its case.

    A known answer is scored in the prompt. Else the unpruned model's greedy answer is the reference
    of every case, and one that differs is only asked for where labels are to be compared with it,
    or for the page.
    """

    server: Server
    cases: Sequence[Case]
    questions: Sequence[PreparedQuestion]
    name: str
    """The name of the questions in the report."""
    unpruned: bool = False
    """Whether the unpruned model's greedy answer is the reference."""

    @property
    def _has_labels(self) -> bool:
        return all(question.answers for question in self.questions)

    @property
    def _decodes(self) -> bool:
        """Whether answers are decoded: else one that is known is scored in the prompt."""
        return self.unpruned or not all(
            question.is_exact for question in self.questions
        )

    @property
    def setup(self) -> Setup:
        """The questions with a digest of them and their images."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.digest}\n{question.answers}\n".encode())
        count = len(self.questions)
        scorer = "greedy decoding gives the reference answer"
        if self._decodes:
            scorer = f"greedy decoding of at most {MAX_TOKENS} tokens gives "
            scorer += (
                "an answer of the data"
                if self._has_labels
                else "the unpruned model's answer"
            )
        return Setup(
            suite="data",
            model=self.server.model or "the first model of the server",
            data=f"{self.name}, {count} questions, {digest.hexdigest()[:12]}",
            scorer=f"vllm-autoprune {__version__}: {scorer}",
            score="right" if self._has_labels else "agrees",
        )

    def plan(self) -> str:
        """The number of requests."""
        cases = sum(not case.refused for case in self.cases)
        questions = len(self.questions)
        more = ", and more that decode answers" if self._decodes else ""
        return f"{cases} cases x {questions} questions: {cases * questions:,} requests{more}"

    def picture(self, id: str) -> str:
        """The picture of a question, small; empty where there is none, or it has changed."""
        buffer = io.BytesIO()
        pictures = next(q.pictures for q in self.questions if q.record.id == id)
        with contextlib.suppress(EvaluationError, IndexError):
            image = pictures[0].image()
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            image.save(buffer, "JPEG")
            return (
                f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
            )
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
            if not (case.refused or contents.is_answered(case.name, question.record.id))
        ]
        if pairs or any(answer.text is None for _, answer in choose_examples(contents)):
            model, names = self.server.check(self.cases, journal)
            pairs = [pair for pair in pairs if pair[0].name in names]
            asyncio.run(self._ask(model, pairs, journal))

    async def _ask(
        self,
        model: str,
        pairs: Sequence[tuple[Case, PreparedQuestion]],
        journal: Journal,
    ) -> None:
        """Score all pairs: of a new evaluation first some of the unpruned model, which are checked.

        Raises :class:`ConfigError` where no score can come of them, :class:`EvaluationError` if
        the server has stopped answering.
        """
        url, connection, _, max_in_flight = self.server
        server = AsyncServerClient(url, max_in_flight, connection)
        progress = tqdm(total=len(pairs), unit="answer", mininterval=5)
        try:
            if not journal.contents.answers:
                checked = [pair for pair in pairs if pair[0].name == FULL.name]
                checked = checked[:: max(1, len(checked) // _CHECKED)][:_CHECKED]
                await self._score_all(server, model, checked, journal, progress)
                # Where none of these answers has a score, no other would have one.
                answers = journal.contents.answers[FULL.name].values()
                what = ""
                failures = [
                    answer.failure for answer in answers if answer.failure is not None
                ]
                where = server.url
                if len(failures) == len(answers):
                    what, _, fix = failures[0].partition(" -> ")
                    fix = fix or _SERVE_TEMPLATE
                elif not any(answer.score is not None for answer in answers):
                    text = next(
                        answer.text for answer in answers if answer.failure is None
                    )
                    what = (
                        f"gives no answer whose tokens can be scored, such as {text!r}"
                    )
                    fix = (
                        f"ask what it answers in {MAX_TOKENS} tokens, without thoughts"
                    )
                elif self._has_labels and not any(answer.score for answer in answers):
                    where = self.name
                    (what, _, fix) = NOTHING_RIGHT.partition(" -> ")
                    what += f", of the {len(answers)} asked first"
                if what:
                    raise ConfigError("eval", [Problem(where, what, fix)])
                known = {question.record.id for _, question in checked}
                pairs = [
                    p
                    for p in pairs
                    if p[0].name != FULL.name or p[1].record.id not in known
                ]
            await self._score_all(server, model, pairs, journal, progress)
            # Without labels only a page reads what a pruned model says instead.
            questions = {question.record.id: question for question in self.questions}
            cases = {case.name: case for case in self.cases}
            for _, answer in choose_examples(journal.contents):
                if answer.text is None:
                    case = cases[answer.case]
                    with contextlib.suppress(
                        EvaluationError, EvaluationFailed, ServerLost
                    ):
                        messages = questions[answer.question].messages(case.frames)
                        text, cut = await generate_answer(
                            [server], model, messages, case.fields
                        )
                        journal.append(
                            [answer.model_copy(update={"text": text, "cut": cut})]
                        )
        finally:
            progress.close()
            await server.close()

    async def _score_all(  # noqa: C901
        self,
        server: AsyncServerClient,
        model: str,
        pairs: Sequence[tuple[Case, PreparedQuestion]],
        journal: Journal,
        progress: tqdm[NoReturn],
    ) -> None:
        """Score pairs concurrently, started in order; answers are written even after an error."""
        # One queue for all workers, so that requests about one image stay close to each other.
        queue = iter(pairs)
        answers = list[Answer]()
        # The unpruned model comes first of a question's cases; the others wait for its answer.
        unpruned = dict[str, asyncio.Future[Answer]]()
        for case, question in pairs:
            if case.name == FULL.name:
                unpruned[question.record.id] = (
                    asyncio.get_running_loop().create_future()
                )
        known = journal.contents.answers.get(FULL.name, {})

        async def work() -> None:
            for case, question in queue:
                id = question.record.id
                reference = None
                if self._decodes and case.name != FULL.name:
                    reference = await unpruned[id] if id in unpruned else known[id]
                try:
                    answer = await self._score(server, model, case, question, reference)
                except EvaluationFailed as error:
                    answer = Answer(case=case.name, question=id, failure=str(error))
                except ServerLost as error:
                    fix = "start it again and add --resume: nothing is lost"
                    raise EvaluationError(f"{error} -> {fix}") from None
                if case.name == FULL.name:
                    unpruned[id].set_result(answer)
                answers.append(answer)
                progress.update()
                if len(answers) >= _WRITE_EVERY:
                    journal.append(answers)
                    answers.clear()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.server.max_in_flight):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            journal.append(answers)

    async def _score(
        self,
        server: AsyncServerClient,
        model: str,
        case: Case,
        question: PreparedQuestion,
        reference: Answer | None,
    ) -> Answer:
        """The answer to one question in one case; ``reference``: that of the unpruned model.

        Raises :class:`EvaluationFailed`, and :class:`ServerLost`.
        """
        messages = question.messages(case.frames)
        fields = case.fields
        answer = Answer(case=case.name, question=question.record.id)
        agrees = False
        update: dict[str, object] = {}
        if not self._decodes:
            scored = await score_answer(
                [server], model, messages, question.answers[0], fields
            )
            # Greedy decoding gives the answer, and then stops or starts another word.
            update["score"] = float(scored.right and not scored.following[:1].isalnum())
            update["logprob"] = round(scored.logprob, _DIGITS)
            return answer.model_copy(
                update={**update, "prompt_tokens": scored.prompt_tokens}
            )
        if reference is None:
            text, cut = await generate_answer([server], model, messages, fields)
            reference = answer = answer.model_copy(update={"text": text, "cut": cut})
        elif reference.failure is not None:
            raise EvaluationFailed(f"the unpruned model: {reference.failure}")
        if reference.text:
            with contextlib.suppress(AnswerChanged):
                scored = await score_answer(
                    [server], model, messages, reference.text, fields
                )
                # The end of an answer is part of it, unless its length ended it.
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
        if self._has_labels:
            known = reference.text if agrees else answer.text
            if known is None:
                known, cut = await generate_answer([server], model, messages, fields)
                update |= {"text": known, "cut": cut}
            update["score"] = question.score_text(known)
        return answer.model_copy(update=update)
