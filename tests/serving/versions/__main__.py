"""``python -m tests.serving.versions VERSION [--check]``: keep what a release has of our hooks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.serving.versions.release import Release, file_of, read, symbols_of
from tests.serving.versions.sources import wheel_of, within


def fetched(version: str) -> Release:
    """A release as its wheel has it; raises OSError where that cannot be reached."""
    wheel = wheel_of(f"vllm=={version}")
    symbols = symbols_of(within(wheel))
    return Release(version=version, wheel=wheel.name, sha256=wheel.sha256, symbols=symbols)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a release's file, or compare it; 1 where it differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.serving.versions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("version", help="such as 0.33.0")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    release, file = fetched(options.version), file_of(options.version)
    gone = [name for name, symbol in release.symbols.items() if symbol is None]
    print(f"{release.wheel}: {len(release.symbols) - len(gone)} of {len(release.symbols)} names")
    print("".join(f"not there: {name}\n" for name in gone), end="")
    if options.check:
        same = file.is_file() and read(file) == release
        print(f"{file.name} says {'the same' if same else 'something else'}")
        return 0 if same else 1
    file.write_text(release.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
