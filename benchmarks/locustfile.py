"""Load test of a served vision-language model: `locust -f benchmarks/locustfile.py --headless ...`.

    python -m benchmarks.load prepare --model NAME --out out/load/workload
    locust -f benchmarks/locustfile.py --headless --only-summary \
        --host http://127.0.0.1:8000 --workload out/load/workload --rate 4 --out out/load/run

The exit status is 0 for a valid run, 1 for one that is not, 2 for wrong arguments. An open loop
sends by the clock, however slow the answers are; a closed loop after each answer; none retries.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import time

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner
from pydantic import ValidationError

from benchmarks import BenchmarkError
from benchmarks.common.client import Client, Record
from benchmarks.common.report import environment
from benchmarks.load.result import COUNTERS, Result, Summary
from benchmarks.load.settings import LOCUST_FIELDS, RunOptions
from benchmarks.load.workload import Prepared
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.flags import add_flags, flag_problems
from vllm_autoprune.http_client import FAILURES, ServerClient

# httpx would log a line for each request before its first token is stamped.
logging.getLogger("httpx").setLevel(logging.WARNING)

_MAX_FAILURES = 10
"""Number of consecutive failures after which the run ends."""
_EARLY = 0.002
"""Seconds of busy waiting before a request is due, because the event loop sleeps whole
milliseconds."""
_TICK = 0.01
"""Seconds that the greenlet which measures the lag sleeps at a time."""
_WARM_UP_AT_ONCE = 4


class _LoadTest:
    """Warms up the server, sends all requests by the users of locust, and judges the run."""

    def __init__(self, locust: Environment, options: RunOptions) -> None:
        self._locust = locust
        self._options = options
        self._prepared = Prepared.read(options.workload)
        self._client = Client(options.host, self._now, connection=options)
        count = len(self._prepared.measured)
        self._schedule = enumerate(options.load.due(count))
        self._measured = options.load.select_measured(count)
        # Recorded before the run, so that its own load does not look like that of other programs.
        self._environment = environment("locust", "gevent")
        self._counters: dict[str, float] | None = None
        self._records: list[Record] = []
        self._start = Event()
        self._stop = Event()
        self._working = options.load.users or 1
        self._consecutive_failures = 0
        self._zero = self._cpu = 0.0
        self._late = [0.0]
        self._broken = ""
        locust.events.test_start.add_listener(self.warm_up)
        locust.events.spawning_complete.add_listener(self.begin)
        locust.events.test_stopping.add_listener(lambda **_: self._stop.set())
        locust.events.quitting.add_listener(self.judge)

    def _now(self) -> float:
        """Seconds since the start of the schedule."""
        return time.perf_counter() - self._zero

    def warm_up(self, **_: object) -> None:
        """Send the requests of the warm-up, before the clock starts."""
        pool = Pool(_WARM_UP_AT_ONCE)
        for body in self._prepared.warm_up:
            pool.spawn(self._client.send, body)
        pool.join()
        self._counters = _read_counters(self._options)
        # A garbage collection of existing objects during the run would delay time stamps.
        gc.collect()
        gc.freeze()

    def begin(self, **_: object) -> None:
        """Start the schedule, which all users wait for."""
        self._zero = time.perf_counter()
        self._cpu = time.process_time()
        gevent.spawn(self.measure_lag)
        self._start.set()

    def measure_lag(self) -> None:
        """Record how late an idle greenlet wakes up, which bounds the error of time stamps."""
        while self._working:
            begin = time.perf_counter()
            gevent.sleep(_TICK)
            self._late.append(time.perf_counter() - begin - _TICK)

    def work(self) -> None:
        """Send this locust user's part of the requests; the last user ends the run."""
        self._start.wait()
        if self._options.load.rate is None:
            for index, _ in self._schedule:  # shared by all users
                if self._stop.is_set():
                    break
                self._send(index, self._now())
        else:
            # Requests are sent when they are due, without waiting for earlier answers.
            pool = Pool()
            maximum = self._options.most
            for index, due in self._schedule:
                if self._stop.wait(max(due - self._now() - _EARLY, 0.0)):
                    break
                while self._now() < due:
                    gevent.sleep(0)  # let answers be read meanwhile
                if len(pool) >= maximum:  # a server so far behind does not recover
                    self._give_up(
                        f"over-saturated: {maximum} requests were in flight at once"
                    )
                    break
                pool.spawn(self._send, index, due)
            pool.join()
        self._working -= 1
        if not self._working:
            assert self._locust.runner is not None
            gevent.spawn(self._locust.runner.quit)

    def _send(self, index: int, due: float) -> None:
        body = self._prepared.measured[index]
        measured = self._measured[index]
        record = self._client.send(body, scheduled=due, index=index, measured=measured)
        self._records.append(record)
        # Locust needs the event for its own statistics and pages.
        self._locust.events.request.fire(
            request_type="chat",
            name="measured" if record.measured else "not measured",
            response_time=1000 * (record.done - record.scheduled),
            response_length=len(record.text),
            exception=None if record.ok else RuntimeError(record.error),
            context={},
        )
        self._consecutive_failures = 0 if record.ok else self._consecutive_failures + 1
        if self._consecutive_failures >= _MAX_FAILURES:
            self._give_up(
                f"{_MAX_FAILURES} requests in a row failed, the last with: {record.error}"
            )

    def _give_up(self, reason: str) -> None:
        """End the run: no further request is sent."""
        self._broken = self._broken or reason
        self._stop.set()

    def judge(self, **_: object) -> None:
        """Judge the run, write and print its result, and set the exit status."""
        options = self._options
        records = self._records
        initial = self._counters
        final = None if initial is None else _read_counters(options)
        result = Result(
            workload=self._prepared.workload,
            options=options,
            summary=Summary.of([records], options),
            # A labelled counter appears with its first event; if it was missing at the start, it
            # was 0.
            counters=final
            and {
                name: total - (initial or {}).get(name, 0.0)
                for name, total in final.items()
            },
            cpu=(time.process_time() - self._cpu) / self._now(),
            lag=sorted(self._late)[int(0.99 * (len(self._late) - 1))],
            broken=self._broken or ("stopped before its end" if self._working else ""),
            environment=self._environment,
        )
        accepted = result.list_interference(records) if options.shared else ()
        update = {
            "reasons": tuple(result.list_reasons(records)),
            "accepted": tuple(accepted),
        }
        result = result.model_copy(update=update)
        print("\n".join(result.format()), flush=True)
        self._locust.process_exit_code = 0 if result.valid else 1
        try:
            result.write(options.out, records)
        except OSError as error:
            print(f"load: {options.out}: result not written: {error}", file=sys.stderr)
            self._locust.process_exit_code = 1


def _read_counters(options: RunOptions) -> dict[str, float] | None:
    """Sum of :data:`COUNTERS` over all engines; None if the server does not answer."""
    with contextlib.suppress(*FAILURES), ServerClient(options.host, options) as client:
        client.http.timeout = 10.0
        if metrics := client.read_metrics():
            totals = {name: metrics.total(metric) for name, metric in COUNTERS.items()}
            return {name: total for name, total in totals.items() if total is not None}
    return None


class ChatUser(User):
    """A user of locust that sends its part of the requests, then ends."""

    test: _LoadTest

    @task
    def work(self) -> None:
        """Wait for the start of the schedule, then send."""
        self.test.work()
        raise StopUser


@events.init_command_line_parser.add_listener
def _add_options(parser: argparse.ArgumentParser, **_: object) -> None:
    add_flags(parser.add_argument_group("load test"), RunOptions, {}, LOCUST_FIELDS)


@events.init.add_listener
def _init(environment: Environment, **_: object) -> None:
    runner = environment.runner
    parsed = environment.parsed_options
    assert runner is not None and parsed is not None
    try:
        if not isinstance(runner, LocalRunner):
            raise BenchmarkError.of(
                "locust",
                "several processes share no schedule",
                "send from one process",
            )
        flags = {
            name: value for name, value in vars(parsed).items() if name in LOCUST_FIELDS
        }
        flags |= {"host": parsed.host, "users": parsed.num_users}
        try:
            options = RunOptions.model_validate(flags)
        except ValidationError as error:
            raise ConfigError("options", flag_problems(error, {})) from None
        parsed.num_users = options.load.users or 1
        parsed.spawn_rate = float(parsed.num_users)
        ChatUser.test = _LoadTest(environment, options)
    except AutopruneError as error:
        print(f"load: {' '.join(str(error).split())}", file=sys.stderr)
        runner.quit()
        sys.exit(2)
