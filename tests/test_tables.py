"""Tables of cases: each is of a test, so that none is left behind unread."""

from __future__ import annotations

from pathlib import Path

from tests.tables import read_tables


def test_every_table_is_of_a_test_that_reads_it() -> None:
    unread = []
    for path in Path(__file__).parent.rglob("test_*.yaml"):
        module = path.with_suffix(".py").read_text(encoding="utf-8")
        for table in read_tables(path):
            head, _, _ = module.partition(f"def test_{table}(")
            decorators = head.rpartition("\n\n\n")[2]
            parametrizes = head != module and "@parametrize_from_file(" in decorators
            looks_up = "read_tables(" in module and f'"{table}"' in module
            if not parametrizes and not looks_up:
                unread.append(f"{path.name}: {table}")
    assert unread == []
