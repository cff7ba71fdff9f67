"""Checks of the cross-entropy kernel that hold on every device; subclasses name the device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3_lite.training import losses
from mamba3_lite.training.losses import IGNORE_INDEX, head_loss

# Relative L2 against float64. The products round logits and gradients to the compute dtype (the
# interpreter even cuts the gradient off where a GPU rounds to nearest).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def problem(rows: int, width: int, vocab: int, device: str) -> list[Tensor]:
    """hidden (rows, width), weight (vocab, width), targets (rows,), every fourth one ignored."""
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) / width**0.5
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[::4] = IGNORE_INDEX
    return [t.to(device) for t in (hidden, weight, targets)]


def value_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, fused: bool, factor: float = 1.0
) -> list[Tensor]:
    """[loss, d_hidden, d_weight] of ``factor`` times the loss."""
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
    loss = head_loss(*leaves, targets, fused=fused)
    return [loss.detach(), *torch.autograd.grad(loss * factor, leaves)]


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = F.cross_entropy(
        leaves[0] @ leaves[1].T, targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return [loss.detach(), *torch.autograd.grad(loss * factor, leaves)]


def run_kernel(
    logits: Tensor, targets: Tensor, vocab: int, *, write_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """(losses, what stands where the logits stood); ``logits`` itself is left alone."""
    from mamba3_lite.kernels.cross_entropy import cross_entropy_

    logits, row_losses = logits.clone(), torch.full(targets.shape, -1.0, device=logits.device)
    cross_entropy_(
        logits, targets, row_losses,
        vocab_size=vocab, ignore_index=IGNORE_INDEX, write_gradient=write_gradient,
    )  # fmt: skip
    return row_losses, logits


class CrossEntropyChecks:
    device: str

    @pytest.fixture(params=[64, 512])
    def block(self, request, monkeypatch):
        monkeypatch.setattr("mamba3_lite.kernels.cross_entropy.BLOCK", request.param)
        monkeypatch.setattr("mamba3_lite.kernels.cross_entropy.WARPS", 2)

    @pytest.mark.parametrize("vocab", [1, 50, 128, 257, 1001])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_loss_and_gradients_against_float64(self, dtype, vocab, block):
        hidden, weight, targets = problem(21, 16, vocab, self.device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        got = value_and_gradients(hidden, weight, targets, fused=True, factor=0.3)
        want = truth(hidden, weight, targets, factor=0.3)
        assert [t.dtype for t in got] == [torch.float32, dtype, dtype]
        assert got[2].shape == weight.shape
        if vocab == 1:
            assert all(not t.any() for t in got)
            return
        for g, w in zip(got, want, strict=True):
            assert relative(g, w) <= TOLERANCE[dtype]
        assert not got[1][::4].any()

    @pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
    def test_autocast_computes_in_bf16_and_keeps_the_dtypes_of_the_leaves(self, hidden_dtype):
        hidden, weight, targets = problem(40, 32, 257, self.device)
        hidden = hidden.to(hidden_dtype)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            got = value_and_gradients(hidden, weight, targets, fused=True)
        assert [t.dtype for t in got] == [torch.float32, hidden_dtype, torch.float32]
        errors = [relative(g, w) for g, w in zip(got, truth(hidden, weight, targets), strict=True)]
        assert max(errors) <= TOLERANCE[torch.bfloat16]
        assert max(errors[1:]) > 10 * TOLERANCE[torch.float32]

    def test_pieces_change_nothing_but_rounding(self, monkeypatch):
        tensors = problem(50, 16, 257, self.device)
        whole = value_and_gradients(*tensors, fused=True)
        monkeypatch.setattr(losses, "_PIECE_ELEMENTS", 7 * 384)
        rows_seen = []
        rows_of_a_piece = losses._rows_of_a_piece

        def recorded(*sizes: int) -> int:
            rows_seen.append(rows_of_a_piece(*sizes))
            return rows_seen[-1]

        monkeypatch.setattr(losses, "_rows_of_a_piece", recorded)
        for g, w in zip(value_and_gradients(*tensors, fused=True), whole, strict=True):
            assert relative(g, w) <= TOLERANCE[torch.float32]
        assert rows_seen == [7]

    def test_all_targets_ignored(self):
        hidden, weight, targets = problem(9, 16, 50, self.device)
        got = value_and_gradients(
            hidden, weight, torch.full_like(targets, IGNORE_INDEX), fused=True
        )
        assert all(not t.any() for t in got)

    def test_no_rows(self):
        hidden, weight, targets = problem(0, 16, 50, self.device)
        loss, d_hidden, d_weight = value_and_gradients(hidden, weight, targets, fused=True)
        assert float(loss) == 0 and d_hidden.shape == (0, 16) and not d_weight.any()

    @pytest.mark.parametrize("vocab", [50, 257])
    def test_extreme_logits(self, vocab, block):
        logits = torch.randn(7, 384) * torch.tensor([1, 0, 1e4, 1e-4, 30, 1, 1])[:, None]
        logits[1] = 1e4  # all equal
        logits[4, 3] = -1e4
        logits[5, 1] = float("-inf")
        logits[6, 2] = 1e4
        targets = torch.tensor([0, 1, 2, 3, 3, 4, 5])
        got_losses, got = run_kernel(logits.to(self.device), targets.to(self.device), vocab)
        real = logits[:, :vocab].double().requires_grad_()
        want_losses = F.cross_entropy(real, targets, reduction="none")
        (want,) = torch.autograd.grad(want_losses.sum(), real)
        assert torch.allclose(got_losses.double().cpu(), want_losses, rtol=1e-6, atol=1e-6)
        assert torch.allclose(got[:, :vocab].double().cpu(), want, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e30, -1e30])
    def test_padding_never_matters(self, poison, block):
        vocab = 257
        clean = torch.randn(5, 384, device=self.device)
        clean[:, vocab:] = 0
        poisoned = clean.clone()
        poisoned[:, vocab:] = poison
        targets = torch.tensor([0, 256, IGNORE_INDEX, 3, 255], device=self.device)
        for c, p in zip(
            run_kernel(clean, targets, vocab), run_kernel(poisoned, targets, vocab), strict=True
        ):
            assert torch.equal(c, p)
        assert not run_kernel(poisoned, targets, vocab)[1][:, vocab:].any()

    def test_padded_weight_rows_never_matter(self, monkeypatch):
        tensors = problem(20, 16, 257, self.device)
        want = value_and_gradients(*tensors, fused=True)
        padded = losses._padded

        def poisoned(weight: Tensor, dtype: torch.dtype) -> Tensor:
            out = padded(weight, dtype)
            assert len(out) == 384 and not out[257:].any()
            out[257:] = 1e6
            return out

        monkeypatch.setattr(losses, "_padded", poisoned)
        for g, w in zip(value_and_gradients(*tensors, fused=True), want, strict=True):
            assert torch.equal(g, w)

    def test_without_gradient_the_logits_stay(self, block):
        logits = torch.randn(6, 384, device=self.device)
        targets = torch.tensor([5, IGNORE_INDEX, 0, 256, 7, 8], device=self.device)
        want, gradient = run_kernel(logits, targets, 257)
        got, after = run_kernel(logits, targets, 257, write_gradient=False)
        assert torch.equal(got, want) and torch.equal(after, logits)
        assert not torch.equal(gradient, logits)

    def test_evaluation_wants_no_gradient(self, monkeypatch):
        tensors = problem(20, 16, 257, self.device)
        hidden, weight = (t.requires_grad_() for t in tensors[:2])
        want = head_loss(hidden, weight, tensors[2], fused=True)
        monkeypatch.setattr(losses, "_add_product", None)  # calling it would fail
        with torch.no_grad():
            assert torch.equal(head_loss(hidden, weight, tensors[2], fused=True), want)
        with pytest.raises(TypeError, match="not callable"):
            head_loss(hidden, weight, tensors[2], fused=True)

    def test_broken_rows_are_loud_where_they_count_and_silent_where_not(self):
        logits = torch.randn(5, 128, device=self.device)
        logits[0, 3] = logits[1, 3] = float("nan")
        logits[2, 3] = float("inf")
        targets = torch.tensor([1, IGNORE_INDEX, 1, 50, -1], device=self.device)
        row_losses, gradient = run_kernel(logits, targets, 50)
        assert row_losses.isnan().tolist() == [True, False, True, True, True]
        assert float(row_losses[1]) == 0 and not gradient[1].any()
