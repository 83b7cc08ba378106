"""Cross-check of one load point against ``vllm bench serve``: both must agree.

Both send the same contents in the same order, in a closed loop of as many users, round by round in
ABBA order.

Median TTFT, mean TPOT and median E2E are compared, but not gaps between deltas: vLLM's tool counts
the first chunk of a chat, which only names the role, as the first token.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.fake_server import MODEL, Reply, fake_server
from benchmarks.load.options import Options
from benchmarks.load.prepared_requests import (
    Prepared,
    build_request_content,
    load_prepared,
    prepare,
)
from benchmarks.load.priority import raise_priority
from benchmarks.load.run import run
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.workload import Workload
from benchmarks.minillava.split import LLAVA
from benchmarks.server import serve

FLOOR = 0.003
"""Seconds by which two clients may always differ: the declared error of our stop-watch."""
THEIR_NAMES: Mapping[str, str] = {
    "median TTFT": "median_ttft_ms",
    "mean TPOT": "mean_tpot_ms",
    "median E2E": "median_e2el_ms",
}
FIGURES = tuple(THEIR_NAMES)
SERVED = "served"
REPLY = Reply(first=0.15, gaps=(0.02, 0.03, 0.025), role_first=False)
"""As vLLM does, the chunk that names the role is sent together with the first text."""


class CrossCheck(StrictModel):
    """Settings of a cross-check."""

    url: str | None
    mock: bool
    model: str
    requests: int
    users: int
    rounds: int
    tolerance: float
    out: Path


@dataclass(frozen=True)
class Agreement:
    """Seconds by figure in each round, of both tools; their medians over rounds are compared."""

    ours: Sequence[Mapping[str, float]]
    theirs: Sequence[Mapping[str, float]]
    tolerance: float
    valid: bool

    def bound(self, figure: str) -> float:
        """Seconds by which the two may differ."""
        return max(self.tolerance * _median(self.theirs, figure), FLOOR)

    def agree(self, figure: str) -> bool:
        """Whether the two medians differ by no more than the tolerance."""
        apart = abs(_median(self.ours, figure) - _median(self.theirs, figure))
        return apart <= self.bound(figure)

    def scatter(self, figure: str) -> float:
        """Seconds between the extreme rounds of one tool, the larger of both tools.

        Above the bound, machine or server vary more than the tools may differ, so that the
        comparison is inconclusive.
        """
        return max(_range(self.ours, figure), _range(self.theirs, figure))

    @property
    def holds(self) -> bool:
        """Whether all figures agree and all of our runs were valid."""
        return self.valid and all(self.agree(figure) for figure in FIGURES)

    def format(self) -> Iterator[str]:
        """One line for each figure, then the verdict."""
        for figure in FIGURES:
            ours, theirs = _median(self.ours, figure), _median(self.theirs, figure)
            yield (
                f"{figure}: {1000 * ours:.2f} ms here, {1000 * theirs:.2f} ms vllm bench serve, "
                f"{100 * (ours / theirs - 1):+.1f} %: {self._verdict(figure)} (tolerance "
                f"{1000 * self.bound(figure):.1f} ms, rounds of one tool up to "
                f"{1000 * self.scatter(figure):.1f} ms apart)"
            )
        if self.holds:
            yield "holds"
        elif self.valid and all(map(self._is_inconclusive, FIGURES)):
            yield "inconclusive: rounds vary more than the tools may differ; use an idle machine"
        else:
            yield "does not hold"

    def _is_inconclusive(self, figure: str) -> bool:
        return self.agree(figure) or self.scatter(figure) > self.bound(figure)

    def _verdict(self, figure: str) -> str:
        if self.agree(figure):
            return "agree"
        return "inconclusive" if self._is_inconclusive(figure) else "DISAGREE"


def cross_check(settings: CrossCheck) -> Agreement:
    """Measure and compare; raises :class:`BenchmarkError` where either tool gives no result."""
    out = settings.out
    with _serve(settings) as (url, model):
        prepared = prepare(
            Workload(
                model=model,
                requests=settings.requests,
                warm_up=4,
                output_tokens=8,
                cache="unique",
                sides=((336, 1.0),),
            ),
            out / "workload",
        )
        data = _write_their_requests(prepared, out)
        ours: list[Mapping[str, float]] = []
        theirs: list[Mapping[str, float]] = []
        valid = True
        for number in range(settings.rounds):
            # ABBA: every second round in reverse order.
            for is_ours in (True, False) if number % 2 == 0 else (False, True):
                if is_ours:
                    figures, good = _measure_ours(settings, url, number)
                    ours.append(figures)
                    valid &= good
                else:
                    theirs.append(_measure_theirs(settings, url, model, data, number))
    return Agreement(ours, theirs, settings.tolerance, valid)


def _measure_ours(settings: CrossCheck, url: str, number: int) -> tuple[Mapping[str, float], bool]:
    result = run(
        Options(
            url=url,
            workload=settings.out / "workload",
            out=settings.out / f"ours-{number}",
            label=f"round {number}",
            load=Load(users=settings.users),
            slo=Slo(),
            patience=120,
            most=512,
            first=None,
        )
    )
    summary = result.summary
    if summary.ttft is None or summary.tpot is None or summary.e2e is None:
        raise BenchmarkError(f"no answers: {result.verdict.describe()}")
    figures = {
        "median TTFT": summary.ttft.at(50).value,
        "mean TPOT": summary.tpot.mean,
        "median E2E": summary.e2e.at(50).value,
    }
    failed = any("failed" in reason or "usage" in reason for reason in result.verdict.reasons)
    return figures, not failed


def _write_their_requests(prepared: Prepared, out: Path) -> Path:
    path = out / "requests-for-vllm.jsonl"
    lines = (
        json.dumps({"content": build_request_content(prepared.workload, line.ask)})
        for line in prepared.measured
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def _measure_theirs(
    settings: CrossCheck, url: str, model: str, data: Path, number: int
) -> Mapping[str, float]:
    folder = settings.out / f"theirs-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    workload = load_prepared(settings.out / "workload").workload
    command = [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve",
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url,
        # Without a tokenizer it reports no TTFT.
        "--model", model, "--tokenizer", str(LLAVA),
        "--dataset-name", "custom_image", "--dataset-path", str(data), "--disable-shuffle",
        "--custom-output-len", str(workload.output_tokens), "--num-prompts", str(settings.requests),
        "--enable-multimodal-chat", "--ignore-eos", "--temperature", "0",
        "--extra-body", json.dumps({"skip_special_tokens": False}),
        "--max-concurrency", str(settings.users), "--num-warmups", "1", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,e2el",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        start_new_session=True, preexec_fn=raise_priority,  # like our own client
    )  # fmt: skip
    path = folder / "result.json"
    if done.returncode or not path.is_file():
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise BenchmarkError(f"vllm bench serve ended with {done.returncode}: {tail}")
    return their_figures(json.loads(path.read_text()), settings.requests)


def their_figures(result: Mapping[str, float], requests: int) -> Mapping[str, float]:
    """Seconds, from vLLM's result file; raises :class:`BenchmarkError` if it is incomplete."""
    if result.get("completed") != requests:
        raise BenchmarkError(f"vllm bench serve: {result.get('completed')} of {requests} answered")
    missing = sorted(THEIR_NAMES[name] for name in FIGURES if THEIR_NAMES[name] not in result)
    if missing:
        raise BenchmarkError(f"vllm bench serve: its result has no {', '.join(missing)}")
    return {name: result[THEIR_NAMES[name]] / 1000 for name in FIGURES}


def _median(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    return median(one[figure] for one in rounds)


def _range(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    values = [one[figure] for one in rounds]
    return max(values) - min(values)


@contextlib.contextmanager
def _serve(settings: CrossCheck) -> Iterator[tuple[str, str]]:
    """Start the server if none is given; yields its address and the name of its model."""
    if settings.url is not None:
        yield settings.url, settings.model
    elif settings.mock:
        with fake_server(REPLY) as server:
            yield server.url, MODEL
    else:
        settings.out.mkdir(parents=True, exist_ok=True)
        flags = (
            "--served-model-name", SERVED, "--max-model-len", "1024", "--block-size", "32",
            "--enforce-eager", "--no-enable-prefix-caching",
            "--mm-processor-cache-gb", "0",
        )  # fmt: skip
        with serve(LLAVA, *flags, log=settings.out / "server.log") as server:
            yield server.url, SERVED
