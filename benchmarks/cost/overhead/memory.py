"""Resident memory over many requests: a pruned server against one without a state.

The caches of stock vLLM (KV blocks, processed images) are small on both servers, so that they are
full after the warm-up, and growth after that is a leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.common.client import Client
from benchmarks.common.progress import log_progress
from benchmarks.common.report import MIB, Claim, Section, Table
from benchmarks.cost.overhead.settings import STATE, Settings, build_request, image_url
from benchmarks.server import Server, serve
from vllm_autoprune.statistics import slope, verdict_of

REQUESTS, WARM_UP, STEP, CONCURRENCY = 2_000, 200, 20, 8
SIDE = 168
CACHE_GB = 0.02
BOUND = int(CACHE_GB * (1 << 30))
TOLERANCE = 8 * MIB
"""Growth that is tolerated: a stock server's resident memory varies by as much."""

FLAGS = (
    "--enforce-eager", "--max-model-len", "2048", "--block-size", "32",
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
        """Bytes of growth from the warm-up to the end, by the slope over all samples."""
        at, resident = self.after_warm_up()
        return slope(at, resident) * (at[-1] - at[0])

    @property
    def level(self) -> float:
        """Resident bytes after the warm-up, the median over samples."""
        return float(median(self.after_warm_up()[1]))


def measure(settings: Settings) -> Section:
    """Both servers, one after the other, with the same requests."""
    total = 400 if settings.quick else REQUESTS
    cache = ("--autoprune-feature-cache-gb", str(CACHE_GB))
    pruned = ("--autoprune-state", STATE, "--autoprune-text-tower", str(settings.text_tower))
    return build_section(
        total,
        _measure_server(settings, "no state", (), total),
        _measure_server(settings, "state", (*pruned, *cache), total),
    )


def _measure_server(settings: Settings, name: str, flags: Sequence[str], total: int) -> Memory:
    log_progress(f"memory, {name}: start the server")
    log = settings.log(f"memory-{name.replace(' ', '-')}")
    # The arenas of malloc grow with the number of threads, which would look like a leak.
    env = {"MALLOC_ARENA_MAX": "2"}
    with serve(settings.model, *FLAGS, *flags, env=env, log=log) as server:
        return _send_requests(server, name, total)


def _send_requests(server: Server, name: str, total: int) -> Memory:
    memory, client = Memory(server.resident_bytes(), [], []), Client(server.url)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for end in range(STEP, total + 1, STEP):
            bodies = [build_numbered_request(server.model, i) for i in range(end - STEP, end)]
            list(pool.map(lambda body: client.send_together([body]), bodies))
            memory.requests.append(end)
            memory.resident.append(server.resident_bytes())
            if end % 200 == 0:
                size = memory.resident[-1] / MIB
                log_progress(f"memory, {name}: {end} of {total}, {size:.0f} MiB")
    return memory


def build_numbered_request(model: str, number: int) -> bytes:
    """A new picture for each warm-up request, later for every second one; all questions differ."""
    image = number if number < WARM_UP else WARM_UP + (number - WARM_UP) // 2
    return build_request(model, f"What is number {number} here?", image_url(image, SIDE, SIDE))


def build_section(total: int, without: Memory, with_state: Memory) -> Section:
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
                verdict_of(growth <= TOLERANCE),
            ),
            Claim(
                f"extra memory that requests take: the declared bound, {BOUND / MIB:.1f} MiB "
                f"(to within {TOLERANCE / MIB:.0f} MiB)",
                f"{by_requests / MIB:+.1f} MiB",
                verdict_of(by_requests <= BOUND + TOLERANCE),
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
