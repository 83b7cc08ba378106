"""Comparisons of arms that take turns on servers of one machine, written as rows of ``docs/data``.

Every request has a new picture or clip. Ratios are those of medians, and their intervals resample
the turns of both arms in pairs.
"""

from __future__ import annotations

import csv
import math
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import psutil  # type: ignore[import-untyped]

from benchmarks.common.client import Client
from benchmarks.common.report import command_line, log_progress
from benchmarks.common.requests import build_body
from benchmarks.common.shapes import read_shape
from benchmarks.server import Server
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.statistics import Estimate, Spread

SERVED = (
    "--served-model-name served --enforce-eager --block-size 32 --max-model-len 4096 "
    "--max-num-batched-tokens 4096 --mm-processor-cache-gb 0.5"
)
USERS = (1, 8)
"""Numbers of concurrent requests; a single one gets three times as many turns."""

_SEEDS = count(1000)  # shared by all turns, so that no server sees anything twice
_TOKENS = 4
# The only allowed token is a word: special tokens would have no text.
_FIELDS = {"ignore_eos": True, "allowed_token_ids": [4]}

OPTIONS: dict[str, dict[str, Any]] = {
    "--rounds": {
        "type": int,
        "default": 5,
        "help": "turns at 8 users; three times as many at 1",
    },
}
"""Options of all commands whose arms take turns."""

Arm = tuple[Server, Mapping[str, object]]
"""The server of an arm, and the fields that the arm adds to a request."""


def build_model(folder: Path) -> Path:
    """Write a folder of a scaled Qwen3-VL-8B with random weights."""
    return build("qwen3_vl", folder / "model", read_shape("scaled-qwen3-vl"))


def as_fields(entry: Mapping[str, object]) -> Mapping[str, object]:
    """Request fields that carry ``entry``, settings of the plugin."""
    return {"mm_processor_kwargs": {"autoprune": entry}}


class Table:
    """Rows of one command, written as they are added; printed if no file is given."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._call = shlex.join(command_line())
        head = ["what", "setting", "value", "low", "high", "unit", "verdict", "command"]
        self._writer.writerow(head)

    def add(
        self,
        what: str,
        setting: str,
        figure: Spread | Estimate | float,
        unit: str,
        verdict: str = "",
    ) -> None:
        """Add a median with quartiles, an estimate with its 95 % interval, or an exact number."""
        if isinstance(figure, int | float):
            exact = f"{figure:.4g}" if isinstance(figure, float) else str(figure)
            values = [exact, "", ""]
        else:
            values = [f"{value:.4g}" for value in astuple(figure)[:3]]
        self._writer.writerow([what, setting, *values, unit, verdict, self._call])
        self._file.flush()


def processor_seconds(server: Server) -> float:
    """User and system time so far of all processes of a server, in seconds."""
    root = psutil.Process(server.process.pid)
    times = [part.cpu_times() for part in (root, *root.children(recursive=True))]
    return sum(float(part.user + part.system) for part in times)


_ByArm = defaultdict[str, list[float]]


@dataclass
class Turns:
    """Wall time and processor time per request of each turn, and TTFT of each request, by arm."""

    setting: str
    measure_work: Callable[[Server], float] = processor_seconds
    seconds: _ByArm = field(default_factory=partial(defaultdict, list))
    ttft: _ByArm = field(default_factory=partial(defaultdict, list))
    work: _ByArm = field(default_factory=partial(defaultdict, list))
    """Processor seconds, by ``measure_work``."""

    def take(
        self,
        arms: Mapping[str, Arm],
        users: int,
        rounds: int,
        draw: Callable[[int], Sequence[Mapping[str, object]]],
    ) -> None:
        """Send ``users`` requests at once to each arm in turn, after a turn that only warms up.

        ``draw`` returns the content of a message from a seed. Raises :class:`BenchmarkError` if a
        request fails.
        """
        for turn in range(-1, rounds * (3 if users == 1 else 1)):
            for name in list(arms)[:: -1 if turn % 2 else 1]:
                server, fields = arms[name]
                client = Client(server.url)
                bodies = []
                for _ in range(users):
                    content = draw(next(_SEEDS))
                    more = {**_FIELDS, **fields}
                    bodies.append(
                        build_body("served", content, tokens=_TOKENS, fields=more)
                    )
                worked = self.measure_work(server)
                begin = time.perf_counter()
                records = client.send_all(
                    bodies, users, subject=f"{self.setting}, {name}"
                )
                end = time.perf_counter()
                if turn >= 0:
                    self.seconds[name].append((end - begin) / users)
                    self.ttft[name] += [record.ttft for record in records]
                    work = self.measure_work(server) - worked
                    self.work[name].append(work / users)
        log_progress(self.setting)

    def write(
        self, table: Table, compared: Mapping[tuple[str, str], float | None]
    ) -> None:
        """Add rows for every arm, and for each pair (under, over) the ratio of their requests/s.

        The value of a pair is the promised minimum of this ratio; its inverse is the limit of the
        ratio of processor times.
        """
        for name, seconds in self.seconds.items():
            setting = f"{self.setting}; {name}"
            table.add(
                "throughput", setting, Spread.of([1 / s for s in seconds]), "requests/s"
            )
            table.add("TTFT", setting, Spread.of(self.ttft[name]), "s")
            table.add("processor time", setting, Spread.of(self.work[name]), "s")
        ratio = Estimate.ratio_of_medians
        for (under, over), minimum in compared.items():
            if not self.seconds.keys() >= {under, over}:
                continue
            gain = ratio(self.seconds[under], self.seconds[over])
            slower = ratio(self.seconds[over], self.seconds[under])
            work = ratio(self.work[over], self.work[under])
            bound = 1 / minimum if minimum else math.inf
            pair = f"{over} over {under}"
            holds = f"at least {minimum}: {slower.at_most(bound)}" if minimum else ""
            table.add(f"throughput, {pair}", self.setting, gain, "times", holds)
            holds = f"at most {bound:.3f}: {work.at_most(bound)}" if minimum else ""
            table.add(f"processor time, {pair}", self.setting, work, "times", holds)
