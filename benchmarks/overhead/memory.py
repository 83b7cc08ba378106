"""Resident memory over many requests: a pruned server against one without a state.

Knows nothing about time. Caches that stock vLLM has too (KV blocks, processed images) are made
small for both servers, so that they are full after the warm-up and what grows later is a leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.overhead.content import body, image_url
from benchmarks.overhead.measure import timed
from benchmarks.overhead.report import Claim, Section, Table
from benchmarks.overhead.resident import MIB, resident_of_group
from benchmarks.overhead.setting import STATE, Setting, progress
from benchmarks.overhead.statistics import plainly, slope
from benchmarks.server import Server, serve

REQUESTS, WARM_UP, STEP, CONCURRENCY = 2_000, 200, 20, 8
SIDE = 168
CACHE_GB = 0.02
BOUND = int(CACHE_GB * (1 << 30))
TOLERANCE = 8 * MIB
"""What counts as no growth: resident memory of a stock server moves by as much on its own."""

FLAGS = (
    "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--block-size", "32",
    "--num-gpu-blocks-override", "256", "--mm-processor-cache-gb", "0.02",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Resident bytes of one server: when ready, and after every STEP requests."""

    ready: int
    requests: list[int]
    resident: list[int]

    def after_warm_up(self) -> tuple[list[int], list[int]]:
        """Requests and resident bytes once caches are full."""
        later = [i for i, sent in enumerate(self.requests) if sent >= WARM_UP]
        return [self.requests[i] for i in later], [self.resident[i] for i in later]

    @property
    def growth(self) -> float:
        """Bytes by which it grows from the warm-up to the end, by the slope over all samples."""
        at, resident = self.after_warm_up()
        return slope(at, resident) * (at[-1] - at[0])

    @property
    def level(self) -> float:
        """Resident bytes after the warm-up, the median over samples."""
        return float(median(self.after_warm_up()[1]))


def measure(setting: Setting) -> Section:
    """Both servers, one after the other, with the same requests."""
    total = 400 if setting.quick else REQUESTS
    cache = ("--autoprune-feature-cache-gb", str(CACHE_GB))
    pruned = ("--autoprune-state", STATE, "--autoprune-text-tower", str(setting.text_tower))
    return section(
        total,
        _one(setting, "no state", (), total),
        _one(setting, "state", (*pruned, *cache), total),
    )


def _one(setting: Setting, name: str, flags: Sequence[str], total: int) -> Memory:
    progress(f"memory, {name}: start the server")
    log = setting.log(f"memory-{name.replace(' ', '-')}")
    # Arenas of malloc grow with the number of threads and would be taken for a leak.
    env = {"MALLOC_ARENA_MAX": "2"}
    with serve(setting.model, *FLAGS, *flags, env=env, log=log) as server:
        return _ask(server, name, total)


def _ask(server: Server, name: str, total: int) -> Memory:
    memory = Memory(_resident(server), [], [])
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for begun in range(0, total, STEP):
            bodies = [request(server.model, i) for i in range(begun, begun + STEP)]
            list(pool.map(lambda sent: timed(server.url, sent), bodies))
            memory.requests.append(begun + STEP)
            memory.resident.append(_resident(server))
            if (begun + STEP) % 200 == 0:
                held = memory.resident[-1] / MIB
                progress(f"memory, {name}: {begun + STEP} of {total}, {held:.0f} MiB")
    return memory


def request(model: str, number: int) -> bytes:
    """A new picture each time in the warm-up, then two questions on each; all questions differ."""
    image = number if number < WARM_UP else WARM_UP + (number - WARM_UP) // 2
    return body(model, f"What is number {number} here?", image_url(image, SIDE, SIDE))


def _resident(server: Server) -> int:
    return sum(resident_of_group(server.process.pid).values())


def section(total: int, without: Memory, with_state: Memory) -> Section:
    """Claims and figures."""
    growth = with_state.growth - without.growth
    at_start = with_state.ready - without.ready
    by_requests = (with_state.level - with_state.ready) - (without.level - without.ready)
    rows = [
        (name, *(f"{value / MIB:.1f}" for value in (m.ready, m.level, m.growth)))
        for name, m in (("no state", without), ("state", with_state))
    ]
    return Section(
        name="memory",
        title="Resident memory",
        setup=[
            f"mini-LLaVA, {total} requests, {CONCURRENCY} at a time, the first {WARM_UP} of them "
            "warm-up; a new picture for every other request, every question new",
            f"feature cache bounded to {BOUND / MIB:.1f} MiB (`--autoprune-feature-cache-gb "
            f"{CACHE_GB}`), full by the end of the warm-up",
            "resident memory is the sum over the processes of the server's group",
            f"the state's server starts {at_start / MIB:+.1f} MiB larger, before any request: "
            "text tower, and the code that loads it",
        ],
        claims=[
            Claim(
                f"no growth over {total} requests beyond a server without a state "
                f"(to within {TOLERANCE / MIB:.0f} MiB)",
                f"{growth / MIB:+.1f} MiB",
                plainly(growth <= TOLERANCE),
            ),
            Claim(
                f"extra memory that requests take: the declared bound, {BOUND / MIB:.1f} MiB "
                f"(to within {TOLERANCE / MIB:.0f} MiB)",
                f"{by_requests / MIB:+.1f} MiB",
                plainly(by_requests <= BOUND + TOLERANCE),
            ),
        ],
        tables=[
            Table(
                "Resident memory, MiB.",
                ("server", "when ready", "after the warm-up (median)", "growth from there"),
                rows,
            )
        ],
        data={"no state": asdict(without), "state": asdict(with_state), "bound": BOUND},
    )
