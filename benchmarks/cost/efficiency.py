"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

Every arm has its own server and the same requests, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.report import (
    MIB,
    command_line,
    environment,
    format_environment,
    format_spread,
    log_progress,
)
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.common.shapes import (
    draw_words,
    write_clip,
    write_llava,
    write_llava_next,
    write_qwen,
)
from benchmarks.server import Server, ServerDied, find_cause, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples, png_url
from vllm_autoprune import load_state
from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape
from vllm_autoprune.cost import ASSUMPTIONS, Cost, estimate_cost
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_POLICIES = (
    "fastv", "pyramiddrop", "sparsevlm", "prumerge_plus", "trim", "visionzip", "dart",
    "divprune", "cdpruner",
)  # fmt: skip
MINI, FULL, _SERVED = "mini-llava", "full", "served"
_WARM_UP, _ANSWER_TOKENS = 2, 16
_SHAPES: Mapping[str, tuple[int, Callable[[Path, int], Path]]] = {
    "llava-1.5-7b": (336, write_llava),
    "llava-next-7b": (672, write_llava_next),
    "qwen2.5-vl-7b": (1008, write_qwen),
}
"""True shapes: side of the image that gives the published number of tokens, writer."""


@dataclass(frozen=True)
class Model:
    """What is served: its folder, its shape at the depth that is served, flags of its server."""

    name: str
    folder: Path
    shape: BackboneShape
    flags: tuple[str, ...]

    @property
    def depth(self) -> int:
        """Language layers of the published model."""
        return self.shape.layers if self.name == MINI else BACKBONE_SHAPES[self.name].layers

    @property
    def label(self) -> str:
        """Name of its files, with the depth where it is not the published one."""
        layers = self.shape.layers
        return self.name if layers == self.depth else f"{self.name}-{layers}-layers"


def _open_model(name: str, layers: int, out: Path) -> Model:
    """The model of that name; the folder of a shape is written below ``out``."""
    if name != MINI:
        folder = _SHAPES[name][1](out / f"{name}-{layers}-layers", layers)
        flags = ("--load-format", "dummy", "--max-model-len", "4096")
        return Model(name, folder, replace(BACKBONE_SHAPES[name], layers=layers), flags)
    config = json.loads((LLAVA / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    grid = vision["image_size"] // vision["patch_size"]
    shape = replace(
        BACKBONE_SHAPES["llava-1.5-7b"],
        name=LLAVA.name,
        layers=text["num_hidden_layers"],
        width=text["hidden_size"],
        feed_forward=text["intermediate_size"],
        kv_width=text["num_key_value_heads"] * text["head_dim"],
        grid_height=grid,
        grid_width=grid,
        source=str(LLAVA),
    )
    return Model(MINI, LLAVA, shape, ("--max-model-len", "1024"))


def _draw_requests(name: str, count: int) -> list[tuple[bytes, bytes]]:
    """Two questions about each of several images: the second has the first one's words, reversed.

    mini-LLaVA gets images and questions that it knows.
    """
    if name == MINI:
        firsts = {example.image_id: example for example in reversed(draw_examples("test", count))}
        asked = [(png_url(firsts[i].image), firsts[i].question) for i in range(count)]
    else:
        side = _SHAPES[name][0]
        asked = [
            (encode_picture(draw_picture(number, side, side)), draw_words(16, number))
            for number in range(count)
        ]
    return [
        (_build_request(question, url), _build_request(" ".join(question.split()[::-1]), url))
        for url, question in asked
    ]


def _build_request(question: str, url: str) -> bytes:
    # A special first token would have no text to be timed.
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    return build_body(_SERVED, build_content(question, [url]), tokens=_ANSWER_TOKENS, fields=fields)


class Measurement(FrozenModel):
    """What was measured of one arm: seconds, bytes and counts."""

    ttft: tuple[float, ...]
    """At the client: HTTP, image processor and vision tower included."""
    again: tuple[float, ...]
    """The same for a second question on the same image, right after the first."""
    prefill: float
    """In the engine, mean: vLLM's own ``request_prefill_time_seconds``, vision tower included."""
    decode: float
    """Per token after the first, of vLLM's ``request_decode_time_seconds``."""
    visual_tokens: float | None
    """Kept tokens of an image, as the plugin counts them; None without the plugin."""
    device_memory: int | None
    """Most memory that the workers had allocated on their GPUs during the requests, all ranks
    together; None without a GPU."""


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


def _serve_arm(
    model: Model, flags: Sequence[str], kv_gb: int, requests: Sequence[tuple[bytes, bytes]],
    log: Path,
) -> Measurement | str:  # fmt: skip
    """Serve an arm and send it all requests; the reason where the server does not start."""
    extension = f"{DeviceMemory.__module__}.{DeviceMemory.__qualname__}"
    flags = (
        *("--served-model-name", _SERVED, *model.flags, "--block-size", "32", "--enforce-eager"),
        *("--max-num-seqs", "8", "--worker-extension-cls", extension, *flags),
    )
    # Workers import this module, which is not installed; the endpoint that calls their methods
    # needs the development mode.
    root = Path(__file__).resolve().parents[2]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gb),
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with serve(model.folder, *flags, env=environment, log=log, patience=900) as server:
            return _send_requests(server, requests)
    except ServerDied:
        return find_cause(log.read_text(errors="replace"))[:300]


def _send_requests(server: Server, requests: Sequence[tuple[bytes, bytes]]) -> Measurement:
    client, timed = Client(server.url, timeout=900), requests[_WARM_UP:]

    def read(name: str, **labels: str) -> float:
        return Metrics(server.get("/metrics")).total(name, **labels) or 0.0

    def call_workers(method: str) -> list[int | None]:
        status, answer = server.post("/collective_rpc", {"method": method})
        results = answer.get("results")
        if status != 200 or not isinstance(results, list):
            raise BenchmarkError(f"{method}: status {status}: {json.dumps(answer)[:200]}")
        return results

    for question, _ in requests[:_WARM_UP]:
        client.send(question)
    call_workers(DeviceMemory.reset_device_memory.__name__)
    seconds = "vllm:request_{}_time_seconds_sum"
    images, kept = "autoprune_images_total", "autoprune_visual_tokens_total"
    images_before, kept_before = read(images), read(kept, stage="after")
    records, again, prefill, decode = [], [], 0.0, 0.0
    for question, second_question in timed:
        prefill -= read(seconds.format("prefill"))
        decode -= read(seconds.format("decode"))
        records.append(client.send(question))
        prefill += read(seconds.format("prefill"))
        decode += read(seconds.format("decode"))
        again.append(client.send(second_question))
    failed = [record.error for record in (*records, *again) if record.error]
    if failed:
        raise BenchmarkError(f"{len(failed)} requests failed: {failed[0]}")
    count, tokens = read(images) - images_before, read(kept, stage="after") - kept_before
    peaks = call_workers(DeviceMemory.peak_device_memory.__name__)
    return Measurement(
        ttft=tuple(record.ttft for record in records),
        again=tuple(record.ttft for record in again),
        prefill=prefill / len(records),
        decode=decode / len(records) / (_ANSWER_TOKENS - 1),
        visual_tokens=tokens / count if count else None,
        device_memory=None if None in peaks else sum(peak for peak in peaks if peak is not None),
    )


_NOTES = (
    *ASSUMPTIONS,
    "TFLOPs and KV are computed for the published depth. Times are measured with the layers that "
    "are served, and include the whole vision tower: with fewer, their ratios are smaller.",
    "Tokens of the full model are counted as published: without a newline for each row.",
    "Prefill: mean of vLLM's request_prefill_time_seconds, which includes vision tower "
    "and selection; decode: of request_decode_time_seconds. TTFT: at the client. One request at a "
    "time, always a new image.",
    "Second question: median TTFT of a second question on each image, right after the first, "
    "and its ratio to the first. Without the plugin, and with policies that ignore questions, "
    "vLLM finds the image's KV in its prefix cache; policies that read the question reuse the "
    "output of the vision tower.",
    "GPU memory: the most that the workers had allocated during the requests. vLLM reserves "
    "its KV cache whatever is pruned, so this changes little; KV MiB is what one prompt needs "
    "of it.",
)
_COLUMNS = (
    "method", "K", "TFLOPs", "prefill, ms", "TTFT, ms: median (quartiles)", "second question, ms",
    "decode, ms/token", "KV, MiB", "GPU memory, MiB",
)  # fmt: skip


def format_table(model: Model, budget: int, arms: Mapping[str, Measurement | str]) -> str:
    """The table in Markdown, the full model first, and notes on its columns."""
    full, rows = arms[FULL], []
    full_cost = compute_cost(model, FULL, budget, None)
    for arm, measured in arms.items():
        if isinstance(measured, str):
            rows.append([arm, f"not served: {measured}", *[""] * (len(_COLUMNS) - 2)])
            continue
        computed = compute_cost(model, arm, budget, measured.visual_tokens)
        waits, again = spread(measured.ttft), median(measured.again)
        memory, prefill = measured.device_memory, measured.prefill
        faster = "" if isinstance(full, str) else f" ({full.prefill / prefill:.2f}x faster)"
        rows.append([
            arm,
            f"{computed.tokens:g}",
            f"{computed.teraflops:.4g} ({full_cost.flops / computed.flops:.1f}x fewer)",
            f"{1000 * prefill:.1f}{faster}",
            format_spread(waits),
            f"{1000 * again:.1f} ({again / waits.median:.2f}x)",
            f"{1000 * measured.decode:.2f}",
            f"{computed.kv_mib:.4g}",
            "not measured" if memory is None else f"{memory / MIB:.0f}",
        ])  # fmt: skip
    layers = model.shape.layers
    served = f"{layers}" if layers == model.depth else f"{layers} of {model.depth}"
    timed = 0 if isinstance(full, str) else len(full.ttft)
    head = f"{model.name}, {served} language layers served, K = {budget}; {timed} requests a row\n"
    notes = (f"- {note}" for note in _NOTES)
    return "\n".join([head, Table("", _COLUMNS, rows).markdown(), "", *notes])


def compute_cost(model: Model, arm: str, budget: int, visual_tokens: float | None) -> Cost:
    """By formula, from the kept tokens that the plugin reports, at the published depth.

    A base policy that ranks tokens by layers of the language model pays for these over all tokens.
    """
    tokens = budget if visual_tokens is None else round(visual_tokens)
    policy = BASE_POLICIES.get(arm)
    layers = policy.layers_read(policy.default_params, model.depth) if policy else 0
    shape = replace(model.shape, layers=model.depth)
    tokens = shape.tokens if arm == FULL else tokens
    return estimate_cost(shape, tokens, ranking_layers=layers)


class Efficiency(FrozenModel):
    """The JSON file of a table; an arm that was not served has its reason."""

    model: str
    layers: int
    budget: int
    digests: Mapping[str, str | None]
    arms: Mapping[str, Measurement | str]
    environment: Mapping[str, str]

    def measured(self) -> dict[str, Measurement]:
        """The arms that were served."""
        return {name: arm for name, arm in self.arms.items() if not isinstance(arm, str)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``efficiency``, each with a default."""
    add = parser.add_argument
    add("--model", choices=(MINI, *_SHAPES), default=MINI, help="checkpoint, or a true shape")
    add("--layers", type=int, default=2, help="language layers of a true shape")
    add("--budget", type=int, help="K (default: a ninth of the visual tokens)")
    add("--policies", default=",".join(_POLICIES), help="base policies to compare with")
    add("--requests", type=int, default=20, help="timed requests of an arm")
    add("--kv-cache-gb", type=int, default=1, help="size of a CPU server's KV cache")
    add("--out", type=Path, default=Path("out/efficiency"), help="folder of files")


def run(options: argparse.Namespace) -> int:
    """0: every arm was served; 1: one was not."""
    model = _open_model(options.model, options.layers, options.out)
    budget = options.budget or model.shape.tokens // 9
    pruning = ["--autoprune-budget", str(budget)]
    if model.shape.relevance == "clip":  # for shapes, one with random weights is written once
        tower = CLIP if model.name == MINI else write_clip(options.out / "clip")
        pruning += ["--autoprune-text-tower", str(tower)]
    states: dict[str, str | None] = {FULL: None}
    states |= {name: name for name in options.policies.split(",") if name}
    states["AutoPrune"] = "autoprune"
    digests = {name: load_state(state).digest if state else None for name, state in states.items()}
    requests = _draw_requests(model.name, _WARM_UP + options.requests)
    arms: dict[str, Measurement | str] = {}
    for name, state in states.items():
        flags = ("--autoprune-state", state, *pruning) if state else ()
        log = options.out / "servers" / f"{model.label}-{name}.log"
        arms[name] = arm = _serve_arm(model, flags, options.kv_cache_gb, requests, log)
        log_progress(f"{name}: {arm if isinstance(arm, str) else f'prefill {arm.prefill:.3f} s'}")
    table = Efficiency(
        model=model.name, layers=model.shape.layers, budget=budget, digests=digests, arms=arms,
        environment=environment(),
    )  # fmt: skip
    text = format_table(model, budget, arms)
    text += f"\n\nEnvironment: {format_environment(table.environment)}.\n"
    text += f"\nCommand: `{shlex.join(command_line())}`\n"
    (options.out / f"{model.label}.md").write_text(text)
    (options.out / f"{model.label}.json").write_text(table.model_dump_json(indent=1) + "\n")
    print(text)
    return int(any(isinstance(arm, str) for arm in arms.values()))
