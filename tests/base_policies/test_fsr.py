from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, native, select
from tests.base_policies.test_cen import continued
from tests.tpdsl.samples import with_relevance
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.base_policies.fsr import FSRParams, focus_size, priority

LINEAR = FSRParams(alpha=1.0, beta=1.0, rho=0.9, kappa=1.0)


def scaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def priorities(tokens: VisualTokens, image: int, alpha: float = 3.0, beta: float = 1.0) -> Tensor:
    """phi of one image of a single tile, in float64."""
    instruction = tokens.require_instruction()
    relevance = scaled(instruction.sign * instruction.cosines[image].double().mean(dim=1))
    return relevance**alpha * scaled(tokens.require_cls_attention()[image].double()) ** beta


def focus_and_scan(rows: Tensor, phi: Tensor, count: int, rho: float) -> tuple[list[int], int]:
    """Picks and the size of the focus, one at a time in float64."""
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    distance = 1 - unit @ unit.T
    order = phi.argsort(descending=True, stable=True).tolist()
    total, reached, focus = float(phi.sum()), 0.0, 0
    while reached < rho * total:
        reached += float(phi[order[focus]])
        focus += 1
    chosen = order[: min(focus, count)]
    while len(chosen) < count:
        left = distance[:, chosen].amin(dim=1)
        left[chosen] = -1
        chosen.append(int(left.argmax()))
    return chosen, min(focus, count)


def refined(rows: Tensor, phi: Tensor, picks: list[int], focus: int, kappa: float) -> Tensor:
    """Rows of the picks after the merge."""
    rows = rows.double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    scan = picks[focus:]
    pairs = []
    for token in range(len(rows)):
        if token not in picks and scan:
            near = [float(unit[token] @ unit[j]) for j in scan]
            best = max(range(len(scan)), key=lambda j: (near[j], -j))
            pairs.append((near[best], token, scan[best]))
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    merged = rows[picks].clone()
    for j in scan:
        members = [token for _, token, owner in pairs[: int(kappa * len(scan))] if owner == j]
        total = float(phi[j] + phi[members].sum())
        if total > 0:
            mixed = phi[j] * rows[j] + (phi[members][:, None] * rows[members]).sum(dim=0)
            merged[picks.index(j)] = mixed / total
    return merged


@pytest.mark.parametrize(("rho", "kappa"), [(0.3, 1.0), (0.6, 3.0), (0.5, 0.0)])
def test_focus_scan_and_refine_are_those_of_the_formulas(rho: float, kappa: float) -> None:
    tokens = images(1, noise=1.0)
    actual = native("fsr", tokens, 12, rho=rho, kappa=kappa)
    assert actual.features is not None
    for image in range(2):
        phi = priorities(tokens, image)
        picks, focus = focus_and_scan(tokens.features[image], phi, 12, rho)
        assert actual.indices[image].tolist() == picks
        expected = refined(tokens.features[image], phi, picks, focus, kappa)
        torch.testing.assert_close(actual.features[image], expected.float(), rtol=1e-3, atol=1e-4)


def test_only_rows_of_the_scan_change() -> None:
    tokens = images(2, noise=1.0)
    served = select("fsr", tokens, 12, rho=0.3)
    assert served.merged is not None
    plain = tokens.features.gather(1, served.picks[:, :, None].expand(-1, -1, 16))
    changed = (served.merged != plain).any(dim=2)
    for image in range(2):
        _, focus = focus_and_scan(tokens.features[image], priorities(tokens, image), 12, 0.3)
        assert 0 < focus < 12
        assert not bool(changed[image, :focus].any()) and bool(changed[image, focus:].any())
    assert select("fsr", tokens, 12, kappa=0.0).merged is None


def test_a_large_focus_is_cut_and_nothing_is_scanned() -> None:
    tokens = images(3)
    served = select("fsr", tokens, 6, rho=1.0)
    order = torch.stack([priorities(tokens, image) for image in range(2)])
    assert torch.equal(served.picks, order.argsort(dim=1, descending=True, stable=True)[:, :6])


def test_focus_size_is_the_least_that_reaches_the_share() -> None:
    phi = torch.tensor([[4.0, 3, 2, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert focus_size(phi, 0.7).tolist() == [[2], [0], [1]]
    assert focus_size(phi, 0.71).tolist() == [[3], [0], [1]]


def test_without_priority_the_scan_begins_as_divprune() -> None:
    """One token alone is attended, and it is the least relevant one."""
    tokens = images(4, noise=1.0)
    attention, relevance = torch.eye(36)[:2], 1 - torch.eye(36)[:2]
    nothing = replace(with_relevance(tokens, relevance), cls_attention=attention)
    assert not bool(priority(LINEAR, nothing).any())
    wanted = select("divprune", tokens, 9).picks
    assert torch.equal(select("fsr", nothing, 9).picks, wanted)
    assert torch.equal(select("fsr", tokens, 9, rho=0.0).picks, wanted)


def test_relevance_is_normalised_over_all_tiles_and_attention_in_each() -> None:
    tokens = images(5, batch=1, grid=Grid(4, 4, tiles=3))
    relevance = -tokens.require_instruction().cosines[0].mean(dim=1)
    attention = tokens.require_cls_attention()[0]
    expected = torch.cat([scaled(attention[16 * t : 16 * t + 16]) for t in range(3)])
    actual = priority(LINEAR, tokens)[0]
    torch.testing.assert_close(actual, expected * scaled(relevance))


def test_without_the_exponent_of_relevance_no_question_is_read() -> None:
    tokens = images(6)
    silent = replace(tokens, instruction=None)
    assert torch.equal(
        select("fsr", silent, 9, alpha=0.0).picks, select("fsr", tokens, 9, alpha=0.0).picks
    )


def test_given_tokens_are_followed_by_priority_alone() -> None:
    tokens = images(7)
    core = select("fsr", tokens, 5, alpha=0.0).picks
    actual = continued("fsr", tokens, core, 6)
    for image in range(2):
        phi = priorities(tokens, image)
        phi[core[image]] = -1
        order = phi.argsort(descending=True, stable=True)
        assert actual[image].tolist() == order[:6].tolist()
