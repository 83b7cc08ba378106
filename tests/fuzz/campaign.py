"""Many texts, each made from a seed and its index, judged in processes that may die.

Blocks that are done are kept in a journal, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import torch

from tests.fuzz.grammar import Grammar
from tests.fuzz.judge import Finding, Judge
from tests.fuzz.mutate import mutate
from tests.fuzz.spoil import spoil, written
from tests.fuzz.tally import Tally
from vllm_autoprune import PruningState

BLOCK = 250
PATIENCE = 120.0
"""Seconds without a finding after which a process counts as hanging."""

_FORK = multiprocessing.get_context("fork")  # torch is imported once, not for every block


@dataclass(frozen=True)
class Campaign:
    """Which texts: ``seed`` and an index decide one; ``full_every``: how many run at full size."""

    seed: int
    count: int
    full_every: int

    def text(self, index: int) -> tuple[str | bytes, list[str]]:
        """The text of an index, and what was done to a sound state to get it."""
        random = Random(f"{self.seed}/{index}")
        state = _grammar().state(random)
        fate = random.random()
        if fate < 0.4:
            return written(state, random), []
        if fate < 0.85:
            done = mutate(state, random)
            return written(state, random), done
        done = mutate(state, random) if random.random() < 0.2 else []
        content, how = spoil(written(state, random), random)
        return content, [*done, how]

    def fully(self, index: int) -> bool:
        """True where the safety check runs at the state's own K on all probes."""
        return index % self.full_every == 0

    @property
    def fingerprint(self) -> str:
        """Changes with the language, and with it what every index stands for."""
        grammar = json.dumps(PruningState.model_json_schema(), sort_keys=True)
        report = f"{self.seed}/{self.full_every}/{grammar}"
        return hashlib.sha256(report.encode()).hexdigest()[:16]


_GRAMMARS: list[Grammar] = []


def _grammar() -> Grammar:
    if not _GRAMMARS:
        _GRAMMARS.append(Grammar(PruningState.model_json_schema()))
    return _GRAMMARS[0]


@dataclass
class _Worker:
    """A process that judges the rest of one block, and what it has found so far."""

    block: range
    done: int
    tally: Tally
    process: BaseProcess
    findings: Connection


class Run:
    """A campaign being run: as many processes as ``jobs``, a journal of finished blocks."""

    def __init__(self, campaign: Campaign, journal: Path, *, jobs: int = 1) -> None:
        self.campaign = campaign
        self.tally = Tally()
        self._journal, self._jobs = journal, jobs
        self._finished = set(self._resumed())

    def _resumed(self) -> Iterator[int]:
        if not self._journal.exists():
            return
        for line in self._journal.read_text().splitlines():
            entry = json.loads(line)
            fits = entry["start"] + entry["tally"]["texts"] <= self.campaign.count
            if entry["fingerprint"] == self.campaign.fingerprint and fits:
                self.tally.merge(Tally.from_json(entry["tally"]))
                yield entry["start"]

    def go(self, progress: Callable[[Tally], None]) -> Tally:
        """Judge what is not in the journal yet; ``progress`` is called after every block."""
        _grammar()
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        waiting = [
            range(start, min(start + BLOCK, self.campaign.count))
            for start in range(0, self.campaign.count, BLOCK)
            if start not in self._finished
        ]
        waiting.reverse()
        workers: list[_Worker] = []
        try:
            while waiting or workers:
                while waiting and len(workers) < self._jobs:
                    workers.append(self._start(waiting.pop()))
                for worker in self._listen(workers):
                    workers.remove(worker)
                    if worker.done < len(worker.block):  # it died; the rest is another's
                        workers.append(self._start(worker.block, worker.done, worker.tally))
                        continue
                    self._record(worker)
                    progress(self.tally)
        finally:
            for worker in workers:
                worker.process.kill()
        return self.tally

    def _start(self, block: range, done: int = 0, tally: Tally | None = None) -> _Worker:
        receive, send = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_judge, args=(self.campaign, block[done:], send))
        process.start()
        send.close()  # so that the end of the process is the end of the pipe
        return _Worker(block, done, tally or Tally(), process, receive)

    def _listen(self, workers: list[_Worker]) -> Iterator[_Worker]:
        """Take in what was found; yields the workers that have ended."""
        ready = wait([worker.findings for worker in workers], timeout=PATIENCE)
        for worker in list(workers):
            if ready and worker.findings not in ready:
                continue
            index = worker.block[worker.done]
            try:
                if not ready:
                    worker.process.kill()
                    raise EOFError
                finding: Finding = worker.findings.recv()
            except EOFError:
                worker.process.join()
                how = f"exit code {worker.process.exitcode}" if ready else "hangs"
                finding = Finding(faults=[f"crash: {how}"])
            worker.tally.add(index, finding, self.campaign.fully(index))
            worker.done += 1
            if worker.done == len(worker.block):
                worker.process.join()
            if worker.done == len(worker.block) or worker.process.exitcode is not None:
                yield worker

    def _record(self, worker: _Worker) -> None:
        self.tally.merge(worker.tally)
        entry = {
            "fingerprint": self.campaign.fingerprint,
            "start": worker.block[0],
            "tally": worker.tally.as_json(),
        }
        with self._journal.open("a") as journal:
            journal.write(json.dumps(entry) + "\n")


def _judge(campaign: Campaign, indices: range, findings: Connection) -> None:
    """In the process: one finding for every index, in order."""
    torch.set_num_threads(1)  # a pool of threads that the parent has does not survive the fork
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for index in indices:
            content, _ = campaign.text(index)
            findings.send(judge.look(content, fully=campaign.fully(index)))
