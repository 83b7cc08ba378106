"""Write requirements/cpu.txt, the exact versions of the CPU environment, without installing it."""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "requirements/cpu.in"
TARGET = ROOT / "requirements/cpu.txt"
EXTRAS = ("bench", "data", "search", "search-openevolve", "dev")

# Distributions that are not installed: the reason, and when the line can be removed.
EXCLUDED = {
    "torchaudio": "a CUDA build on PyPI, which fails on import beside a CPU torch; vLLM needs it "
    "for audio models only. Remove when PyPI carries a CPU build",
    "torchcodec": "as torchaudio; vLLM needs it for one of its video decoders only",
}


def main() -> None:
    """Resolve, remove the excluded distributions and write the lock."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = project["dependencies"] + [req for extra in EXTRAS for req in extras[extra]]
    # The lines of cpu.in replace the requirement `vllm`.
    lines = [line.split("#")[0].strip() for line in SOURCE.read_text().splitlines()]
    lines = [line for line in lines if line]
    lines += [req for req in ours if re.split(r"[^\w-]", req)[0] != "vllm"]
    print(
        f"resolving {SOURCE.relative_to(ROOT)} and the extras {', '.join(EXTRAS)}",
        flush=True,
    )
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *lines]
    report = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    # Normalised name and version of every distribution that pip would install.
    metadata = (item["metadata"] for item in report["install"])
    versions = {
        re.sub(r"[-_.]+", "-", meta["name"]).lower(): meta["version"]
        for meta in metadata
    }
    cuda = {name for name in versions if name.startswith(("nvidia-", "cuda-"))}
    dropped = EXCLUDED.keys() | cuda
    header = [
        "# The CPU environment, exactly. Written by `make lock` (scripts/lock.py), not by hand.",
        "# Install with --no-deps: some declared dependencies are left out on purpose.",
        *(
            f"#   {name}: {reason}."
            for name, reason in EXCLUDED.items()
            if name in versions
        ),
    ]
    # The build tag is cut off, because indexes differ in it: 0.28.0 accepts 0.28.0+cpu too.
    versions["torchvision"] = versions["torchvision"].split("+")[0]
    pins = [f"{name}=={versions[name]}" for name in sorted(versions.keys() - dropped)]
    TARGET.write_text("\n".join(header + pins) + "\n")
    print(f"wrote {TARGET.relative_to(ROOT)}: {len(pins)} distributions")


if __name__ == "__main__":
    main()
