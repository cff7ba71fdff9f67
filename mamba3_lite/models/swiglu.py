"""The gated activation of the feed-forward: silu(gate) * up of (..., 2 F), gate first."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3_lite.models.ssd_triton import HAS_TRITON

_BLOCK = 1024
_WARPS = 4


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F); on CUDA with Triton in one pass each way, else in plain PyTorch."""
    if gate_up.is_cuda and HAS_TRITON and gate_up.dtype != torch.float64:
        return torch.ops.mamba3_lite.swiglu(gate_up)
    return plain_swiglu(gate_up)


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """The twin of the kernels."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _launch(kernel, half: int, *tensors: Tensor) -> None:
    rows = tensors[0].numel() // (2 * half)
    block = min(_BLOCK, 1 << (half - 1).bit_length())
    on = torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else contextlib.nullcontext()
    with on:
        kernel[(rows, -(-half // block))](*tensors, F=half, BLOCK=block, num_warps=_WARPS)


@torch.library.custom_op("mamba3_lite::swiglu", mutates_args=())
def _fused(gate_up: Tensor) -> Tensor:
    from mamba3_lite.kernels.swiglu import swiglu_forward_kernel

    gate_up, half = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], half)
    _launch(swiglu_forward_kernel, half, gate_up, out)
    return out


@_fused.register_fake
def _(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("mamba3_lite::swiglu_backward", mutates_args=())
def _fused_backward(gate_up: Tensor, d_out: Tensor) -> Tensor:
    from mamba3_lite.kernels.swiglu import swiglu_backward_kernel

    gate_up, d_out = gate_up.contiguous(), d_out.contiguous()
    d_gate_up = torch.empty_like(gate_up)
    _launch(swiglu_backward_kernel, d_out.shape[-1], gate_up, d_out, d_gate_up)
    return d_gate_up


@_fused_backward.register_fake
def _(gate_up, d_out):
    return gate_up.new_empty(gate_up.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_out):
    return torch.ops.mamba3_lite.swiglu_backward(*ctx.saved_tensors, d_out)


torch.library.register_autograd("mamba3_lite::swiglu", _backward, setup_context=_setup_context)
