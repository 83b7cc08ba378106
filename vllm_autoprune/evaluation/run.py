"""Runs of an evaluation: cases, the suite that asks a running server, progress, report files.

Every request carries the pruning options of its case, so the server needs ``--autoprune-requests
states``. Whatever ends a run, the answers recorded until then are kept, and the report tells
whether they are valid.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel
from tqdm import tqdm

from vllm_autoprune import __version__
from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import AutopruneError, ConfigError, EvaluationFailed, Problem
from vllm_autoprune.evaluation.journal import (
    JOURNAL,
    RESIZED,
    Answer,
    Arm,
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.questions import PreparedQuestion
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.scoring_request import pruning_options, score_answer
from vllm_autoprune.http_client import (
    FAILURES,
    AsyncServerClient,
    RequestRefused,
    ServerClient,
    ServerLost,
)
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_REQUESTS_FLAG = "--autoprune-requests"
_DIGITS = 5
"""Decimals of log-probabilities; bfloat16 has less precision."""
_WRITE_EVERY = 64
"""Answers that are written together; a killed process loses at most as many."""


def evaluate(
    setup: Setup,
    cases: Sequence[Case],
    measure: Callable[[Journal], None],
    folder: Path,
    *,
    resume: bool,
) -> Report:
    """Measure what is missing and write the report files.

    ``measure`` adds to the journal what it lacks. It raises :class:`ConfigError` if it cannot
    start, as this does, and :class:`EvaluationError` if it cannot continue: a reason in the report.
    """
    path = folder / JOURNAL
    if not resume and path.exists() and path.stat().st_size:
        what, fix = "already contains an evaluation", "add --resume, or name another folder"
        raise ConfigError("eval", [Problem(f"--out {folder}", what, fix)])
    with Journal(path) as journal:
        contents, interruptions = journal.contents, list[str]()
        # A server that need not be asked again was asked whose state is its own.
        marks = {name: case.served for name, case in contents.cases.items()}
        cases = [c.model_copy(update={"served": marks.get(c.name, False)}) for c in cases]
        journal.append([setup, *cases])
        try:
            measure(journal)
        except EvaluationError as error:
            interruptions.append(f"stopped: {error}")
        except KeyboardInterrupt:
            text = f"stopped; {path} keeps what was measured, --resume goes on from it"
            raise KeyboardInterrupt(text) from None
        except ConfigError:
            if not (contents.answers or contents.totals):
                path.unlink()  # else the corrected command would have to say --resume
            raise
        report = Report.build(contents, interruptions)
    try:
        (folder / "report.json").write_text(report.format_json())
        (folder / "report.md").write_text(report.format_markdown())
    except OSError as error:
        fix = f"make room; {JOURNAL} is kept, and --resume writes the report from it"
        raise EvaluationError(f"{folder}: {error.strerror} -> {fix}") from None
    return report


FULL = Case(name="full", arm="full", label="full", pruning={"enabled": False})
"""The unpruned model, which every other case is compared with."""

_SOURCE = "autoprune"
"""The shipped state whose exchange is applied to every base policy."""


def _prune_case(
    arm: Arm, label: str, state: PruningState, budget: int | str, base: str = ""
) -> Case:
    """A case that sends a state in every request; refused if the state cannot have the budget."""
    refused, quota = "", None
    try:
        quota = materialize(state, BudgetCall.parse(budget)).quota
    except AutopruneError as error:
        refused = str(error)
    return Case(
        name=f"{label}@{budget}",
        arm=arm,
        label=label,
        budget=budget,
        base=base,
        quota=quota,
        digest=state.digest,
        pruning=pruning_options(state, budget),
        refused=refused,
    )


def _residual_on(policy: str) -> PruningState:
    """The shipped state with another base policy."""
    source = load_state(_SOURCE)
    if policy == source.base_policy.name:
        return source
    data = source.model_dump(mode="json")
    data |= {"name": f"{_SOURCE}-on-{policy}", "base_policy": {"name": policy, "params": {}}}
    return load_state(data | {"provenance": {}})


def build_cases(names: Sequence[str], said: Sequence[int | str]) -> list[Case]:
    """The full model; for each budget both controls, and each state with its base policy alone.

    ``names``: states by name or file; ``all`` is the exchange of ``autoprune`` on every base
    policy, which gives a table of base policies. Raises :class:`BudgetError` for no budget.
    """
    # A share stays as it was said; a number is one.
    rules = {budget: BudgetCall.parse(budget, "--budgets").rule() for budget in said}
    budgets = [rule if isinstance(rule, int) else budget for budget, rule in rules.items()]
    states = [
        state
        for name in names
        for state in (map(_residual_on, BASE_POLICIES) if name == "all" else [load_state(name)])
    ]
    cases, controls = [FULL], (("random", "random keep"), ("resized", RESIZED))
    labels = {(keep, ""): keep for keep, _ in controls}

    def label_of(state: PruningState, other: str) -> str:
        """Its name, or ``other`` where another policy has that label."""
        name = other if state.name in labels.values() else state.name
        return labels.setdefault((state.name, state.digest), name)

    # The names of states come before those of their base policies, which may be the same.
    state_labels = [label_of(state, f"{state.name}-{state.digest[:12]}") for state in states]
    for budget in budgets:
        # K tokens without a policy: chosen at random, or of the image resized to K.
        for keep, label in controls:
            fields = {"name": f"{keep}@{budget}", "arm": keep, "label": label, "budget": budget}
            pruning = {"keep": keep, "budget": budget}
            cases.append(Case.model_validate({**fields, "pruning": pruning}))
        for state, label in zip(states, state_labels, strict=True):
            # The base policy of the state with the same parameters, and no exchange.
            policy = state.base_policy
            data = load_state(policy.name).model_dump(mode="json")
            alone = load_state(data | {"base_policy": policy.model_dump(mode="json")})
            base = label_of(alone, f"{alone.name}-of-{label}")
            cases.append(_prune_case("base", base, alone, budget))
            if state.digest != alone.digest:
                shipped = state.digest == _residual_on(policy.name).digest
                arm: Arm = "autoprune" if shipped else "found"
                cases.append(_prune_case(arm, label, state, budget, f"{base}@{budget}"))
    return list({case.name: case for case in cases}.values())


class _Allows(BaseModel):
    level: str


class _Served(BaseModel):
    """What is read of ``/v1/autoprune``; as it is here where the server has no such page."""

    state: str | None = ""
    digest: str = ""
    requests: str = ""
    allows: _Allows | None = None


class Server(NamedTuple):
    """A server that is asked, and how."""

    url: str
    connection: Connection
    model: str | None
    """None: the first that it serves."""
    max_in_flight: int

    def check(self, cases: Sequence[Case], journal: Journal) -> tuple[str, Collection[str]]:
        """Its model, and the names of the cases that it serves.

        What requests may choose is asked first, where the server says it, then a small request for
        each case. The journal gets the reasons of those that are refused, and which case is the
        server's own state, also where none is. Raises :class:`ConfigError` for a server that does
        not answer, serves another model, or refuses all tokens or every state.
        """
        from PIL import Image

        buffer = io.BytesIO()
        Image.new("RGB", (224, 224), "grey").save(buffer, "PNG")
        image = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        part = {"type": "image_url", "image_url": {"url": image}}
        content = [part, {"type": "text", "text": "?"}]
        checked = {case.name: case for case in cases}
        with ServerClient(self.url, self.connection) as client:
            with client.reporting_failures():
                models, served = client.list_models(), _Served()
            model = client.choose_model(models, self.model)
            with contextlib.suppress(*FAILURES, RequestRefused):  # another page has that address
                served = _Served.model_validate(client.read_served())
            if served.state is None:
                raise _refuse(client.url, "serves no state")
            if served.allows is not None and served.allows.level in ("none", "budget"):
                raise _refuse(client.url, f"lets requests set {served.requests}")
            for case in cases:
                if case.refused:
                    continue
                if case.digest and case.digest == served.digest:
                    checked[case.name] = case.model_copy(update={"served": True})
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 1,
                    "mm_processor_kwargs": {"autoprune": case.pruning},
                }
                try:
                    client.chat(body)
                except RequestRefused as error:
                    if case.name == FULL.name:
                        what = f"lets requests choose nothing ({error})"
                        raise _refuse(client.url, what) from None
                    checked[case.name] = case.model_copy(update={"refused": str(error)})
                except FAILURES:  # the server fails in the evaluation as well, which tells how
                    pass
        states = [c.name for c in cases if "state" in c.pruning and not c.refused]
        reasons = [checked[name].refused for name in states]
        if reasons and all(reasons):
            if _REQUESTS_FLAG in reasons[0]:
                raise _refuse(client.url, f"refuses every state ({reasons[0]})")
            fix = "name states that its model serves, such as --state cen_divprune"
            what = f"refuses every state: {reasons[0]}"
            raise ConfigError("eval", [Problem(client.url, what, fix)])
        if served.state and served.digest not in {case.digest for case in cases}:
            checked[""] = Case(
                name=f"served {served.digest[:12]}",
                arm="found",
                label=served.state,
                digest=served.digest,
                refused=f"was not asked -> name it with --state {served.state}, or its file",
                served=True,
            )
        journal.append([*checked.values()])
        return model, [case.name for case in checked.values() if not case.refused]


def _refuse(url: str, what: str) -> ConfigError:
    """The error of a server that serves no request's choice; without its own advice, for others."""
    what = what.partition(" -> ")[0].partition(" Start the server")[0]
    what += ")" * (what.count("(") - what.count(")"))
    fix = f"start it with --autoprune-state NAME {_REQUESTS_FLAG} states"
    return ConfigError("eval", [Problem(url, what, fix)])


@dataclass
class QuestionSuite:
    """Questions of a file, each request with the pruning options of its case."""

    server: Server
    cases: Sequence[Case]
    questions: Sequence[PreparedQuestion]
    name: str
    """The name of the questions in the report."""

    @property
    def setup(self) -> Setup:
        """The questions with a digest of them and their images."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.digest}\n{question.answers}\n".encode())
        count = len(self.questions)
        return Setup(
            suite="data",
            model=self.server.model or "the first model of the server",
            data=f"{self.name}, {count} questions, {digest.hexdigest()[:12]}",
            scorer=f"vllm-autoprune {__version__}: greedy decoding gives the reference answer",
        )

    def plan(self) -> str:
        """The number of requests."""
        cases, questions = sum(not case.refused for case in self.cases), len(self.questions)
        return f"{cases} cases x {questions} questions: {cases * questions:,} requests"

    def measure(self, journal: Journal) -> None:
        """Score the unanswered questions."""
        journal.append([question.record for question in self.questions])
        pairs = [
            (case, question)
            for question in self.questions
            for case in self.cases
            if not (case.refused or journal.contents.is_answered(case.name, question.record.id))
        ]
        if pairs:
            model, names = self.server.check(self.cases, journal)
            pairs = [pair for pair in pairs if pair[0].name in names]
            asyncio.run(self._ask(model, pairs, journal))

    async def _ask(
        self,
        model: str,
        pairs: Sequence[tuple[Case, PreparedQuestion]],
        journal: Journal,
    ) -> None:
        """Score all pairs concurrently, started in order; answers are written even after an error.

        Raises :class:`EvaluationError` if the server has stopped answering.
        """
        url, connection, _, max_in_flight = self.server
        server = AsyncServerClient(url, max_in_flight, connection)
        # One queue for all workers, so that requests about one image stay close to each other.
        queue, answers = iter(pairs), list[Answer]()
        progress = tqdm(total=len(pairs), unit="answer", mininterval=5)

        async def work() -> None:
            for case, question in queue:
                answer = Answer(case=case.name, question=question.record.id)
                result = dict[str, object]()
                try:
                    scored = await score_answer(
                        [server], model, question.messages(), question.answers[0], case.pruning
                    )
                    # Greedy decoding gives the answer, and then stops or starts another word.
                    right = scored.right and not scored.following[:1].isalnum()
                    logprob, tokens = round(scored.logprob, _DIGITS), scored.prompt_tokens
                    result = {"score": float(right), "logprob": logprob, "prompt_tokens": tokens}
                except EvaluationFailed as error:
                    result = {"failure": str(error)}
                except ServerLost as error:
                    fix = "start it again and add --resume: nothing is lost"
                    raise EvaluationError(f"{error} -> {fix}") from None
                answers.append(answer.model_copy(update=result))
                progress.update()
                if len(answers) >= _WRITE_EVERY:
                    journal.append(answers)
                    answers.clear()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max_in_flight):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            journal.append(answers)
            progress.close()
            await server.close()
