"""Losses against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from d3d.train.losses import Recorded, Teacher, head_loss, slot_losses, slot_weights


@pytest.mark.parametrize("rows", [1, 5, 128, 300])
def test_the_loss_over_a_frozen_head_is_the_weighted_cross_entropy_with_its_gradient(
    rows: int,
) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, head = (
        torch.randn(rows, 16, generator=generator),
        torch.randn(97, 16, generator=generator),
    )
    targets, weights = (
        torch.randint(0, 97, (rows,), generator=generator),
        torch.rand(rows, generator=generator),
    )
    results = []
    for frozen in (True, False):
        x = hidden.clone().requires_grad_()
        loss = head_loss(x, head.clone().requires_grad_(not frozen), targets, weights)
        (3 * loss).backward()
        assert x.grad is not None
        results.append((loss.detach(), x.grad))
    expected = (
        F.cross_entropy(hidden @ head.T, targets, reduction="none") * weights
    ).sum() / weights.sum()
    for loss, gradient in results:
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradient, results[1][1], atol=1e-6, rtol=1e-4)


def test_rows_without_weight_count_nothing_and_no_weight_at_all_is_no_nan() -> None:
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8)
    targets = torch.tensor([1, 2, 3, 4])
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0])
    loss = head_loss(hidden, head, targets, weights)
    torch.testing.assert_close(
        loss, head_loss(hidden[[0, 2]], head, targets[[0, 2]], weights[[0, 2]])
    )
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad[[1, 3]].any()
    assert head_loss(hidden, head, targets, torch.zeros(4)).item() == 0


def test_a_bfloat16_head_is_right_within_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(200, 16, generator=generator),
        torch.randn(97, 16, generator=generator),
    )
    targets, weights = torch.randint(0, 97, (200,), generator=generator), torch.ones(200)
    gradients, values = [], []
    for dtype in (torch.float32, torch.bfloat16):
        x = hidden.clone().to(dtype).requires_grad_()
        loss = head_loss(x, head.to(dtype), targets, weights)
        loss.backward()
        assert x.grad is not None
        gradients.append(x.grad.float())
        values.append(loss.item())
    assert values[1] == pytest.approx(values[0], rel=0.01)
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


def given(rows: int = 150) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden, head = (
        torch.randn(rows, 16, generator=generator),
        torch.randn(97, 16, generator=generator),
    )
    return (
        hidden,
        head,
        torch.randint(0, 97, (rows,), generator=generator),
        torch.rand(rows, generator=generator),
    )


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_teacher_shares_the_label(share: float) -> None:
    hidden, head, targets, weights = given()
    teacher = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = head_loss(one, head, targets, weights, Teacher(teacher, share))
    logits = other @ head.T
    label = (1 - share) * F.one_hot(targets, 97) + share * (teacher @ head.T).softmax(-1)
    expected = (F.cross_entropy(logits, label, reduction="none") * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_a_head_that_is_trained_has_no_teacher() -> None:
    hidden, head, targets, weights = given()
    with pytest.raises(ValueError, match="its own teacher"):
        head_loss(hidden, head.requires_grad_(), targets, weights, Teacher(hidden, 0.5))


def test_losses_and_hits_of_slots() -> None:
    hidden, head, targets, _ = given()
    losses, hits = slot_losses(hidden, head, targets)
    logits = hidden @ head.T
    torch.testing.assert_close(
        losses, F.cross_entropy(logits, targets, reduction="none"), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(hits, logits.argmax(-1) == targets)


INSIDE = torch.tensor([[True, True, True], [True, True, False]])
LOSSES = -torch.tensor([[0.8, 0.4, 0.2], [0.6, 0.2, 0.9]]).log()


def test_decay_weighs_early_slots_most() -> None:
    weights = slot_weights("decay", 2.0, torch.zeros(2, 3), torch.zeros(2, 3), INSIDE)
    assert weights.flatten().tolist() == pytest.approx(
        [1.0, 0.60653, 0.36788, 1.0, 0.60653, 0.0], abs=1e-4
    )


def test_dpace_weighs_a_slot_by_what_hangs_on_it() -> None:
    weights = slot_weights("dpace", 2.0, LOSSES, torch.zeros(2, 3), INSIDE)
    a, b, c = 0.9, 0.9 * 0.7, 0.9 * 0.7 * 0.6  # survival with q = 0.8, 0.4, 0.2
    d, e = 0.8, 0.8 * 0.6
    assert weights.flatten().tolist() == pytest.approx(
        [a + b + c, b + c, c, d + e, e, 0.0], abs=1e-6
    )


def test_first_failure_stops_behind_the_first_wrong_slot() -> None:
    hits = torch.tensor([[True, False, True], [False, True, True]])
    weights = slot_weights("first_failure", 2.0, LOSSES, hits, INSIDE)
    assert weights.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("trained_head", [False, True], ids=["frozen head", "trained head"])
def test_a_recorded_distribution_teaches_as_the_teacher_itself_does(trained_head: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, teacher = (torch.randn(200, 8, generator=generator) for _ in range(2))
    head = torch.randn(12, 8, generator=generator)
    targets, weights = (
        torch.randint(0, 12, (200,), generator=generator),
        torch.rand(200, generator=generator),
    )
    probabilities, ids = (teacher @ head.T).softmax(-1).sort(-1, descending=True)
    losses, gradients = [], []
    for trained, one in (
        (False, Teacher(teacher, 0.3)),
        (trained_head, Recorded(ids, probabilities, 0.3)),
    ):
        given = hidden.clone().requires_grad_()
        loss = head_loss(given, head.clone().requires_grad_(trained), targets, weights, one)
        loss.backward()
        losses.append(loss.item())
        gradients.append(given.grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)
