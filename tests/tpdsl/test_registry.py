from __future__ import annotations

import pytest

from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall, Group, Registry, atom, declare
from vllm_autoprune.tpdsl.state import PruningState

BY_GROUP: dict[Group, list[str]] = {
    "budget_control": [
        f"fixed_budget@{k}" for k in (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
    ],
    "scoring": [
        "instruction_guided_visual_relevance",
        "attention_proxy_saliency",
        "spatial_centrality_prior",
        "redundancy_density_penalty",
        "local_contrast_saliency",
    ],
    "similarity_kernel": ["pairwise_cosine_kernel", "runtime_conditional_similarity_kernel"],
    "score_fusion": ["weighted_product_fusion"],
    "candidate_pool": ["quality_pool_builder", "diversity_pool_builder"],
    "selection_constraints": [
        "reference_residual_exchange_selector",
        "anchor_controlled_pool_dpp_selector",
    ],
    "reassembly": ["mean_residual"],
    "safety_checks": [
        "preserve_budget",
        "no_shape_change",
        "deterministic",
        "fallback_to_selection",
    ],
}
EVERY_ATOM = [(group, name) for group, names in BY_GROUP.items() for name in names]


@pytest.mark.parametrize("group", BY_GROUP)
def test_the_atoms_of_each_group(group: Group) -> None:
    # Atoms may be added; none may be removed, because states name them.
    assert set(BY_GROUP[group]) <= set(ATOMS.names(group))


def test_every_atom_is_in_exactly_one_group() -> None:
    listed = [name for group in ROLES for name in ATOMS.names(group)]
    assert sorted(listed) == sorted(ATOMS.names()) and len(set(listed)) == len(ATOMS)


@pytest.mark.parametrize("name", ATOMS.names())
def test_atoms_and_parameters_are_documented(name: str) -> None:
    entry = ATOMS[name]
    assert entry.name == name and entry.role == ROLES[entry.group]
    assert entry.doc.endswith(".") and "\n" not in entry.doc
    for parameter in entry.call.parameters():
        field = entry.call.model_fields[parameter]
        assert field.description, f"{name}.{parameter} has no description"
        assert not field.is_required(), f"{name}.{parameter} has no default"


@pytest.mark.parametrize("name", ATOMS.names())
def test_call_accepts_only_its_own_name(name: str) -> None:
    call = ATOMS[name].call
    assert ATOMS.of(call.model_validate({"atom": name})) is ATOMS[name]
    with pytest.raises(ValueError, match=r"atom\n  Input should be"):
        call.model_validate({"atom": "another"})


def test_parameters_are_listed_without_the_name() -> None:
    selector = ATOMS["anchor_controlled_pool_dpp_selector"].call
    assert selector.parameters() == ("q_e", "r_min")
    assert ATOMS["preserve_budget"].call.parameters() == ()


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("instruction_guided_visual_relevance", {"instruction", "words"}),
        ("attention_proxy_saliency", {"cls_attention"}),
        ("spatial_centrality_prior", set()),
        ("redundancy_density_penalty", set()),
        ("local_contrast_saliency", set()),
    ],
)
def test_a_signal_says_which_costly_inputs_it_reads(name: str, needs: set[str]) -> None:
    assert ATOMS[name].needs == needs


def test_only_names_of_the_paper_are_marked() -> None:
    ours = [name for name in ATOMS.names() if not ATOMS[name].paper]
    assert "diversity_pool_builder" in ours
    assert "quality_pool_builder" not in ours


def test_duplicate_name_is_refused() -> None:
    def quality_pool_builder() -> None:
        """Another of that name."""

    with pytest.raises(ValueError, match="'quality_pool_builder' is declared twice"):
        atom("candidate_pool")(quality_pool_builder)


def test_a_declaration_enters_name_group_parameters_and_doc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = Registry()
    monkeypatch.setattr("vllm_autoprune.tpdsl.registry.ATOMS", fresh)

    class Call(AtomCall):
        strength: float = 0.5

    def brighten() -> None:
        """Make it brighter.

        More about it.
        """

    call = declare("brighten", "scoring", Call, brighten, origin="extension")
    entry = fresh["brighten"]
    assert (entry.name, entry.group, entry.role) == ("brighten", "scoring", "S")
    assert entry.origin == "extension" and not entry.paper
    assert entry.doc == "Make it brighter." and entry.function is brighten
    assert call.model_validate({"atom": "brighten"}).model_dump() == {
        "atom": "brighten",
        "strength": 0.5,
    }
    assert len(fresh) == 1 and fresh.names("reassembly") == []


def test_the_grammar_of_a_state_holds_every_atom() -> None:
    schema = str(PruningState.model_json_schema())
    assert all(f"'{name}'" in schema for name in ATOMS.names())
