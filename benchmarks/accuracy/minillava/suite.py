"""The mini-LLaVA suite: one server, to which every request brings the state of its case.

Requests are ordered by scene, question and case, so that all requests about an image are close to
each other and its vision features are computed once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.accuracy.minillava.cases import Family, build_cases
from benchmarks.accuracy.minillava.model import (
    MiniLlava,
    default_scenes,
    prepare_questions,
)
from benchmarks.server import ServerDied, command, serve
from vllm_autoprune.evaluation import run
from vllm_autoprune.evaluation.journal import (
    MME,
    Case,
    Contents,
    EvaluationError,
    Journal,
    Setup,
    unanswered,
)
from vllm_autoprune.evaluation.questions import questions_digest
from vllm_autoprune.evaluation.run import SCORER, Progress, score_answers
from vllm_autoprune.http_client import MAX_IN_FLIGHT

NAME = "minillava"
FLAGS = (
    "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-state", "cdpruner", "--autoprune-requests", "states",
)  # fmt: skip

_START_TIMEOUT = 1200.0
"""Seconds; a start takes ten on an idle machine, but many minutes on a busy one."""


@dataclass(frozen=True)
class Settings:
    """The server and how it is asked; without ``url`` a server is started."""

    url: str | None = None
    served_name: str | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    log: Path | None = None
    wait: float = 1.0
    """Seconds before a failed request is sent again."""

    def at(self, url: str) -> run.Settings:
        """The same settings for the server at ``url``."""
        return run.Settings(url, self.served_name, self.max_in_flight, self.wait)


class MiniLlavaSuite:
    """The questions about a number of scenes, answered in every case."""

    def __init__(
        self, model: MiniLlava, cases: Sequence[Case], scenes: int, settings: Settings
    ) -> None:
        self.cases = cases
        self._model, self._scenes, self._settings = model, scenes, settings
        self._questions = {one.record.id: one for one in prepare_questions(scenes)}
        self._total = sum(not case.refused for case in cases) * len(self._questions)
        digest = questions_digest(list(self._questions.values()))
        self.setup = Setup(
            suite=NAME,
            model=f"mini-LLaVA {model.name}, weights {model.digest}",
            data=f"test split, {scenes} scenes, {digest}",
            scorer=SCORER,
            mme_divisor=2.0 * max(len(self._categories), 1),
        )

    @property
    def _categories(self) -> set[str]:
        questions = [one.record for one in self._questions.values()]
        return {question.category for question in questions if question.benchmark == MME}

    def plan(self) -> Sequence[str]:
        """The server's command line, and the number of requests."""
        return [
            " ".join(command(self._model.llava, 8000, self._flags))
            if self._settings.url is None
            else f"(served at {self._settings.url})",
            f"{len(self.cases)} cases x {len(self._questions)} questions about {self._scenes} "
            f"scenes: {self._total:,} requests",
        ]

    @property
    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, "--autoprune-text-tower", str(self._model.text_tower))

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Ask the unanswered questions; a server is started only if there are any."""
        records = [one.record for one in self._questions.values()]
        journal.append(records)
        todo = list(unanswered(journal.contents, self.cases, records))
        if not todo:
            return
        pairs = [(case, self._questions[question.id]) for case, question in todo]
        with self._server(progress) as url:
            # Only now, so that the speed does not include the start of the server.
            progress.begin(self._total, self._total - len(todo))
            asyncio.run(score_answers(self._settings.at(url), pairs, journal, progress))

    @contextlib.contextmanager
    def _server(self, progress: Progress) -> Iterator[str]:
        if self._settings.url is not None:
            yield self._settings.url
            return
        progress.write(f"starting vllm serve with mini-LLaVA {self._model.name} ...")
        try:
            with serve(
                self._model.llava, *self._flags, log=self._settings.log, patience=_START_TIMEOUT
            ) as server:
                try:
                    yield server.url
                except EvaluationError:
                    status = server.process.poll()
                    if status is None:
                        raise
                    raise EvaluationError(
                        f"vllm serve ended with {status} (log: {server.log}) -> fix that and add "
                        "--resume: nothing is lost"
                    ) from None
        except ServerDied as error:
            what = str(error).split("\n")[0].rstrip(":")
            where = f" (log: {self._settings.log})" if self._settings.log is not None else ""
            raise EvaluationError(f"{what}{where} -> fix that and add --resume") from None

    def objections(self, contents: Contents) -> Sequence[str]:
        """Prompt lengths that do not match K, which shows that a case was not served as asked."""
        return list(chain.from_iterable(self._check_lengths(contents, case) for case in self.cases))

    def _check_lengths(self, contents: Contents, case: Case) -> Iterator[str]:
        full = contents.answers.get("full", {})
        removed = self._model.tokens - case.budget if case.budget else 0
        for name, answer in contents.answers.get(case.name, {}).items():
            whole = full.get(name)
            if whole is None or whole.prompt_tokens is None or answer.prompt_tokens is None:
                continue
            if answer.prompt_tokens != whole.prompt_tokens - removed:
                yield (
                    f"{case.name}: a prompt has {answer.prompt_tokens} tokens instead of "
                    f"{whole.prompt_tokens} - {removed}: the case was not served as asked"
                )
                return


def build_suite(
    model: MiniLlava,
    budgets: Sequence[int],
    families: Sequence[Family],
    scenes: int | None,
    settings: Settings,
) -> MiniLlavaSuite:
    """The suite for budgets and families of cases; raises :class:`ConfigError`."""
    cases = build_cases(model.tokens, budgets, families)
    return MiniLlavaSuite(model, cases, scenes or default_scenes(len(cases)), settings)
