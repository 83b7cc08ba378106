"""Type the commands of README.md and docs/: python scripts/docs_commands.py [--all] [--list].

Every line of a ``sh`` block belongs to exactly one kind. *Quick* ones are run in a folder that has
the files they name (a picture, questions, a state; mini-LLaVA under the names of real checkpoints).
*Server* ones need the server that a page starts on a CPU, which is started for them; ``--all`` runs
them too. All others are listed with the reason why they are not typed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "benchmarks/minillava/checkpoint"

QUICK, SERVER = "quick", "server"

_NOT_TYPED: tuple[tuple[str, str], ...] = (
    ("^make (demo|test|bench-check)", "runs everything, this script included"),
    ("^make docs", "part of make test"),
    (
        "pip3? install|pip wheel|git clone|-m venv|^make test VENV",
        "changes an environment, or needs a network",
    ),
    ("^docker |^kubectl |^helm ", "needs Docker or a cluster"),
    (
        r"vllm serve (llava-hf|Qwen|OpenGVLab|google)/|vllm serve \.\.\.",
        "needs weights from the Hub and a GPU",
    ),
    (
        r"gpu-\d|http://server:|--worker |--master |dashscope|/opt/lmms|-model llava-hf/",
        "needs other machines or the Hub",
    ),
    ("--gpu", "needs a GPU"),
    ("^vllm-autoprune selftest", "starts engines for minutes; make test runs its parts"),
    ("^vllm-autoprune search", "asks a proposer and a served model for minutes"),
    (
        r"^python -m (benchmarks|tests)\.|^locust |^for |^done$|^B=|^\$B ",
        "measures for minutes to hours; tests parse its options",
    ),
    ("^vllm serve (benchmarks|out)/", "another page's server, of the same kind as the one typed"),
)
"""Pattern -> why a command is not typed."""

_SERVE = re.compile(r"^VLLM_CPU_KVCACHE_SPACE=1 vllm serve benchmarks/minillava/")
_NEEDS_SERVER = re.compile(r"(localhost|127\.0\.0\.1):8000")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page; ``kind`` is quick, server, or the reason why it is not typed."""

    page: str
    text: str

    @property
    def kind(self) -> str:
        """Raises ValueError for a command that no rule covers."""
        for pattern, reason in _NOT_TYPED:
            if re.search(pattern, self.text):
                return reason
        if _SERVE.match(self.text) or _NEEDS_SERVER.search(self.text):
            return SERVER
        if self.text.startswith("vllm-autoprune "):
            return QUICK
        raise ValueError(f"{self.page}: nothing says how to type: {self.text}")


def read_commands() -> list[Command]:
    """All commands, in the order of the pages of the site, the README first."""
    nav = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in nav)]
    studies = sorted((ROOT / "docs").glob("*/*.md"))
    return [
        Command(str(page.relative_to(ROOT)), line)
        for page in (*pages, *(page for page in studies if page not in pages))
        for line in _lines(page.read_text(encoding="utf-8"))
    ]


def _lines(text: str) -> Iterator[str]:
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+# .*$", "", " ".join(line.split()))
            if command and not command.startswith("#"):
                yield command


def prepare_folder(folder: Path) -> None:
    """Write the files that commands name into a folder."""
    from PIL import Image

    sys.path.insert(0, str(ROOT))
    import numpy as np

    from benchmarks.minillava.split import draw_examples, png

    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "llava-1.5-7b-hf").symlink_to(CHECKPOINT / "llava")
    (folder / "clip-vit-large-patch14-336").symlink_to(CHECKPOINT / "clip")
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
    rng = np.random.default_rng(0)
    np.savez(
        folder / "arrays.npz",
        allow_pickle=False,
        features=rng.normal(size=(576, 16)),
        patches=rng.normal(size=(576, 8)),
        text=rng.normal(size=(2, 8)),
        cls_attention=rng.random(576),
        sign=1,
    )


def type_quick(command: Command, folder: Path) -> int:
    """Run a quick command in this process and in ``folder``; returns its exit status."""
    from vllm_autoprune.cli.main import main as run

    before = Path.cwd()
    os.chdir(folder)
    try:
        return run(shlex.split(command.text)[1:])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        os.chdir(before)


def type_with_server(commands: Sequence[Command], folder: Path) -> list[str]:
    """Start the server that the pages start on a CPU, type what needs it; returns what failed."""
    from benchmarks.server import serve

    (start,) = {command.text for command in commands if _SERVE.match(command.text)}
    model, *flags = shlex.split(start)[3:]
    failed = []
    with serve(folder / model, *flags) as server:
        address = server.url.removeprefix("http://")
        for command in commands:
            if _SERVE.match(command.text):
                continue
            text = _NEEDS_SERVER.sub(address, command.text)
            program = f"{shlex.quote(sys.executable)} -m vllm_autoprune.cli.main"
            text = re.sub(r"^vllm-autoprune", program, text)
            shutil.rmtree(folder / "out", ignore_errors=True)
            done = subprocess.run(
                ["bash", "-c", f"set -o pipefail; {text}"],
                cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
            )  # fmt: skip
            if done.returncode:
                failed.append(f"{command.page}: {command.text}")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a command that is typed fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="those that need a server too")
    parser.add_argument("--list", action="store_true", help="print what is typed, and stop")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    commands = read_commands()
    if options.list:
        for command in commands:
            print(f"{command.kind:>10.60}: {command.page}: {command.text}")
        return 0
    with tempfile.TemporaryDirectory(prefix="docs-commands-") as name:
        folder = Path(name)
        prepare_folder(folder)
        quick = {command.text: command for command in commands if command.kind == QUICK}
        failed = [text for text, command in quick.items() if type_quick(command, folder) != 0]
        if options.all:
            failed += type_with_server([c for c in commands if c.kind == SERVER], folder)
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
