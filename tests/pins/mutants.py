"""Mutants of the product, each with a unit test that finds it, in ``mutants.csv``.

``python -m tests.pins.mutants record`` draws them, always the same, among lines that unit tests
run. ``check`` applies the recorded ones to the code as it is now: a line is looked for by its text,
so it may have moved; exit status 1 where one that was found survives. Both go on where they were
stopped, take half an hour or more, need ``coverage``, and work on a copy: they write this table
and ``out/mutants`` only.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import csv
import importlib
import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.csv")
COLUMNS = ("file", "function", "line", "mutant", "found_by")
SURVIVES, NOT_FOUND = "survives", "not found"

COUNT = 300
PACKAGES = ("vllm_autoprune", "offline_search")
ROOMS = ("ops", "tpdsl", "base_policies", "serving")
"""Rooms of the first package that are mutated; the second is as a whole."""

QUIETLY = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
UNIT_TESTS = ("-m", "not engine and not slow", "tests")
LEFT_OUT = ("pins", "benchmarks", "docs", "hostile", "test_wheel.py")
"""Tests of other things than the product, or of everything at once."""

SLOW, PATIENCE = 5.0, 60.0
"""Seconds of a test that is left out, and of all tests of a mutant."""

BATCHES = (30, 300)
"""Tests that are run first, and all that are run: most mutants are found by the first."""

PRELOADED = ("torch", "transformers", "vllm.config", "vllm.engine.arg_utils")
"""Imported once, not for every mutant."""

FORK = multiprocessing.get_context("fork")

OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""What takes the place of an operator."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A line of a function, without its indentation, and what takes its place."""

    file: str
    function: str
    line: str
    mutant: str


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What takes the place of a node: an expression or a statement."""
    changed: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OTHER:
            changed.ops = [OTHER[type(operator)]()]
            yield changed
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OTHER:
            changed.op = OTHER[type(operator)]()
            yield changed
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield from (ast.Constant(value + step) for step in (1, -1))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))


def walk(text: str) -> Iterator[tuple[ast.AST, str, range]]:
    """Each node but those of annotations and f-strings, with its function and the lines of that."""
    waiting: list[tuple[ast.AST, str, range]]
    waiting = [(ast.parse(text), "", range(1, text.count("\n") + 2))]
    while waiting:
        node, function, lines = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        yield node, function, lines
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                nodes = [n for n in children if isinstance(n, ast.AST)]
                waiting += [(n, function, lines) for n in nodes if not isinstance(n, ast.JoinedStr)]


def mutants_of(file: str, text: str) -> Iterator[tuple[int, Mutant]]:
    """Mutants of single lines whose text is unique in their function, by the line's number."""
    source = text.splitlines()
    for node, function, lines in walk(text):
        for changed in changes(node):
            place: Any = changed if hasattr(changed, "lineno") else node
            raw = source[place.lineno - 1].encode()
            before, after = raw[: place.col_offset].decode(), raw[place.end_col_offset :].decode()
            new, old = f"{before}{ast.unparse(changed)}{after}".strip(), raw.decode().strip()
            unique = [source[i - 1].strip() for i in lines if i <= len(source)].count(old) == 1
            if place.lineno == place.end_lineno and unique and new != old:
                yield place.lineno, Mutant(file, function, old, new)


class Tree:
    """A copy of the tracked files, and the tests that run each of their lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        state = sha256()
        for name in listed.split("\0")[:-1]:
            content, path = (ROOT / name).read_bytes(), folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if name.endswith(".py") and not name.startswith("tests/pins/"):
                state.update(content)
        (ROOT / "out" / "mutants").mkdir(parents=True, exist_ok=True)
        self.stem = ROOT / "out" / "mutants" / state.hexdigest()[:16]
        if not self.stem.with_suffix(".json").exists():
            measurement = FORK.Process(target=measure, args=(folder, self.stem))
            measurement.start()
            measurement.join()
        self._seconds: dict[str, float] = json.loads(self.stem.with_suffix(".json").read_text())
        self._data = coverage.CoverageData(str(self.stem.with_suffix(".coverage")))
        self._data.read()
        self._sources = {
            str(path.relative_to(folder)): path.read_text(encoding="utf-8")
            for package in PACKAGES
            for path in sorted((folder / package).rglob("*.py"))
        }
        self._applied = 0

    def tests(self, file: str, number: int) -> list[str]:
        """Tests that run a line: first those whose path is most like its own, then the quickest."""
        measured = [path for path in self._data.measured_files() if path.endswith(f"/{file}")]
        contexts = self._data.contexts_by_lineno(measured[0]) if measured else {}
        names = {*contexts.get(number, ())}
        if names == {""}:  # run by an import
            names = {name for names in contexts.values() for name in names}
        known = [name for name in names if self._seconds.get(name, SLOW) < SLOW]
        parts = Path(file).with_suffix("").parts
        close = {test: sum(part in file_of(test) for part in parts) for test in known}
        return sorted(known, key=lambda test: (-close[test], self._seconds[test], test))

    def draw(self) -> list[Mutant]:
        """Mutants of lines that tests run; each line is as likely."""
        chance = random.Random(0)
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for file, text in self._sources.items():
            if file.split("/")[1] in ROOMS or file.startswith(PACKAGES[1]):
                for number, mutant in mutants_of(file, text):
                    by_line.setdefault((file, number), []).append(mutant)
        places = sorted(by_line)
        chance.shuffle(places)
        drawn = (chance.choice(by_line[place]) for place in places if self.tests(*place))
        return [*islice(drawn, COUNT)]

    def find(self, mutant: Mutant) -> tuple[str, int] | None:
        """Place of a mutant's line: in its function, in one of that name, or anywhere."""
        places: tuple[set[tuple[str, int]], ...] = (set(), set(), set())
        for file, text in self._sources.items():
            lines = [line.strip() for line in text.splitlines()]
            numbers = {i for i, line in enumerate(lines, 1) if line == mutant.line}
            places[2].update((file, number) for number in numbers)
            for _, function, inside in walk(text) if numbers else ():
                here = {(file, number) for number in numbers if number in inside}
                if function.rpartition(".")[2] == mutant.function.rpartition(".")[2]:
                    places[1].update(here)
                if (file, function) == (mutant.file, mutant.function):
                    places[0].update(here)
        return next((level.pop() for level in places if len(level) == 1), None)

    @contextlib.contextmanager
    def applied(self, mutant: Mutant, file: str, number: int) -> Iterator[None]:
        """The copy with the mutant in it, at a time of its own: compiled files go by that."""
        path, text = self.folder / file, self._sources[file]
        changed = path.stat().st_mtime
        lines = text.splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace(mutant.line, mutant.mutant)
        self._applied += 1
        try:
            path.write_text("".join(lines), encoding="utf-8")
            os.utime(path, (self._applied, self._applied))
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, (changed, changed))

    def find_test(self, mutant: Mutant, recorded: Sequence[str]) -> str:
        """The test that finds a mutant: one that fails with it, and passes without it."""
        place = self.find(mutant)
        if place is None:
            return NOT_FOUND
        tests = list(dict.fromkeys([*recorded, *self.tests(*place)]))
        tests = [test for test in tests if (self.folder / file_of(test)).exists()]
        deadline = time.monotonic() + PATIENCE
        for batch in (tests[: BATCHES[0]], tests[slice(*BATCHES)]):
            while batch and (remaining := deadline - time.monotonic()) > 0:
                with self.applied(mutant, *place):
                    failed = self._run(batch, remaining)
                if not failed:
                    break
                if not self._run([failed], PATIENCE):
                    return failed
                batch = [test for test in batch if test != failed]
        return SURVIVES

    def _run(self, tests: Sequence[str], seconds: float) -> str:
        """The test that fails first, in a forked process; empty where none does in this time."""
        receive, send = FORK.Pipe(duplex=False)
        process = FORK.Process(target=run_tests, args=(self.folder, tests, send))
        process.start()
        send.close()
        failed = ""
        with contextlib.suppress(EOFError):
            failed = receive.recv() if receive.poll(seconds) else ""
        process.kill()
        process.join()
        return failed


def file_of(test: str) -> str:
    """The file of a test's name."""
    return test.partition("::")[0]


def enter(folder: Path) -> None:
    """Let this process import the product and its tests from a folder."""
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def run_tests(folder: Path, tests: Sequence[str], send: Connection) -> None:
    """Run tests of a folder, in this process, up to the first that fails."""
    enter(folder)
    plugin, status = Observer(tests), 1
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()):
        files = dict.fromkeys(map(file_of, tests))
        options = ("-x", "--timeout=20", f"--basetemp={folder / 'out'}")
        status = pytest.main([*QUIETLY, *options, *files], plugins=[plugin])
    # What stops pytest itself, such as a conftest that cannot be imported, is found by any.
    send.send(plugin.failed or ("" if status in (0, 5) else tests[0]))


def measure(folder: Path, stem: Path) -> None:
    """Write which tests run each line, and their seconds."""
    enter(folder)
    measurement = coverage.Coverage(str(stem.with_suffix(".coverage")), source=[*PACKAGES])
    plugin = Observer(measurement=measurement)
    others = [f"--ignore=tests/{name}" for name in LEFT_OUT]
    measurement.start()
    pytest.main([*QUIETLY, *UNIT_TESTS, *others], plugins=[plugin])
    measurement.stop()
    measurement.save()
    stem.with_suffix(".json").write_text(json.dumps(plugin.seconds))


class Observer:
    """Pytest plugin: seconds of tests that pass, and the first that fails.

    Runs the given tests alone, in their order; with a measurement, each as a context of it.
    """

    def __init__(
        self, tests: Sequence[str] = (), measurement: coverage.Coverage | None = None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.failed = ""
        self._order = {test: place for place, test in enumerate(tests)}
        self._measurement = measurement

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order:
            chosen = [item for item in items if item.nodeid in self._order]
            items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._measurement is not None:
            self._measurement.switch_context(item.nodeid)
        yield
        if self._measurement is not None:
            self._measurement.switch_context("")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")
        seconds = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = round(seconds, 3) if report.passed else SLOW


def read(path: Path) -> dict[Mutant, str]:
    """Mutants of a table with the test that finds each."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {Mutant(*row[:4]): row[4] for row in [*csv.reader(file)][1:]}


def append(path: Path, row: Sequence[str]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([row] if file.tell() else [COLUMNS, row])


def main(verb: str = "") -> int:
    """Exit status 1 where a mutant survives that was found, 2 for wrong arguments."""
    if verb not in ("record", "check"):
        print("python -m tests.pins.mutants record|check", file=sys.stderr)
        return 2
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        tree, recorded = Tree(Path(name)), read(TABLE)
        path, mutants = TABLE, tree.draw()
        if verb == "check":
            path = tree.stem.with_suffix(".csv")
            mutants = [mutant for mutant, test in recorded.items() if test != SURVIVES]
        results = read(path)
        for number, mutant in enumerate(mutants, 1):
            if mutant not in results:
                known = [recorded[mutant]] if mutant in recorded else []
                results[mutant] = tree.find_test(mutant, known)
                append(path, [*astuple(mutant), results[mutant]])
            print(f"{number}/{len(mutants)} {mutant.file}: {results[mutant]}", flush=True)
    if verb == "record":
        return 0
    for mutant, test in results.items():
        if test in (SURVIVES, NOT_FOUND):
            print(f"{test}: {mutant.file}, {mutant.function}: {mutant.line} -> {mutant.mutant}")
    return 1 if SURVIVES in results.values() else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
