"""silu(gate) * up and its gradient, each input read once.

A compiler makes the gradient of the two halves as one concatenation, and reads everything twice.
Legend: R rows, F width of a half.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(F: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets into (R, 2 F) and (R, F) of one row's block of columns, and which of them exist."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row * (2 * F) + columns, row * F + columns, columns < F


@triton.jit
def swiglu_forward_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R, blocks of F): out (R, F) from gate_up (R, 2 F), gate first."""
    wide, narrow, inside = _tile(F, BLOCK)
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + F, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + narrow, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(gate_up, d_out, d_gate_up, F: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R, blocks of F): d_gate_up (R, 2 F)."""
    wide, narrow, inside = _tile(F, BLOCK)
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + F, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + narrow, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = d * up * share * (1.0 + gate * (1.0 - share))
    tl.store(d_gate_up + wide, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    d_up = d * gate * share
    tl.store(d_gate_up + wide + F, d_up.to(d_gate_up.dtype.element_ty), mask=inside)
