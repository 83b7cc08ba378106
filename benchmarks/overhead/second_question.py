"""Further questions on an image run no vision tower; the cache that does it keeps its bound.

Knows nothing about engines: a process of its own counts, because a server tells nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.overhead.report import Claim, Section
from benchmarks.overhead.setting import Setting, progress
from benchmarks.overhead.statistics import plainly
from benchmarks.overhead.vision_runs import IMAGES, MORE, QUESTIONS
from benchmarks.server import CPU_ENVIRONMENT


def measure(setting: Setting) -> Section:
    """Start the process and read what it counted."""
    progress("second question: start an engine")
    command = [sys.executable, "-m", "benchmarks.overhead.vision_runs"]
    with setting.log("second-question").open("w") as log:
        done = subprocess.run(
            [*command, str(setting.model), str(setting.text_tower)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **CPU_ENVIRONMENT},
            text=True,
            check=True,
            timeout=300,
        )
    return section(json.loads(done.stdout.splitlines()[-1]))


def section(counted: Mapping[str, int]) -> Section:
    """Claims and figures."""
    later = IMAGES * (QUESTIONS - 1)
    mib = {name: counted[name] / (1 << 20) for name in ("held", "limit")}
    return Section(
        name="second-question",
        title="A second question on the same image",
        setup=[
            f"mini-LLaVA in one process; {IMAGES} images, {QUESTIONS} different questions on each",
            f"then {MORE} further images, more than the feature cache holds",
        ],
        claims=[
            Claim(
                f"the vision tower runs for the first question on an image ({IMAGES} times) "
                f"and for none of {later} further ones",
                f"{counted['first']} runs, then {counted['later']}",
                plainly((counted["first"], counted["later"]) == (IMAGES, 0)),
            ),
            Claim(
                f"the feature cache stays within its bound of {mib['limit']:.2f} MiB",
                f"at most {mib['held']:.2f} MiB",
                plainly(0 < counted["held"] <= counted["limit"]),
            ),
        ],
        tables=[],
        data=dict(counted),
    )
