"""Set up `make test-next`: a newer vLLM for CPUs that has no CPU wheel yet, in a folder.

The ordinary wheel is installed without its dependencies. Put before the environment on
``PYTHONPATH``, its Python sources hide the installed vLLM's; its compiled kernels stay unused, so
nothing that computes with a model can run.

Remove when: the release has a CPU wheel, and the lock names it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

RELEASE = "0.33.0"


def main() -> int:
    """Install the release, unless it is there; 1 where pip cannot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", default=RELEASE)
    options = parser.parse_args()
    folder: Path = options.folder
    metadata = folder / f"vllm-{options.release}.dist-info" / "METADATA"
    if (folder / "complete").is_file() and metadata.is_file():
        print(f"test-next: vLLM {options.release}, as it is in {folder}")
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    print(f"test-next: installing vLLM {options.release} without dependencies into {folder}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(folder), f"vllm=={options.release}"]
    if subprocess.run(command, check=False).returncode:
        print(f"test-next: pip finds no vLLM {options.release}", file=sys.stderr)
        return 1
    # vLLM takes the CPU as its platform by the name of its version.
    text = metadata.read_text(encoding="utf-8")
    stated = f"\nVersion: {options.release}\n"
    metadata.write_text(text.replace(stated, stated.rstrip() + "+cpu\n", 1), encoding="utf-8")
    (folder / "complete").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
