"""One token through the model: five kernels a layer, each reading weights or state once.

Legend: B batch, H heads, P channels of a head, N complex state width, K inputs and M outputs of a
product, W = H (P + 4 N + 1) columns of the projection (x, Re B, Im B, Re C, Im C, dt).

A layer is norm and in_proj, the SSD step, the folded mixer onto the residual, norm with gate, up
and SwiGLU, and the down product onto the residual. At larger batches a norm is a kernel of its own.

A step is bound by memory, and at batch 1 by the latency of the chain, so with PDL (programmatic
dependent launch, compute capability 9.0) a kernel starts while its predecessor runs, and takes in
what does not depend on it: its weights, or the state. ``griddepcontrol.wait`` then waits for all
that the predecessor has written. Every kernel waits, so all earlier kernels are finished behind it,
too.

Nothing is accumulated in memory: equal inputs give equal bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mamba3_lite.kernels.fused import _softplus

_TURNS_PER_RADIAN = tl.constexpr(0.15915494309189535)
_RADIANS_PER_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _announce(PDL: tl.constexpr):
    """The next kernel may start: it waits by itself before it reads anything of ours."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def _to_l2(addresses):
    """Asks for the cache lines at these addresses (int64), without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load_columns(at, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from K on are 0. A mask costs the wide loads, so where none is needed there is none.

    ``k`` has the rank of ``at``.
    """
    if K % BLOCK_K == 0:
        return tl.load(at)
    return tl.load(at, mask=k < K, other=0.0)


@triton.jit
def embed_kernel(
    ids, weight, x, scale, scaled, squares,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks of K): x (B, K), the rows of ``weight`` that ``ids`` (B,) int64 name.

    With ``scale`` (K,), of the next norm: ``scaled`` (B, K) is x times it, and squares (B, PARTS)
    the sums of x squared by block, then zeros.
    """
    _announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    k = block * BLOCK + tl.arange(0, BLOCK)
    _wait(PDL)
    values = tl.load(weight + tl.load(ids + row) * K + k, mask=k < K, other=0.0)
    tl.store(x + row * K + k, values, mask=k < K)
    if scale is not None:
        v = values.to(tl.float32)
        left = v * tl.load(scale + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(scaled + row * K + k, left.to(values.dtype), mask=k < K)
        tl.store(squares + row * PARTS + block, tl.sum(v * v, 0))
        part = tl.arange(0, PARTS)
        beyond = (part >= tl.num_programs(1)) & (block == 0)
        tl.store(squares + row * PARTS + part, 0.0, mask=beyond)


@triton.jit
def vector_kernel(
    x, norm, weight, out, eps,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of M), batch 1: out (M,) = weight (M, K) times x (K,), in float32.

    NORM: x goes through RMSNorm with the scales ``norm`` (K,) first. GATED: weight is (2 M, K), and
    out is silu of the upper half's product times the lower one's. ADD: onto what ``out`` holds.
    """
    _announce(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the end are read as the last one, and not stored.
    at = weight + tl.minimum(row, M - 1)[:, None] * K + k[None, :]
    w = _load_columns(at, k[None, :], K, BLOCK_K).to(tl.float32)
    if GATED:
        up = _load_columns(at + M * K, k[None, :], K, BLOCK_K).to(tl.float32)
    if NORM:
        scale = _load_columns(norm + k, k, K, BLOCK_K).to(tl.float32)
    _wait(PDL)
    v = _load_columns(x + k, k, K, BLOCK_K).to(tl.float32)
    factor = 1.0
    if NORM:
        # The same for all outputs: it comes last, so that neither sum waits for the other.
        factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
        v = v * scale
    result = tl.sum(w * v[None, :], 1) * factor
    if GATED:
        result = _silu(result) * (tl.sum(up * v[None, :], 1) * factor)
    if ADD:
        result += tl.load(out + row, mask=row < M, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < M)


@triton.jit
def _largest(values, columns, M: tl.constexpr):
    """Along the last dimension: the largest, and the first column where it is; NaN if any is."""
    axis: tl.constexpr = len(values.shape) - 1
    wrong = tl.sum((values != values).to(tl.int32), axis)
    largest = tl.max(values, axis, keep_dims=True)
    place = tl.min(tl.where(values == largest, columns, M - 1), axis)
    return tl.where(wrong > 0, float("nan"), tl.max(values, axis)), place


@triton.jit(do_not_specialize=["batch"])
def batch_kernel(
    x, weight, out, batch, values, places,
    K: tl.constexpr, M: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, LINES: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of M, blocks of B): ``vector_kernel`` for x (B, K) and out (B, M); no norm.

    LINES, a power of two, is at least the number of 128-byte lines of BLOCK_M rows of ``weight``.
    values, places (B, blocks of M): as in ``largest_kernel``, or None. Without KEEP ``out`` is not
    written.
    """
    _announce(PDL)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    ELEMENT: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        # What the loop reads is on its way while the predecessor runs.
        first = tl.program_id(0).to(tl.int64) * BLOCK_M * K * ELEMENT
        line = tl.minimum(first + tl.arange(0, LINES) * 128, (M * K - 1) * ELEMENT)
        _to_l2(weight.to(tl.int64) + line)
        if GATED:
            _to_l2(weight.to(tl.int64) + M * K * ELEMENT + line)
    _wait(PDL)
    # Rows beyond the end are read as the last one, and not stored.
    x_rows = x + tl.minimum(b, batch - 1)[:, None] * K
    w_rows = weight + tl.minimum(m, M - 1)[None, :] * K
    acc = tl.zeros((BLOCK_B, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_B, BLOCK_M), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        across = (k0 + k)[None, :]
        down = (k0 + k)[:, None]
        a = _load_columns(x_rows + across, across, K, BLOCK_K)
        w = _load_columns(w_rows + down, down, K, BLOCK_K)
        acc = tl.dot(a, w, acc, input_precision="tf32x3")
        if GATED:
            up = _load_columns(w_rows + M * K + down, down, K, BLOCK_K)
            acc_up = tl.dot(a, up, acc_up, input_precision="tf32x3")
    if GATED:
        acc = _silu(acc) * acc_up
    inside = (b < batch)[:, None] & (m < M)[None, :]
    at = out + b[:, None] * M + m[None, :]
    if ADD:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
    if values is not None:
        largest, place = _largest(tl.where(m[None, :] < M, acc, float("-inf")), m[None, :], M)
        to = b * tl.num_programs(0) + tl.program_id(0)
        tl.store(values + to, largest, mask=b < batch)
        tl.store(places + to, place, mask=b < batch)


@triton.jit
def norm_kernel(
    x, norm, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (B,): out (B, K) = RMSNorm(x (B, K)) with the scales ``norm`` (K,)."""
    _announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    scale = _load_columns(norm + k, k, K, BLOCK).to(tl.float32)
    _wait(PDL)
    v = _load_columns(x + row * K + k, k, K, BLOCK).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps) * scale
    tl.store(out + row * K + k, v.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def largest_kernel(
    logits, values, places, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (B, blocks of M): of each block of logits (B, M) float32 the largest, and where.

    values, places (B, blocks), float32 and int32: the first of equals; NaN if any is.
    """
    _announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _wait(PDL)
    value = tl.load(logits + row * M + column, mask=column < M, other=float("-inf"))
    largest, place = _largest(value, column, M)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + at, largest)
    tl.store(places + at, place)


@triton.jit
def best_kernel(
    values, places, ids, found, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (B,): of the S blocks of ``largest_kernel`` the best: ids (B,) int64, where.

    found (B, 2) float64: where and how large, NaN if any is.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    _wait(PDL)
    # Not earlier: what the next step asks for before it waits is then as this step leaves it.
    _announce(PDL)
    value = tl.load(values + row * S + block, mask=block < S, other=float("-inf"))
    place = tl.load(places + row * S + block, mask=block < S, other=2147483647)
    wrong = tl.sum((value != value).to(tl.int32), 0)
    largest = tl.max(value, 0)
    # Among NaN nothing is the largest: the id is then some column, and ``found`` says NaN.
    place = tl.min(tl.where((value == largest) | (wrong > 0), place, 2147483647), 0)
    tl.store(ids + row, place.to(tl.int64))
    tl.store(found + 2 * row, place.to(tl.float64))
    tl.store(found + 2 * row + 1, tl.where(wrong > 0, float("nan"), largest).to(tl.float64))


@triton.jit
def _sine_cosine(x):
    """Of -pi/2 <= x <= pi/2, within 1e-7: the first terms of both series, and no branch."""
    square = x * x
    sine = -1.0 / 39916800.0
    sine = sine * square + 1.0 / 362880.0
    sine = sine * square - 1.0 / 5040.0
    sine = sine * square + 1.0 / 120.0
    sine = sine * square - 1.0 / 6.0
    cosine = 1.0 / 479001600.0
    cosine = cosine * square - 1.0 / 3628800.0
    cosine = cosine * square + 1.0 / 40320.0
    cosine = cosine * square - 1.0 / 720.0
    cosine = cosine * square + 1.0 / 24.0
    cosine = cosine * square - 0.5
    return x + x * square * sine, 1.0 + square * cosine


@triton.jit
def _expm1_near_zero(x):
    """e^x - 1 for -0.5 <= x <= 0, to float32's relative precision: eight terms of the series."""
    total = 1.0 + x * (1.0 / 8)
    for i in tl.static_range(7, 1, -1):
        total = 1.0 + total * (x * (1.0 / i))
    return total * x


@triton.jit
def _transition(alpha, omega, s):
    """e^{(alpha + i omega) s} as ``whole + real + i imag``, whole being 1 near 1 and 0 else."""
    turn = omega.to(tl.float64) * _TURNS_PER_RADIAN * s.to(tl.float64)
    angle = (turn - tl.floor(turn + 0.5)).to(tl.float32) * _RADIANS_PER_TURN
    size = tl.exp(alpha * s)
    whole = tl.where(alpha * s > -0.5, 1.0, 0.0)
    # e^{i angle} - 1 = -2 sin^2(angle / 2) + i sin(angle), without cancellation.
    sine, cosine = _sine_cosine(angle * 0.5)
    below_one = 2.0 * sine * sine
    near_one = _expm1_near_zero(alpha * s) * (1.0 - below_one) - below_one
    real = tl.where(whole > 0.0, near_one, size * (1.0 - below_one))
    return whole, real, size * (2.0 * sine * cosine)


@triton.jit
def ssd_step_kernel(
    proj, a_re, a_im, state, y,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B H, tiles of P): h <- e^{A s} h + B x^T in place, y (B, H P) = Re(C h).

    proj (B, W) is the projection; state (B, H, 2 N, P): real rows above imaginary ones; computed in
    float32 whatever its dtype. The factor is split as in ``ssd_complex.split_factor``: near 1 only
    what differs from 1 is rounded.
    """
    _announce(PDL)
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    n = tl.arange(0, TILE_N)
    p = tl.program_id(1) * TILE_P + tl.arange(0, TILE_P)
    inside = (n < N)[:, None] & (p < P)[None, :]
    at = state + program * (2 * N * P) + n[:, None] * P + p[None, :]
    # The state is of the last token, so it need not wait; nor need the cache keep it.
    first: tl.constexpr = "evict_first"
    h_re = tl.load(at, mask=inside, other=0.0, eviction_policy=first).to(tl.float32)
    h_im = tl.load(at + N * P, mask=inside, other=0.0, eviction_policy=first).to(tl.float32)
    alpha, omega = tl.load(a_re + head), tl.load(a_im + head)
    _wait(PDL)
    width = H * (P + 4 * N + 1)
    row = proj + (program // H) * width
    x = tl.load(row + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    pairs = row + H * P + head * N + n
    b_re = tl.load(pairs, mask=n < N, other=0.0).to(tl.float32)
    b_im = tl.load(pairs + H * N, mask=n < N, other=0.0).to(tl.float32)
    c_re = tl.load(pairs + 2 * H * N, mask=n < N, other=0.0).to(tl.float32)
    c_im = tl.load(pairs + 3 * H * N, mask=n < N, other=0.0).to(tl.float32)
    s = _softplus(tl.load(row + H * (P + 4 * N) + head).to(tl.float32))

    whole, real, imag = _transition(alpha, omega, s)
    new_re = whole * h_re + (real * h_re - imag * h_im + b_re[:, None] * x[None, :])
    new_im = whole * h_im + (real * h_im + imag * h_re + b_im[:, None] * x[None, :])
    kind = state.dtype.element_ty
    tl.store(at, new_re.to(kind), mask=inside, eviction_policy=first)
    tl.store(at + N * P, new_im.to(kind), mask=inside, eviction_policy=first)
    read = tl.sum(c_re[:, None] * new_re - c_im[:, None] * new_im, 0)
    tl.store(y + program * P + p, read.to(y.dtype.element_ty), mask=p < P)
