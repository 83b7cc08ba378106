"""The coordinator of a load test: starts the workers, collects all records, judges the run.

It lives on locust's master, or in the only process where there are no workers.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

import gevent
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner, Runner

from benchmarks.common.metrics import MetricsWatcher, server_info
from benchmarks.common.report import command_line
from benchmarks.common.request_record import Journal, Record
from benchmarks.load.messages import (
    DONE,
    READY,
    RECORD,
    START,
    Done,
    Ready,
    Start,
)
from benchmarks.load.result import (
    RECORDS,
    REQUESTS_CSV,
    ClientFacts,
    Result,
    RunFacts,
    client_environment,
    format_result,
    judge_run,
    summarize,
    write_requests_csv,
)
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import Prepared, load_prepared

POLL = 0.5
"""Seconds between two readings of the server's ``/metrics``."""
HEAD_START = 0.5
"""Seconds from the start message to the start of the schedule, for it to reach all workers."""


class Coordinator:
    """Tracks the workers; a run that loses one is not valid."""

    def __init__(self, runner: Runner, options: RunOptions) -> None:
        self._runner, self._options = runner, options
        self._prepared: Prepared = load_prepared(options.workload)
        self._journal = Journal(options.out / RECORDS)
        self._watch = MetricsWatcher(options.url)
        # Before the run, whose own load is not to be taken for that of other programs.
        self._environment = client_environment()
        self._ready: dict[str, Ready] = {}
        self._done: dict[str, ClientFacts] = {}
        self._server_info: dict[str, str] = {}
        self._broken: str | None = None
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._spawned = self._started = False
        for kind, listener in (
            (READY, self._on_ready),
            (RECORD, self._on_record),
            (DONE, self._on_done),
        ):
            runner.register_message(kind, listener)

    @property
    def workers(self) -> int:
        """How many workers send requests."""
        return self._runner.worker_count if isinstance(self._runner, MasterRunner) else 1

    def spawned(self) -> None:
        """Locust has started all users."""
        self._spawned = True
        self._start_if_all_are_ready()

    def finish(self) -> int:
        """Judge the run, write and print its result; returns the exit status."""
        self._journal.close()
        planned = len(self._prepared.measured[: self._options.first or None])
        unfinished = "" if len(self._done) >= max(len(self._ready), 1) else "stopped before its end"
        records = self._journal.records
        facts = RunFacts(
            planned=planned,
            clients=tuple(self._done.values()),
            unwritten=self._journal.failure,
            broken=self._broken or unfinished or None,
        )
        summary, metrics = summarize(records, self._options.slo), self._watch.metrics()
        load, workload = self._options.load, self._prepared.workload
        verdict = judge_run(workload, load, records, facts, summary, metrics)
        result = Result(
            label=self._options.label or load.label,
            url=self._options.url,
            began=self._began,
            workload=workload,
            workload_digest=self._prepared.digest,
            load=load,
            slo=self._options.slo,
            verdict=verdict,
            summary=summary,
            metrics=metrics,
            facts=facts,
            server=self._server_info,
            environment=self._environment,
            command=command_line(),
        )
        print("\n".join(format_result(result)), flush=True)
        try:
            result.write(self._options.out)
            write_requests_csv(records, self._options.out / REQUESTS_CSV)
        except OSError as error:
            print(f"load: {self._options.out}: result not written: {error}", file=sys.stderr)
            return 1
        return 0 if verdict.valid else 1

    def _on_ready(self, environment: Environment, msg: Message, **_: object) -> None:
        ready = Ready.model_validate(msg.data)
        problem = ready.problem
        if problem is None and ready.digest != self._prepared.digest:
            problem = (
                f"a worker has another workload ({ready.digest}, here {self._prepared.digest}): "
                "prepare it there with the same settings"
            )
        if problem is not None:
            self._end(problem)
            return
        self._ready[msg.node_id] = ready
        self._start_if_all_are_ready()

    def _start_if_all_are_ready(self) -> None:
        if self._started or not self._spawned or len(self._ready) < self.workers:
            return
        self._started = True
        self._server_info = server_info(self._options.url)
        self._watch.update()
        at = time.time() + HEAD_START
        for index, client in enumerate(self._ready):
            start = Start(at=at, index=index, of=len(self._ready))
            self._runner.send_message(START, start.model_dump(), client_id=client)
        gevent.spawn(self._poll)

    def _poll(self) -> None:
        while True:
            gevent.sleep(POLL)
            self._watch.update()
            if self._has_lost_a_worker():
                self._end("a worker was lost")
                return

    def _has_lost_a_worker(self) -> bool:
        if not isinstance(self._runner, MasterRunner):
            return False
        clients = self._runner.clients
        missing = {client.id for client in clients.missing}
        expected = self._ready.keys() - self._done.keys()
        return any(client in missing or client not in clients for client in expected)

    def _on_record(self, environment: Environment, msg: Message, **_: object) -> None:
        self._journal.add(Record.model_validate(msg.data))

    def _on_done(self, environment: Environment, msg: Message, **_: object) -> None:
        self._done[msg.node_id] = Done.model_validate(msg.data).facts
        if len(self._done) >= len(self._ready):
            self._watch.update()
            gevent.spawn(self._runner.quit)

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        gevent.spawn(self._runner.quit)
