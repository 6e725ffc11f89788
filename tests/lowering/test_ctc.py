"""`ctc_loss` on xla tensors against CPU torch: lengths as lists and as tensors, edges included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor  # noqa: F401  (the "xla" device)

STEPS, BATCH, CLASSES = 9, 4, 5


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(STEPS, BATCH, CLASSES), torch.randint(1, CLASSES, (BATCH, 4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("input_lengths", "target_lengths", "zero_infinity"),
    [
        ([9, 9, 9, 9], [4, 4, 4, 4], False),
        ([9, 7, 5, 9], [4, 1, 2, 0], False),  # an empty target
        ([9, 3, 2, 9], [4, 4, 3, 2], True),  # more labels than steps: no alignment
    ],
)
def test_loss_and_gradient(
    as_tensors: bool,
    flat: bool,
    input_lengths: list[int],
    target_lengths: list[int],
    zero_infinity: bool,
) -> None:
    logits, targets = _inputs(1)
    if flat:
        targets = torch.cat([t[:n] for t, n in zip(targets, target_lengths, strict=True)])
    losses, grads = [], []
    for device in ("cpu", "xla"):
        x = logits.clone().to(device).detach().requires_grad_()
        lengths = (input_lengths, target_lengths)
        if as_tensors:
            lengths = tuple(torch.tensor(n).to(device) for n in lengths)
        options = {"reduction": "none", "zero_infinity": zero_infinity}
        loss = F.ctc_loss(x.log_softmax(-1), targets.to(device), *lengths, **options)
        loss.sum().backward()
        losses.append(loss.detach().cpu())
        grads.append(x.grad.cpu())
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_repeated_labels_need_a_blank_between() -> None:
    logits, _ = _inputs(2)
    targets = torch.tensor([[2, 2, 3, 3]] * BATCH)
    lengths = ([6, 5, 9, 7], [4, 4, 4, 2])  # the second has no alignment
    expected = F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction="none")
    actual = F.ctc_loss(
        logits.to("xla").log_softmax(-1), targets.to("xla"), *lengths, reduction="none"
    )
    assert torch.isinf(expected[1])
    torch.testing.assert_close(actual.cpu(), expected)


def test_blank_out_of_range_raises() -> None:
    logits, targets = _inputs(3)
    with pytest.raises(RuntimeError, match="blank must be in label range"):
        F.ctc_loss(logits.to("xla"), targets.to("xla"), [9] * 4, [4] * 4, blank=CLASSES)
