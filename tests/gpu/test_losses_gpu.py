"""The head and the loss on CUDA: the shared checks, and a shape like that of production."""

import pytest
import torch

from mamba3_lite.models import ssd_triton
from mamba3_lite.training import losses
from mamba3_lite.training.losses import IGNORE_INDEX, head_loss
from tests.cross_entropy_checks import (
    CrossEntropyChecks,
    relative,
    run_kernel,
    value_and_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
WIDTH, VOCAB = 1024, 50257


class TestOnCuda(CrossEntropyChecks):
    device = "cuda"


def production(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised hidden rows, the initial weights of the model, one target in ten ignored."""
    hidden = torch.randn(rows, WIDTH, device="cuda").to(dtype)
    weight = torch.randn(VOCAB, WIDTH, device="cuda") * 0.02
    targets = torch.randint(0, VOCAB, (rows,), device="cuda")
    targets[::10] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 5e-3), (torch.float32, 1e-4)], ids=["bf16", "fp32"]
)
def test_production_shape_against_float64_and_twice_the_same(dtype, tolerance, monkeypatch):
    assert not torch.backends.cuda.matmul.allow_tf32
    # Two pieces in bf16, four in float32; the float64 truth comes in pieces, too.
    monkeypatch.setattr(losses, "_PIECE_ELEMENTS", 2**26)
    hidden, weight, targets = production(4096, dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        first, second = (
            value_and_gradients(hidden, weight, targets, fused=True, factor=1 / 3) for _ in range(2)
        )
    want = value_and_gradients(hidden.double(), weight.double(), targets, fused=False, factor=1 / 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert relative(first[0], want[0]) <= min(tolerance, 1e-3)
    assert relative(first[1], want[1]) <= tolerance
    assert relative(first[2], want[2]) <= tolerance
    assert first[2].shape == (VOCAB, WIDTH) and first[2].dtype == torch.float32


def test_peak_memory_stays_below_full_float32_logits():
    rows = 16384
    hidden, weight, targets = production(rows, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value_and_gradients(hidden, weight, targets, fused=True)
    assert torch.cuda.max_memory_allocated() - before < rows * VOCAB * 4 / 2


def test_cuda_takes_the_kernel_except_for_float64(monkeypatch):
    taken = []
    for name in ("_fused_pieces", "_plain_pieces"):
        original = getattr(losses, name)
        monkeypatch.setattr(
            losses, name, lambda *a, name=name, run=original: (taken.append(name), run(*a))[1]
        )
    hidden, weight, targets = production(8, torch.float32)
    loss = head_loss(hidden, weight, targets)
    wide = head_loss(hidden.double(), weight.double(), targets)
    monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
    without = head_loss(hidden, weight, targets)
    assert taken == ["_fused_pieces", "_plain_pieces", "_plain_pieces"]
    assert relative(loss, wide) <= 1e-6 and relative(without, wide) <= 1e-6


def test_offsets_beyond_32_bits():
    rows, width = 43_000, 50_304
    assert rows * width > 2**31
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    logits = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.randn(width, device="cuda")
    targets = torch.full((rows,), 5, device="cuda")
    many = run_kernel(logits, targets, VOCAB)
    alone = run_kernel(logits[-1:], targets[-1:], VOCAB)
    for m, a in zip(many, alone, strict=True):
        assert a.any() and torch.equal(m[-1:], a)
