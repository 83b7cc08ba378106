"""Writes requirements/cpu.txt: the exact versions of the CPU environment.

Resolves without installing anything. It knows nothing about the environment that `make venv`
builds from the result.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "requirements/cpu.in"
TARGET = ROOT / "requirements/cpu.txt"
EXTRAS = ("bench", "search", "search-openevolve", "dev")

# Distribution: why the environment does without it, and when this line can go.
LEFT_OUT = {
    "torchaudio": "a CUDA build on PyPI, which fails on import beside a CPU torch; vLLM needs it "
    "for audio models only. Remove when PyPI carries a CPU build",
    "torchcodec": "as torchaudio; vLLM needs it for one of its video decoders only",
}


def wanted() -> list[str]:
    """Requirements to resolve: cpu.in and our own, less `vllm`, which cpu.in stands for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = project["dependencies"] + [req for extra in EXTRAS for req in extras[extra]]
    lines = [line.split("#")[0].strip() for line in SOURCE.read_text().splitlines()]
    return [line for line in lines if line] + [
        req for req in ours if re.split(r"[^\w-]", req)[0] != "vllm"
    ]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name and version of everything that pip would install, names normalised."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *requirements]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = (item["metadata"] for item in report["install"])
    return {re.sub(r"[-_.]+", "-", meta["name"]).lower(): meta["version"] for meta in found}


def main() -> None:
    """Resolve, drop what is left out, write the lock."""
    print(f"resolving {SOURCE.relative_to(ROOT)} and the extras {', '.join(EXTRAS)}", flush=True)
    versions = resolve(wanted())
    cuda = {name for name in versions if name.startswith(("nvidia-", "cuda-"))}
    dropped = LEFT_OUT.keys() | cuda
    header = [
        "# The CPU environment, exactly. Written by `make lock` (scripts/lock.py), not by hand.",
        "# Install with --no-deps: some declared dependencies are left out on purpose.",
        *(f"#   {name}: {reason}." for name, reason in LEFT_OUT.items() if name in versions),
    ]
    # Whichever build of torchvision the index has: 0.28.0 is met by 0.28.0+cpu too.
    versions["torchvision"] = versions["torchvision"].split("+")[0]
    pins = [f"{name}=={versions[name]}" for name in sorted(versions.keys() - dropped)]
    TARGET.write_text("\n".join(header + pins) + "\n")
    print(f"wrote {TARGET.relative_to(ROOT)}: {len(pins)} distributions")


if __name__ == "__main__":
    main()
