"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

python -m benchmarks.cost efficiency --model mini-llava --budget 16
python -m benchmarks.cost efficiency --model llava-next-7b --layers 2 --policies cdpruner
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import EMPTY, Client, Record, build_body, build_content
from benchmarks.common.metrics import MetricsWatcher
from benchmarks.common.report import (
    MIB,
    Table,
    command_line,
    environment,
    format_environment,
    format_spread,
    log_progress,
)
from benchmarks.common.shapes import write_clip, write_llava, write_llava_next, write_qwen
from benchmarks.load.experiment import Arm, interleave
from benchmarks.load.settings import Workload
from benchmarks.load.workload import Prepared, prepare
from benchmarks.server import Server, ServerDied, serve
from benchmarks.yardsticks.engine import MAX_ANSWER_TOKENS
from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples, grade_answers, png_url
from vllm_autoprune import load_state
from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape
from vllm_autoprune.cost import ASSUMPTIONS, Cost, estimate_cost
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.statistics import spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

LLAVA_7B = BACKBONE_SHAPES["llava-1.5-7b"]
LLAVA_NEXT_7B = BACKBONE_SHAPES["llava-next-7b"]
QWEN_7B = BACKBONE_SHAPES["qwen2.5-vl-7b"]

POLICIES = (
    "fastv", "pyramiddrop", "sparsevlm", "prumerge_plus", "trim", "visionzip", "dart",
    "divprune", "cdpruner",
)  # fmt: skip
MINI, FULL, SERVED = "mini-llava", "full", "served"
SHAPES: Mapping[str, tuple[BackboneShape, int, Callable[[Path, int], Path]]] = {
    LLAVA_7B.name: (LLAVA_7B, 336, write_llava),
    LLAVA_NEXT_7B.name: (LLAVA_NEXT_7B, 672, write_llava_next),
    QWEN_7B.name: (QWEN_7B, 1008, write_qwen),
}
"""True shapes: geometry, side of the image that gives the published number of tokens, writer."""
_PATH = os.pathsep.join(
    [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
)
"""Where the workers of a server find this module, which is not installed."""


@dataclass(frozen=True)
class Model:
    """What is served, and the image size that gives the published number of tokens."""

    name: str
    folder: Path
    geometry: BackboneShape
    """With the depth that is served."""
    depth: int
    """Language layers of the published model."""
    side: int
    """Of the square images, pixels."""
    flags: tuple[str, ...]

    @property
    def scored(self) -> bool:
        """Whether its weights are real, so that its answers can be scored."""
        return self.name == MINI

    @property
    def label(self) -> str:
        """Name of its files, with the depth where it is not the published one."""
        layers = self.geometry.layers
        return self.name if layers == self.depth else f"{self.name}-{layers}-layers"

    def estimate(self, tokens: int, ranking_layers: int = 0) -> Cost:
        """The cost of a prompt by formula, at the published depth."""
        at_full_depth = replace(self.geometry, layers=self.depth)
        return estimate_cost(at_full_depth, tokens, ranking_layers=ranking_layers)


def load_model(name: str, layers: int, out: Path) -> Model:
    """The model of that name; the folder of a shape is written below ``out``."""
    if name != MINI:
        geometry, side, write = SHAPES[name]
        folder = write(out / f"{name}-{layers}-layers", layers)
        flags = ("--load-format", "dummy", "--max-model-len", "4096")
        return Model(name, folder, replace(geometry, layers=layers), geometry.layers, side, flags)
    config = json.loads((LLAVA / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    grid = int(vision["image_size"]) // int(vision["patch_size"])
    geometry = BackboneShape(
        name=LLAVA.name,
        family="llava",
        layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        feed_forward=int(text["intermediate_size"]),
        kv_width=int(text["num_key_value_heads"]) * int(text["head_dim"]),
        grid_height=grid,
        grid_width=grid,
        tiles=1,
        relevance="clip",
        has_cls=True,
        tower_rows=True,
        merger=False,
        source=str(LLAVA),
    )
    return Model(MINI, LLAVA, geometry, geometry.layers, 168, ("--max-model-len", "1024"))


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


class Refusal(StrictModel):
    """The reason why an arm cannot be served."""

    reason: str


Passes = Mapping[str, Sequence[Pass | Refusal]]
"""By arm, in the order of rows; the full model first."""


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


def _call_workers(server: Server, method: str) -> list[object]:
    status, answer = server.post("/collective_rpc", {"method": method})
    results = answer.get("results")
    if status != 200 or not isinstance(results, list):
        raise BenchmarkError(f"{method}: status {status}: {json.dumps(answer)[:200]}")
    return results


def read_device_memory(server: Server) -> int | None:
    """Peak memory of all ranks' GPUs since :meth:`DeviceMemory.reset_device_memory`, in bytes."""
    peaks = _call_workers(server, DeviceMemory.peak_device_memory.__name__)
    return None if None in peaks else sum(int(str(peak)) for peak in peaks)


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
        # The plugin's refusal, else the last line of the log.
        _, refused, refusal = str(error).partition("vllm-autoprune: ")
        reason = refusal if refused else str(error).strip().splitlines()[-1]
        return Refusal(reason=" ".join(reason.split())[:300])


def _send_requests(server: Server, model: Model, requests: Prepared, scenes: int) -> Pass:
    client = Client(server.url, timeout=900)

    def read_prefill() -> float:
        metrics = Metrics(server.get("/metrics"))
        return metrics.total("vllm:request_prefill_time_seconds_sum") or 0.0

    for body in requests.warm_up:
        client.send(body)
    _call_workers(server, DeviceMemory.reset_device_memory.__name__)
    watcher = MetricsWatcher(server.url)
    watcher.update()
    records, again = list[Record](), list[Record]()
    prefill = 0.0
    for body in requests.measured:
        before = read_prefill()
        records.append(client.send(body))
        prefill += read_prefill() - before
        again.append(client.send(_ask_again(body)))
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


def _ask_again(body: bytes) -> bytes:
    """A question about the same image with the same words in reverse order."""
    content = json.loads(body)
    question = content["messages"][0]["content"][-1]
    question["text"] = " ".join(reversed(question["text"].split()))
    return json.dumps(content).encode()


def measure_score(client: Client, scenes: int) -> tuple[float, float]:
    """Accuracy and accuracy+ over mini-LLaVA's held-out questions."""
    examples = draw_examples("test", scenes)
    bodies = []
    for example in examples:
        content = build_content(example.question, [png_url(example.image)])
        bodies.append(build_body(SERVED, content, tokens=MAX_ANSWER_TOKENS))
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(client.send, bodies))
    # An answer without text is a wrong answer, not a failed request.
    _check_answers([record for record in records if record.error != EMPTY])
    result = grade_answers(examples, [record.text for record in records])
    return 100 * result.accuracy, 100 * result.accuracy_plus


def _check_answers(records: Sequence[Record]) -> None:
    failed = [record.error for record in records if record.error]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")


COLUMNS = (
    "method", "K", "TFLOPs", "prefill, ms", "TTFT, ms: median (quartiles)",
    "second question, ms", "decode, ms/token", "KV, MiB", "GPU memory, MiB", "score",
)  # fmt: skip


def format_table(model: Model, budget: int, passes: Passes) -> str:
    """The table in Markdown, and notes on its columns."""
    full = [entry for entry in passes.get(FULL, ()) if isinstance(entry, Pass)]
    served = f"{model.geometry.layers}"
    served += "" if model.depth == model.geometry.layers else f" of {model.depth}"
    head = (
        f"{model.name}, {served} language layers served, K = {budget}; "
        f"{sum(len(entry.ttft) for entry in full)} timed requests a row, in {len(full)} passes\n"
    )
    rows: list[Sequence[str]] = []
    for arm, all_passes in passes.items():
        measured = [entry for entry in all_passes if isinstance(entry, Pass)]
        if measured:
            rows.append(list(_cells(model, arm, budget, measured, full or measured)))
        else:
            reasons = [entry.reason for entry in all_passes if isinstance(entry, Refusal)]
            reason = reasons[0] if reasons else "no pass"
            rows.append([arm, f"not served: {reason}", *[""] * (len(COLUMNS) - 2)])
    table = Table("", COLUMNS, rows).markdown()
    return "\n".join([head, table, "", *(f"- {line}" for line in _list_notes(model))])


def _cells(
    model: Model, arm: str, budget: int, measured: Sequence[Pass], full: Sequence[Pass]
) -> Iterator[str]:
    computed = compute_cost(model, arm, budget, measured)
    prefill = mean(entry.prefill for entry in measured)
    fewer = model.estimate(model.geometry.tokens).flops / computed.flops
    waits = spread([value for entry in measured for value in entry.ttft])
    again = [1000 * value for entry in measured for value in entry.again]
    scored = [entry.score for entry in measured if entry.score is not None]
    memory = [entry.device_memory for entry in measured if entry.device_memory is not None]
    yield arm
    yield f"{computed.tokens:g}"
    yield f"{computed.teraflops:.4g} ({fewer:.1f}x fewer)"
    yield f"{1000 * prefill:.1f} ({mean(entry.prefill for entry in full) / prefill:.2f}x faster)"
    yield format_spread(waits)
    ratio = median(again) / (1000 * waits.median) if again else 0.0
    yield f"{median(again):.1f} ({ratio:.2f}x)" if again else "not measured"
    yield f"{1000 * median(value for entry in measured for value in entry.decode):.2f}"
    yield f"{computed.kv_mib:.4g}"
    yield f"{max(memory) / MIB:.0f}" if memory else "not measured"
    yield f"{mean(a + b for a, b in scored):.1f}" if scored else "none: dummy weights"


def compute_cost(model: Model, arm: str, budget: int, measured: Sequence[Pass]) -> Cost:
    """By formula, from the kept tokens that the plugin reports, at the published depth.

    A base policy that ranks tokens by layers of the language model pays for these over all tokens.
    """
    kept = [entry.visual_tokens for entry in measured if entry.visual_tokens is not None]
    tokens = model.geometry.tokens if arm == FULL else round(mean(kept)) if kept else budget
    policy = BASE_POLICIES.get(arm)
    layers = policy.layers_read(policy.default_params, model.depth) if policy else 0
    return model.estimate(tokens, ranking_layers=layers)


def _list_notes(model: Model) -> Iterator[str]:
    yield from ASSUMPTIONS
    if model.depth != model.geometry.layers:
        yield (
            f"TFLOPs and KV: computed for all {model.depth} layers. Times: measured on "
            f"{model.geometry.layers}; they include the whole vision tower, so ratios of times are "
            "smaller than at full depth."
        )
    yield "Tokens of the full model are counted as published: without a newline for each row."
    yield (
        "Prefill: mean of vLLM's request_prefill_time_seconds, which includes vision tower "
        "and selection. TTFT and decode: at the client, one request at a time, always a new image."
    )
    yield (
        "Second question: median TTFT of a second question on each image, right after the first, "
        "and its ratio to the first. Without the plugin, and with policies that ignore questions, "
        "vLLM finds the image's KV in its prefix cache; policies that read the question reuse the "
        "output of the vision tower."
    )
    yield (
        "GPU memory: the most that the workers had allocated during the requests. vLLM reserves "
        "its KV cache whatever is pruned, so this changes little; KV MiB is what one prompt needs "
        "of it."
    )
    if model.scored:
        yield "Score: accuracy + accuracy+ on held-out questions, at most 200."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    add, names = parser.add_argument, (MINI, *SHAPES)
    add("--model", choices=names, default=MINI, help="checkpoint, or true shape without weights")
    add("--layers", type=int, default=2, help="language layers of a true shape")
    add("--budget", type=int, help="K (default: a ninth of the visual tokens)")
    add("--policies", default=",".join(POLICIES), help="base policies to compare with")
    add("--state", default="autoprune", help="pruning state, a file or a name")
    add("--requests", type=int, default=20, help="timed requests a pass")
    add("--scenes", type=int, default=20, help="scenes of the score; 0: no score")
    add("--passes", type=int, default=1, help="passes over all arms (2: ABBA)")
    add("--kv-cache-gb", type=int, default=1, help="size of a CPU server's KV cache")
    add("--out", type=Path, default=Path("out/efficiency"), help="folder of files")


def run(options: argparse.Namespace) -> int:
    """0: every arm was served; 1: one was not."""
    model = load_model(options.model, options.layers, options.out)
    budget = options.budget or model.geometry.tokens // 9
    # The same requests for every arm, each with another image of the published size.
    workload = Workload(
        model=SERVED,
        requests=options.requests,
        warm_up=2,
        output_tokens=16,
        sides={model.side: 1},
        aspects={"1/1": 1},
        words={16: 1},
        vocabulary="english" if model.scored else "numbered",
    )
    requests = prepare(workload, options.out / f"requests-{model.name}")
    arms = _build_arms(model, options, budget)
    passes: dict[str, list[Pass | Refusal]] = {arm.name: [] for arm in arms}
    for number, arm in interleave(arms, options.passes):
        log = options.out / "servers" / f"{model.label}-{number}-{arm.name}.log"
        result = measure(arm, model, requests, options.scenes, log)
        passes[arm.name].append(result)
        text = result.reason if isinstance(result, Refusal) else f"prefill {result.prefill:.3f} s"
        log_progress(f"{arm.name}: {text}")
    machine = environment()
    text = format_table(model, budget, passes)
    text += f"\n\nEnvironment: {format_environment(machine)}.\n"
    text += f"\nCommand: `{shlex.join(command_line())}`\n"
    data = {
        "model": model.name,
        "layers": model.geometry.layers,
        "budget": budget,
        "digests": {arm.name: arm.digest for arm in arms},
        "passes": {name: [one.model_dump() for one in all_] for name, all_ in passes.items()},
        "environment": machine,
    }
    (options.out / f"{model.label}.md").write_text(text)
    (options.out / f"{model.label}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(text)
    return int(any(isinstance(entry, Refusal) for all_ in passes.values() for entry in all_))


def _build_arms(model: Model, options: argparse.Namespace, budget: int) -> list[Arm]:
    common = (
        "--served-model-name", SERVED, *model.flags, "--block-size", "32", "--enforce-eager",
        "--max-num-seqs", "8",
    )  # fmt: skip
    pruning = ["--autoprune-budget", str(budget)]
    if model.geometry.relevance == "clip":  # for shapes, one with random weights is written once
        tower = CLIP if model.name == MINI else write_clip(options.out / "clip")
        pruning += ["--autoprune-text-tower", str(tower)]
    kv = (("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gb)),)
    stock = Arm(name=FULL, model=str(model.folder), flags=common, environment=kv)
    arms = [stock]
    states = {name: name for name in options.policies.split(",") if name}
    for name, state in (states | {"AutoPrune": options.state}).items():
        flags = (*common, "--autoprune-state", state, *pruning)
        changes = {"name": name, "flags": flags, "digest": load_state(state).digest}
        arms.append(stock.model_copy(update=changes))
    return arms
