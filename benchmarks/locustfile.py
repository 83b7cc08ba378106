"""Load test of a served vision-language model: `locust -f benchmarks/locustfile.py --headless ...`.

    python -m benchmarks.load prepare --model NAME --out out/load/workload
    locust -f benchmarks/locustfile.py --headless --only-summary \
        --host http://127.0.0.1:8000 --workload out/load/workload --rate 4 --out out/load/run

With ``--master --expect-workers 2`` and two ``--worker`` the workers share the schedule
(docs/benchmarks.md). The exit status is 0 for a valid run, 1 for one that is not valid, 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import sys

from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from benchmarks.common import BenchmarkError
from benchmarks.load.client import Sender
from benchmarks.load.coordinator import Coordinator
from benchmarks.load.settings import LOCUST_OWN, RunOptions, add_flags, list_options, read_options

_SENDERS: list[Sender] = []
_COORDINATORS: list[Coordinator] = []
"""At most one of each in a process; locust passes its events to functions, not to objects."""


class ChatUser(User):
    """Sends its part of the schedule, then ends."""

    @task
    def work(self) -> None:
        """Wait for the start message, and send."""
        for sender in _SENDERS:
            sender.work()
        raise StopUser


@events.init_command_line_parser.add_listener
def _add_options(parser: argparse.ArgumentParser, **_: object) -> None:
    add_flags(parser, RunOptions, LOCUST_OWN)


def _read_options(parsed: argparse.Namespace) -> RunOptions:
    """The options; locust's own ``--host`` and ``--users`` among them."""
    if not parsed.host:
        raise BenchmarkError("--host is missing; the server, such as http://127.0.0.1:8000")
    given = {key: getattr(parsed, key) for key in list_options(RunOptions, LOCUST_OWN)}
    users = None if str(given["rate"] or "").strip(" 0.") else parsed.num_users or 1
    return read_options(RunOptions, {**given, "url": parsed.host, "users": users})


@events.init.add_listener
def _init(environment: Environment, **_: object) -> None:
    runner, parsed = environment.runner, environment.parsed_options
    assert runner is not None and parsed is not None
    try:
        if not isinstance(runner, WorkerRunner):
            chosen = _read_options(parsed)
            expected = parsed.expect_workers if isinstance(runner, MasterRunner) else 1
            parsed.num_users = chosen.users or expected
            if parsed.num_users < expected:
                raise BenchmarkError(
                    f"{expected} workers cannot share {chosen.users} users "
                    "-> give each worker at least one"
                )
            parsed.spawn_rate = float(parsed.num_users)
            _COORDINATORS.append(Coordinator(runner, chosen))
        if not isinstance(runner, MasterRunner):
            _SENDERS.append(Sender(environment, runner))
    except BenchmarkError as error:
        print(f"load: {error}", file=sys.stderr)
        runner.quit()
        sys.exit(2)


@events.test_start.add_listener
def _start(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    for sender in _SENDERS:
        environment.parsed_options.host = environment.host or environment.parsed_options.host
        sender.begin(_read_options(environment.parsed_options))


@events.spawning_complete.add_listener
def _spawned(**_: object) -> None:
    for coordinator in _COORDINATORS:
        coordinator.spawned()


@events.test_stopping.add_listener
def _stopping(**_: object) -> None:
    for sender in _SENDERS:
        sender.stop()


@events.quitting.add_listener
def _quitting(environment: Environment, **_: object) -> None:
    for coordinator in _COORDINATORS:
        environment.process_exit_code = coordinator.finish()
