"""The lmms-eval suite: one run of lmms-eval for every benchmark in every case.

Complete runs are not repeated, so servers can be measured one after another on one machine.
"""

from __future__ import annotations

import base64
import contextlib
import io
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import Contents, Journal
from vllm_autoprune.evaluation.lmms.benchmarks import PINNED, Benchmark
from vllm_autoprune.evaluation.lmms.output import read_output
from vllm_autoprune.evaluation.lmms.process import LmmsEval
from vllm_autoprune.evaluation.lmms.servers import Server
from vllm_autoprune.evaluation.records import Case, EvaluationError, Setup
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.evaluation.served import Refusals
from vllm_autoprune.http_client import (
    FAILURES,
    RequestRefused,
    ServerClient,
    choose_model,
    reporting_failures,
)

_TOLERANCE = 0.05
"""Points by which a total may differ from the mean of its samples, as both are rounded."""


class LmmsSuite:
    """Benchmarks through lmms-eval."""

    def __init__(
        self,
        servers: Sequence[Server],
        benchmarks: Sequence[Benchmark],
        lmms_eval: LmmsEval,
        folder: Path,
        *,
        backbone: str,
        mme_divisor: float,
    ) -> None:
        """``folder`` receives the files of lmms-eval."""
        self._servers, self._benchmarks = servers, benchmarks
        self._lmms_eval, self._folder = lmms_eval, folder
        self.cases = [server.case for server in servers]
        limit = "" if lmms_eval.limit is None else f", the first {lmms_eval.limit} of each"
        self.setup = Setup(
            suite="lmms",
            model=lmms_eval.served_name,
            data=", ".join(f"{one.name} ({one.task})" for one in benchmarks) + limit,
            scorer=f"lmms-eval {PINNED}",
            backbone=backbone,
            mme_divisor=mme_divisor,
        )

    def plan(self) -> Sequence[str]:
        """Every command line that will be run."""
        return [
            shlex.join(
                self._lmms_eval.command(server.url, one.task, self._folder_of(server, one, 1))
            )
            for server in self._servers
            for one in self._benchmarks
        ]

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Run what is not complete, after checking all servers."""
        todo = [
            (server, one)
            for server in self._servers
            for one in self._benchmarks
            if not server.case.refused and not _is_complete(journal.contents, server, one)
        ]
        total = sum(not case.refused for case in self.cases) * len(self._benchmarks)
        progress.begin(total, total - len(todo))
        if not todo:
            return
        self._lmms_eval.check()
        problems = [
            p for server in {s.url: s for s, _ in todo}.values() for p in self._problems(server)
        ]
        if problems:
            raise ConfigError("eval", problems)
        refused = self._refused_cases({s.case.name: s for s, _ in todo}.values(), journal)
        for server, one in todo:
            if server.case.name not in refused:
                progress.write(f"{server.case.name}: {one.task} ...")
                self._run(server, one, journal)
            progress.advance()

    def _refused_cases(self, servers: Iterable[Server], journal: Journal) -> Collection[str]:
        """Cases whose states a server refuses, by a small request; recorded with its reason.

        Raises :class:`ConfigError` where a server refuses every state.
        """
        own = [server for server in servers if server.case.pruning]
        if not own:
            return ()
        refusals = Refusals(own[0].url, [server.case for server in own], journal.contents)
        for server in own:
            body = {
                "model": self._lmms_eval.served_name,
                "messages": [{"role": "user", "content": _plain_image()}],
                "max_tokens": 1,
                "mm_processor_kwargs": {"autoprune": server.case.pruning},
            }
            # A server that fails otherwise fails in the task as well, which tells how.
            with contextlib.suppress(*FAILURES), ServerClient(server.url) as client:
                try:
                    client.chat(body)
                except RequestRefused as error:
                    refusals.refuse(server.case, str(error))
        journal.append(
            [s.case.model_copy(update={"refused": refusals.reasons[s.case.name]})
             for s in own if s.case.name in refusals.reasons]
        )  # fmt: skip
        return refusals.reasons.keys()

    def _run(self, server: Server, benchmark: Benchmark, journal: Journal) -> None:
        attempt = next(
            n for n in range(1, 10_000) if not self._folder_of(server, benchmark, n).exists()
        )
        folder = self._folder_of(server, benchmark, attempt)
        self._lmms_eval.run(
            server.url,
            benchmark,
            server.case.pruning,
            folder,
            lambda: next(self._problems(server), None) is None,
        )
        output = read_output(folder, benchmark, server.case.name)
        journal.append([*output.questions, *output.answers])
        if output.total is not None:
            journal.append([output.total])
        elif next(self._problems(server), None) is not None:
            raise EvaluationError(
                f"{server.url} stopped answering -> start it again and add --resume: complete "
                "tasks are not repeated"
            )

    def _folder_of(self, server: Server, benchmark: Benchmark, attempt: int) -> Path:
        return self._folder / server.case.name / benchmark.task / str(attempt)

    def _problems(self, server: Server) -> Iterator[Problem]:
        """Whether a server does not answer, or serves another model."""
        try:
            with reporting_failures(server.url), ServerClient(server.url) as client:
                models = client.list_models()
            choose_model(server.url, models, self._lmms_eval.served_name)
        except ConfigError as error:
            yield from error.problems

    def objections(self, contents: Contents) -> Sequence[str]:
        """Totals that differ from the mean of their samples, and servers that do not prune.

        Covers every case in the journal, as some may be from an earlier run.
        """
        objections = list[str]()
        for case in contents.cases.values():
            for benchmark in self._benchmarks:
                objections += _check_total(contents, case, benchmark)
            objections += _check_pruned(contents, case)
        return objections


def _plain_image() -> list[dict[str, object]]:
    """The content of a request about a small grey image."""
    buffer = io.BytesIO()
    Image.new("RGB", (224, 224), "grey").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]


def _check_total(contents: Contents, case: Case, benchmark: Benchmark) -> Iterator[str]:
    total = contents.totals.get(case.name, {}).get(benchmark.name)
    answers = [
        answer
        for question, answer in contents.answers.get(case.name, {}).items()
        if contents.questions[question].benchmark == benchmark.name
    ]
    scores = [answer.score for answer in answers if answer.score is not None]
    if total is None or not benchmark.mean or len(scores) != len(answers):
        return
    mean = 100 * sum(scores) / len(scores)
    if abs(mean - total.value) > _TOLERANCE:
        yield (
            f"{case.name}: lmms-eval reports {total.value:.2f} for {benchmark.name}, but its "
            f"samples have a mean of {mean:.2f}"
        )


def _is_complete(contents: Contents, server: Server, benchmark: Benchmark) -> bool:
    questions = [q.id for q in contents.questions.values() if q.benchmark == benchmark.name]
    return benchmark.name in contents.totals.get(server.case.name, {}) and all(
        contents.is_answered(server.case.name, question) for question in questions
    )


def _check_pruned(contents: Contents, case: Case) -> Iterator[str]:
    """Compare prompt lengths: a pruned case has shorter prompts than the full model."""
    if not case.budget:
        return
    full, own = contents.answers.get("full", {}), contents.answers.get(case.name, {})
    pairs = [
        (answer.prompt_tokens, whole.prompt_tokens)
        for question, answer in own.items()
        if (whole := full.get(question)) is not None
        and answer.prompt_tokens is not None
        and whole.prompt_tokens is not None
    ]
    longer = [pair for pair in pairs if pair[0] >= pair[1]]
    if longer:
        yield (
            f"{case.name}: {len(longer)} of {len(pairs)} prompts are as long as with all tokens: "
            "its server does not prune"
        )
