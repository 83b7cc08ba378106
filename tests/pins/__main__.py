"""Pins: tables of what must not change, in ``tests/pins/data``.

``python -m tests.pins write`` makes them, ``check`` prints the rows that differ. Names of tables
after the verb leave out the others.
"""

from __future__ import annotations

import os
import sys


def main(verb: str = "", *names: str) -> int:
    """Exit status 1 where a table differs, 2 for wrong arguments."""
    # Read when libraries are imported: the hub is not asked, and help texts have one width.
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="100")
    from tests.pins import commands, language, serving  # noqa: F401  (registers the tables)
    from tests.pins.table import TABLES, differences, write

    if verb not in ("write", "check") or not {*names} <= TABLES.keys():
        print(f"python -m tests.pins write|check [{'|'.join(TABLES)}]...", file=sys.stderr)
        return 2
    lines: list[str] = []
    for name in names or TABLES:
        if verb == "write":
            write(name)
            continue
        try:
            lines += differences(name)
        except Exception as error:  # of one table, which is not to hide the others
            lines.append(f"! {name}: {type(error).__name__}: {error}")
    print(*lines, sep="\n", end="")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
