"""`python -m benchmarks.overhead`: arguments, what is measured, what is printed.

Knows nothing about how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.overhead.report import ORDER, Section, markdown, write
from benchmarks.overhead.setting import Setting

LAYERS = 16


def parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description="Measure what pruning itself costs; files go to out/overhead.",
    )
    made.add_argument("what", nargs="?", default="all", choices=(*ORDER, "all"))
    made.add_argument("--layers", type=int, default=LAYERS, help="language layers of ttft's model")
    made.add_argument("--quick", action="store_true", help="few requests: does it run at all?")
    made.add_argument("--model", type=Path, default=LLAVA, help="mini-LLaVA of the other parts")
    made.add_argument("--text-tower", type=Path, default=CLIP, help="CLIP that belongs to it")
    made.add_argument("--out", type=Path, default=Path("out/overhead"), help="where files go")
    made.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)  # so that servers are ended as by Ctrl-C
    setting = Setting(options.model, options.text_tower, options.layers, options.quick, options.out)
    sections = []
    try:
        for name in ORDER if options.what == "all" else (options.what,):
            sections.append(MEASUREMENTS[name](setting))
            write(sections[-1], options.out)
    except KeyboardInterrupt:
        print("overhead: stopped, no server is left running", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps([dataclasses.asdict(section) for section in sections], indent=1))
    else:
        print(markdown(sections))
    return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _ttft(setting: Setting) -> Section:
    from benchmarks.overhead import parts, shape, ttft, ttft_report

    llava = shape.write_llava(setting.out / f"llava-{setting.layers}-layers", setting.layers)
    clip = shape.write_clip(setting.out / "clip")
    runs = [ttft.measure(setting, llava, tower) for tower in (clip, None)]
    return ttft_report.section(setting.layers, runs, parts.parts(llava, clip, setting.quick))


def _inert(setting: Setting) -> Section:
    from benchmarks.overhead import inert

    return inert.measure(setting)


def _memory(setting: Setting) -> Section:
    from benchmarks.overhead import memory

    return memory.measure(setting)


def _second_question(setting: Setting) -> Section:
    from benchmarks.overhead import second_question

    return second_question.measure(setting)


MEASUREMENTS: Mapping[str, Callable[[Setting], Section]] = {
    "ttft": _ttft,
    "inert": _inert,
    "memory": _memory,
    "second-question": _second_question,
}

if __name__ == "__main__":
    sys.exit(main())
