"""`python -m benchmarks.cost offline`: vLLM's ``LLM()`` in Python, stock and pruned.

The engine runs in a process of its own with vLLM's defaults, as in a script of a user. Answers of
dummy weights mean nothing: what counts is that a prompt falls by N - K tokens and that a budget of
all tokens answers as stock vLLM does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import environment, format_environment
from benchmarks.common.requests import build_content, draw_picture, encode_picture
from benchmarks.common.shapes import draw_words
from benchmarks.cost.efficiency import OPTIONS as _EFFICIENCY
from benchmarks.cost.efficiency import ServedModel
from benchmarks.cost.turns import as_fields
from benchmarks.server import CPU_ENVIRONMENT
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.report import Table

_ANSWER_TOKENS = 8
_COLUMNS = ("arm", "prompt tokens", "seconds", "answer")


def _start(model: ServedModel, budget: int) -> Any:
    """The engine, on a GPU with vLLM's defaults."""
    from vllm import LLM

    options: dict[str, Any] = {}
    # Not is_available(): after that call the engine could not be forked.
    if not torch.cuda.device_count():
        options = {"enforce_eager": True, "block_size": 32, "max_num_seqs": 8}
        options["dtype"] = choose_dtype()
        os.environ.update(CPU_ENVIRONMENT)
    if "--load-format dummy" in model.flags:
        options["load_format"] = "dummy"
    settings = {"state": "cen_divprune", "budget": budget, "requests": "budget"}
    return LLM(
        model=str(model.folder),
        max_model_len=4096 if "load_format" in options else 1024,
        additional_config={"autoprune": settings},
        **options,
    )


def _ask(llm: Any, url: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """One greedy answer about a picture."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    messages = [{"role": "user", "content": build_content(draw_words(16, 1), [url])}]
    entry = as_fields(fields)["mm_processor_kwargs"]
    begin = time.perf_counter()
    (output,) = llm.chat(messages, sampling, use_tqdm=False, mm_processor_kwargs=entry)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "seconds": time.perf_counter() - begin,
        "answer": list(output.outputs[0].token_ids),
    }


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: _EFFICIENCY[name] for name in ("--model", "--layers", "--budget")},
    "--out": {"type": Path, "default": Path("out/offline"), "help": "folder of files"},
}


def run(options: argparse.Namespace) -> int:
    """Ask each arm, print and write; returns 0 if prompts and answers are as they should be."""
    model = ServedModel.open(options.model, options.layers, options.out)
    budget = options.budget or model.shape.tokens // 9
    url = encode_picture(draw_picture(2, model.side, model.side))
    arms: dict[str, Mapping[str, object]] = {
        "stock": {"enabled": False},
        "all tokens": {"budget": "1/1"},
        "pruned": {},
    }
    llm = _start(model, budget)
    rows = {name: _ask(llm, url, fields) for name, fields in arms.items()}
    removed = rows["stock"]["prompt_tokens"] - rows["pruned"]["prompt_tokens"]
    # LLaVA-NeXT's newlines, which published tables leave out, go with the tokens.
    holds = rows["stock"]["answer"] == rows["all tokens"]["answer"] and (
        removed >= model.shape.tokens - budget
    )
    record = {"holds": holds, "environment": environment(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "offline.json").write_text(json.dumps(record, indent=1))
    cells = [
        [
            name,
            f"{row['prompt_tokens']:,}",
            f"{row['seconds']:.3f}",
            " ".join(map(str, row["answer"])),
        ]
        for name, row in rows.items()
    ]
    print(Table("", _COLUMNS, cells).markdown())
    verdict = "as they should be" if holds else "WRONG"
    print(
        f"\nPrompts are {removed:,} tokens shorter; answers and prompts are {verdict}."
    )
    print(format_environment())
    return int(not holds)
