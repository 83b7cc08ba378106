"""Run the self-test of one backbone on one model runner, in a process of its own, and its report.

Each run has its own process, because vLLM keeps engine state until its process ends, and because a
backbone that fails must not stop the others. ``checks`` evaluates the report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_autoprune.errors import AutopruneError

BLOCK = 32
"""Tokens of one block of the prefix cache."""

SMALL_BUDGET = 5
"""K of the pruned completions."""

SPLIT_QUESTION = "large"
"""Name of the question that is asked under a state with a core."""

SPLIT_BUDGET = 40
"""K of the completions under a state with a core, more than a block; less where N is."""

RECALL = 6
"""K_r of the later turns under a state with a core."""


Rows = list[list[int]]
"""Indices of the rows of each image or part, or positions on each axis."""


class Completion(BaseModel):
    """One completion: token ids of prompt and output, and the positions the model received.

    ``logprob`` is the sum over output tokens; ``cached`` counts prompt tokens from the prefix
    cache; ``positions`` has one row for each axis, with every token that was computed.
    """

    # NaN and infinity must survive JSON, so that a check can report them.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    prompt: list[int]
    ids: list[int]
    logprob: float
    cached: int
    positions: Rows


Completions = dict[str, Completion]
"""Completions by name of the question."""


class Profile(BaseModel):
    """vLLM's description of a model."""

    runner: Literal["v1", "v2"]
    """The model runner that vLLM used."""
    hybrid: bool = False
    """Whether some layers have linear attention."""
    mixed: bool = False
    """Whether vLLM caches different things for different layers."""


class PrunedImages(BaseModel):
    """Kept rows of the images of each question under a small K."""

    kept: dict[str, Rows]
    """Index of each kept row among an image's unpruned rows, or -1 if it equals none of them."""
    texts: dict[str, Rows]
    """How many kept rows stand before each row of an image's text, where the plugin embeds it."""
    vision_runs: int
    """Runs of the vision tower beyond one for each image."""


class SplitImage(BaseModel):
    """One image under a state with a core, which ranks before the patch merger if there is one."""

    split_kept: Rows
    """Rows that the core and the delta keep; of both together where images cannot be split."""
    recalled: Rows
    """Rows that each later turn recalls."""
    splittable: bool
    """Whether images of this backbone can be several items of a prompt."""
    recall_refused: bool
    """Whether a request for recall is refused, where they cannot."""
    merger_error: float | None
    """Largest error of the ranked rows against what enters the merger in transformers, relative to
    how much tokens differ; None without a merger, or where transformers has no such model."""


class Report(Profile, PrunedImages, SplitImage):
    """What a backbone did under every setting; ``report[setting]`` has completions by question."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    completions: dict[str, Completions]
    """By setting and question:

    - ``stock`` without a state; ``whole`` with a K that keeps every token; ``pruned`` with a small
      K; ``again`` the same a second time; ``alone`` after all caches were emptied; ``chunked`` with
      prefill chunks of a few tokens; ``preempted`` by the scheduler
    - ``split``: questions about one image under a state with a core, and the third turn of a
      conversation, together, alone, and with chunked and preempted prefill
    - ``cells``: a page with its blank cells (``stock``), with all that are ``left`` without them,
      and ``few`` of these, with empty caches and with chunked prefill
    - ``videos``: a video of which a few tokens are kept (``few``), with empty caches and chunked
      prefill, where its tokens can be chosen
    - ``stock others`` and ``others``: a video with all of its tokens, where the model takes one
    """
    predicted: dict[str, list[int]]
    """N of every image, computed from its size, by question."""
    cells: list[int] | None
    """Cells that remain of the page; None where a request for that is refused."""
    video: Rows
    """Rows of the video that each run of ``videos`` keeps."""
    fallbacks: int
    """Selections that failed."""
    errors: dict[str, int]
    placed: bool
    """Whether kept tokens keep their positions; false if the model cannot do so."""

    def __getitem__(self, setting: str) -> Completions:
        return self.completions[setting]


REPORT_PREFIX = "selftest-report:"

TIMEOUT = 900.0
"""Maximum seconds for a backbone."""

RUNNERS: Mapping[str, Mapping[str, str]] = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}
"""vLLM's model runners: name -> environment in which vLLM uses it."""

_TRITON_PROBE = "from vllm.triton_utils import HAS_TRITON; print('triton:', HAS_TRITON)"

ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of an engine within its process, of a tiny model."""


class SelftestError(AutopruneError):
    """A tiny model could not be served; its problem has the last output of its process."""


def available_runners() -> tuple[str, ...]:
    """Names of the model runners that vLLM can use here: V1 always, V2 only with Triton.

    Tested in a process of its own, because the import of vLLM initialises devices
    (``vllm.triton_utils.HAS_TRITON``, ``VllmConfig.use_v2_model_runner``).
    """
    process = subprocess.run(
        [sys.executable, "-c", _TRITON_PROBE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return tuple(RUNNERS) if "triton: True" in process.stdout.splitlines() else ("v1",)


def run_backbone(
    name: str, environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> Report:
    """Run the self-test of one backbone; raises :class:`SelftestError` if it gives no report."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "vllm_autoprune.selftest.serve", name],
            env={**os.environ, **ENGINE_ENVIRONMENT, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SelftestError.of(name, f"gave no report in {timeout:.0f} s") from None
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(REPORT_PREFIX):
            return Report.model_validate_json(line.removeprefix(REPORT_PREFIX))
    tail = "\n".join((process.stdout + process.stderr).splitlines()[-30:])
    raise SelftestError.of(name, f"ended with {process.returncode}:\n{tail}")
