"""A fake lmms-eval: asks a server four questions and writes the files of version 0.7.3.

It runs as a program. FAKE_VERSION and FAKE_ERROR (after which it exits with 0) make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

GOLD = ("yes", "no", "yes", "no")


def ask(base_url: str, model: str, question: str) -> tuple[str, int]:
    """The answer and its prompt tokens; of a failure what lmms-eval writes, and none."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    if pruning := json.loads(os.environ["AUTOPRUNE_PRUNING"]):
        body["mm_processor_kwargs"] = {"autoprune": pruning}
    try:
        headers = json.loads(os.environ["AUTOPRUNE_HEADERS"])
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=10)
        content = reply.raise_for_status().json()
    except httpx.HTTPError as error:
        return f"[LMMS_EVAL_REQUEST_FAILED after 3 retries] {error}", 0
    return content["choices"][0]["message"]["content"], content["usage"]["prompt_tokens"]


def judge(task: str, number: int, text: str) -> dict[str, Any]:
    """The metric of one sample."""
    if task == "mmvet":  # the real one keeps its judge's name, and logs a failure that is no error
        if "OPENAI_API_URL" not in os.environ:
            print("failed to get a score")
        return {"gpt_eval_score": {"score": 0.8, "url": os.environ.get("OPENAI_API_URL")}}
    right = float(text.strip().lower() == GOLD[number])
    if task != "mme":
        return {"exact_match": right}
    kind, category = ("perception", "existence") if number < 2 else ("cognition", "code_reasoning")
    score = {"question_id": f"{category}/1.jpg", "category": category, "score": right}
    return {f"mme_{kind}_score": score}


def main() -> int:
    if sys.argv[1:] == ["version"]:
        print(f"lmms-eval {os.environ.get('FAKE_VERSION', '0.7.3')}\nPython     3.11")
        return 0
    if "FAKE_ERROR" in os.environ:
        return 0
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "batch_size", "output_path"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--log_samples", action="store_true", required=True)
    options = parser.parse_args()
    task, model_args = options.tasks, dict(p.split("=", 1) for p in options.model_args.split(","))
    samples, images, totals = [], [], dict[str, float]()
    for number, gold in enumerate(GOLD):
        text, tokens = ask(model_args["base_url"], model_args["model_version"], f"{task} {number}?")
        judgement = judge(task, number, text)
        counts = [{"input_tokens": tokens, "output_tokens": int(tokens > 0)}]
        sample = {"doc_id": number, "target": gold, "filtered_resps": text, "token_counts": counts}
        samples.append({**sample, **judgement})
        images.append({"task": task, "doc_id": number, "image": f"i{number // 2}"})
        ((name, score),) = judgement.items()
        points = score["score"] if isinstance(score, dict) else score
        scale = {"mme": 50, "mmvet": 25}.get(task, 0.25)
        totals[f"{name},none"] = totals.get(f"{name},none", 0.0) + scale * points
        totals[f"{name}_stderr,none"] = 0.1
    summary = {"results": {task: totals}, "n-samples": {task: {"effective": len(GOLD)}}}
    folder = Path(options.output_path) / model_args["model_version"]
    folder.mkdir(parents=True)
    (folder / "20260101_000000_results.json").write_text(json.dumps(summary))
    for path, records in (
        (Path(os.environ["AUTOPRUNE_IMAGES"]), images),
        (folder / f"20260101_000000_samples_{task}.jsonl", samples),
    ):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
