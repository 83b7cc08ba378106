"""Times of the parts of a pruned request, each measured outside a server on random tensors."""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import torch
from PIL import Image

from benchmarks.common.shapes import CLIP_WIDTH, TOKENS, WIDTH
from benchmarks.cost.overhead.settings import BUDGET, QUESTION, STATE, draw_words, image_url
from vllm_autoprune.statistics import Spread, spread

SIDE = 24
Work = Callable[[], object]


def measure_parts(llava: Path, clip: Path, quick: bool) -> dict[str, Spread]:
    """Seconds of each part, one image."""
    parts: dict[str, Spread] = {}
    # vLLM's front end runs torch in one thread, and its CPU worker on all cores but one.
    cores, threads = (os.cpu_count() or 2) - 1, torch.get_num_threads()
    with torch.inference_mode():
        for threads_used, works in ((1, _frontend(llava)), (cores, _worker(clip))):
            torch.set_num_threads(threads_used)
            parts |= {name: _measure(work, 5 if quick else 20) for name, work in works.items()}
    torch.set_num_threads(threads)
    return parts


def _measure(work: Work, times: int) -> Spread:
    for _ in range(2):
        work()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return spread(seconds)


def _frontend(llava: Path) -> Mapping[str, Work]:
    from transformers import AutoImageProcessor
    from vllm.multimodal.hasher import MultiModalHasher

    processor = AutoImageProcessor.from_pretrained(llava)
    url = image_url(0).partition(",")[2]
    image = Image.open(io.BytesIO(base64.b64decode(url))).convert("RGB")
    return {
        "API server: base64 and PNG": lambda: Image.open(io.BytesIO(base64.b64decode(url))).convert(
            "RGB"
        ),
        "API server: hash of the image": lambda: MultiModalHasher.hash_kwargs(
            "blake3", image=image
        ),
        "API server: image processor": lambda: processor(images=[image], return_tensors="pt"),
    }


def _worker(clip: Path) -> Mapping[str, Work]:
    from transformers import AutoTokenizer

    from vllm_autoprune import Grid, Instruction, VisualTokens, load_state, materialize, refine
    from vllm_autoprune.serving.shared.text_tower import read_text_tower
    from vllm_autoprune.serving.worker.relevance import ClipTower, InputEmbeddings

    tower = ClipTower(read_text_tower(str(clip)), torch.device("cpu"))
    ids = tuple(AutoTokenizer.from_pretrained(clip)(draw_words(QUESTION, 1))["input_ids"])
    table = torch.nn.Embedding(2048, WIDTH, dtype=torch.bfloat16)
    embeddings = InputEmbeddings(table, torch.device("cpu"))
    short = tuple(range(QUESTION))
    policy = materialize(load_state(STATE), BUDGET)
    features = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16)
    attention = torch.rand(1, TOKENS).softmax(dim=1)
    patches, text = torch.randn(1, TOKENS, CLIP_WIDTH), torch.randn(1, 1, CLIP_WIDTH)
    wide, used = torch.randn(1, 1, WIDTH), torch.ones(1, 1, dtype=torch.bool)

    def select(instruction: Instruction) -> object:
        return refine(policy, VisualTokens(features, Grid(SIDE, SIDE), attention, instruction))

    # A new text each time: the tower caches pooled texts.
    fresh = count(1)

    return {
        "worker: text tower": lambda: tower.instructions([(*ids[:-1], next(fresh), ids[-1])]),
        "worker: selection, relevance by the text tower": lambda: select(
            Instruction(patches, text, used, -1)
        ),
        "worker: mean input embedding": lambda: embeddings.instructions([short]),
        "worker: selection, relevance by input embeddings": lambda: select(
            Instruction(features, wide, used, 1)
        ),
    }
