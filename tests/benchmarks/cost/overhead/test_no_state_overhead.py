"""Measuring the plugin without a state, against servers without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.fake_server import MODEL, Reply, fake_server
from benchmarks.cost.overhead import no_state_overhead
from benchmarks.cost.overhead.no_state_overhead import COMPARED, REQUESTS, SERVERS, Measured
from benchmarks.server import Server


@pytest.fixture
def running() -> Iterator[dict[str, Server]]:
    """Servers that answer at once, the plugin's with another text."""
    this: Any = SimpleNamespace(pid=os.getpid())
    with ExitStack() as stack:
        servers = {}
        for name in SERVERS:
            texts = ("other",) if name == "plugin" else ("same",)
            reply = Reply(deltas=texts, first=0.0, gaps=(0.0,))
            url = stack.enter_context(fake_server(reply)).url
            servers[name] = Server(url, MODEL, this, Path(os.devnull))
        yield servers


def test_every_server_gets_every_request(
    running: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_state_overhead, "WARM_UP", 1)
    monkeypatch.setattr(no_state_overhead, "EACH", 2)
    monkeypatch.setattr(no_state_overhead, "POLLING", 0.0)
    measured = Measured()
    no_state_overhead._send_rounds(running, 0, 3, measured)
    for times in (measured.totals, measured.processor):
        counts = [{name: len(rows) for name, rows in times[kind].items()} for kind in REQUESTS]
        assert counts == [dict.fromkeys(SERVERS, 3)] * len(REQUESTS)
    values = [row for by in measured.processor.values() for rows in by.values() for row in rows]
    assert all(len(row) == 2 and min(row) > 0 for row in values)


def test_an_answer_of_other_bytes_is_named(running: dict[str, Server]) -> None:
    measured = Measured()
    no_state_overhead._compare_answers(running, 0, measured)
    assert measured.compared == len(measured.differing) == COMPARED
    assert measured.differing[:2] == ["text 0/0", "image 0/1"]
    alike = dict.fromkeys(SERVERS, running["stock"])
    measured = Measured()
    no_state_overhead._compare_answers(alike, 0, measured)
    assert (measured.compared, measured.differing) == (COMPARED, [])
