"""``python -m benchmarks.accuracy.clips``: which tokens of a clip to keep, and how many frames.

A server answers the test split twice. First it gets eight frames of each clip, and every method
keeps the same number of visual tokens. Then it gets clips of 64 frames, in which each visitor is
there for a single frame, and keeps the same number of visual tokens of 8, 16, 32 and 64 frames.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import BenchmarkError
from benchmarks.common.command import run_command
from benchmarks.common.report import log_progress
from benchmarks.cost.turns import Table
from benchmarks.search.evaluator import write_data
from benchmarks.server import serve
from benchmarks.yardsticks.examples import CHECKPOINTS, Split, weights_digest
from benchmarks.yardsticks.pages import TOKEN
from benchmarks.yardsticks.questions import CATEGORIES
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.connection import Connection
from vllm_autoprune.evaluation.cases import build_cases
from vllm_autoprune.evaluation.journal import FEWER_FRAMES, Case, Journal
from vllm_autoprune.evaluation.pictures import _decode
from vllm_autoprune.evaluation.question_suite import QuestionSuite
from vllm_autoprune.evaluation.questions import read_questions
from vllm_autoprune.evaluation.run import Server
from vllm_autoprune.http_client import MAX_IN_FLIGHT
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats

_FLAGS = (
    "--enforce-eager --block-size 32 --max-model-len 4096 --trust-request-mm-kwargs "
    "--autoprune-state vcast --autoprune-requests states"
)
_STATES = ("vcast", "echoprune", "evs", "vidcom2", "cen_divprune", "cen_cdpruner")
_SHARES = ("1/2", "1/4", "1/8", "1/16")
# Sides, in tokens, of resized frames that have at most this share of tokens; 1/16 has no such side.
_SIDES = {"1/2": 4, "1/4": 3, "1/8": 2}
_FRAMES = (8, 16, 32, 64)
_TOKENS = (72, 144, 288)
_LONG_STATES = ("vcast", "vidcom2")
_LOWER = "lower resolution"


@dataclass
class _Answers:
    """Answers to the questions of one file, by method and K, and differences from ``baselines``."""

    title: str
    baselines: Sequence[str]
    rights: dict[tuple[str, str], Floats] = field(default_factory=dict)
    prompts: dict[tuple[str, str], Floats] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    clips: Sequence[str] = ()

    def add(
        self,
        server: Server,
        journal: Path,
        data: Path,
        frames: int,
        cases: Mapping[tuple[str, str], Case],
    ) -> None:
        """Ask about ``frames`` of each clip in ``data``, except what ``journal`` has answers to.

        Raises :class:`BenchmarkError` if any answer is missing.
        """
        questions = read_questions(data / "test.jsonl", frames=frames)
        suite = QuestionSuite(server, [*cases.values()], questions, data.name)
        log_progress(f"{journal.stem}: {suite.plan()}")
        with Journal(journal) as written:
            written.append([suite.setup, *cases.values()])
            suite.measure(written)
        for name, case in cases.items():
            by_id = written.contents.answers.get(case.name, {})
            answers = [by_id[q.record.id] for q in questions if q.record.id in by_id]
            scores = [answer.score for answer in answers if answer.score is not None]
            if len(scores) < len(questions):
                refused = written.contents.cases[case.name].refused
                why = refused or "some requests failed"
                raise BenchmarkError.of(
                    str(journal), f"{case.name}: {why}", "start again"
                )
            self.rights[name] = np.array(scores)
            self.prompts[name] = np.array(
                [answer.prompt_tokens for answer in answers], float
            )
        self.kinds = [question.record.topic for question in questions]
        self.clips = [question.record.image for question in questions]

    def write(self, table: Table) -> None:
        """Add rows for all questions and for each kind, with intervals over clips."""
        kinds = np.array(self.kinds)
        clips = np.array(self.clips)
        for kind in ("all", *CATEGORIES["clips"]["clips"]):
            members = kinds == kind if kind != "all" else np.ones(len(kinds), bool)
            bootstrap = ClusterBootstrap(clips[members].tolist())
            for (method, budget), correct in self.rights.items():
                figures = {("right", "%"): 100 * correct}
                for baseline in self.baselines:
                    other = self.rights.get((baseline, budget))
                    if other is not None and method != baseline:
                        figures[f"right less {baseline}", "points"] = 100 * (
                            correct - other
                        )
                if kind == "all":
                    figures["prompt", "tokens"] = self.prompts[method, budget]
                for (what, unit), values in figures.items():
                    estimate = Estimate.of(bootstrap.mean(values[members]))
                    table.add(
                        what,
                        f"{self.title}, {budget}; {method}; {kind}",
                        estimate,
                        unit,
                    )


def _name(case: Case, behind: str = "") -> tuple[str, str]:
    """Method and K of a case, for the table."""
    budget = f"K = {case.budget}" if case.budget else "all tokens"
    return case.label + behind, budget


def _shrink(data: Path, out: Path, side: int) -> Path:
    """Copy a folder with frames of ``side`` tokens a side, resized as a server resizes them."""
    for path in data.rglob("*.*"):
        copy = out / path.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            _, frame = _decode(path.read_bytes())
            frame.resize((side * TOKEN, side * TOKEN), Image.Resampling.BICUBIC).save(
                copy
            )
        else:
            shutil.copy(path, copy)
    return out


def main() -> int:
    """Ask, and print rows of ``docs/data``; returns the exit status, 1 after an error."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.clips", description=__doc__
    )
    parser.add_argument(
        "--clips", type=int, default=96, help="of the test split, in each part"
    )
    text = "folder of files, where what was answered is not asked again"
    parser.add_argument(
        "--out", type=Path, default=Path("out/accuracy-clips"), help=text
    )
    text = "compare these alone, at eight frames, with the first of them"
    parser.add_argument("--states", nargs="+", metavar="STATE", help=text)
    return run_command("clips", lambda: _measure(**vars(parser.parse_args())))


def _measure(out: Path, clips: int, states: Sequence[str] | None) -> int:
    scenes: dict[Split, int] = {"search": 1, "validation": 1, "test": clips}
    write_data(out / "clips", scenes, model="clips")
    if states is None:
        write_data(out / "long", scenes, model="clips", brief_frames=_FRAMES[-1])
    answers = out / weights_digest(CHECKPOINTS["clips"])
    answers.mkdir(exist_ok=True)
    with serve(
        CHECKPOINTS["clips"], *_FLAGS.split(), log=out / "server.log"
    ) as started:
        server = Server(started.url, Connection(), None, MAX_IN_FLIGHT)
        if states is None:
            parts = [
                _compare_methods(server, out, answers),
                _compare_lengths(server, out, answers),
            ]
        else:
            parts = [_compare_states(server, out, answers, states)]
    table = Table()
    for part in parts:
        part.write(table)
    return 0


def _compare_states(
    server: Server, out: Path, answers: Path, states: Sequence[str]
) -> _Answers:
    """The states at equal numbers of tokens of eight frames, less the first of them."""
    few = _FRAMES[0]
    cases = build_cases(states, _SHARES, frames=few)
    named = {_name(case): case for case in cases if case.label in ("full", *states)}
    compared = _Answers(f"{few} frames", states[:1])
    compared.add(server, answers / "states.jsonl", out / "clips", few, named)
    return compared


def _compare_methods(server: Server, out: Path, answers: Path) -> _Answers:
    """All methods at equal numbers of tokens of eight frames, less fewer frames and *norm*."""
    few = _FRAMES[0]
    cases = build_cases(_STATES, _SHARES, frames=few)
    equal = _Answers(f"{few} frames", (FEWER_FRAMES, "norm"))
    named = {_name(case): case for case in cases}
    equal.add(server, answers / "equal.jsonl", out / "clips", few, named)
    for share, side in _SIDES.items():
        low = _shrink(out / "clips", out / f"side-{side}", side)
        lower = {(_LOWER, f"K = {share}"): cases[0]}
        equal.add(server, answers / f"side-{side}.jsonl", low, few, lower)
    return equal


def _compare_lengths(server: Server, out: Path, answers: Path) -> _Answers:
    """Equal numbers of tokens of ever more frames, less `vcast` of eight."""
    longer = _Answers(
        f"clips of {_FRAMES[-1]} frames", (f"vcast of {_FRAMES[0]} frames",)
    )
    for frames in _FRAMES:
        cases = build_cases(_LONG_STATES, _TOKENS, frames=frames)
        named = {
            _name(case, f" of {frames} frames"): case
            for case in cases
            if case.label in ("full", *_LONG_STATES)
        }
        journal = answers / f"{frames}-frames.jsonl"
        longer.add(server, journal, out / "long", frames, named)
    return longer


if __name__ == "__main__":
    raise SystemExit(main())
