"""Where the extra time goes, part by part: the same work outside a server, on random tensors.

Knows nothing about servers, and nothing about what their processes do to each other's cores.
"""

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

from benchmarks.overhead.content import image_url, words
from benchmarks.overhead.setting import STATE
from benchmarks.overhead.shape import CLIP_WIDTH, TOKENS, WIDTH
from benchmarks.overhead.statistics import Spread, spread
from benchmarks.overhead.ttft import BUDGET, QUESTION

SIDE = 24
Work = Callable[[], object]


def parts(llava: Path, clip: Path, quick: bool) -> dict[str, Spread]:
    """Seconds of each part, one image."""
    found: dict[str, Spread] = {}
    # vLLM's front end runs torch in one thread, and its CPU worker on all cores but one.
    cores, threads = (os.cpu_count() or 2) - 1, torch.get_num_threads()
    with torch.inference_mode():
        for count, made in ((1, _frontend(llava)), (cores, _worker(clip))):
            torch.set_num_threads(count)
            found |= {name: _timed(work, 5 if quick else 20) for name, work in made.items()}
    torch.set_num_threads(threads)
    return found


def _timed(work: Work, times: int) -> Spread:
    for _ in range(2):
        work()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return spread(taken)


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
    from vllm_autoprune.serving.relevance import ClipTower, InputEmbeddings
    from vllm_autoprune.serving.towers import describe_tower

    tower = ClipTower(describe_tower(str(clip)), torch.device("cpu"))
    ids = tuple(AutoTokenizer.from_pretrained(clip)(words(QUESTION, 1))["input_ids"])
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

    # Never the same words twice: the tower remembers pooled texts.
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
