"""Measurements of one arm of the efficiency table: prefill, decode, memory, score."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import EMPTY, Client, build_body, build_content
from benchmarks.common.metrics import MetricsWatcher, stage_seconds
from benchmarks.common.request_record import Record
from benchmarks.cost.efficiency.models import Model
from benchmarks.load.experiment import Arm
from benchmarks.load.settings import Workload
from benchmarks.load.workload import Line, Prepared, build_request_body, prepare
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import draw_examples, grade_answers, png_url
from benchmarks.server import Server, ServerDied, serve

SERVED = "served"
OUTPUT_TOKENS = 16
CONCURRENCY = 8

_PATH = os.pathsep.join(
    [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
)
"""Where the workers of a server find this module, which is not installed."""


class Pass(StrictModel):
    """Measurements of one arm while its requests ran once: seconds, bytes and counts."""

    ttft: tuple[float, ...]
    """At the client: HTTP, image processor and vision tower included."""
    again: tuple[float, ...] = ()
    """The same for a second question on the same image, right after the first."""
    prefill: float
    """In the engine, mean: vLLM's own ``request_prefill_time_seconds``, vision tower included."""
    decode: tuple[float, ...]
    """Per token after the first, of each request."""
    prompt_tokens: float
    visual_tokens: float | None
    """Kept tokens of an image, as the plugin counts them; None without the plugin."""
    device_memory: int | None
    """Most memory that the workers had allocated on their GPUs during the requests, all ranks
    together; None without a GPU."""
    score: tuple[float, float] | None = None
    """Accuracy and accuracy+, per cent."""


class DeviceMemory:
    """Extension of vLLM's workers (``--worker-extension-cls``) that reads the memory of the GPU.

    Only the process that allocates can tell what was allocated at most: the driver counts all
    that vLLM reserved at its start, which is the same however many tokens are kept.
    """

    device: torch.device

    def reset_device_memory(self) -> None:
        """Forget the peak of the start, when vLLM runs its largest batch."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_device_memory(self) -> int | None:
        """Most bytes allocated since the reset; None on another device than a CUDA GPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)


def read_device_memory(server: Server) -> int | None:
    """Peak memory of all ranks' GPUs since :meth:`DeviceMemory.reset_device_memory`, in bytes."""
    peaks = _call_workers(server, DeviceMemory.peak_device_memory.__name__)
    return None if None in peaks else sum(int(str(peak)) for peak in peaks)


def _call_workers(server: Server, method: str) -> list[object]:
    status, answer = server.post("/collective_rpc", {"method": method})
    results = answer.get("results")
    if status != 200 or not isinstance(results, list):
        raise BenchmarkError(f"{method}: status {status}: {json.dumps(answer)[:200]}")
    return results


class Refusal(StrictModel):
    """The reason why an arm cannot be served."""

    reason: str


def prepare_requests(model: Model, number: int, out: Path) -> Prepared:
    """The same requests for every arm, each with another image of the published size."""
    return prepare(
        Workload(
            model=SERVED,
            requests=number,
            warm_up=2,
            output_tokens=OUTPUT_TOKENS,
            sides=((model.side, 1.0),),
            aspects=(("1/1", 1.0),),
            words=((16, 1.0),),
            vocabulary="english" if model.scored else "numbered",
        ),
        out / f"requests-{model.name}",
    )


def measure(arm: Arm, model: Model, requests: Prepared, scenes: int, log: Path) -> Pass | Refusal:
    """Serve the arm and send all requests; a :class:`Refusal` where the server does not start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    extension = f"{DeviceMemory.__module__}.{DeviceMemory.__qualname__}"
    flags = (*arm.flags, "--worker-extension-cls", extension)
    # The endpoint that calls methods of the workers needs the development mode.
    environment = {**dict(arm.environment), "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": _PATH}
    try:
        with serve(arm.model, *flags, env=environment, log=log, patience=900) as server:
            return _send_requests(server, model, requests, scenes)
    except ServerDied as error:
        return Refusal(reason=_find_reason(str(error)))


def _send_requests(server: Server, model: Model, requests: Prepared, scenes: int) -> Pass:
    client = Client(server.url, timeout=900)
    for line in requests.warm_up:
        client.send(requests.body(line))
    _call_workers(server, DeviceMemory.reset_device_memory.__name__)
    watcher = MetricsWatcher(server.url)
    watcher.update()
    records, again = list[Record](), list[Record]()
    prefill = 0.0
    for line in requests.measured:
        before = stage_seconds(server.get("/metrics"))["prefill"]
        records.append(client.send(requests.body(line), index=line.ask.index))
        prefill += stage_seconds(server.get("/metrics"))["prefill"] - before
        again.append(client.send(_build_second_question(requests, line), index=line.ask.index))
    watcher.update()
    metrics = watcher.metrics()
    _check_answers([*records, *again])
    kept, images = metrics.visual_tokens_after, metrics.images
    return Pass(
        ttft=tuple(record.ttft for record in records),
        again=tuple(record.ttft for record in again),
        prefill=prefill / len(records),
        decode=tuple(tpot for record in records if (tpot := record.tpot) is not None),
        prompt_tokens=sum(r.prompt_tokens or 0 for r in records) / len(records),
        visual_tokens=kept / images if kept and images else None,
        device_memory=read_device_memory(server),
        score=measure_score(client, scenes) if model.scored and scenes else None,
    )


def _build_second_question(requests: Prepared, line: Line) -> bytes:
    """A question about the same image with the same words in reverse order."""
    reversed_words = " ".join(reversed(line.ask.question.split()))
    request = line.ask.model_copy(update={"question": reversed_words})
    return build_request_body(requests.workload, request)


def measure_score(client: Client, scenes: int) -> tuple[float, float]:
    """Accuracy and accuracy+ over mini-LLaVA's held-out questions."""
    examples = draw_examples("test", scenes)
    bodies = [
        build_body(
            SERVED,
            build_content(example.question, [png_url(example.image)]),
            tokens=MAX_ANSWER_TOKENS,
        )
        for example in examples
    ]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        records = list(pool.map(client.send, bodies))
    # An answer without text is a wrong answer, not a failed request.
    _check_answers([record for record in records if record.error != EMPTY])
    result = grade_answers(examples, [record.text for record in records])
    return 100 * result.accuracy, 100 * result.accuracy_plus


def _check_answers(records: Sequence[Record]) -> None:
    failed = [record.error for record in records if record.error]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")


def _find_reason(log: str) -> str:
    """The plugin's refusal, else the last line of the log."""
    _, refused, refusal = log.partition("vllm-autoprune: ")
    reason = refusal if refused else log.strip().splitlines()[-1]
    return " ".join(reason.split())[:300]
