"""Coordinator of a load test: starts the workers, collects all records, judges the run.

It lives on locust's master, or in the only process where there are no workers.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from datetime import UTC, datetime

import gevent
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner, Runner

from benchmarks.common.client import Journal, Record
from benchmarks.common.metrics import MetricsWatcher, server_info
from benchmarks.common.report import command_line, environment
from benchmarks.load.client import DONE, READY, RECORD, START, Ready, Start, describe_priority
from benchmarks.load.result import (
    RECORDS,
    REQUESTS_CSV,
    ClientFacts,
    Result,
    RunFacts,
    format_result,
    judge_run,
    summarize,
    write_requests_csv,
)
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import load_prepared

POLL = 0.5
"""Seconds between two readings of the server's ``/metrics``."""
HEAD_START = 0.5
"""Seconds from the start message to the start of the schedule, for it to reach all workers."""


class Coordinator:
    """Tracks the workers; a run that loses one is not valid."""

    def __init__(self, runner: Runner, options: RunOptions) -> None:
        self._runner, self._options = runner, options
        self._prepared = load_prepared(options.workload)
        self._journal = Journal(options.out / RECORDS)
        self._watch = MetricsWatcher(options.url)
        # Before the run, whose own load is not to be taken for that of other programs.
        versions = {name: importlib.metadata.version(name) for name in ("locust", "gevent")}
        self._environment = {**environment(), **versions, "priority": describe_priority()}
        self._ready: dict[str, Ready] = {}
        self._done: dict[str, ClientFacts] = {}
        self._server_info: dict[str, str] = {}
        self._broken: str | None = None
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._spawned = self._started = False
        runner.register_message(READY, self._on_ready)
        runner.register_message(RECORD, self._on_record)
        runner.register_message(DONE, self._on_done)

    def spawned(self) -> None:
        """Locust has started all users."""
        self._spawned = True
        self._start_if_all_are_ready()

    def finish(self) -> int:
        """Judge the run, write and print its result; returns the exit status."""
        self._journal.close()
        options, prepared, records = self._options, self._prepared, self._journal.records
        unfinished = (
            None if len(self._done) >= max(len(self._ready), 1) else "stopped before its end"
        )
        facts = RunFacts(
            planned=len(prepared.measured[: options.first or None]),
            clients=tuple(self._done.values()),
            unwritten=self._journal.failure,
            broken=self._broken or unfinished,
        )
        summary, metrics = summarize(records, options.slo), self._watch.metrics()
        result = Result(
            label=options.label or options.load.label,
            url=options.url,
            began=self._began,
            workload=prepared.workload,
            workload_digest=prepared.digest,
            load=options.load,
            slo=options.slo,
            verdict=judge_run(prepared.workload, options.load, records, facts, summary, metrics),
            summary=summary,
            metrics=metrics,
            facts=facts,
            server=self._server_info,
            environment=self._environment,
            command=command_line(),
        )
        print("\n".join(format_result(result)), flush=True)
        try:
            result.write(options.out)
            write_requests_csv(records, options.out / REQUESTS_CSV)
        except OSError as error:
            print(f"load: {options.out}: result not written: {error}", file=sys.stderr)
            return 1
        return 0 if result.verdict.valid else 1

    def _on_ready(self, environment: Environment, msg: Message, **_: object) -> None:
        ready = Ready.model_validate(msg.data)
        if ready.problem is not None:
            self._end(ready.problem)
        elif ready.digest != self._prepared.digest:
            self._end(
                f"a worker has another workload ({ready.digest}, here {self._prepared.digest}): "
                "prepare it there with the same settings"
            )
        else:
            self._ready[msg.node_id] = ready
            self._start_if_all_are_ready()

    def _start_if_all_are_ready(self) -> None:
        workers = self._runner.worker_count if isinstance(self._runner, MasterRunner) else 1
        if self._started or not self._spawned or len(self._ready) < workers:
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
            if isinstance(self._runner, MasterRunner):
                clients = self._runner.clients
                missing = {client.id for client in clients.missing}
                expected = [client for client in self._ready if client not in self._done]
                if any(client in missing or client not in clients for client in expected):
                    self._end("a worker was lost")
                    return

    def _on_record(self, environment: Environment, msg: Message, **_: object) -> None:
        self._journal.add(Record.model_validate(msg.data))

    def _on_done(self, environment: Environment, msg: Message, **_: object) -> None:
        self._done[msg.node_id] = ClientFacts.model_validate(msg.data)
        if len(self._done) >= len(self._ready):
            self._watch.update()
            gevent.spawn(self._runner.quit)

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        gevent.spawn(self._runner.quit)
