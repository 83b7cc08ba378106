"""The demo from questions to its table, against fake servers; its one-line failures; Ctrl-C."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks import BenchmarkError, demo
from benchmarks.common.client import Client
from benchmarks.server import ServerDied
from benchmarks.yardsticks.examples import draw_examples
from tests.fake_server import Body, Reply, fake_server
from vllm_autoprune.stream import EMPTY

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"


def pruning(body: Body) -> dict[str, object]:
    """The pruning fields of a request."""
    return dict(body.get("mm_processor_kwargs", {}).get("autoprune", {}))


def parts(body: Body) -> tuple[dict[str, Any], str]:
    """Image and question of a request."""
    image, question = body["messages"][0]["content"]
    return image, question["text"]


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Body]]:
    """What each fake server gets, by the name of its log; answers are right unless resized."""
    examples = draw_examples("test", 2)
    right = {(f"asked-{e.image_id}", e.question): e.answer for e in examples}
    requests: dict[str, list[Body]] = {}

    def reply(body: Body) -> Reply:
        fields = pruning(body)
        (image, question) = parts(body)
        text = right.get((str(image.get("uuid")), question), "w1")
        text = "none" if fields.get("keep") == "resized" else text
        # Later requests may be answered earlier.
        tokens = 20 + int(str(fields.get("budget", 144)))
        return Reply(
            tuple(text),
            ttft=0.01 * (len(question) % 3),
            usage={"prompt_tokens": tokens},
        )

    @contextlib.contextmanager
    def serve(model: Path, *flags: str, log: Path) -> Iterator[SimpleNamespace]:
        with fake_server(reply, model=None) as server:
            yield SimpleNamespace(url=server.url)
        requests[log.stem] = server.requests

    monkeypatch.setattr(demo, "serve", serve)
    monkeypatch.setattr(demo, "_SCENES", 2)
    for name, number in (("_ALONE", 2), ("_TOGETHER", 8), ("_IMAGES", 2)):
        monkeypatch.setattr(demo, name, number)
    return requests


def test_the_tables_say_what_was_measured(
    sent: dict[str, list[Body]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [0.9, 0.1, 0.1])
    monkeypatch.setattr("os.getloadavg", lambda: (4.0, 4.0, 4.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with handlers_restored():
        assert demo.main(["--out", str(tmp_path)]) == 0
    tables, log = capsys.readouterr()
    assert tables == (tmp_path / "tables.md").read_text()
    assert "| prompt of a request, tokens | 164 | 164 | 164 |" in tables
    # 2 x 4 layers x 2,048 x 4 or 2 bytes a token
    assert re.search(
        r"\| KV cache of a request, MB \| (10\.7|5\.4) \| \1 \| \1 \|", tables
    )
    assert (
        "| image resized | 0.0 ± 4.9 |" in tables
        and "| all tokens | 100.0 ± 4.9 |" in tables
    )
    # 130 s, three times as many at a load of 4 on 2 cores, + 1,070 x 0.1 s
    assert "load average is 4.0 on 2 cores" in " ".join(log.split())
    assert "takes about 9 minutes" in " ".join(log.split())


def test_arms_are_asked_alike_and_find_nothing_of_each_other_in_caches(
    sent: dict[str, list[Body]], tmp_path: Path
) -> None:
    with handlers_restored():
        assert demo.main(["--out", str(tmp_path)]) == 0
    # mini-LLaVA is asked the same questions in every arm.
    questions = Counter(parts(body)[1] for body in sent["stock"])
    for choice in demo._CHOICES.values():
        fields = {"budget": 16, **choice}
        of_arm = [body for body in sent["pruned"] if pruning(body) == fields]
        assert Counter(parts(body)[1] for body in of_arm) == questions
    # Arms of the large model share no image on a server, and each has new words in every request.
    arms = [sent["speed-stock"]]
    for field in (None, "resized"):
        arms.append(
            [
                body
                for body in sent["speed-pruned"]
                if pruning(body).get("keep") == field
            ]
        )
    for arm in arms:
        assert len(arm) == len({parts(body)[1] for body in arm}) == 2 + 2 + 8 + 2 * 2
        # Only the images of two questions are sent again.
        images = Counter(parts(body)[0]["image_url"]["url"] for body in arm)
        assert Counter(images.values()) == {1: 2 + 2 + 8, 2: 2}
    pruned, resized = ({str(parts(body)[0]) for body in arm} for arm in arms[1:])
    assert not pruned & resized


def test_the_tables_of_the_readme_are_those_of_its_data() -> None:
    rows = csv.DictReader(
        (README.parent / "docs/data/demo.csv").read_text().splitlines()
    )
    figures = []
    for row in rows:
        ends = [
            float(row[name]) if row[name] else None for name in ("value", "low", "high")
        ]
        cells = [row["what"], row["model"], row["arm"], *ends, row["unit"]]
        figures.append(demo._Figure._make(cells))
    shown = (
        README.read_text()
        .partition("<!-- demo -->\n")[2]
        .partition("<!-- /demo -->")[0]
    )
    assert demo._format_tables(figures) == shown


@pytest.mark.parametrize(
    ("rights", "width"),
    [
        # Wilson for p = 1/2: 1.96 sqrt(1/4 / 40 + 1.96^2 / (4 * 40^2)) / (1 + 1.96^2 / 40)
        ([(number // 20, number % 2 == 0) for number in range(40)], 0.1480),
        # Scenes of 0 and 1: 1.96 x sqrt(0.5) / sqrt(2)
        ([(number // 20, number < 20) for number in range(40)], 0.98),
    ],
)
def test_correlated_scenes_widen_the_interval(
    rights: list[tuple[int, bool]], width: float
) -> None:
    assert demo._half_width(rights) == pytest.approx(width, abs=1e-4)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            Reply(status=400, error="no such budget"),
            "not answered: status 400: .*no such",
        ),
        (Reply(("",), ttft=0.0), "not answered: the answer contains no text"),
    ],
)
def test_a_failed_question_ends_the_demo(reply: Reply, message: str) -> None:
    with fake_server(reply, model=None) as server:
        client = Client(server.url)
        bodies = [b'{"stream": true}'] * 3
        with pytest.raises(BenchmarkError, match=message):
            client.send_all(bodies)
        if reply.status == 200:
            records = client.send_all(bodies, accepted=EMPTY)
            assert [record.text for record in records] == [""] * 3


def test_a_server_that_does_not_start_is_one_line_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(model: Path, *flags: str, log: Path) -> None:
        log.write_text("INFO x\n\nvllm-autoprune: cannot serve:\n  - bad -> fix")
        raise ServerDied.diagnose(log)

    monkeypatch.setattr(demo, "serve", serve)
    with handlers_restored():
        assert demo.main(["--out", str(tmp_path)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"demo: the server did not start: .*stock\.log: cannot serve: - bad -> fix",
        line,
    )


# The demo as it is, but what it starts is the stand-in.
_SCRIPT = """
import signal, sys
from benchmarks import server
from benchmarks.demo import main

# What a shell starts in the background ignores Ctrl-C, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
server.command = lambda model, port, *more: [sys.executable, sys.argv[1], str(port), *sys.argv[2:4]]
sys.exit(main(["--out", sys.argv[4]]))
"""


@pytest.mark.parametrize(
    ("health", "sent_signal"),
    [("starting", signal.SIGINT), ("healthy", signal.SIGTERM)],
)
def test_an_interrupt_ends_the_whole_group_of_the_server(
    tmp_path: Path, health: str, sent_signal: signal.Signals
) -> None:

    def alive(pid: int) -> bool:
        return (
            psutil.pid_exists(pid)
            and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )

    pids = tmp_path / "pids"
    arguments = [str(HERE / "hanging_server.py"), str(pids), health, str(tmp_path)]
    awaited = pids.with_suffix(".asked") if health == "healthy" else pids
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *arguments],
        cwd=README.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not awaited.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server, child = map(int, pids.read_text().split())
            assert alive(server) and alive(child)
            process.send_signal(sent_signal)
            time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    process.pid, sent_signal
                )  # an impatient second one changes nothing
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and out == ""
    assert not alive(server) and not alive(child)
    assert err.splitlines()[-1] == "demo: stopped, no server is left running"
    assert "Traceback" not in err
