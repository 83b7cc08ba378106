"""Replay every golden case in a folder: ``python -m tests.golden DIR``.

One line a failure, a count at the end; exit status 1 where any case failed or none was found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.case import DATA, read
from tests.golden.replay import METHODS, replay


def main(arguments: list[str] | None = None) -> int:
    """Replay the cases below a folder of ``<method>/case_XX.npz``; 0 where all of them agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DATA, help="default: those here")
    folder: Path = parser.parse_args(arguments).folder
    passed = failed = 0
    strangers = {path for path in folder.glob("*/") if path.name not in METHODS}
    for path in [*sorted(folder.rglob("*.npz")), *sorted(strangers)]:
        try:
            problems = [f"no method of the name {path.name!r} is known"]
            problems = problems if path.is_dir() else replay(read(path))
        except Exception as error:  # any failure of one file must not stop the others
            problems = [f"{type(error).__name__}: {error}".partition("\n")[0]]
        if problems:
            failed += 1
            print(f"{path.relative_to(folder)}: {'; '.join(problems)}")
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
