"""Replay every golden case in a folder: ``python -m tests.golden DIR``.

One line a failure, a count at the end; exit status 1 where any case failed or none was found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.case import DATA, read
from tests.golden.replay import METHODS, replay


def failures(path: Path) -> list[str]:
    """Problems of one case file; a file that cannot be read or replayed is a failure."""
    if path.is_dir():
        return [f"no method of the name {path.name!r} is known"]
    try:
        return replay(read(path))
    except Exception as error:  # any failure of one file must not stop the others
        return [
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}"
        ]


def main(arguments: list[str] | None = None) -> int:
    """Replay the cases below a folder of ``<method>/case_XX.npz``; 0 where all of them agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=DATA, help="default: those kept here"
    )
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        print(f"{folder}: no such folder\n0 passed, 1 failed")
        return 1
    passed = failed = 0
    for path in [*sorted(folder.rglob("*.npz")), *_strangers(folder)]:
        actual = failures(path)
        if actual:
            failed += 1
            print(f"{path.relative_to(folder)}: {'; '.join(actual)}")
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


def _strangers(folder: Path) -> list[Path]:
    """Folders that contain no case and are not named after a method."""
    inside = (path for path in folder.iterdir() if path.is_dir() and path.name not in METHODS)
    return sorted(path for path in inside if not any(path.rglob("*.npz")))


if __name__ == "__main__":
    sys.exit(main())
