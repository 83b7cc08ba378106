"""Coordinator of a load test: starts the workers, collects all records, judges the run.

It lives on locust's master, or in the only process where there are no workers.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from datetime import UTC, datetime

import gevent
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner

from benchmarks.common.client import MetricsWatcher, Record, fetch
from benchmarks.common.report import command_line, environment
from benchmarks.load.client import DONE, READY, RECORD, START, describe_priority
from benchmarks.load.result import (
    RECORDS,
    ClientFacts,
    Journal,
    Result,
    RunFacts,
    format_result,
    judge_run,
    summarize,
)
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import load_prepared

_POLL = 0.5
"""Seconds between two readings of the server's ``/metrics``."""
_HEAD_START = 0.5
"""Seconds from the start message to the start of the schedule, for it to reach all workers."""


def server_info(url: str) -> dict[str, str]:
    """Version and pruning state, from ``/version`` and the plugin's ``/v1/autoprune``, if any."""
    pages: list[dict[str, object]] = []
    for path in ("/version", "/v1/autoprune"):
        try:
            content = json.loads(fetch(url, path) or "{}")
        except ValueError:
            content = None
        pages.append(content if isinstance(content, dict) else {})
    served, state = pages
    budget = state.get("budget")
    info = {
        "server version": served.get("version"),
        **{f"autoprune {name}": state.get(name) for name in ("state", "digest", "version")},
        "autoprune budget": budget.get("k") if isinstance(budget, dict) else None,
    }
    return {name: str(value) for name, value in info.items() if value is not None}


class Coordinator:
    """Tracks the workers; a run that loses one is not valid."""

    def __init__(self, locust: Environment, options: RunOptions) -> None:
        assert locust.runner is not None
        self._locust, self._runner, self._options = locust, locust.runner, options
        self._prepared = load_prepared(options.workload)
        self._journal = Journal(options.out / RECORDS)
        self._watch = MetricsWatcher(options.url)
        # Before the run, whose own load is not to be taken for that of other programs.
        versions = {name: importlib.metadata.version(name) for name in ("locust", "gevent")}
        self._environment = {**environment(), **versions, "priority": describe_priority()}
        self._ready: list[str] = []
        self._done: dict[str, ClientFacts] = {}
        self._server_info: dict[str, str] = {}
        self._broken: str | None = None
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._spawned = self._started = False
        self._runner.register_message(READY, self._on_ready)
        self._runner.register_message(RECORD, self._on_record)
        self._runner.register_message(DONE, self._on_done)
        locust.events.spawning_complete.add_listener(self._on_spawned)
        locust.events.quitting.add_listener(self._on_quitting)

    def _on_ready(self, environment: Environment, msg: Message, **_: object) -> None:
        problem, digest = msg.data.get("problem"), msg.data.get("digest")
        if problem is None and digest != self._prepared.digest:
            problem = (
                f"a worker has another workload ({digest}, here {self._prepared.digest}): "
                "prepare it there with the same settings"
            )
        if problem is not None:
            self._end(problem)
            return
        self._ready.append(msg.node_id)
        self._start_if_all_are_ready()

    def _on_spawned(self, **_: object) -> None:
        """Locust has started all users."""
        self._spawned = True
        self._start_if_all_are_ready()

    def _start_if_all_are_ready(self) -> None:
        workers = self._runner.worker_count if isinstance(self._runner, MasterRunner) else 1
        if self._started or not self._spawned or len(self._ready) < workers:
            return
        self._started = True
        self._server_info = server_info(self._options.url)
        self._watch.update()
        at = time.time() + _HEAD_START
        for index, client in enumerate(self._ready):
            share = {"at": at, "index": index, "of": len(self._ready)}
            self._runner.send_message(START, share, client_id=client)
        gevent.spawn(self._poll)

    def _poll(self) -> None:
        while True:
            gevent.sleep(_POLL)
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

    def _on_quitting(self, **_: object) -> None:
        """Judge the run, write and print its result, and set the exit status."""
        self._journal.close()
        options, records = self._options, self._journal.records
        unfinished = len(self._done) < max(len(self._ready), 1)
        result = Result(
            label=options.label or options.load.label,
            url=options.url,
            began=self._began,
            workload=self._prepared.workload,
            workload_digest=self._prepared.digest,
            load=options.load,
            slo=options.slo,
            summary=summarize([records], options.slo),
            metrics=self._watch.metrics(),
            facts=RunFacts(
                planned=len(self._prepared.measured),
                clients=tuple(self._done.values()),
                unwritten=self._journal.failure,
                broken=self._broken or ("stopped before its end" if unfinished else None),
            ),
            server=self._server_info,
            environment=self._environment,
            command=command_line(),
        )
        result = result.model_copy(update={"verdict": judge_run(result, records)})
        print("\n".join(format_result(result)), flush=True)
        self._locust.process_exit_code = 0 if result.verdict.valid else 1
        try:
            result.write(options.out)
        except OSError as error:
            print(f"load: {options.out}: result not written: {error}", file=sys.stderr)
            self._locust.process_exit_code = 1
