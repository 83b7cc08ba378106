"""The commands of README.md and docs/, and how each is typed here.

Every command of a ``sh`` block is of one kind. *Quick* ones are run in the process of the tests.
*Long* ones are typed into a shell, page by page and in order, in a copy of the repository: they
start the servers that a page names, or ask one. Those that measure for minutes to hours get options
with which they measure less. All others need what this machine lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.search.evaluator import write_data
from benchmarks.server import serve

ROOT = Path(__file__).resolve().parents[2]
_WEIGHTS = ROOT / "benchmarks/yardsticks/weights/minillava"
_SERVED = f"{_WEIGHTS.relative_to(ROOT)}/llava"
"""A model by the name that the pages' server has for it."""

_NOT_TYPED = re.compile(
    r"^make test"  # it types these commands
    r"|pip3? install|pip wheel|git clone|-m venv"  # changes an environment, or needs a network
    r"|^docker |^kubectl |^helm "  # a cluster
    r"|vllm serve (llava-hf|Qwen|OpenGVLab|google)/|vllm serve \.\.\."  # the Hub, and a GPU
    r"|^guidellm "  # not installed
    r"|gpu-\d|http://server:|--worker |dashscope|/opt/lmms"  # other machines, or a network
    r"|--gpu|--runner v2"
    r"|^scripts/gpu_day"  # tests/test_gpu_day.py does
)
"""What this machine cannot type, each with its reason."""
_SERVE = re.compile(r"^(VLLM_\w+=\S+ )*vllm serve (benchmarks|out)/")
"""A server that this machine can run; it goes on after the command."""
_ADDRESS = re.compile(r"(localhost|127\.0\.0\.1):8000")
"""Of a server that the page starts, or the first page."""
_LONG = re.compile(
    r"^(python -m (benchmarks|tests)\.|locust |for |make demo$"
    r"|vllm-autoprune (search|selftest|explain))"
)
_LESS = (
    ("^make demo$", "VENV=none PYTHON=python"),
    ("^vllm-autoprune selftest$", "llava_next --runner v1"),
    ("^vllm-autoprune search .*--server-url", "--rounds 1 --per-round 2 --images 4"),
    (r"^vllm serve ", "--enforce-eager --block-size 32"),
    (
        r"\.cost efficiency --model llava-next",
        "--model llava-1.5-7b --requests 1 --layers 1",
    ),
    (r"\.cost efficiency", "--requests 1 --policies cdpruner --layers 1"),
    (r"\.accuracy\.clips", "--clips 2"),
    (r"\.accuracy\.yardsticks .*--methods", "--images 2"),
    (r"\.accuracy\.yardsticks", "--images 2 --methods random cdpruner"),
    (r"eval --data out/scenes", "--limit 20 --budgets 8"),
    (r"\.load prepare", f"--model {_SERVED} --requests 6 --warm-up 1"),
    (r"\.load paired .*--users", "--users 1,2 --requests 4 --warm-up 1 --passes 1"),
    (r"\.load paired .*--rates", "--requests 4 --warm-up 1 --passes 1"),
    (r"\.search study", "--seeds 1 --budgets 8 --rounds 1 --yardsticks minillava"),
    (r"\.search ablations", "--seeds 1 --rounds 1"),
)
"""Pattern, and options that a long command gets besides its own, with which it takes minutes.

Of an option that is given twice the second value counts.
"""
_BUSY = re.compile(r"not valid: the client was the bottleneck")
"""What measurements answer, with status 1, where the machine is not idle."""


class Command(NamedTuple):
    """A command of a page."""

    page: str
    text: str

    @property
    def kind(self) -> Literal["quick", "long", "not typed"]:
        """How it is typed; raises ValueError for a command that no rule covers."""
        if _NOT_TYPED.search(self.text):
            return "not typed"
        if any(rule.search(self.text) for rule in (_LONG, _SERVE, _ADDRESS)):
            return "long"
        if self.text.startswith("vllm-autoprune "):
            return "quick"
        raise ValueError(f"{self.page}: nothing says how to type: {self.text}")

    @property
    def typed(self) -> str:
        """Its text, with options with which it takes minutes at most where it takes longer."""
        for pattern, options in _LESS:
            if re.search(pattern, self.text):
                return re.sub("(; done)?$", rf" {options}\1", self.text, count=1)
        return self.text


def read_commands() -> list[Command]:
    """All commands, in the order of the pages of the site, the README first; a loop is one."""
    nav = re.findall(
        r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs" / name for name in nav if name != "atoms.md"),
    ]
    outside = [
        page for page in sorted((ROOT / "docs").glob("*/*.md")) if page not in pages
    ]
    commands = []
    for page in (*pages, *outside):
        blocks = re.findall(
            r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
        )
        for block in blocks:
            block = block.replace("\\\n", " ")
            joined = re.sub(r"; do\n(.*?)\ndone", r"; do \1; done", block, flags=re.S)
            lines = (
                re.sub(r"\s+# .*$", "", " ".join(x.split()))
                for x in joined.splitlines()
            )
            name = str(page.relative_to(ROOT))
            commands += [
                Command(name, line) for line in lines if line and line[0] != "#"
            ]
    return commands


def prepare_folder(folder: Path) -> None:
    """Copy the repository into a folder, with the files that commands name."""
    leave_out = shutil.ignore_patterns(".*", "out", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=leave_out, dirs_exist_ok=True)
    for hub_id, name in (
        ("llava-hf/llava-1.5-7b-hf", "llava"),
        ("openai/clip-vit-large-patch14-336", "clip"),
    ):
        (folder / hub_id).parent.mkdir()
        (folder / hub_id).symlink_to(_WEIGHTS / name)
    for name in ("state.json", "my-state.json"):
        shutil.copyfile(ROOT / "policies/cdpruner.json", folder / name)
    write_data(folder / "questions", {"search": 4, "validation": 4, "test": 12}, each=1)
    lines = map(json.loads, (folder / "questions/test.jsonl").read_text().splitlines())
    asked = [{**line, "image": f"questions/{line['image']}"} for line in lines]
    (folder / "questions.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in asked)
    )


def type_page(commands: Sequence[Command], folder: Path) -> Iterator[str]:
    """Type the long commands of one page in order, each to its end; yields what failed, and how.

    A server that the page starts goes on until it starts another, or ends; a page that starts none
    asks that of the first page which does.
    """
    shared = next(command for command in read_commands() if _SERVE.match(command.text))
    # Programs and packages are those of this environment and of the copy.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    shutil.rmtree(folder / "out", ignore_errors=True)
    with contextlib.chdir(folder), contextlib.ExitStack() as servers:
        address = ""
        for command in commands:
            starts = bool(_SERVE.match(command.text))
            if starts or (_ADDRESS.search(command.text) and not address):
                servers.close()
                text = (command if starts else shared).typed.replace(" --port 8000", "")
                model, *flags = shlex.split(text.partition(" serve ")[2])
                server = serve(model, *flags, env={"PYTHONPATH": str(folder)})
                address = servers.enter_context(server).url.removeprefix("http://")
            if not starts:
                text = _ADDRESS.sub(address, command.typed)
                done = subprocess.run(
                    ["bash", "-c", f"set -eo pipefail; {text}"],
                    env=environment,
                    timeout=3600,
                    check=False,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                if done.returncode and not _BUSY.search(done.stdout):
                    yield "\n".join([command.text, *done.stdout.splitlines()[-20:]])
