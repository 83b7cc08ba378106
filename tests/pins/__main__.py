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
    from tests.pins.table import DATA, TABLES, differences, render

    if verb not in ("write", "check") or not {*names} <= TABLES.keys():
        print(
            f"python -m tests.pins write|check [{'|'.join(TABLES)}]...", file=sys.stderr
        )
        return 2
    lines: list[str] = []
    for name in names or TABLES:
        if verb == "check":
            lines += differences(name)
        else:
            (DATA / f"{name}.json").write_text(render(name), encoding="utf-8")
    print(*lines, sep="\n", end="")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
