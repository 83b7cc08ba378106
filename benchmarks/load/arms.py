"""The arms of a comparison: stock vLLM, the base policy alone, and a state; or running servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.shapes import write_llava
from benchmarks.load.settings import SHAPE, PairedOptions
from benchmarks.minillava.split import CLIP, LLAVA
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


def choose_arms(options: PairedOptions) -> tuple[Arm, ...]:
    """The running servers; else stock, the state's base policy alone and the state, by this order.

    The three servers have the same flags otherwise.
    """
    if options.attach:
        return tuple(Arm(name=name, url=url.rstrip("/")) for name, url in options.attach)
    model, tower, common = Path(options.model), options.text_tower, options.server_flags
    if options.model.startswith(f"{SHAPE}:"):
        layers = options.model.partition(":")[2]
        if not layers.isdecimal() or int(layers) < 1:
            raise BenchmarkError(f"--model {options.model}: {layers!r} is not a whole number")
        folder = Path("out/load") / f"llava-{layers}-{options.tower_layers}-{options.width}"
        model = write_llava(
            folder, int(layers), tower_layers=options.tower_layers, width=options.width
        )
        common = (*common, "--load-format", "dummy")
    elif model == LLAVA:
        tower = tower or CLIP
    elif not model.exists() and len(model.parts) != 2:
        raise BenchmarkError(
            f"--model {model}: no such folder -> name a checkpoint, ORGANISATION/NAME on the "
            f"Hub, or {SHAPE}:LAYERS"
        )
    off = options.cache == "off"
    shared = ("--served-model-name", options.served_name, *common, *(CACHE_FLAGS if off else ()))
    pruning = (
        *(() if options.budget is None else ("--autoprune-budget", str(options.budget))),
        *(() if tower is None else ("--autoprune-text-tower", str(tower))),
        *(FEATURE_CACHE if off else ()),
    )
    state = load_state(options.state)
    base = load_state(state.base_policy.name)

    def arm(name: str, served: PruningState | None, flag: str = "") -> Arm:
        own = () if served is None else ("--autoprune-state", flag, *pruning)
        return Arm(
            name=name,
            model=str(model),
            flags=(*shared, *own),
            digest=None if served is None else served.digest,
            environment=(("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gb)),),
        )

    return (
        arm("stock", None),
        arm("base policy", base, state.base_policy.name),
        arm("AutoPrune", state, options.state),
    )


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
