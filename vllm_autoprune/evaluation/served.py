"""Evaluation on one running server, where every request carries the pruning options of its case.

The server needs ``--autoprune-requests states``. :class:`FileSuite` asks the questions of a JSONL
file; other suites share :func:`score_answers` and :func:`prune_case`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from offline_search.evaluation.served_evaluator import MAX_IN_FLIGHT
from vllm_autoprune import __version__
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.evaluation.client import AnswerClient, PreparedQuestion, questions_digest
from vllm_autoprune.evaluation.journal import Contents, Journal, unanswered
from vllm_autoprune.evaluation.question_file import read_questions
from vllm_autoprune.evaluation.records import MME, RESIZED, Answer, Arm, Case, Setup
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState

SCORER = f"vllm-autoprune {__version__}: greedy decoding gives the reference answer"
FULL = Case(name="full", arm="full", label="full", pruning={"enabled": False})
"""The unpruned model, which every other case is compared with."""

_WRITE_EVERY = 64
"""Answers that are written together; a killed process loses at most as many."""


@dataclass(frozen=True)
class Settings:
    """Address and model of the server, and limits of the requests to it."""

    url: str
    served_name: str | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    wait: float = 1.0
    """Seconds before a failed request is sent again."""


def random_case(budget: int) -> Case:
    """The case that keeps K tokens chosen at random."""
    pruning: dict[str, JsonValue] = {"keep": "random", "budget": budget}
    return Case(
        name=f"random@{budget}", arm="random", label="random keep", budget=budget, pruning=pruning
    )


def resized_case(budget: int) -> Case:
    """The resize control: the image at K tokens without a policy."""
    pruning: dict[str, JsonValue] = {"keep": "resized", "budget": budget}
    return Case(
        name=f"resized@{budget}", arm="resized", label=RESIZED, budget=budget, pruning=pruning
    )


def prune_case(
    name: str, arm: Arm, label: str, state: PruningState, budget: int, base: str = ""
) -> Case:
    """A case that sends a state in every request; refused if the state cannot have K = budget."""
    refused, quota = "", None
    try:
        quota = materialize(state, budget).quota
    except AutopruneError as error:
        refused = str(error)
    return Case(
        name=name,
        arm=arm,
        label=label,
        budget=budget,
        base=base,
        quota=quota,
        digest=state.digest,
        pruning={
            "state": state.model_dump(mode="json", exclude={"provenance"}),
            "budget": budget,
        },
        refused=refused,
    )


async def score_answers(
    settings: Settings,
    pairs: Sequence[tuple[Case, PreparedQuestion]],
    journal: Journal,
    progress: Progress,
) -> None:
    """Score all pairs concurrently, started in order; answers are written even after an error."""
    client = AnswerClient(settings.url, settings.max_in_flight, settings.wait)
    queue, done = iter(pairs), list[Answer]()

    async def work() -> None:
        for case, question in queue:
            done.append(await client.score(case, question))
            progress.advance()
            if len(done) >= _WRITE_EVERY:
                journal.append(done)
                done.clear()

    try:
        await client.select_model(settings.served_name)
        async with asyncio.TaskGroup() as group:
            for _ in range(settings.max_in_flight):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise _first_error(errors) from None
    finally:
        journal.append(done)
        await client.close()


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first


class FileSuite:
    """The questions of a JSONL file: full tokens, controls, base policies and states."""

    def __init__(
        self,
        path: Path,
        states: Sequence[str],
        budgets: Sequence[int],
        settings: Settings,
        limit: int | None = None,
    ) -> None:
        """``states`` are names or files, ``limit`` the maximum number of questions."""
        self.cases = list(build_cases([load_state(state) for state in states], budgets))
        self._path, self._settings = path, settings
        self._questions = {q.record.id: q for q in read_questions(path, limit)}
        records = [question.record for question in self._questions.values()]
        categories = {record.category for record in records if record.benchmark == MME}
        digest = questions_digest(list(self._questions.values()))
        self.setup = Setup(
            suite="data",
            model=settings.served_name or "the first model of the server",
            data=f"{path.name}, {len(records)} questions, {digest}",
            scorer=SCORER,
            mme_divisor=2.0 * max(len(categories), 1),
        )

    def plan(self) -> Sequence[str]:
        """The server, and the number of requests."""
        cases = [case for case in self.cases if not case.refused]
        count = len(self._questions)
        return [
            f"(served at {self._settings.url})",
            f"{len(cases)} cases x {count} questions: {len(cases) * count:,} requests",
        ]

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Score the unanswered questions."""
        records = [question.record for question in self._questions.values()]
        journal.append(records)
        todo = list(unanswered(journal.contents, self.cases, records))
        if not todo:
            return
        total = sum(not case.refused for case in self.cases) * len(records)
        progress.begin(total, total - len(todo))
        pairs = [(case, self._questions[question.id]) for case, question in todo]
        asyncio.run(score_answers(self._settings, pairs, journal, progress))

    def objections(self, contents: Contents) -> Sequence[str]:
        """Cases without any prompt shorter than the unpruned one, so that K had no effect."""
        full = contents.answers.get(FULL.name, {})
        return list(self._check_lengths(contents, full))

    def _check_lengths(self, contents: Contents, full: dict[str, Answer]) -> Iterator[str]:
        for case in self.cases:
            answers = contents.answers.get(case.name, {}) if case.budget else {}
            pairs = [(answer, full[name]) for name, answer in answers.items() if name in full]
            known = [
                (answer.prompt_tokens, whole.prompt_tokens)
                for answer, whole in pairs
                if answer.prompt_tokens is not None and whole.prompt_tokens is not None
            ]
            if known and all(pruned >= unpruned for pruned, unpruned in known):
                yield f"{case.name}: no prompt is shorter than unpruned: K keeps every token"


def build_cases(states: Sequence[PruningState], budgets: Sequence[int]) -> Iterator[Case]:
    """The full model; for each budget both controls, and each state with its base policy alone."""
    yield FULL
    names: set[str] = set()
    for budget in budgets:
        yield random_case(budget)
        yield resized_case(budget)
        for state in states:
            alone = _base_policy_alone(state)
            base = prune_case(f"{alone.name}@{budget}", "base", alone.name, alone, budget)
            own = prune_case(
                f"{state.name}@{budget}", "found", state.name, state, budget, base.name
            )
            cases = (base,) if state.digest == alone.digest else (base, own)
            for case in cases:
                if case.name not in names:
                    names.add(case.name)
                    yield case


def _base_policy_alone(state: PruningState) -> PruningState:
    """The base policy of a state with the same parameters, and no exchange."""
    alone = load_state(state.base_policy.name).model_dump(mode="json")
    alone["base_policy"] = state.base_policy.model_dump(mode="json")
    return load_state(alone)
