"""Write the locks requirements/cpu.txt and requirements/release.txt, without installing them."""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "requirements/cpu.in"
TARGET = ROOT / "requirements/cpu.txt"
RELEASE = ROOT / "requirements/release.txt"
EXTRAS = ("bench", "data", "search", "search-openevolve", "dev")

# Distributions that are not installed: the reason, and when the line can be removed.
EXCLUDED = {
    "torchaudio": "a CUDA build on PyPI, which fails on import beside a CPU torch; vLLM needs it "
    "for audio models only. Remove when PyPI carries a CPU build",
    "torchcodec": "as torchaudio; vLLM needs it for one of its video decoders only",
}


def resolve(requirements: Iterable[str], keep: Path | None) -> dict[str, str]:
    """Normalised name and version of every distribution that pip would install.

    The versions in the lock ``keep`` stay as they are.
    """
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *requirements]
    if keep is not None:
        command += ["--constraint", str(keep)]
    report = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    metadata = (item["metadata"] for item in report["install"])
    return {
        re.sub(r"[-_.]+", "-", meta["name"]).lower(): meta["version"]
        for meta in metadata
    }


def write(lock: Path, header: Iterable[str], versions: dict[str, str]) -> None:
    """Write a lock: comments, then one pin a line."""
    pins = [f"{name}=={versions[name]}" for name in sorted(versions)]
    lock.write_text("\n".join([*header, *pins]) + "\n")
    print(f"wrote {lock.relative_to(ROOT)}: {len(pins)} distributions")


def main() -> None:
    """Resolve both environments, remove the excluded distributions and write the locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    help_text = "change no version that is locked: for a dependency that is added"
    parser.add_argument("--keep", action="store_true", help=help_text)
    keep = parser.parse_args().keep
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
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
    versions = resolve(lines, TARGET if keep else None)
    cuda = {name for name in versions if name.startswith(("nvidia-", "cuda-"))}
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
    dropped = EXCLUDED.keys() | cuda
    write(
        TARGET,
        header,
        {name: versions[name] for name in versions.keys() - dropped},
    )
    print("resolving the group release", flush=True)
    tools = resolve(settings["dependency-groups"]["release"], RELEASE if keep else None)
    header = [
        "# What `make release` runs, exactly. Written by `make lock`, not by hand."
    ]
    write(RELEASE, header, tools)


if __name__ == "__main__":
    main()
