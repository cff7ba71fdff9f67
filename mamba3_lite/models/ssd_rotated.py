"""The complex SSD as a real one: rotate B and C by the phase, and a real SSD with state 2N is left.

With A = alpha + i beta, tau_t = sum_{k<=t} s_k and theta_t = beta tau_t,

    Re(C_t . B_j e^{A (tau_t - tau_j)})
        = e^{alpha (tau_t - tau_j)} [Re c_t, -Im c_t] . [Re b_j, Im b_j]

where c = C e^{i theta} and b = B e^{-i theta} (Propositions 2 and 3 of arXiv 2603.15569 with one
frequency a head). The phase is local to a chunk; the carried state is rotated by the chunk's total
phase, which makes it equal to the true complex state with its real rows above its imaginary rows.
Everything is real, so the whole function compiles into one graph.

Legend: B batch, T time, H heads, D channels of a head, N complex state width, K = 2N, C chunk
length, nc chunks.
"""

import torch
from torch import Tensor

from mamba3_lite.models.ssd_complex import (
    Pair,
    causal_exponent,
    gated_exponents,
    pad_segments,
    pad_time,
    prefix_decay,
    softplus,
    split_factor,
)


def _rotate(state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex product of (upper half + i lower half of dimension -2) with cos + i sin."""
    real, imag = state.chunk(2, -2)
    return torch.cat([real * cos - imag * sin, real * sin + imag * cos], -2)


def _wide(t: Tensor) -> Tensor:
    """One number a head, ready to multiply its (K, D) state."""
    return t[..., None, None]


def _rotated_operands(b: Pair, c: Pair, phase: Tensor) -> Pair:
    """B e^{-i phase} and C e^{i phase} as real (B, nc, H, C, K).

    b, c pairs of (B, nc, C, H, N), phase (B, nc, C, H).
    """
    cos, sin = torch.cos(phase)[..., None], torch.sin(phase)[..., None]
    (b_re, b_im), (c_re, c_im) = b, c
    b_rot = torch.cat([b_re * cos + b_im * sin, b_im * cos - b_re * sin], -1)
    c_rot = torch.cat([c_re * cos - c_im * sin, -(c_im * cos + c_re * sin)], -1)
    return b_rot.transpose(2, 3), c_rot.transpose(2, 3)


def run(
    x: Tensor,
    b: Pair,
    c: Pair,
    dt: Tensor,
    a: Pair,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Whole-sequence seam of ``ssd_backends`` (shapes there); float32, float64 for float64 x."""
    batch, length, heads, channels = x.shape
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    size = min(chunk_size, length)
    pad = (size - length % size) % size

    def chunked(t: Tensor) -> Tensor:
        return pad_time(t.to(compute), pad).unflatten(1, (-1, size))

    s = pad_time(softplus(dt.double()), pad)
    log_decay, phase = prefix_decay(*a, s, size)
    b_rot, c_rot = _rotated_operands(
        (chunked(b[0]), chunked(b[1])), (chunked(c[0]), chunked(c[1])), phase.to(compute)
    )
    xc = chunked(x).transpose(2, 3)

    segments = None
    if segment_ids is not None:
        segments = pad_segments(segment_ids, pad).unflatten(1, (-1, size))
    from_start, to_end, over_chunk = gated_exponents(log_decay, segments)
    from_start, to_end = torch.exp(from_start).to(compute), torch.exp(to_end).to(compute)
    exponent = causal_exponent(log_decay.to(compute).transpose(2, 3), segments)
    y = ((c_rot @ b_rot.mT) * torch.exp(exponent)) @ xc
    added = (b_rot * to_end.transpose(2, 3)[..., None]).mT @ xc

    # The true state leaves the chunk turned by its whole phase.
    end = phase[:, :, -1]
    added = _rotate(added, *(_wide(t.to(compute)) for t in (torch.cos(end), torch.sin(end))))
    factors = (_wide(t.to(compute)).unbind(1) for t in split_factor(over_chunk, end))
    h = x.new_zeros(batch, heads, b_rot.shape[-1], channels, dtype=compute)
    if state is not None:
        h = state.to(compute)
    starts = []
    for added_c, whole, real, imag in zip(added.unbind(1), *factors, strict=True):
        starts.append(h)
        h = whole * h + (_rotate(h, real, imag) + added_c)
    reading = c_rot * from_start.transpose(2, 3)[..., None]
    y = y + reading @ torch.stack(starts, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :length], h if return_state else None


def step(x: Tensor, b: Pair, c: Pair, dt: Tensor, a: Pair, state: Tensor) -> Pair:
    """One token: h <- e^{A s} h + B x^T, y = Re(C h).

    x (B, H, D), b and c pairs of (B, H, N), dt (B, H), state (B, H, 2N, D).
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    s = softplus(dt.double())
    whole, real, imag = (
        _wide(t.to(compute)) for t in split_factor(a[0].double() * s, a[1].double() * s)
    )
    written = torch.cat(b, -1).to(compute)[..., :, None] * x.to(compute)[..., None, :]
    state = state.to(compute)
    state = whole * state + (_rotate(state, real, imag) + written)
    reading = torch.cat([c[0], -c[1]], -1).to(compute)
    return (reading[..., None, :] @ state).squeeze(-2), state
