"""The summed loss of the head in plain torch operations, and who decides that they run."""

import pytest
import torch

from mamba3_lite.training import losses
from mamba3_lite.training.losses import IGNORE_INDEX, head_loss
from tests.cross_entropy_checks import problem, relative, truth, value_and_gradients


@pytest.mark.parametrize("rows_of_a_piece", [1, 7, 1000])
@pytest.mark.parametrize("vocab", [2, 50, 257])
def test_loss_and_gradients_against_float64(vocab, rows_of_a_piece, monkeypatch):
    monkeypatch.setattr(losses, "_PIECE_ELEMENTS", rows_of_a_piece * vocab)
    hidden, weight, targets = problem(30, 16, vocab, "cpu")
    want = truth(hidden, weight, targets, factor=0.3)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        got = value_and_gradients(
            hidden.to(dtype), weight.to(dtype), targets, fused=False, factor=0.3
        )
        assert [t.dtype for t in got] == [dtype] * 3
        for g, w in zip(got, want, strict=True):
            assert relative(g, w) <= tolerance
        assert not got[1][::4].any()


def test_all_targets_ignored():
    hidden, weight, targets = problem(9, 16, 50, "cpu")
    got = value_and_gradients(hidden, weight, torch.full_like(targets, IGNORE_INDEX), fused=False)
    assert all(not t.any() for t in got)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_bf16_and_keeps_the_dtypes_of_the_leaves(hidden_dtype):
    hidden, weight, targets = problem(40, 32, 257, "cpu")
    hidden = hidden.to(hidden_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = value_and_gradients(hidden, weight, targets, fused=False)
    assert [t.dtype for t in got] == [torch.float32, hidden_dtype, torch.float32]
    errors = [relative(g, w) for g, w in zip(got, truth(hidden, weight, targets), strict=True)]
    assert max(errors) <= 5e-3 and max(errors[1:]) > 1e-4


def test_upstream_factor_is_not_rounded_to_bf16():
    """1/3 is off by 0.2 % in bf16: every gradient below the head would be, and the head's not."""
    hidden, weight, targets = problem(64, 32, 50, "cpu")
    hidden = hidden.bfloat16()
    _, once, _ = value_and_gradients(hidden, weight, targets, fused=False)
    _, third, _ = value_and_gradients(hidden, weight, targets, fused=False, factor=1 / 3)
    once, third = once.double(), third.double()
    fitted = float((once * third).sum() / (once * once).sum())
    assert fitted == pytest.approx(1 / 3, rel=3e-4)


def test_a_second_backward_is_refused():
    hidden, weight, targets = problem(9, 16, 50, "cpu")
    loss = head_loss(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("gradients", [True, False])
def test_a_cpu_takes_the_plain_way_and_wants_gradients_only_in_training(gradients, monkeypatch):
    calls = []
    plain = losses._plain_pieces

    def recorded(*arguments):
        result = plain(*arguments)
        calls.append([part is not None for part in result])
        return result

    monkeypatch.setattr(losses, "_plain_pieces", recorded)
    hidden, weight, targets = problem(9, 16, 50, "cpu")
    with torch.set_grad_enabled(gradients):
        loss = head_loss(hidden, weight.requires_grad_(), targets)
    assert loss.requires_grad is gradients
    assert calls == [[True, gradients, gradients]]


def test_pieces_are_few_and_equal():
    production = losses._rows_of_a_piece(32768, 50304, 2)
    assert production == 8192
    for rows in (1, 100, 10_000, 32_767, 100_003):
        for itemsize in (2, 4):
            piece = losses._rows_of_a_piece(rows, 50304, itemsize)
            assert piece * 50304 * itemsize <= 2**30
            assert rows % piece == 0 or rows % piece > piece * 0.9
    assert losses._rows_of_a_piece(5, 2**31, 2) == 1
