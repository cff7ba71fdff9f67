"""The per-chunk kernel on CUDA: the shared checks, and the sizes that only a GPU can hold."""

import pytest
import torch
from torch import Tensor

from mamba3_lite.models import ssd_triton
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.ssd_complex import per_chunk_ssd_pytorch
from tests.per_chunk_checks import TOLERANCE, PerChunkChecks, launches_during, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]

PRODUCTION = {"d_model": 1024, "n_heads": 16, "head_dim": 64, "state_dim": 64, "ffn_dim": 2048}


class TestOnCuda(PerChunkChecks):
    device = "cuda"


def assert_last_batch_element_equals_it_alone(tensors: list[Tensor]) -> None:
    with torch.no_grad():
        got = ssd_triton.per_chunk_ssd_triton(*tensors)
        want = ssd_triton.per_chunk_ssd_triton(*(t[-1:] for t in tensors))
    for g, w in zip(got, want, strict=True):
        assert w.abs().sum() > 0
        assert torch.equal(g[-1:], w)


def device_inputs(batch: int, chunks: int, chunk: int, heads: int, state_dim: int, head_dim: int):
    shape = (batch, chunks, chunk, heads)
    b = torch.randn(*shape, state_dim, dtype=torch.complex64, device="cuda")
    x = torch.randn(*shape, head_dim, device="cuda")
    log_decay = -torch.rand(shape, device="cuda").cumsum(2)
    a_log = torch.complex(log_decay, torch.randn(shape, device="cuda"))
    # C is B once more: what counts here is where the kernel reads, and memory is short.
    return [b, b, x, a_log, torch.exp(a_log[:, :, -1:] - a_log)]


def test_offsets_beyond_32_bits_a05():
    needed_gib = 70
    if torch.cuda.mem_get_info()[0] < needed_gib * 2**30:
        pytest.skip(f"needs {needed_gib} GiB of free GPU memory")
    tensors = device_inputs(17, 512, 256, 16, 64, 16)
    assert tensors[0].numel() > 2**31
    assert_last_batch_element_equals_it_alone(tensors)


def test_more_than_65535_batch_elements_a05():
    tensors = device_inputs(70_000, 1, 16, 1, 16, 16)
    assert_last_batch_element_equals_it_alone(tensors)


@pytest.mark.parametrize("warps, stages", [("8", "1"), ("4", "2")])
def test_launch_knobs_change_no_result(warps, stages, monkeypatch):
    tensors = [t.cuda() for t in make_inputs(64, 64, 64).tensors]
    want = per_chunk_ssd_pytorch(
        *(t.to(torch.promote_types(t.dtype, torch.float64)) for t in tensors)
    )
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", warps)
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_STAGES", stages)
    got = ssd_triton.per_chunk_ssd_triton(*tensors)
    for name, g, w in zip(("y", "state"), got, want, strict=True):
        assert (g - w).norm() <= TOLERANCE[name] * w.norm()


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_production_block_under_bf16_autocast_a12(grad_checkpoint):
    block = Mamba3Block(
        PRODUCTION | {"ssd_dispatch": "triton", "grad_checkpoint": grad_checkpoint}
    ).cuda()
    hidden = torch.randn(2, 2048, 1024, device="cuda")

    def forward_and_backward():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = block(hidden).float().square().mean()
        loss.backward()

    assert launches_during(forward_and_backward) == (2 if grad_checkpoint else 1)
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all(), name
