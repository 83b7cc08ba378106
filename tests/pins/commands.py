"""Pins of the command line: flags, and keys of what is printed with ``--json``."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from PIL import Image

from tests.benchmarks.accuracy.minillava_server import answering
from tests.offline_search.synthetic import answer_search, dataset, endpoint
from tests.pins.table import Table, key_paths, table
from vllm_autoprune.cli.commands import SUMMARIES, selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.run import SelftestError

ADVISE = (
    "advise --questions 16 --tokens 2928 --budget 320 --core 256 --tower-ms 12424 "
    "--prefill-ms-per-token 70.741"
)
SEARCH = "--proposer-model m --budget 8 --rounds 1 --per-round 2 --strategy autoprune"


def run(*arguments: str) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return printed.getvalue()


@table
def commands() -> Table:
    """Flags of each command, and the keys of what it prints with ``--json``."""
    usages = {name: run(name, "--help").partition("\n\n")[0] for name in SUMMARIES}
    flags = {
        name: re.findall(r"--[a-z][a-z-]*", usage) for name, usage in usages.items()
    }
    keys = {
        f"{name} --json": sorted(key_paths(json.loads(text)))
        for name, text in printed()
    }
    return {**flags, **keys}


def printed() -> Iterator[tuple[str, str]]:
    """What commands print with ``--json``; servers are fakes, the selftest serves nothing."""
    yield "validate", run("validate", "autoprune", "--json")
    yield "advise", run(*ADVISE.split(), "--json")
    fails = SelftestError.of("llava_next", "is not served here")
    with patch.object(selftest, "run_backbone", side_effect=fails):
        yield "selftest", run("selftest", "llava_next", "--runner", "v1", "--json")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        lines = []
        for colour, answer in itertools.product(("red", "blue"), ("yes", "no")):
            Image.new("RGB", (8, 8), colour).save(f"{colour}.png")
            about = {
                "image": f"{colour}.png",
                "question": f"{answer}?",
                "category": colour,
            }
            lines.append(json.dumps({**about, "answer": answer}))
        Path("questions.jsonl").write_text("\n".join(lines))
        with endpoint(answering) as server:
            evaluate = (
                f"eval --data questions.jsonl --server-url {server.url} --budgets 8"
            )
            yield "eval", run(*evaluate.split(), "--state", "autoprune", "--json")
        with endpoint(answer_search) as server:
            search = f"search --data {dataset(Path(name)).folder} --ledger ledger.jsonl {SEARCH}"
            search += (
                f" --server-url {server.url} --proposer-url {server.url}/v1 --json"
            )
            yield "search --dry-run", run(*search.split(), "--dry-run")
            yield "search", run(*search.split())
        yield (
            "search report",
            run("search", "report", "--ledger", "ledger.jsonl", "--json"),
        )
