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
from pydantic import ValidationError

from benchmarks.common import BenchmarkError
from benchmarks.load.client import Coordinator, Sender
from benchmarks.load.settings import LOCUST_FIELDS, RunOptions
from vllm_autoprune.cli.flags import add_flags, flag_problems
from vllm_autoprune.cli.output import format_error
from vllm_autoprune.errors import AutopruneError, ConfigError


class ChatUser(User):
    """Sends its part of the schedule, then ends."""

    sender: Sender

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
            Coordinator(environment, options)
        if not isinstance(runner, MasterRunner):
            ChatUser.sender = Sender(environment)
    except AutopruneError as error:
        print(f"load: {' '.join(format_error(error).split())}", file=sys.stderr)
        runner.quit()
        sys.exit(2)


@events.test_start.add_listener
def _start(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    if not isinstance(environment.runner, MasterRunner):
        environment.parsed_options.host = environment.host or environment.parsed_options.host
        ChatUser.sender.begin(_read_options(environment.parsed_options))
