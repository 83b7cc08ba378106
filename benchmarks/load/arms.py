"""The arms of a comparison: stock vLLM, the base policy alone, and a state; or running servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.load.workload import Cache
from benchmarks.server import ServerDied, serve
from vllm_autoprune import PruningState, load_state

CACHE_FLAGS = ("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0")
FEATURE_CACHE = ("--autoprune-feature-cache-gb", "0")


class Arm(StrictModel):
    """One way to serve the model."""

    name: str
    url: str | None = None
    """Of a running server; None: one is started for every pass."""
    model: str = ""
    flags: tuple[str, ...] = ()
    digest: str | None = None
    """Of the state; None for stock."""
    environment: tuple[tuple[str, str], ...] = ()


def build_arms(
    model: Path,
    state: str,
    *,
    budget: int | None,
    text_tower: Path | None,
    served_name: str,
    common: Sequence[str],
    cache: Cache,
    environment: Sequence[tuple[str, str]] = (),
) -> tuple[Arm, ...]:
    """Stock, the state's base policy alone, and the state; otherwise with the same flags."""
    refined = load_state(state)
    base = load_state(refined.base_policy.name)
    off = cache == "off"
    shared = ("--served-model-name", served_name, *common, *(CACHE_FLAGS if off else ()))
    pruning = (
        *(() if budget is None else ("--autoprune-budget", str(budget))),
        *(() if text_tower is None else ("--autoprune-text-tower", str(text_tower))),
        *(FEATURE_CACHE if off else ()),
    )

    def arm(name: str, of: PruningState | None, flag: str = "") -> Arm:
        flags = shared if of is None else (*shared, "--autoprune-state", flag, *pruning)
        digest = None if of is None else of.digest
        return Arm(
            name=name,
            model=str(model),
            flags=flags,
            digest=digest,
            environment=tuple(environment),
        )

    return (
        arm("stock", None),
        arm("base policy", base, refined.base_policy.name),
        arm("AutoPrune", refined, state),
    )


def parse_attached(pairs: Sequence[str]) -> tuple[Arm, ...]:
    """From ``NAME=URL`` each; raises :class:`BenchmarkError` for anything else."""
    arms = []
    for pair in pairs:
        name, equals, url = pair.partition("=")
        if not (name and equals and url.startswith(("http://", "https://"))):
            raise BenchmarkError(f"--attach {pair}: expected NAME=http://HOST:PORT")
        arms.append(Arm(name=name, url=url.rstrip("/")))
    if len({arm.name for arm in arms}) < len(arms):
        raise BenchmarkError("--attach: two servers have the same name")
    return tuple(arms)


def interleave(arms: Sequence[Arm], passes: int) -> list[tuple[int, Arm]]:
    """ABBA order (ABCCBA): every second pass backwards, so that drift affects all arms alike."""
    return [
        (number, arm)
        for number in range(passes)
        for arm in (arms if number % 2 == 0 else tuple(reversed(arms)))
    ]


@contextlib.contextmanager
def serve_arm(arm: Arm, log: Path) -> Iterator[str]:
    """The address of a server of this arm, for as long as the block lasts."""
    if arm.url is not None:
        yield arm.url
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                serve(arm.model, *arm.flags, env=dict(arm.environment), log=log, patience=600)
            )
        except ServerDied as error:
            last = str(error).splitlines()[-1]
            raise BenchmarkError(
                f"{arm.name}: the server did not start: {last} (log: {log})"
            ) from error
        yield server.url
