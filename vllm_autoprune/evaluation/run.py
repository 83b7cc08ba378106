"""Runs of an evaluation: suites, of which one asks a running server, progress, and report files.

Every request carries the pruning options of its case, so the server needs ``--autoprune-requests
states``. Whatever ends a run, the answers recorded until then are kept, and the report tells
whether they are valid.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

from pydantic import JsonValue

from vllm_autoprune import __version__
from vllm_autoprune.errors import AutopruneError, ConfigError, EvaluationFailed, Problem
from vllm_autoprune.evaluation.journal import (
    JOURNAL,
    MME,
    RESIZED,
    Answer,
    Arm,
    Case,
    Contents,
    EvaluationError,
    Journal,
    Setup,
    unanswered,
)
from vllm_autoprune.evaluation.pages import build_document
from vllm_autoprune.evaluation.questions import PreparedQuestion, questions_digest, read_questions
from vllm_autoprune.evaluation.report import Report, build_report
from vllm_autoprune.evaluation.scoring_request import pruning_options, score_answer
from vllm_autoprune.http_client import (
    MAX_IN_FLIGHT,
    AsyncServerClient,
    ServerLost,
    choose_model,
    reporting_failures,
)
from vllm_autoprune.report import render_document, render_markdown
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_SECONDS_BETWEEN_LINES = 10.0

_Suffix = Literal["json", "html", "md"]
"""Files of a report."""


class Progress:
    """Share, speed and remaining time of a run; ``write`` gets a line at most every ten seconds."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.write = write
        self._clock = clock
        self._total = self._done = self._earlier = 0
        self._started = self._written = clock()

    def begin(self, total: int, earlier: int = 0) -> None:
        """Start the clock; ``earlier`` items of the total are left out of the speed."""
        self._total, self._earlier, self._done = total, earlier, earlier
        self._started = self._written = self._clock()
        if earlier:
            self.write(f"{earlier:,} of {total:,} are recorded already")

    def advance(self, count: int = 1) -> None:
        """Count items as done."""
        self._done += count
        now = self._clock()
        if now - self._written < _SECONDS_BETWEEN_LINES and self._done < self._total:
            return
        self._written = now
        rate = (self._done - self._earlier) / max(now - self._started, 1e-9)
        seconds = (self._total - self._done) / max(rate, 1e-9)
        remaining = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        self.write(
            f"{self._done / self._total:4.0%}  {self._done:,} of {self._total:,}, {rate:.2g}/s, "
            f"{remaining} left"
        )


class Suite(Protocol):
    """A set of questions for one model, to be answered in several cases."""

    @property
    def setup(self) -> Setup:
        """Model, data and settings that the measurements belong to."""

    @property
    def cases(self) -> Sequence[Case]:
        """Every way to serve the questions; one of them is the full model."""

    def plan(self) -> Sequence[str]:
        """Describe what will be run, without starting anything."""

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Add to the journal what it lacks.

        Raises :class:`ConfigError` if it cannot start and :class:`EvaluationError` if it cannot
        continue; the journal keeps the answers until then.
        """

    def objections(self, contents: Contents) -> Iterable[str]:
        """Reasons against complete answers, beyond those that every suite has."""


def evaluate(suite: Suite, folder: Path, *, resume: bool, progress: Progress) -> Report:
    """Measure what is missing and write the report files.

    Raises :class:`ConfigError` or :class:`EvaluationError` if the evaluation cannot start.
    """
    path = folder / JOURNAL
    if not resume and path.exists() and path.stat().st_size:
        what, fix = "already contains an evaluation", "add --resume, or name another folder"
        raise ConfigError("eval", [Problem(f"--out {folder}", what, fix)])
    with Journal(path) as journal:
        journal.append([suite.setup, *suite.cases])
        interruptions: list[str] = []
        try:
            suite.measure(journal, progress)
        except EvaluationError as error:
            interruptions.append(f"stopped: {error}")
        except ConfigError:
            if not (journal.contents.answers or journal.contents.totals):
                path.unlink()  # else the corrected command would have to say --resume
            raise
        contents = journal.contents
        report = build_report(contents, [*interruptions, *suite.objections(contents)])
    try:
        for suffix in get_args(_Suffix):
            (folder / f"report.{suffix}").write_text(format_report(report, suffix))
    except OSError as error:
        fix = f"free some space; {JOURNAL} is kept, and --resume writes the report from it"
        raise EvaluationError(f"{folder}: {error.strerror} -> {fix}") from None
    return report


def format_report(report: Report, suffix: _Suffix) -> str:
    """The report as a file; JSON without the states that were sent, which the journal contains."""
    if suffix != "json":
        render = render_document if suffix == "html" else render_markdown
        return render(build_document(report))
    content = report.model_dump(
        mode="json",
        exclude={"rows": {"__all__": {"case": {"pruning"}}}, "refused": {"__all__": {"pruning"}}},
    )
    return json.dumps({"valid": report.valid, **content}, indent=1) + "\n"


FULL = Case(name="full", arm="full", label="full", pruning={"enabled": False})
"""The unpruned model, which every other case is compared with."""

SOURCE = "autoprune"
"""The shipped state whose exchange is applied to every base policy."""

_REJECTED = "status 4"
"""How the failure of a request begins that the server rejected, and would reject again."""

_ATTEMPTS = 3
_DIGITS = 5
"""Decimals of log-probabilities; bfloat16 has less precision."""

_REJECTIONS = 2
"""Questions that a server rejects in a row, from the first on, before a case counts as refused."""

_WRITE_EVERY = 64
"""Answers that are written together; a killed process loses at most as many."""


@dataclass(frozen=True)
class Settings:
    """Address and model of the server, and limits of the requests to it."""

    url: str = ""
    """Empty where the suite starts a server."""
    served_name: str | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    wait: float = 1.0
    """Seconds before a failed request is sent again."""


def control_case(keep: Literal["random", "resized"], budget: int) -> Case:
    """A control of K tokens without a policy: chosen at random, or of the image resized to K."""
    label = RESIZED if keep == "resized" else "random keep"
    pruning: dict[str, JsonValue] = {"keep": keep, "budget": budget}
    name = f"{keep}@{budget}"
    return Case(name=name, arm=keep, label=label, budget=budget, pruning=pruning)


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
        pruning=pruning_options(state, budget),
        refused=refused,
    )


async def _score_answers(
    settings: Settings,
    pairs: Sequence[tuple[Case, PreparedQuestion]],
    journal: Journal,
    progress: Progress,
) -> None:
    """Score all pairs concurrently, started in order; answers are written even after an error.

    A case whose state the server rejects from the first question on is recorded as refused, with
    the server's reason. Raises :class:`ConfigError` where it rejects every state, or any choice.
    """
    server = AsyncServerClient(settings.url, settings.max_in_flight)
    # One queue for all workers, so that requests about one image stay close to each other.
    queue, done = iter(pairs), list[Answer]()
    refusals = Refusals(settings.url, [case for case, _ in pairs], journal.contents)

    async def work() -> None:
        for case, question in queue:
            if case.name not in refusals.reasons:
                answer = await _score(server, model, case, question, settings.wait)
                refusals.add(case, answer)
                done.append(answer)
            progress.advance()
            if len(done) >= _WRITE_EVERY:
                journal.append(done)
                done.clear()

    try:
        with reporting_failures(settings.url):
            models = await server.list_models()
        model = choose_model(settings.url, models, settings.served_name)
        async with asyncio.TaskGroup() as group:
            for _ in range(settings.max_in_flight):
                group.create_task(work())
    except ExceptionGroup as errors:
        error: Exception = errors
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            done.clear()  # else the corrected command would have to say --resume
        raise error from None
    finally:
        journal.append(done)
        journal.append(refusals.records([case for case, _ in pairs]))
        await server.close()


async def _score(
    server: AsyncServerClient, model: str, case: Case, question: PreparedQuestion, wait: float
) -> Answer:
    """The answer is right if greedy decoding gives it and then stops or starts another word.

    Raises :class:`EvaluationError` if the server has stopped answering.
    """
    record = Answer(case=case.name, question=question.record.id)
    try:
        scored = await score_answer(
            [server], model, question.image, question.text, question.answer, case.pruning,
            attempts=_ATTEMPTS, first_wait=wait,
        )  # fmt: skip
    except EvaluationFailed as error:
        return record.model_copy(update={"failure": str(error)})
    except ServerLost as error:
        fix = "start it again and add --resume: nothing is lost"
        raise EvaluationError(f"{error} -> {fix}") from None
    return record.model_copy(
        update={
            "score": float(scored.right and not scored.following[:1].isalnum()),
            "logprob": round(scored.logprob, _DIGITS),
            "prompt_tokens": scored.prompt_tokens,
        }
    )


class Refusals:
    """The cases whose states a server refuses; the others are measured without them."""

    def __init__(self, url: str, cases: Sequence[Case], contents: Contents) -> None:
        """``cases``: that of every question that will be asked."""
        self.reasons: dict[str, str] = {}
        """By case, the server's message."""
        self._url, self._asked = url, Counter(case.name for case in cases)
        self._states = {c.name for c in contents.cases.values() if "state" in c.pruning}
        self._served = {
            name
            for name, answers in contents.answers.items()
            if any(answer.failure is None for answer in answers.values())
        }
        self._rejected = Counter[str]()

    def add(self, case: Case, answer: Answer) -> None:
        """Count an answer; raises :class:`ConfigError` once nothing is left to compare."""
        if not (answer.failure or "").startswith(_REJECTED):
            self._served.add(case.name)
            self.reasons.pop(case.name, None)
            return
        self._rejected[case.name] += 1
        count = min(_REJECTIONS, self._asked[case.name])
        if case.name not in self._served and self._rejected[case.name] >= count:
            self.refuse(case, answer.failure or "")

    def refuse(self, case: Case, reason: str) -> None:
        """Record a refusal; raises :class:`ConfigError` once nothing is left to compare."""
        nothing = case.name == FULL.name
        if case.name in self._states:
            self.reasons[case.name] = reason
            others = (self._asked.keys() & self._states) - self.reasons.keys()
            nothing = not others and not self._served & self._states
        if nothing:
            fix = "start it with --autoprune-requests states, or name states that its model serves"
            raise ConfigError("eval", [Problem(self._url, f"refuses every state: {reason}", fix)])

    def records(self, cases: Sequence[Case]) -> list[Case]:
        """Those of the cases that are refused, with the reason."""
        return [
            case.model_copy(update={"refused": self.reasons[case.name]})
            for case in cases
            if case.name in self.reasons
        ]


class QuestionSuite:
    """Questions that one server answers in every case, each request with its pruning options."""

    def __init__(
        self,
        questions: Sequence[PreparedQuestion],
        cases: Sequence[Case],
        settings: Settings,
        *,
        suite: str,
        model: str,
        data: str,
    ) -> None:
        """``suite``, ``model`` and ``data`` are names for the report."""
        self.cases, self.settings = cases, settings
        self._questions = {question.record.id: question for question in questions}
        records = [question.record for question in questions]
        categories = {record.category for record in records if record.benchmark == MME}
        self._total = sum(not case.refused for case in cases) * len(questions)
        self.setup = Setup(
            suite=suite,
            model=model,
            data=f"{data}, {questions_digest(questions)}",
            scorer=f"vllm-autoprune {__version__}: greedy decoding gives the reference answer",
            mme_divisor=2.0 * max(len(categories), 1),
        )

    def describe_server(self) -> str:
        """The server, as the plan names it."""
        return f"(served at {self.settings.url})"

    def open_server(self, progress: Progress) -> AbstractContextManager[str]:
        """Address of the server, while the context is open."""
        return nullcontext(self.settings.url)

    def plan(self) -> Sequence[str]:
        """The server, and the number of requests."""
        cases = sum(not case.refused for case in self.cases)
        count = f"{cases} cases x {len(self._questions)} questions: {self._total:,} requests"
        return [self.describe_server(), count]

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Score the unanswered questions; the server is opened only if there are any."""
        records = [question.record for question in self._questions.values()]
        journal.append(records)
        todo = list(unanswered(journal.contents, self.cases, records))
        if not todo:
            return
        pairs = [(case, self._questions[question.id]) for case, question in todo]
        with self.open_server(progress) as url:
            # Only now, so that the speed does not include the start of a server.
            progress.begin(self._total, self._total - len(todo))
            settings = replace(self.settings, url=url)
            asyncio.run(_score_answers(settings, pairs, journal, progress))

    def objections(self, contents: Contents) -> Iterable[str]:
        """Cases without any prompt shorter than the unpruned one, so that K had no effect."""
        return [
            f"{case.name}: no prompt is shorter than unpruned: K keeps every token"
            for case in self.cases
            if (lengths := prompt_lengths(contents, case))
            and all(pruned >= unpruned for pruned, unpruned in lengths)
        ]


def file_suite(
    path: Path, cases: Sequence[Case], settings: Settings, limit: int | None = None
) -> QuestionSuite:
    """The questions of a JSONL file, ``limit`` at most."""
    questions = read_questions(path, limit)
    model = settings.served_name or "the first model of the server"
    data = f"{path.name}, {len(questions)} questions"
    return QuestionSuite(questions, cases, settings, suite="data", model=model, data=data)


def prompt_lengths(contents: Contents, case: Case) -> list[tuple[int, int]]:
    """Prompt tokens of a case that prunes and of the full model, of each question, where known."""
    full = contents.answers.get(FULL.name, {})
    return [
        (answer.prompt_tokens, full[name].prompt_tokens or 0)
        for name, answer in contents.answers.get(case.name, {}).items()
        if case.budget and answer.prompt_tokens is not None
        and name in full and full[name].prompt_tokens is not None
    ]  # fmt: skip


def residual_on(policy: str) -> PruningState:
    """The shipped state with another base policy."""
    source = load_state(SOURCE)
    if policy == source.base_policy.name:
        return source
    data = source.model_dump(mode="json")
    data |= {"name": f"{SOURCE}-on-{policy}", "base_policy": {"name": policy, "params": {}}}
    return load_state(data | {"provenance": {}})


def build_cases(names: Sequence[str], budgets: Sequence[int]) -> Iterator[Case]:
    """The full model; for each budget both controls, and each state with its base policy alone.

    ``names``: states by name or file; ``all`` is the exchange of ``autoprune`` on every base
    policy, which gives a table of base policies.
    """
    states = [
        state
        for name in names
        for state in (map(residual_on, BASE_POLICIES) if name == "all" else [load_state(name)])
    ]
    yield FULL
    used: set[str] = set()
    for budget in budgets:
        yield control_case("random", budget)
        yield control_case("resized", budget)
        for state in states:
            # The base policy of the state with the same parameters, and no exchange.
            data = load_state(state.base_policy.name).model_dump(mode="json")
            alone = load_state(data | {"base_policy": state.base_policy.model_dump(mode="json")})
            cases = [prune_case(f"{alone.name}@{budget}", "base", alone.name, alone, budget)]
            if state.digest != alone.digest:
                shipped = state.digest == residual_on(state.base_policy.name).digest
                arm: Arm = "autoprune" if shipped else "found"
                name = f"{state.name}@{budget}"
                cases.append(prune_case(name, arm, state.name, state, budget, cases[0].name))
            for case in cases:
                if case.name not in used:
                    used.add(case.name)
                    yield case
