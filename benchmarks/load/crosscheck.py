"""One point measured twice: by this load test and by ``vllm bench serve``, which must agree.

Knows nothing about how either sends. Both get the same bodies' contents in the same order, in a
closed loop of as many users, round by round in ABBA order.

Compared are median TTFT, mean TPOT and median E2E. Not gaps between deltas: vLLM's tool counts the
first chunk of a chat, which only names the role, as the first token, so it sees one gap more.
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

from benchmarks.load.errors import LoadError
from benchmarks.load.first import come_first
from benchmarks.load.load import Load, Slo
from benchmarks.load.mock import MODEL, Script, mock_server
from benchmarks.load.options import Options
from benchmarks.load.plain import Plain
from benchmarks.load.prepared import Prepared, content, load, prepare
from benchmarks.load.run import run
from benchmarks.load.workload import Workload
from benchmarks.minillava.split import LLAVA
from benchmarks.server import serve

FLOOR = 0.003
"""Seconds that two clients may differ by in any case: the error declared for our stop-watch."""
THEIR_NAMES: Mapping[str, str] = {
    "median TTFT": "median_ttft_ms",
    "mean TPOT": "mean_tpot_ms",
    "median E2E": "median_e2el_ms",
}
FIGURES = tuple(THEIR_NAMES)
SERVED = "served"
SCRIPT = Script(first=0.15, gaps=(0.02, 0.03, 0.025), role_first=False)
"""The role's chunk goes out with the first text, as vLLM does it."""


class CrossCheck(Plain):
    """What is compared, and how closely it must agree."""

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
    """Seconds by figure, round by round: ours and theirs. Medians over rounds are compared."""

    ours: Sequence[Mapping[str, float]]
    theirs: Sequence[Mapping[str, float]]
    tolerance: float
    valid: bool

    def bound(self, figure: str) -> float:
        """Seconds that the two may differ by."""
        return max(self.tolerance * _median(self.theirs, figure), FLOOR)

    def agree(self, figure: str) -> bool:
        """Whether the two medians are that close."""
        apart = abs(_median(self.ours, figure) - _median(self.theirs, figure))
        return apart <= self.bound(figure)

    def scatter(self, figure: str) -> float:
        """Seconds between the extreme rounds of one tool, the larger of both tools.

        Above the bound, the machine or the server changed more from round to round than the tools
        may differ, so that a difference tells nothing about them.
        """
        return max(_width(self.ours, figure), _width(self.theirs, figure))

    @property
    def holds(self) -> bool:
        """Whether all figures agree and all of our runs were valid."""
        return self.valid and all(self.agree(figure) for figure in FIGURES)

    def lines(self) -> Iterator[str]:
        """A line a figure, then the verdict."""
        for figure in FIGURES:
            ours, theirs = _median(self.ours, figure), _median(self.theirs, figure)
            yield (
                f"{figure}: {1000 * ours:.2f} ms here, {1000 * theirs:.2f} ms vllm bench serve, "
                f"{100 * (ours / theirs - 1):+.1f} %: {self._spoken(figure)} (tolerance "
                f"{1000 * self.bound(figure):.1f} ms, rounds of one tool up to "
                f"{1000 * self.scatter(figure):.1f} ms apart)"
            )
        if self.holds:
            yield "holds"
        elif self.valid and all(map(self._open, FIGURES)):
            yield "cannot tell: rounds scatter more than the tools may differ; use a calm machine"
        else:
            yield "does not hold"

    def _open(self, figure: str) -> bool:
        return self.agree(figure) or self.scatter(figure) > self.bound(figure)

    def _spoken(self, figure: str) -> str:
        if self.agree(figure):
            return "agree"
        return "cannot tell" if self._open(figure) else "DISAGREE"


def check(wanted: CrossCheck) -> Agreement:
    """Measure and compare; raises :class:`LoadError` where either tool gives no result."""
    out = wanted.out
    with _server(wanted) as (url, model):
        prepared = prepare(
            Workload(
                model=model,
                requests=wanted.requests,
                warm_up=4,
                output_tokens=8,
                cache="unique",
                sides=((336, 1.0),),
            ),
            out / "workload",
        )
        data = _theirs_data(prepared, out)
        ours: list[Mapping[str, float]] = []
        theirs: list[Mapping[str, float]] = []
        valid = True
        for number in range(wanted.rounds):
            # ABBA: every second round the other way about.
            for mine in (True, False) if number % 2 == 0 else (False, True):
                if mine:
                    figures, good = _ours(wanted, url, number)
                    ours.append(figures)
                    valid &= good
                else:
                    theirs.append(_theirs(wanted, url, model, data, number))
    return Agreement(ours, theirs, wanted.tolerance, valid)


def _ours(wanted: CrossCheck, url: str, number: int) -> tuple[Mapping[str, float], bool]:
    result = run(
        Options(
            url=url,
            workload=wanted.out / "workload",
            out=wanted.out / f"ours-{number}",
            label=f"round {number}",
            load=Load(users=wanted.users),
            slo=Slo(),
            patience=120,
            most=512,
            first=None,
        )
    )
    found = result.summary
    if found.ttft is None or found.tpot is None or found.e2e is None:
        raise LoadError(f"no answers: {result.verdict.spoken()}")
    figures = {
        "median TTFT": found.ttft.at(50).value,
        "mean TPOT": found.tpot.mean,
        "median E2E": found.e2e.at(50).value,
    }
    failed = any("failed" in reason or "usage" in reason for reason in result.verdict.reasons)
    return figures, not failed


def _theirs_data(prepared: Prepared, out: Path) -> Path:
    path = out / "requests-for-vllm.jsonl"
    lines = (json.dumps({"content": content(line.ask)}) for line in prepared.measured)
    path.write_text("\n".join(lines) + "\n")
    return path


def _theirs(
    wanted: CrossCheck, url: str, model: str, data: Path, number: int
) -> Mapping[str, float]:
    folder = wanted.out / f"theirs-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    workload = load(wanted.out / "workload").workload
    command = [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve",
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url,
        # Without a tokenizer it gives no TTFT; lengths are the server's own either way.
        "--model", model, "--tokenizer", str(LLAVA),
        "--dataset-name", "custom_image", "--dataset-path", str(data), "--disable-shuffle",
        "--custom-output-len", str(workload.output_tokens), "--num-prompts", str(wanted.requests),
        "--enable-multimodal-chat", "--ignore-eos", "--temperature", "0",
        "--extra-body", json.dumps({"skip_special_tokens": False}),
        "--max-concurrency", str(wanted.users), "--num-warmups", "1", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,e2el",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        start_new_session=True, preexec_fn=come_first,  # as ours is
    )  # fmt: skip
    path = folder / "result.json"
    if done.returncode or not path.is_file():
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise LoadError(f"vllm bench serve ended with {done.returncode}: {tail}")
    return their_figures(json.loads(path.read_text()), wanted.requests)


def their_figures(found: Mapping[str, float], asked: int) -> Mapping[str, float]:
    """Seconds, from vLLM's result file; raises :class:`LoadError` where it is not all there."""
    if found.get("completed") != asked:
        raise LoadError(f"vllm bench serve: {found.get('completed')} of {asked} answered")
    missing = sorted(THEIR_NAMES[name] for name in FIGURES if THEIR_NAMES[name] not in found)
    if missing:
        raise LoadError(f"vllm bench serve: its result has no {', '.join(missing)}")
    return {name: found[THEIR_NAMES[name]] / 1000 for name in FIGURES}


def _median(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    return median(one[figure] for one in rounds)


def _width(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    values = [one[figure] for one in rounds]
    return max(values) - min(values)


@contextlib.contextmanager
def _server(wanted: CrossCheck) -> Iterator[tuple[str, str]]:
    """The address and the model's name."""
    if wanted.url is not None:
        yield wanted.url, wanted.model
    elif wanted.mock:
        with mock_server(SCRIPT) as server:
            yield server.url, MODEL
    else:
        wanted.out.mkdir(parents=True, exist_ok=True)
        flags = (
            "--served-model-name", SERVED, "--max-model-len", "1024", "--block-size", "32",
            "--enforce-eager", "--dtype", "bfloat16", "--no-enable-prefix-caching",
            "--mm-processor-cache-gb", "0",
        )  # fmt: skip
        with serve(LLAVA, *flags, log=wanted.out / "server.log") as server:
            yield server.url, SERVED
