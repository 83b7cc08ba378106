"""The sending half of a load test: one per locust worker, with its share of the requests.

Knows nothing about verdicts: it sends, stamps and tells the keeper.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust.env import Environment
from locust.rpc import Message
from locust.runners import Runner

from benchmarks.load.client import Client
from benchmarks.load.errors import LoadError
from benchmarks.load.facts import ClientFacts
from benchmarks.load.messages import DONE, GO, READY, RECORD, Done, Go, Ready
from benchmarks.load.options import Options
from benchmarks.load.pace import Lag, closed_loop, open_loop
from benchmarks.load.prepared import Line, Prepared, load
from benchmarks.load.record import Phase, Record

WARM_UP_AT_ONCE = 4
IN_A_ROW = 10
"""Failures without an answer between them, after which the server counts as gone."""

Item = tuple[Line, Phase]


class Sender:
    """Waits for the word to go, sends, and says when its share is done."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._go, self._stop = Event(), Event()
        self._share: list[tuple[Item, float]] = []
        self._queue: Iterator[Item] = iter(())
        self._left = self._failed_in_a_row = self._index = 0
        self._zero = self._cpu = 0.0
        self._broken: str | None = None
        self._lag: Lag | None = None
        self._options: Options | None = None
        self._prepared: Prepared | None = None
        runner.register_message(GO, self._on_go)

    def begin(self, options: Options) -> None:
        """Read the bodies, warm the server up, and tell the keeper; called when a test starts."""
        self._options = options
        try:
            self._prepared = load(options.workload)
        except LoadError as error:
            self._tell(READY, Ready(digest="", problem=str(error)))
            return
        gevent.spawn(self._warm_up, self._prepared)

    def work(self) -> None:
        """What every locust user does: its part of the share, then nothing more."""
        self._go.wait()
        if self._options is None:
            return
        if self._options.load.rate is None:
            closed_loop(self._queue, self._now, self._send, self._stop)
            return
        share, self._share = self._share, []  # the first user of a worker sends it all
        if share:
            told = open_loop(share, self._now, self._send, self._stop, self._options.most)
            self._broken = self._broken or told
            self._finish_if_over()

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()
        self._go.set()

    def _warm_up(self, prepared: Prepared) -> None:
        pool = Pool(WARM_UP_AT_ONCE)
        client = self._client()
        for line in prepared.warm_up:
            pool.spawn(client.send, prepared.body(line), index=line.ask.index)
        pool.join()
        # What is there by now stays: walking through it again would hold up every stamp.
        gc.collect()
        gc.freeze()
        self._tell(READY, Ready(digest=prepared.digest))

    def _on_go(self, environment: Environment, msg: Message, **_: object) -> None:
        word = Go.model_validate(msg.data)
        prepared, options = self._prepared, self._options
        assert prepared is not None and options is not None
        lines = prepared.measured[: options.first]
        phases, due = options.load.phases(len(lines)), options.load.due(len(lines))
        whole = [((line, phase), at) for line, phase, at in zip(lines, phases, due, strict=True)]
        self._share = whole[word.index :: word.of]
        self._queue = iter([item for item, _ in self._share])
        self._left, self._index = len(self._share), word.index
        self._zero = time.perf_counter() + (word.at - time.time())
        self._lag, self._cpu = Lag(), time.process_time()
        # Users of a closed loop would start at once.
        gevent.spawn_later(max(word.at - time.time(), 0.0), self._go.set)
        if not self._share:
            self._finish_if_over()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _client(self) -> Client:
        assert self._options is not None
        key = os.environ.get("OPENAI_API_KEY")
        headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"} if key else {}
        return Client(self._options.url, self._now, self._options.patience, headers)

    def _send(self, item: Item, at: float) -> None:
        line, phase = item
        assert self._prepared is not None
        record = self._client().send(
            self._prepared.body(line),
            index=line.ask.index,
            scheduled=at,
            phase=phase,
            worker=self._index,
            images=len(line.ask.pictures),
        )
        self._tell(RECORD, record)
        self._show(record)
        self._failed_in_a_row = 0 if record.ok else self._failed_in_a_row + 1
        if self._failed_in_a_row >= IN_A_ROW and self._broken is None:
            self._broken = f"{IN_A_ROW} requests in a row failed, the last with: {record.error}"
            self._stop.set()
        self._left -= 1
        self._finish_if_over()

    def _show(self, record: Record) -> None:
        """Tell locust, for its own statistics and pages; ours are made from the records."""
        self._environment.events.request.fire(
            request_type="chat",
            name=record.phase,
            response_time=1000 * (record.e2e if record.ok else record.done - record.scheduled),
            response_length=len(record.text),
            exception=None if record.ok else RuntimeError(record.error),
            context={},
        )

    def _finish_if_over(self) -> None:
        """Once, when nothing is left or nothing more will be sent."""
        if self._lag is None or (self._left > 0 and not self._stop.is_set()):
            return
        seconds = max(self._now(), 1e-9)
        cpu = (time.process_time() - self._cpu) / seconds
        (middle, late), self._lag = self._lag.stop(), None
        facts = ClientFacts(
            worker=self._index, cpu=cpu, lag_p50=middle, lag_p99=late, broken=self._broken
        )
        self._tell(DONE, Done(facts=facts))

    def _tell(self, kind: str, told: Ready | Record | Done) -> None:
        self._runner.send_message(kind, told.model_dump(mode="json"))
