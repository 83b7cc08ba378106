"""Type the commands of README.md and docs/: python scripts/docs_commands.py [--all].

Every command of a ``sh`` block is of one kind. *Quick* ones are run in this process. *Long* ones
are typed into a shell with ``--all``, page by page and in order, in a copy of the repository: they
start the servers that a page names, or ask one. Those that measure for minutes to hours get options
with which they measure less. All others need what this machine lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "benchmarks/yardsticks/weights/minillava"

QUICK, LONG = "quick", "long"

_NOT_TYPED = re.compile(
    r"^make test"  # it types these commands
    r"|pip3? install|pip wheel|git clone|-m venv"  # changes an environment, or needs a network
    r"|^docker |^kubectl |^helm "  # a cluster
    r"|vllm serve (llava-hf|Qwen|OpenGVLab|google)/|vllm serve \.\.\."  # the Hub, and a GPU
    r"|gpu-\d|http://server:|--worker |dashscope|/opt/lmms"  # other machines, or a network
    r"|--gpu|--runner v2"
)
"""What this machine cannot type, each with its reason."""

_LESS: tuple[tuple[str, str], ...] = (
    ("^make demo$", "VENV=none PYTHON=python"),
    ("^vllm-autoprune selftest$", "llava_next --runner v1"),
    ("^vllm-autoprune search .*--server-url", "--rounds 1 --per-round 2 --images 4"),
    (r"^vllm serve ", "--enforce-eager --block-size 32"),
    (r"\.cost efficiency", "--requests 1 --policies cdpruner"),
    (r"\.accuracy\.yardsticks .*--methods", "--images 2"),
    (r"\.accuracy\.yardsticks", "--images 2 --methods random cdpruner"),
    (r"\.accuracy\.minillava", "--scenes 2 --budgets 8 --cases random policies"),
    (r"\.load prepare", f"--model {CHECKPOINT}/llava --requests 6 --warm-up 1"),
    (r"\.load paired .*--users", "--users 1,2 --requests 4 --warm-up 1 --passes 1"),
    (r"\.load paired .*--rates", "--requests 4 --warm-up 1 --passes 1"),
    (r"\.search study", "--seeds 1 --budgets 8 --rounds 1 --yardsticks minillava"),
    (r"tests\.fuzz", "--count 200"),
)
"""Pattern -> options that a long command gets besides its own, with which it takes minutes at most.

Of an option that is given twice the second value counts.
"""

_SERVE = re.compile(r"^(VLLM_CPU_KVCACHE_SPACE=1 )?vllm serve (benchmarks|out)/")
_NEEDS_SERVER = re.compile(r"(localhost|127\.0\.0\.1):8000")
_LONG = re.compile(
    r"^(python -m (benchmarks|tests)\.|locust |for |make demo$"
    r"|vllm-autoprune (search|selftest|explain))"
)
_BUSY = re.compile(r"not valid: (the client was the bottleneck|client \S+ used)")
"""What measurements answer, with status 1, where the machine is not idle."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page; ``kind`` is quick, long, or not typed."""

    page: str
    text: str

    @property
    def kind(self) -> str:
        """Raises ValueError for a command that no rule covers."""
        if _NOT_TYPED.search(self.text):
            return "not typed"
        if _LONG.match(self.text) or self.starts_server or self.needs_server:
            return LONG
        if self.text.startswith("vllm-autoprune "):
            return QUICK
        raise ValueError(f"{self.page}: nothing says how to type: {self.text}")

    @property
    def starts_server(self) -> bool:
        """Whether a server that this machine can run goes on after the command."""
        return bool(_SERVE.match(self.text))

    @property
    def needs_server(self) -> bool:
        """Whether it asks the server that its page starts, or that of the first page."""
        return bool(_NEEDS_SERVER.search(self.text))

    @property
    def typed(self) -> str:
        """Its text, with options with which it takes minutes at most where it takes longer."""
        for pattern, options in _LESS:
            if re.search(pattern, self.text):
                return re.sub("(; done)?$", rf" {options}\1", self.text, count=1)
        return self.text


def read_commands() -> list[Command]:
    """All commands, in the order of the pages of the site, the README first."""
    nav = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in nav if name != "atoms.md")]
    studies = sorted((ROOT / "docs").glob("*/*.md"))
    return [
        Command(str(page.relative_to(ROOT)), line)
        for page in (*pages, *(page for page in studies if page not in pages))
        for line in _lines(page.read_text(encoding="utf-8"))
    ]


def _lines(text: str) -> Iterator[str]:
    """The commands of all blocks; a loop is one."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        block = re.sub(
            r"; do\n(.*?)\ndone", r"; do \1; done", block.replace("\\\n", " "), flags=re.DOTALL
        )
        for line in block.splitlines():
            command = re.sub(r"\s+# .*$", "", " ".join(line.split()))
            if command and not command.startswith("#"):
                yield command


def prepare_folder(folder: Path) -> None:
    """Copy the repository into a folder, with the files that commands name."""
    from PIL import Image

    sys.path.insert(0, str(ROOT))

    from benchmarks.search.evaluator import write_data
    from benchmarks.yardsticks.examples import draw_examples, png

    leave_out = shutil.ignore_patterns(".*", "out", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=leave_out, dirs_exist_ok=True)
    for hub_id, name in (
        ("llava-hf/llava-1.5-7b-hf", "llava"),
        ("openai/clip-vit-large-patch14-336", "clip"),
    ):
        (folder / hub_id).parent.mkdir()
        (folder / hub_id).symlink_to(CHECKPOINT / name)
    for name in ("state.json", "my-state.json"):
        shutil.copyfile(ROOT / "policies/cdpruner.json", folder / name)
    Image.new("RGB", (168, 168), "teal").save(folder / "photo.jpg")
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for example in draw_examples("test", 1)[:8]:
            if example.kind == "mme" or example.answer in ("yes", "no"):
                continue
            (folder / "scene.png").write_bytes(png(example.image))
            line = {"image": "scene.png", "question": example.question, "answer": example.answer}
            file.write(json.dumps(line) + "\n")
    write_data(folder / "questions", {"search": 4, "validation": 4, "test": 4}, each=1)


def type_quick(command: Command, folder: Path) -> int:
    """Run a quick command in this process and in ``folder``; returns its exit status."""
    from vllm_autoprune.cli.main import main as run

    with contextlib.chdir(folder):
        try:
            return run(shlex.split(command.text)[1:])
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1


def type_page(commands: Sequence[Command], folder: Path) -> Iterator[tuple[Command, float, str]]:
    """Type the long commands of one page in order, each to its end.

    A server that the page starts goes on until it starts another, or ends; a page that starts none
    asks that of the first page which does. Yields each command with its seconds and, where it
    failed, what it printed last.
    """
    shared = next(command for command in read_commands() if command.starts_server)
    # Programs and packages are those of this environment and of the copy.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder / "out", ignore_errors=True)
    with contextlib.chdir(folder), contextlib.ExitStack() as servers:
        address = ""
        for command in commands:
            before = time.monotonic()
            if command.starts_server or (command.needs_server and not address):
                servers.close()
                address = _start(command if command.starts_server else shared, servers, folder)
            failure = ""
            if not command.starts_server:
                failure = _type(_NEEDS_SERVER.sub(address, command.typed), environment)
            yield command, time.monotonic() - before, failure


def _start(command: Command, servers: contextlib.ExitStack, folder: Path) -> str:
    from benchmarks.server import serve

    words = shlex.split(command.typed.replace(" --port 8000", ""))
    model, *flags = words[words.index("serve") + 1 :]
    server = serve(model, *flags, env={"PYTHONPATH": str(folder)})
    return servers.enter_context(server).url.removeprefix("http://")


def _type(text: str, environment: dict[str, str]) -> str:
    """What a failed command printed last, or nothing."""
    done = subprocess.run(
        ["bash", "-c", f"set -eo pipefail; {text}"],
        env=environment, timeout=1200, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode == 0 or _BUSY.search(done.stdout):
        return ""
    return "\n".join(["", *done.stdout.splitlines()[-20:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a command that is typed fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="type the long ones too (an hour)")
    parser.add_argument("--only", default="", help="pages or commands that contain this")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    commands = [c for c in read_commands() if options.only in f"{c.page}: {c.text}"]
    with tempfile.TemporaryDirectory(prefix="docs-commands-") as name:
        folder = Path(name)
        prepare_folder(folder)
        quick = {command.text: command for command in commands if command.kind == QUICK}
        failed = [text for text, command in quick.items() if type_quick(command, folder) != 0]
        long = [command for command in commands if command.kind == LONG and options.all]
        for page, ones in itertools.groupby(long, lambda command: command.page):
            for command, seconds, failure in type_page(list(ones), folder):
                print(f"{seconds:5.0f} s  {page}: {command.typed}{failure}", flush=True)
                failed += [command.text] if failure else []
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
