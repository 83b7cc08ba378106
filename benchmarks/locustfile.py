"""Load test of a served vision-language model: `locust -f benchmarks/locustfile.py --headless ...`.

    python -m benchmarks.load prepare --model NAME --out out/load/workload
    locust -f benchmarks/locustfile.py --headless --only-summary \
        --host http://127.0.0.1:8000 --workload out/load/workload --rate 4 --out out/load/run

With ``--processes 2``, or ``--master --expect-workers 2`` and two ``--worker`` on other machines,
the workers share the schedule (docs/benchmarks.md). The exit status is 0 for a valid run, 1 for one
that is not valid, 2 for wrong arguments.

Senders are on each worker, one coordinator is on the master; they exchange messages as JSON, and
without workers one locust runner sends them to itself. An open loop sends by the clock, however
slow the answers are; a closed loop after each answer; none retries.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc import Message
from locust.runners import MasterRunner, WorkerRunner
from pydantic import ValidationError

from benchmarks import BenchmarkError
from benchmarks.common.client import Client, Record
from benchmarks.common.report import environment
from benchmarks.load.result import (
    COUNTERS,
    ClientFacts,
    Result,
    format_result,
    list_interference,
    list_reasons,
    summarize,
    write_result,
)
from benchmarks.load.settings import LOCUST_FIELDS, RunOptions
from benchmarks.load.workload import load_prepared
from vllm_autoprune.cli.flags import add_flags, flag_problems
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.http_client import FAILURES, ServerClient

# A line for each request would be written before its first token is stamped.
logging.getLogger("httpx").setLevel(logging.WARNING)

_START, _RECORD, _DONE = "load-start", "load-record", "load-done"
"""Messages: when to start and which share to send; one record; the facts of a client at its end."""
_MAX_FAILURES = 10
"""Consecutive failures after which the run is given up."""
_EARLY = 0.002
"""Seconds of busy waiting before a request is due: an event loop sleeps whole milliseconds."""
_TICK = 0.01
"""Seconds that the greenlet which measures the lag sleeps each time."""
_WARM_UP_AT_ONCE = 4
_HEAD_START = 0.5
"""Seconds from the start message to the start of the schedule, for it to reach all workers."""


class _Sender:
    """Waits for the start message, sends its share, and reports when it is done."""

    def __init__(self, environment: Environment) -> None:
        assert environment.runner is not None
        self._environment, self._runner = environment, environment.runner
        self._start, self._stop = Event(), Event()
        self._share: Iterator[tuple[int, float]] = iter(())
        self._bodies: list[bytes] = []
        self._measured: list[bool] = []
        self._digest, self._broken = "", ""
        self._working = self._consecutive_failures = self._worker = 0
        self._zero = self._cpu = 0.0
        self._late = [0.0]
        self._options: RunOptions
        self._client: Client
        self._runner.register_message(_START, self._on_start)
        environment.events.test_start.add_listener(self._begin)
        environment.events.test_stopping.add_listener(self._on_stopping)

    def _begin(self, environment: Environment, **_: object) -> None:
        """Read the bodies; a failure is reported once the run starts."""
        assert environment.parsed_options is not None
        environment.parsed_options.host = environment.host or environment.parsed_options.host
        self._options = _read_options(environment.parsed_options)
        try:
            self._client = Client(self._options.host, self._now, connection=self._options)
            prepared = load_prepared(self._options.workload)
            self._bodies, self._digest = [*prepared.measured], prepared.digest
            self._measured = self._options.load.select_measured(len(self._bodies))
        except AutopruneError as error:
            self._broken = str(error)
        # Garbage collection of what exists by now would delay time stamps.
        gc.collect()
        gc.freeze()

    def _on_start(self, environment: Environment, msg: Message, **_: object) -> None:
        """Take every ``of``-th request from ``worker`` on; ``at`` is the Unix time of the start."""
        at, self._worker, of = float(msg.data["at"]), int(msg.data["worker"]), int(msg.data["of"])
        # From here on each worker goes by its own monotonic clock.
        self._zero = time.perf_counter() + (at - time.time())
        self._cpu = time.process_time()
        if not self._broken and self._digest != msg.data["digest"]:
            self._broken = "a worker has another workload: prepare it there with the same settings"
        if not self._broken:
            due = self._options.load.due(len(self._bodies))
            self._share = iter([*enumerate(due)][self._worker :: of])
            gevent.spawn(self._measure_lag)
        # Users begin as soon as this event is set.
        gevent.spawn_later(max(at - time.time(), 0.0), self._start.set)

    def _on_stopping(self, **_: object) -> None:
        """Send no further request."""
        self._stop.set()
        self._start.set()

    def _measure_lag(self) -> None:
        """Record how late an idle greenlet wakes up, which bounds the error of time stamps."""
        while self._working:
            before = time.perf_counter()
            gevent.sleep(_TICK)
            self._late.append(time.perf_counter() - before - _TICK)

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def work(self) -> None:
        """The task of every locust user: send its part of the share; the last one reports."""
        self._working += 1
        self._start.wait()
        if self._options.load.rate is None:
            for index, _ in self._share:  # of all users
                if self._stop.is_set():
                    break
                self._send(index, self._now())
        else:
            self._send_by_schedule()
        self._working -= 1
        if not self._working:
            cpu = (time.process_time() - self._cpu) / (self._now() + _HEAD_START)
            lag = sorted(self._late)[int(0.99 * (len(self._late) - 1))]
            broken = self._broken or None
            facts = ClientFacts(worker=self._worker, cpu=cpu, lag=lag, broken=broken)
            self._runner.send_message(_DONE, facts.model_dump(mode="json"))

    def _send_by_schedule(self) -> None:
        """Send every request when it is due, without waiting for answers."""
        pool, most = Pool(), self._options.most
        for index, at in self._share:
            if self._stop.wait(max(at - self._now() - _EARLY, 0.0)):
                break
            while self._now() < at:
                gevent.sleep(0)  # let answers be read meanwhile
            if len(pool) >= most:  # a server that far behind does not recover
                reason = f"over-saturated: {most} requests were in flight at once"
                self._broken = self._broken or reason
                self._stop.set()
                break
            pool.spawn(self._send, index, at)
        pool.join()

    def _send(self, index: int, at: float) -> None:
        labels = {"index": index, "measured": self._measured[index], "worker": self._worker}
        record = self._client.send(self._bodies[index], scheduled=at, **labels)
        self._runner.send_message(_RECORD, record.model_dump(mode="json"))
        # For locust's own statistics and pages.
        self._environment.events.request.fire(
            request_type="chat",
            name="measured" if record.measured else "not measured",
            response_time=1000 * (record.done - record.scheduled),
            response_length=len(record.text),
            exception=None if record.ok else RuntimeError(record.error),
            context={},
        )
        self._consecutive_failures = 0 if record.ok else self._consecutive_failures + 1
        if self._consecutive_failures >= _MAX_FAILURES and not self._broken:
            self._broken = (
                f"{_MAX_FAILURES} requests in a row failed, the last with: {record.error}"
            )
            self._stop.set()


class _Coordinator:
    """Warms up the server, starts the workers, collects all records, and judges the run.

    It lives on locust's master, or in the only process where there are no workers. A run that loses
    a worker is not valid.
    """

    def __init__(self, locust: Environment, options: RunOptions) -> None:
        assert locust.runner is not None
        self._locust, self._runner, self._options = locust, locust.runner, options
        self._prepared = load_prepared(options.workload)
        self._client = Client(options.host, connection=options)
        # Before the run, whose own load is not to be taken for that of other programs.
        self._environment = environment("locust", "gevent")
        self._counters: dict[str, float] | None = None
        self._records: list[Record] = []
        self._clients: list[ClientFacts] = []
        self._workers = 1
        self._broken: str | None = None
        self._runner.register_message(_RECORD, self._on_record)
        self._runner.register_message(_DONE, self._on_done)
        locust.events.spawning_complete.add_listener(lambda **_: gevent.spawn(self._conduct))
        locust.events.quitting.add_listener(self._on_quitting)

    def _conduct(self) -> None:
        """Start the run, and watch its workers: locust has started all users."""
        client, pool = self._client, Pool(_WARM_UP_AT_ONCE)
        for body in self._prepared.warm_up:
            pool.spawn(client.send, body)
        pool.join()
        self._counters = _read_counters(self._options)
        workers = getattr(self._runner, "clients", None)  # of a master
        ids = ["local"] if workers is None else [*workers]
        self._workers = len(ids)
        start = {"at": time.time() + _HEAD_START, "of": len(ids), "digest": self._prepared.digest}
        for number, worker in enumerate(ids):
            self._runner.send_message(_START, {**start, "worker": number}, client_id=worker)
        while workers is not None and len(self._clients) < len(ids):
            gevent.sleep(0.5)
            lost = len(workers) - len(workers.missing) < len(ids)
            if lost and len(self._clients) < len(ids):
                self._broken = "a worker was lost"
                gevent.spawn(self._runner.quit)
                return

    def _on_record(self, environment: Environment, msg: Message, **_: object) -> None:
        self._records.append(Record.model_validate(msg.data))
        print(f"answered {len(self._records)} of {len(self._prepared.measured)}", flush=True)

    def _on_done(self, environment: Environment, msg: Message, **_: object) -> None:
        self._clients.append(ClientFacts.model_validate(msg.data))
        if len(self._clients) >= self._workers:
            gevent.spawn(self._runner.quit)

    def _on_quitting(self, **_: object) -> None:
        """Judge the run, write and print its result, and set the exit status."""
        options, records, before = self._options, self._records, self._counters
        after = None if before is None else _read_counters(options)
        unfinished = len(self._clients) < self._workers
        result = Result(
            workload=self._prepared.workload,
            options=options,
            summary=summarize([records], options),
            # A labelled counter appears with its first event, so that before it there was none.
            counters=after
            and {k: total - (before or {}).get(k, 0.0) for k, total in after.items()},
            clients=tuple(self._clients),
            broken=self._broken or ("stopped before its end" if unfinished else None),
            environment=self._environment,
        )
        accepted = list_interference(result, records) if options.shared else ()
        update = {"reasons": tuple(list_reasons(result, records)), "accepted": tuple(accepted)}
        result = result.model_copy(update=update)
        print("\n".join(format_result(result)), flush=True)
        self._locust.process_exit_code = 0 if result.valid else 1
        try:
            write_result(options.out, result, records)
        except OSError as error:
            print(f"load: {options.out}: result not written: {error}", file=sys.stderr)
            self._locust.process_exit_code = 1


def _read_counters(options: RunOptions) -> dict[str, float] | None:
    """:data:`COUNTERS` of all engines since their start; None where the server does not answer."""
    with contextlib.suppress(*FAILURES), ServerClient(options.host, options) as client:
        client.http.timeout = 10.0
        if metrics := client.read_metrics():
            totals = {name: metrics.total(metric) for name, metric in COUNTERS.items()}
            return {name: total for name, total in totals.items() if total is not None}
    return None


class ChatUser(User):
    """Sends its part of the schedule, then ends."""

    sender: _Sender

    @task
    def work(self) -> None:
        """Wait for the start message, and send."""
        self.sender.work()
        raise StopUser


@events.init_command_line_parser.add_listener
def _add_options(parser: argparse.ArgumentParser, **_: object) -> None:
    add_flags(parser.add_argument_group("load test"), RunOptions, {}, LOCUST_FIELDS)


def _read_options(parsed: argparse.Namespace) -> RunOptions:
    """The options; locust's own ``--host`` and ``--users`` among them."""
    flags = {name: value for name, value in vars(parsed).items() if name in LOCUST_FIELDS}
    try:
        return RunOptions.model_validate({**flags, "host": parsed.host, "users": parsed.num_users})
    except ValidationError as error:
        raise ConfigError("options", flag_problems(error, {})) from None


@events.init.add_listener
def _init(environment: Environment, **_: object) -> None:
    runner, parsed = environment.runner, environment.parsed_options
    assert runner is not None and parsed is not None
    try:
        if not isinstance(runner, WorkerRunner):
            options = _read_options(parsed)
            expected = parsed.expect_workers if isinstance(runner, MasterRunner) else 1
            parsed.num_users = options.load.users or expected
            if parsed.num_users < expected:
                raise BenchmarkError(
                    f"{expected} workers cannot share {options.users} users "
                    "-> give each worker at least one"
                )
            parsed.spawn_rate = float(parsed.num_users)
            _Coordinator(environment, options)
        if not isinstance(runner, MasterRunner):
            ChatUser.sender = _Sender(environment)
    except AutopruneError as error:
        print(f"load: {' '.join(str(error).split())}", file=sys.stderr)
        runner.quit()
        sys.exit(2)
