"""Fuzzing campaign: texts generated from a seed and an index, judged in worker processes.

Finished blocks are recorded in a journal, from which an interrupted run resumes.
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
    """Parameters of a campaign: every ``full_every``-th text is checked at full size."""

    seed: int
    count: int
    full_every: int

    def text(self, index: int) -> tuple[str | bytes, list[str]]:
        """The text of an index, and the mutations that were applied to a valid state."""
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
        """Whether the safety check runs at the state's own K on all probes."""
        return index % self.full_every == 0

    @property
    def fingerprint(self) -> str:
        """Digest of the language; texts of an index are comparable only under the same one."""
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
    """A process that judges the rest of one block, and its findings so far."""

    block: range
    done: int
    tally: Tally
    process: BaseProcess
    findings: Connection


class Run:
    """A running campaign: ``jobs`` processes and a journal of finished blocks."""

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

    def run(self, progress: Callable[[Tally], None]) -> Tally:
        """Judge the texts that are not in the journal; ``progress`` is called after every block."""
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
                    if worker.done < len(worker.block):  # it crashed; another worker takes the rest
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
        """Receive findings; yields the workers that have ended."""
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
    """Judge a block in a worker process: one finding for every index, in order."""
    torch.set_num_threads(1)  # thread pools of the parent do not survive the fork
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for index in indices:
            content, _ = campaign.text(index)
            findings.send(judge.look(content, fully=campaign.fully(index)))
