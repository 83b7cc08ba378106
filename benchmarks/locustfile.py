"""Load test of a served vision-language model: `locust -f benchmarks/locustfile.py --headless ...`.

Knows nothing about what is measured: it hands locust's events to ``benchmarks.load``.

    python -m benchmarks.load prepare --model NAME --out out/load/workload
    locust -f benchmarks/locustfile.py --headless --only-summary \
        --host http://127.0.0.1:8000 --workload out/load/workload --rate 4 --out out/load/run

With ``--master --expect-workers 2`` and two ``--worker`` the workers share the schedule
(docs/benchmarks.md). The exit status is 0 for a valid run, 1 for one that is not valid, 2 for a
wrong call.
"""

from __future__ import annotations

import argparse
import sys

from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from benchmarks.load.errors import LoadError
from benchmarks.load.keeper import Keeper
from benchmarks.load.options import add, options, users
from benchmarks.load.sender import Sender

_SENDERS: list[Sender] = []
_KEEPERS: list[Keeper] = []
"""At most one of each in a process; locust hands its events to functions, not to objects."""


class ChatUser(User):
    """Sends its part of the schedule, then ends."""

    @task
    def work(self) -> None:
        """Wait for the word to go, and send."""
        for sender in _SENDERS:
            sender.work()
        raise StopUser


@events.init_command_line_parser.add_listener
def _add_options(parser: argparse.ArgumentParser, **_: object) -> None:
    add(parser)


@events.init.add_listener
def _init(environment: Environment, **_: object) -> None:
    runner, parsed = environment.runner, environment.parsed_options
    assert runner is not None and parsed is not None
    try:
        if not isinstance(runner, WorkerRunner):
            chosen = options(parsed)
            expected = parsed.expect_workers if isinstance(runner, MasterRunner) else 1
            parsed.num_users = users(chosen.load, expected)
            parsed.spawn_rate = float(parsed.num_users)
            _KEEPERS.append(Keeper(runner, chosen))
        if not isinstance(runner, MasterRunner):
            _SENDERS.append(Sender(environment, runner))
    except (LoadError, ValueError) as error:
        print(f"load: {error}", file=sys.stderr)
        runner.quit()
        sys.exit(2)


@events.test_start.add_listener
def _start(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    for sender in _SENDERS:
        environment.parsed_options.host = environment.host or environment.parsed_options.host
        sender.begin(options(environment.parsed_options))


@events.spawning_complete.add_listener
def _spawned(**_: object) -> None:
    for keeper in _KEEPERS:
        keeper.spawned()


@events.test_stopping.add_listener
def _stopping(**_: object) -> None:
    for sender in _SENDERS:
        sender.stop()


@events.quitting.add_listener
def _quitting(environment: Environment, **_: object) -> None:
    for keeper in _KEEPERS:
        environment.process_exit_code = keeper.finish()
