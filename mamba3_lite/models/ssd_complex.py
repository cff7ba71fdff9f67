"""Complex state-space dual (SSD): the token-by-token oracle and the chunkwise form in PyTorch.

Legend: B batch, T time, H heads, D channels of a head, N complex state width, C chunk length,
nc number of chunks.

Recurrence, per batch and head, with s_t = softplus(dt_t):

    h_t = exp(A s_t) h_{t-1} + B_t x_t^T        (N, D), complex
    y_t = sum_n C_t[n] h_t[n, :]                 (D,), the model uses the real part

The chunkwise form is the state-space dual of Mamba-2 (arXiv 2405.21060, section 6) with a complex
decay. Two rules keep it right at any length: the exponent is masked, never the exponential (above
the diagonal exp() overflows, and 0 * inf is NaN); and the state is carried chunk by chunk, so no
prefix sum is ever longer than a chunk.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3_lite.errors import UserError

Pair = tuple[Tensor, Tensor]
PerChunk = Callable[..., tuple[Tensor, Tensor]]


def softplus(dt: Tensor) -> Tensor:
    """s = log(1 + exp(dt)), same shape; the threshold of 40 makes it exact in float64 as well."""
    return F.softplus(dt, threshold=40.0)


def ssd_naive_complex(
    x: Tensor,
    A: Tensor,
    B_t: Tensor,
    C_t: Tensor,
    dt: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    segment_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The oracle: one token at a time, O(T) steps, in the precision of its inputs.

    Args:
        x: (B, T, H, D) real or complex.
        A: (H,) complex, the decay per unit of s; taken as given.
        B_t, C_t: (B, T, H, N) complex.
        dt: (B, T, H) real, before softplus.
        initial_state: (B, H, N, D) complex, zero when absent.
        segment_ids: (B, T) integers; the state is reset where the id changes.

    Returns:
        The complex output (B, T, H, D), with ``return_final_state`` also the state (B, H, N, D).
    """
    batch, length, heads, channels = x.shape
    h = initial_state
    if h is None:
        h = B_t.new_zeros(batch, heads, B_t.shape[-1], channels)
    decay = torch.exp(A * softplus(dt))
    if segment_ids is not None:
        keeps = segment_ids[:, 1:] == segment_ids[:, :-1]
        kept = F.pad(keeps, (1, 0), value=True)[..., None]
        decay = torch.where(kept, decay, torch.zeros_like(decay))
    outputs = []
    # unbind, not indexing: the gradient of an index is a tensor of the full length, which would
    # make this O(T^2).
    for decay_t, b, c, x_t in zip(
        decay.unbind(1), B_t.unbind(1), C_t.unbind(1), x.unbind(1), strict=True
    ):
        h = decay_t[..., None, None] * h + b[..., :, None] * x_t[..., None, :]
        outputs.append((c[..., None, :] @ h).squeeze(-2))
    y = torch.stack(outputs, 1)
    return (y, h) if return_final_state else y


def prefix_decay(
    A_real: Tensor, A_imag: Tensor, s: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Chunk-local inclusive prefix sums of A s: log-magnitude and phase, (B, nc, C, H) float64.

    These are the only sums along time, and they hold one number per token and head, so float64
    costs nothing; in float32 a phase of a few hundred radians would already be off by 1e-4. The
    phase is wrapped to [-pi, pi], which changes no exponential and makes it safe to round to
    float32 afterwards.

    Args:
        A_real, A_imag: (H,) real.
        s: (B, T, H) float64, T a multiple of ``chunk_size``; softplus of dt, 0 on padding.
    """
    prefix = s.unflatten(1, (-1, chunk_size)).cumsum(2)
    phase = A_imag.double() * prefix
    turns = torch.round(phase.detach() / (2 * math.pi))
    return A_real.double() * prefix, phase - turns * (2 * math.pi)


def causal_exponent(log_decay: Tensor, segment_ids: Tensor | None) -> Tensor:
    """log_decay[l] - log_decay[s] for s <= l in one segment, -inf elsewhere.

    Args:
        log_decay: (B, nc, H, C) real, an inclusive prefix sum.
        segment_ids: (B, nc, C) or None.

    Returns:
        (B, nc, H, C, C) real, rows l and columns s.
    """
    length = log_decay.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    if segment_ids is not None:
        seen = seen & (segment_ids[..., :, None] == segment_ids[..., None, :])[:, :, None]
    return (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~seen, -math.inf)


def per_chunk_ssd_pytorch(
    Bc: Tensor,
    Cc: Tensor,
    Xc: Tensor,
    A_log: Tensor,
    decay_states: Tensor,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What happens inside one chunk: the output from the chunk itself, and the state it adds.

    Args:
        Bc, Cc: (B, nc, C, H, N) complex.
        Xc: (B, nc, C, H, D) real or complex.
        A_log: (B, nc, C, H) complex, chunk-local inclusive prefix sum of A s (imaginary part may be
            wrapped).
        decay_states: (B, nc, C, H) complex, exp(A_log at the chunk's end - A_log); 0 where a later
            segment has begun.
        segment_ids: (B, nc, C) integers or None.

    Returns:
        Y_diag (B, nc, C, H, D): complex for complex x, its real part for real x; state
        (B, nc, H, N, D) complex.
    """
    b, c, x = (t.transpose(2, 3) for t in (Bc, Cc, Xc))
    a_log = A_log.transpose(2, 3)
    exponent = causal_exponent(a_log.real, segment_ids)
    angle = a_log.imag[..., :, None] - a_log.imag[..., None, :]
    weights = (c @ b.mT) * torch.polar(torch.exp(exponent), angle)
    carried = (b * decay_states.transpose(2, 3)[..., None]).mT
    if x.is_complex():
        y, state = weights @ x, carried @ x
    else:
        y, state = weights.real @ x, torch.complex(carried.real @ x, carried.imag @ x)
    return y.transpose(2, 3), state


def pad_time(t: Tensor, pad: int) -> Tensor:
    """Appends ``pad`` zero steps along dimension 1."""
    return F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) if pad else t


def pad_segments(segment_ids: Tensor, pad: int) -> Tensor:
    """(B, T) -> (B, T + pad).

    Padding belongs to the last document, so the final state is the one after the last token.
    """
    return torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, pad)], 1) if pad else segment_ids


def gated_exponents(log_decay: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-magnitudes that tie a chunk to its neighbours.

    They are -inf, so a weight of exactly 0, across a document boundary.

    Args:
        log_decay: (B, nc, C, H), chunk-local inclusive prefix sum.
        segments: (B, nc, C) document ids or None.

    Returns:
        From the chunk's start to each token (B, nc, C, H), from each token to the chunk's end
        (B, nc, C, H), and over the whole chunk (B, nc, H). The incoming state belongs to the last
        document of the chunk before.
    """
    from_start, over_chunk = log_decay, log_decay[:, :, -1]
    to_end = log_decay[:, :, -1:] - log_decay
    if segments is None:
        return from_start, to_end, over_chunk
    last = segments[..., -1]
    incoming = torch.cat([segments[:, :1, 0], last[:, :-1]], 1)
    return (
        from_start.masked_fill((segments != incoming[..., None])[..., None], -math.inf),
        to_end.masked_fill((segments != last[..., None])[..., None], -math.inf),
        over_chunk.masked_fill((last != incoming)[..., None], -math.inf),
    )


def split_factor(exponent: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The carry factor f = exp(exponent + i phase) as whole + (real + i imag), whole 0 or 1.

    A factor near 1, rounded to float32, is off by up to 6e-8, and by the same amount at every
    chunk: over a thousand chunks of slow decay that is a bias of 6e-5 in the state. What differs
    from 1 is rounded instead: h <- whole h + (real + i imag) h. Arguments float64, any shape.
    """
    whole = (exponent > -0.5).to(exponent.dtype)
    half = torch.sin(phase / 2)
    # e^{i phase} - 1 = -2 sin^2(phase / 2) + i sin(phase), without cancellation.
    near_one = torch.expm1(exponent) * torch.cos(phase) - 2 * half * half
    magnitude = torch.exp(exponent)
    real = torch.where(whole > 0, near_one, magnitude * torch.cos(phase))
    return whole, real, magnitude * torch.sin(phase)


def _carry(whole: Tensor, factor: Tensor, states: Tensor, initial: Tensor) -> Pair:
    """Runs the state over the chunks, by (B, nc, H) split factors and (B, nc, H, N, D) additions.

    Returns:
        The state at each chunk's start (B, nc, H, N, D), and the last (B, H, N, D).
    """
    h = initial
    starts = []
    for whole_c, factor_c, added in zip(
        whole[..., None, None].unbind(1),
        factor[..., None, None].unbind(1),
        states.unbind(1),
        strict=True,
    ):
        starts.append(h)
        h = whole_c * h + (factor_c * h + added)
    return torch.stack(starts, 1), h


def _check_shapes(x: Tensor, A: Tensor, B_t: Tensor, C_t: Tensor, dt: Tensor, chunk_size: int):
    batch, length, heads, _ = x.shape
    if length < 1 or chunk_size < 1:
        raise UserError(f"SSD needs T >= 1 and chunk_size >= 1, got T={length}, {chunk_size=}.")
    want = {"A": (heads,), "dt": (batch, length, heads), "B_t": B_t.shape, "C_t": B_t.shape}
    got = {"A": A.shape, "dt": dt.shape, "B_t": B_t.shape, "C_t": C_t.shape}
    for name, shape in want.items():
        if tuple(got[name]) != tuple(shape) or tuple(B_t.shape[:3]) != (batch, length, heads):
            raise UserError(
                f"SSD: {name} has shape {tuple(got[name])}, which does not fit x {tuple(x.shape)}."
            )


def chunkwise(
    x: Tensor,
    A: Tensor,
    B_t: Tensor,
    C_t: Tensor,
    dt: Tensor,
    chunk_size: int,
    per_chunk: PerChunk,
    *,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The chunkwise algorithm around a per-chunk implementation; returns (y real, final state)."""
    batch, length, heads, channels = x.shape
    pad = (chunk_size - length % chunk_size) % chunk_size
    compute = torch.complex128 if B_t.dtype == torch.complex128 else torch.complex64
    # Padding comes after softplus: s = 0 leaves the state untouched, so the final state is right
    # for any T.
    s = pad_time(softplus(dt.double()), pad)
    b, c = (pad_time(t.to(compute), pad).unflatten(1, (-1, chunk_size)) for t in (B_t, C_t))
    xc = pad_time(x.to(compute if x.is_complex() else compute.to_real()), pad)
    xc = xc.unflatten(1, (-1, chunk_size))

    log_decay, phase = prefix_decay(A.real, A.imag, s, chunk_size)
    segments = None
    if segment_ids is not None:
        segments = pad_segments(segment_ids, pad).unflatten(1, (-1, chunk_size))
    from_start, to_end, over_chunk = gated_exponents(log_decay, segments)
    from_start = torch.polar(torch.exp(from_start), phase).to(compute)
    to_end = torch.polar(torch.exp(to_end), phase[:, :, -1:] - phase).to(compute)
    whole, real, imag = split_factor(over_chunk, phase[:, :, -1])
    factor = torch.complex(real, imag).to(compute)
    a_log = torch.complex(log_decay, phase).to(compute)

    y, added = per_chunk(b, c, xc, a_log, to_end, segments)
    if initial_state is None:
        initial_state = added.new_zeros(batch, heads, b.shape[-1], channels)
    starts, final = _carry(whole.to(compute.to_real()), factor, added, initial_state.to(compute))
    reading = (c * from_start[..., None]).transpose(2, 3)
    y_off = (reading @ starts).transpose(2, 3).real
    y = (y.real if y.is_complex() else y) + y_off
    return y.flatten(1, 2)[:, :length], final


def ssd_complex_chunkwise(
    x: Tensor,
    A: Tensor,
    B_t: Tensor,
    C_t: Tensor,
    dt: Tensor,
    chunk_size: int = 64,
    ssd_dispatch: str = "pytorch",
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    segment_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The complex SSD in chunks: the real part of :func:`ssd_naive_complex`.

    O(T C) work, O(T/C) steps.

    Args:
        x: (B, T, H, D) real or complex (complex x runs on "pytorch" and "triton" only).
        A: (H,) complex, the decay per unit of s; taken as given, Re(A) > 0 included.
        B_t, C_t: (B, T, H, N) complex.
        dt: (B, T, H) real, before softplus.
        chunk_size: any length >= 1; T need not be a multiple.
        ssd_dispatch: "pytorch", "triton", or a name of ``ssd_backends.BACKENDS``.
        initial_state: (B, H, N, D) complex; differentiable.
        segment_ids: (B, T) integers, constant inside a document and non-decreasing; state never
            crosses a change.

    Returns:
        y (B, T, H, D) real, with ``return_final_state`` also the state after the last token,
        (B, H, N, D) complex.

    Raises:
        UserError: shapes that do not fit, or a dispatch that is unknown or cannot run here.
        ImportError: "triton" without Triton.
    """
    _check_shapes(x, A, B_t, C_t, dt, chunk_size)
    if ssd_dispatch in ("pytorch", "triton"):
        per_chunk: PerChunk = per_chunk_ssd_pytorch
        if ssd_dispatch == "triton":
            from mamba3_lite.models.ssd_triton import per_chunk_ssd_triton as per_chunk
        y, state = chunkwise(
            x, A, B_t, C_t, dt, chunk_size, per_chunk,
            initial_state=initial_state, segment_ids=segment_ids,
        )  # fmt: skip
        return (y, state) if return_final_state else y

    from mamba3_lite.models import ssd_backends

    if x.is_complex():
        raise UserError(f"ssd_dispatch={ssd_dispatch!r} needs real x; use 'pytorch' or 'triton'.")
    packed = None
    if initial_state is not None:
        packed = torch.cat([initial_state.real, initial_state.imag], 2)
    y, final = ssd_backends.resolve(ssd_dispatch, ssd_backends.Shape.of(x, B_t, chunk_size)).run(
        x, (B_t.real, B_t.imag), (C_t.real, C_t.imag), dt, (A.real, A.imag),
        chunk_size=chunk_size, state=packed, return_state=return_final_state,
        segment_ids=segment_ids,
    )  # fmt: skip
    if not return_final_state:
        return y
    assert final is not None
    return y, torch.complex(*final.chunk(2, 2))
