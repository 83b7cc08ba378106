"""The keeping half of a load test: gives the word to go, keeps every record, gives the verdict.

Knows nothing about sending. It lives on locust's master, or beside the sender where there are no
workers.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

import gevent
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner, Runner

from benchmarks.load.facts import ClientFacts, RunFacts
from benchmarks.load.journal import Journal
from benchmarks.load.messages import DONE, GO, READY, RECORD, Done, Go, Ready
from benchmarks.load.options import Options
from benchmarks.load.prepared import Prepared, load
from benchmarks.load.record import Record
from benchmarks.load.result import RECORDS, Result, command, environment
from benchmarks.load.server_metrics import Watch
from benchmarks.load.summary import summarize
from benchmarks.load.table import lines
from benchmarks.load.told import about
from benchmarks.load.verdict import judge

POLL = 0.5
"""Seconds between two looks at the server's ``/metrics``."""
HEAD_START = 0.5
"""Seconds from the word to go to the start of the schedule, for the word to arrive everywhere."""


class Keeper:
    """Counts workers in and out; a run that loses one is not valid."""

    def __init__(self, runner: Runner, options: Options) -> None:
        self._runner, self._options = runner, options
        self._prepared: Prepared = load(options.workload)
        self._journal = Journal(options.out / RECORDS)
        self._watch = Watch(options.url)
        self._ready: dict[str, Ready] = {}
        self._done: dict[str, ClientFacts] = {}
        self._told: dict[str, str] = {}
        self._broken: str | None = None
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._spawned = self._gone = False
        for kind, listener in (
            (READY, self._on_ready),
            (RECORD, self._on_record),
            (DONE, self._on_done),
        ):
            runner.register_message(kind, listener)

    @property
    def workers(self) -> int:
        """How many senders there are."""
        return self._runner.worker_count if isinstance(self._runner, MasterRunner) else 1

    def spawned(self) -> None:
        """All users are there."""
        self._spawned = True
        self._go_if_all_wait()

    def finish(self) -> int:
        """Judge what is on record, write and print it; the exit status."""
        self._journal.close()
        planned = len(self._prepared.measured[: self._options.first])
        unended = "" if len(self._done) >= max(len(self._ready), 1) else "stopped before its end"
        records = self._journal.records
        facts = RunFacts(
            planned=planned,
            clients=tuple(self._done.values()),
            unwritten=self._journal.failure,
            broken=self._broken or unended or None,
        )
        summary, metrics = summarize(records, self._options.slo), self._watch.metrics()
        load_, workload = self._options.load, self._prepared.workload
        verdict = judge(workload, load_, records, facts, summary, metrics)
        result = Result(
            label=self._options.label,
            url=self._options.url,
            began=self._began,
            workload=workload,
            workload_digest=self._prepared.digest,
            load=load_,
            slo=self._options.slo,
            verdict=verdict,
            summary=summary,
            metrics=metrics,
            facts=facts,
            server=self._told,
            environment=environment(),
            command=command(),
        )
        print("\n".join(lines(result)), flush=True)
        try:
            result.write(self._options.out)
        except OSError as error:
            print(f"load: {self._options.out}: result not written: {error}", file=sys.stderr)
            return 1
        return 0 if verdict.valid else 1

    def _on_ready(self, environment: Environment, msg: Message, **_: object) -> None:
        told = Ready.model_validate(msg.data)
        problem = told.problem
        if problem is None and told.digest != self._prepared.digest:
            problem = (
                f"a worker has another workload ({told.digest}, here {self._prepared.digest}): "
                "prepare it there with the same settings"
            )
        if problem is not None:
            self._end(problem)
            return
        self._ready[msg.node_id] = told
        self._go_if_all_wait()

    def _go_if_all_wait(self) -> None:
        if self._gone or not self._spawned or len(self._ready) < self.workers:
            return
        self._gone = True
        self._told = about(self._options.url)
        self._watch.look()
        at = time.time() + HEAD_START
        for index, client in enumerate(self._ready):
            word = Go(at=at, index=index, of=len(self._ready))
            self._runner.send_message(GO, word.model_dump(), client_id=client)
        gevent.spawn(self._look)

    def _look(self) -> None:
        while True:
            gevent.sleep(POLL)
            self._watch.look()
            if self._lost():
                self._end("a worker was lost")
                return

    def _lost(self) -> bool:
        if not isinstance(self._runner, MasterRunner):
            return False
        clients = self._runner.clients
        missing = {client.id for client in clients.missing}
        waited_for = self._ready.keys() - self._done.keys()
        return any(client in missing or client not in clients for client in waited_for)

    def _on_record(self, environment: Environment, msg: Message, **_: object) -> None:
        self._journal.add(Record.model_validate(msg.data))

    def _on_done(self, environment: Environment, msg: Message, **_: object) -> None:
        self._done[msg.node_id] = Done.model_validate(msg.data).facts
        if len(self._done) >= len(self._ready):
            self._watch.look()
            gevent.spawn(self._runner.quit)

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        gevent.spawn(self._runner.quit)
