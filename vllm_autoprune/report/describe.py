"""Description of a state in words and fields, and comparison of two states."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import RankAt
from vllm_autoprune.tpdsl.transfer import Change, list_changes, state_document


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two states; equal digests mean equal behaviour."""

    digests: tuple[str, str]
    changes: tuple[Change, ...]

    @property
    def same_behaviour(self) -> bool:
        """Whether only names and provenance may differ."""
        return self.digests[0] == self.digests[1]


def compare(first: PruningState, second: PruningState) -> Comparison:
    """Compare two states field by field, with default values written out."""
    changes = list_changes(state_document(first), state_document(second))
    return Comparison((first.digest, second.digest), changes)


Parameters = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Part:
    """One atom as a state uses it."""

    atom: str
    parameters: Parameters
    doc: str


@dataclass(frozen=True, slots=True)
class SignalPart:
    """One signal: its weight, and its share of all weights."""

    atom: str
    weight: float
    share: float
    parameters: Parameters
    doc: str


@dataclass(frozen=True, slots=True)
class CorePart:
    """The core at one budget: its policy, and the largest number of its tokens."""

    tokens: int
    policy: Part
    share: float
    cover: float
    strength: float


@dataclass(frozen=True, slots=True)
class Description:
    """Fields of a state at one budget; ``budget`` is the smallest and largest K of an image.

    ``reads`` are the inputs beyond features; ``words`` are sentences that describe the state.
    """

    name: str
    digest: str
    budget: tuple[int, int]
    budget_atom: Part
    base_policy: Part
    source: Part
    rank_at: RankAt
    priors: tuple[Part, ...]
    core: CorePart | None
    q_e: int
    r_min: int
    signals: tuple[SignalPart, ...]
    kernel: Part
    fusion: Part
    pool: tuple[Part, ...]
    partition: Part
    selector: Part
    reassembly: Part
    safety: tuple[Part, ...]
    reads: tuple[str, ...]
    provenance: Parameters
    words: tuple[str, ...]


def describe(state: PruningState, budget: int | None = None) -> Description:
    """Describe a state at K, by default its own; raises :class:`BudgetError` for a wrong K."""
    policy = materialize(state, budget)
    calls = state.scoring.signals
    total = sum(call.weight for call in calls) or 1.0
    return Description(
        name=state.name,
        digest=state.digest,
        budget=_range(policy),
        budget_atom=_part(state.budget),
        base_policy=_base_part(state.base_policy),
        source=_part(state.source.tokens),
        rank_at=state.rank_at,
        priors=tuple(_part(call) for call in state.source.priors),
        core=_core(policy),
        q_e=policy.quota,
        r_min=policy.r_min,
        signals=tuple(
            SignalPart(
                call.atom,
                call.weight,
                call.weight / total,
                _parameters(call, without=("weight",)),
                ATOMS.of(call).doc,
            )
            for call in calls
        ),
        kernel=_part(state.scoring.kernel),
        fusion=_part(state.scoring.fusion),
        pool=tuple(_part(call) for call in state.constraints.pool),
        partition=_part(state.constraints.partition),
        selector=_part(state.constraints.selector),
        reassembly=_part(state.reassembly),
        safety=tuple(_part(call) for call in state.safety),
        reads=tuple(sorted(policy.needs)),
        provenance=state.provenance.model_dump(mode="json"),
        words=_words(policy),
    )


def _base_part(call: BasePolicyCall) -> Part:
    return Part(call.name, call.params.model_dump(mode="json"), BASE_POLICIES[call.name].doc)


def _core(policy: PruningPolicy) -> CorePart | None:
    core = policy.state.core
    if core is None:
        return None
    return CorePart(policy.core, _base_part(core.policy), core.share, core.cover, core.strength)


def _part(call: AtomCall) -> Part:
    return Part(call.atom, _parameters(call), ATOMS.of(call).doc)


def _parameters(call: AtomCall, without: tuple[str, ...] = ()) -> Parameters:
    dumped: Parameters = call.model_dump(mode="json", exclude={"atom", *without})
    return dumped


def _range(policy: PruningPolicy) -> tuple[int, int]:
    return policy.state.budget.range() if policy.varies else (policy.budget, policy.budget)


_SHARES_ALL = "It does not read the instruction, so all questions on one image share its KV cache."


def _ranking(state: PruningState) -> tuple[str, ...]:
    if state.rank_at == "merger_out":
        return ()
    return ("Tokens are ranked by what enters the patch merger, before it merges them.",)


def _words(policy: PruningPolicy) -> tuple[str, ...]:
    state, (least, most) = policy.state, _range(policy)
    k = f"{most}" if least == most else f"{least} to {most}, by its size,"
    base = policy.base.name
    sentences = [f"Keeps {k} visual tokens of every image, starting from those that {base} picks."]
    if state.core is not None and policy.core:
        of = state.core.policy.name
        if policy.core == policy.budget:
            kept = f"Keeps {k} visual tokens of every image, all chosen by {of}."
            return (kept, *_ranking(state), _SHARES_ALL)
        share = f"{policy.core}" if least == most else f"{state.core.share:.0%}"
        sentences = [
            f"Keeps {k} visual tokens of every image.",
            f"{share} of them are the core, chosen by {of} without the question; the others, the "
            f"delta, start from those that {base} picks given the core.",
        ]
    if policy.refines:
        pools = ", then ".join(call.atom for call in state.constraints.pool)
        count = sum(call.weight > 0 for call in state.scoring.signals)
        sentences.append(
            f"At most {policy.quota} of them are exchanged for candidates, so at least "
            f"{policy.r_min} stay."
        )
        sentences.append(
            f"Quality is the {state.scoring.fusion.atom} of {count} signals; candidates come "
            f"from {pools}."
        )
    else:
        sentences.append("Nothing is exchanged: the base policy alone chooses.")
    sentences += _ranking(state)
    if policy.reads_instruction and policy.core:
        sentences.append(
            "Only the delta reads the instruction: questions on one image share the KV cache of "
            "its core."
        )
    elif policy.reads_instruction:
        sentences.append(
            "It reads the instruction, so two questions on one image may keep different tokens and "
            "share no KV cache."
        )
    else:
        sentences.append(_SHARES_ALL)
    if not policy.falls_back:
        sentences.append(
            "If it fails at run time, it does not fall back to the base policy's selection."
        )
    return tuple(sentences)
