"""The suite: serves mini-LLaVA once, and asks every case by requests that bring their state.

Knows nothing about figures. Requests go scene by scene, question by question, case by case, so that
all of one image are near each other and its vision features are computed once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.journal import Contents, Journal, missing
from benchmarks.accuracy.minillava.asking import Asker
from benchmarks.accuracy.minillava.cases import Family, cases
from benchmarks.accuracy.minillava.model import Asked, MiniLlava, digest, held_out
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.records import MME, Answer, Case, Opened
from benchmarks.server import ServerDied, command, serve
from offline_search.evaluation.served_evaluator import MAX_IN_FLIGHT
from vllm_autoprune import __version__

NAME = "minillava"
SCORER = f"vllm-autoprune {__version__}: greedy decoding would say the reference answer"
FLAGS = (
    "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-state", "cdpruner", "--autoprune-requests", "states",
)  # fmt: skip

_PATIENCE = 1200.0
"""Seconds for the server to start: ten on a free machine, many minutes on a crowded one."""
_AT_A_TIME = 64
"""Answers that are written together; as many are lost to a kill at most."""


@dataclass(frozen=True)
class Settings:
    """How it is asked; ``url`` of a running server, or None to start one."""

    url: str | None = None
    served_name: str | None = None
    at_once: int = MAX_IN_FLIGHT
    log: Path | None = None
    wait: float = 1.0
    """Seconds before a failed request is sent again."""


class MiniLlavaSuite:
    """Questions about ``scenes`` scenes, answered in every case."""

    def __init__(
        self, model: MiniLlava, found: Sequence[Case], scenes: int, settings: Settings
    ) -> None:
        self.cases = found
        self._model, self._scenes, self._settings = model, scenes, settings
        self._asked = {one.record.id: one for one in held_out(scenes)}
        self.opened = Opened(
            suite=NAME,
            model=f"mini-LLaVA {model.name}, weights {model.digest}",
            data=f"test split, {scenes} scenes, {digest(list(self._asked.values()))}",
            scorer=SCORER,
            mme_divisor=2.0 * max(len(self._categories), 1),
        )

    @property
    def _categories(self) -> set[str]:
        questions = [one.record for one in self._asked.values()]
        return {question.category for question in questions if question.benchmark == MME}

    def plan(self) -> Sequence[str]:
        """The server's command line and how much it is asked."""
        asked = sum(not case.refused for case in self.cases) * len(self._asked)
        return [
            " ".join(command(self._model.llava, 8000, self._flags))
            if self._settings.url is None
            else f"(served at {self._settings.url})",
            f"{len(self.cases)} cases x {len(self._asked)} questions about {self._scenes} scenes: "
            f"{asked:,} requests",
        ]

    @property
    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, "--autoprune-text-tower", str(self._model.text_tower))

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Ask what the journal lacks; the server is started only where something is missing."""
        journal.put([one.record for one in self._asked.values()])
        records = [one.record for one in self._asked.values()]
        todo = list(missing(journal.contents, self.cases, records))
        total = sum(not case.refused for case in self.cases) * len(records)
        if not todo:
            return
        pairs = [(case, self._asked[question.id]) for case, question in todo]
        with self._server(progress) as url:
            # Only now: waiting for a server says nothing about how fast it answers.
            progress.begin(total, total - len(todo))
            asyncio.run(self._ask(url, pairs, journal, progress))

    @contextlib.contextmanager
    def _server(self, progress: Progress) -> Iterator[str]:
        if self._settings.url is not None:
            yield self._settings.url
            return
        progress.say(f"starting vllm serve with mini-LLaVA {self._model.name} ...")
        try:
            with serve(
                self._model.llava, *self._flags, log=self._settings.log, patience=_PATIENCE
            ) as server:
                try:
                    yield server.url
                except EvaluationError:
                    status = server.process.poll()
                    if status is None:
                        raise
                    raise EvaluationError(
                        f"vllm serve ended with {status} (log: {server.log}) -> mend that and add "
                        "--resume: nothing is lost"
                    ) from None
        except ServerDied as error:
            what = str(error).split("\n")[0].rstrip(":")
            where = f" (log: {self._settings.log})" if self._settings.log is not None else ""
            raise EvaluationError(f"{what}{where} -> mend that and add --resume") from None

    async def _ask(
        self,
        url: str,
        pairs: Sequence[tuple[Case, Asked]],
        journal: Journal,
        progress: Progress,
    ) -> None:
        """All pairs in their order, so many in flight; every answer is written, come what may."""
        asker = Asker(url, self._settings.at_once, self._settings.wait)
        waiting, done = iter(pairs), list[Answer]()

        async def work() -> None:
            for case, asked in waiting:
                done.append(await asker.ask(case, asked))
                progress.advance()
                if len(done) >= _AT_A_TIME:
                    journal.put(done)
                    done.clear()

        try:
            await asker.prepare(self._settings.served_name)
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.at_once):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            journal.put(done)
            await asker.close()

    def objections(self, contents: Contents) -> Sequence[str]:
        """Prompts have to be as long as K says: the proof that a case was served as such."""
        return list(chain.from_iterable(self._wrong_lengths(contents, case) for case in self.cases))

    def _wrong_lengths(self, contents: Contents, case: Case) -> Iterator[str]:
        full = contents.answers.get("full", {})
        removed = self._model.tokens - case.budget if case.budget else 0
        for name, answer in contents.answers.get(case.name, {}).items():
            whole = full.get(name)
            if whole is None or whole.prompt_tokens is None or answer.prompt_tokens is None:
                continue
            if answer.prompt_tokens != whole.prompt_tokens - removed:
                yield (
                    f"{case.name}: a prompt of {answer.prompt_tokens} tokens where "
                    f"{whole.prompt_tokens} - {removed} were due: it was not served as asked"
                )
                return


def suite(
    model: MiniLlava,
    budgets: Sequence[int],
    families: Sequence[Family],
    scenes: int | None,
    settings: Settings,
) -> MiniLlavaSuite:
    """The suite for budgets and families of cases; raises :class:`ConfigError`."""
    found = cases(model.tokens, budgets, families)
    return MiniLlavaSuite(model, found, scenes or model.scenes(len(found)), settings)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
