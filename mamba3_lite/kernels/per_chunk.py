"""The per-chunk SSD kernel: output inside a chunk and the state that the chunk adds, in float32.

Legend: B batch, nc chunks, C tokens of a chunk (l reads, s writes), H heads, N complex state width,
D channels of a head.

    Y_diag[l]  = sum_{s <= l, same segment} (C_l . B_s) e^{a_l - a_s} x_s
    state      = sum_s decay_s B_s x_s^T

With a = log-magnitude + i phase, e^{a_l - a_s} is split: the phase turns C_l by e^{i phase_l} and
B_s by e^{-i phase_s}, one sine and cosine a token; the magnitude stays a difference, one
exponential a pair of tokens. The exponent is masked, never the exponential, so a pair that does not
count weighs exactly 0 whatever stands above the diagonal.
"""

import triton
import triton.language as tl


@triton.jit
def token_rows(program, H, C: tl.constexpr, tokens):
    """Rows of a (B, nc, C, H) tensor for ``tokens`` of the chunk and head that one program owns.

    64-bit: batch x length x heads x width passes 2^31 in ordinary training, and a 32-bit offset
    wraps without an error.
    """
    program = program.to(tl.int64)
    return ((program // H) * C + tokens) * H + program % H


@triton.jit
def _load_tile(re, im, rows, columns, keep, WIDTH: tl.constexpr):
    offsets = rows[:, None] * WIDTH + columns[None, :]
    return tl.load(re + offsets, mask=keep, other=0.0), tl.load(im + offsets, mask=keep, other=0.0)


@triton.jit
def _load_pair(re, im, rows, keep):
    return tl.load(re + rows, mask=keep, other=0.0), tl.load(im + rows, mask=keep, other=0.0)


@triton.jit
def _dot(left, right, total):
    # Not TF32: its 10-bit products would cost three digits against the PyTorch path.
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _products(
    b_re, b_im, c_re, c_im, rows_l, rows_s, in_l, in_s, phase_l, phase_s,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, COMPLEX_X: tl.constexpr,
):  # fmt: skip
    """(C_l . B_s) e^{i (phase_l - phase_s)}: real part and, for complex x only, imaginary part."""
    cos_l, sin_l = tl.cos(phase_l)[:, None], tl.sin(phase_l)[:, None]
    cos_s, sin_s = tl.cos(phase_s)[:, None], tl.sin(phase_s)[:, None]
    re = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    im = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        cr, ci = _load_tile(c_re, c_im, rows_l, n, in_l[:, None] & (n < N)[None, :], N)
        br, bi = _load_tile(b_re, b_im, rows_s, n, in_s[:, None] & (n < N)[None, :], N)
        turned_cr, turned_ci = cr * cos_l - ci * sin_l, cr * sin_l + ci * cos_l
        turned_br = tl.trans(br * cos_s + bi * sin_s)
        turned_bi = tl.trans(bi * cos_s - br * sin_s)
        re = _dot(turned_cr, turned_br, re)
        re = _dot(-turned_ci, turned_bi, re)
        if COMPLEX_X:
            im = _dot(turned_cr, turned_bi, im)
            im = _dot(turned_ci, turned_br, im)
    return re, im


@triton.jit
def _output_tile(
    l0, b_re, b_im, c_re, c_im, x_re, x_im, a_re, a_im, segments, y, program, d, H,
    C: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    COMPLEX_X: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Y_diag of the tokens from l0 on, channels d; skips the tiles above the diagonal."""
    token_l = l0 + tl.arange(0, BLOCK_T)
    in_l = token_l < C
    rows_l = token_rows(program, H, C, token_l)
    log_l, phase_l = _load_pair(a_re, a_im, rows_l, in_l)
    y_re = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    y_im = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for s0 in range(0, l0 + BLOCK_T, BLOCK_T):
        token_s = s0 + tl.arange(0, BLOCK_T)
        in_s = token_s < C
        rows_s = token_rows(program, H, C, token_s)
        log_s, phase_s = _load_pair(a_re, a_im, rows_s, in_s)
        re, im = _products(
            b_re, b_im, c_re, c_im, rows_l, rows_s, in_l, in_s, phase_l, phase_s,
            N, BLOCK_T, BLOCK_N, COMPLEX_X,
        )  # fmt: skip
        counts = (token_s[None, :] <= token_l[:, None]) & in_l[:, None]
        if HAS_SEGMENTS:
            chunk = (program.to(tl.int64) // H) * C
            segment_l = tl.load(segments + chunk + token_l, mask=in_l, other=0)
            segment_s = tl.load(segments + chunk + token_s, mask=in_s, other=0)
            counts = counts & (segment_l[:, None] == segment_s[None, :])
        weight = tl.exp(tl.where(counts, log_l[:, None] - log_s[None, :], float("-inf")))
        re = re * weight
        offsets = rows_s[:, None] * D + d[None, :]
        keep = in_s[:, None] & (d < D)[None, :]
        xr = tl.load(x_re + offsets, mask=keep, other=0.0)
        y_re = _dot(re, xr, y_re)
        if COMPLEX_X:
            im = im * weight
            xi = tl.load(x_im + offsets, mask=keep, other=0.0)
            y_re = _dot(-im, xi, y_re)
            y_im = _dot(re, xi, y_im)
            y_im = _dot(im, xr, y_im)
    offsets = rows_l[:, None] * D + d[None, :]
    keep = in_l[:, None] & (d < D)[None, :]
    if COMPLEX_X:
        tl.store(y + 2 * offsets, y_re, mask=keep)
        tl.store(y + 2 * offsets + 1, y_im, mask=keep)
    else:
        tl.store(y + offsets, y_re, mask=keep)


@triton.jit
def _state_tile(
    n0, b_re, b_im, x_re, x_im, decay_re, decay_im, state, program, d, H,
    C: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPLEX_X: tl.constexpr,
):  # fmt: skip
    """The added state of the slots from n0 on, channels d."""
    n = n0 + tl.arange(0, BLOCK_N)
    h_re = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    h_im = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for s0 in range(0, C, BLOCK_T):
        token = s0 + tl.arange(0, BLOCK_T)
        in_s = token < C
        rows = token_rows(program, H, C, token)
        fr, fi = _load_pair(decay_re, decay_im, rows, in_s)
        fr, fi = fr[:, None], fi[:, None]
        br, bi = _load_tile(b_re, b_im, rows, n, in_s[:, None] & (n < N)[None, :], N)
        left_re, left_im = tl.trans(br * fr - bi * fi), tl.trans(br * fi + bi * fr)
        offsets = rows[:, None] * D + d[None, :]
        keep = in_s[:, None] & (d < D)[None, :]
        xr = tl.load(x_re + offsets, mask=keep, other=0.0)
        h_re = _dot(left_re, xr, h_re)
        h_im = _dot(left_im, xr, h_im)
        if COMPLEX_X:
            xi = tl.load(x_im + offsets, mask=keep, other=0.0)
            h_re = _dot(-left_im, xi, h_re)
            h_im = _dot(left_re, xi, h_im)
    offsets = (program.to(tl.int64) * N + n)[:, None] * D + d[None, :]
    keep = (n < N)[:, None] & (d < D)[None, :]
    tl.store(state + 2 * offsets, h_re, mask=keep)
    tl.store(state + 2 * offsets + 1, h_im, mask=keep)


@triton.jit
def per_chunk_kernel(
    b_re, b_im, c_re, c_im, x_re, x_im, a_re, a_im, decay_re, decay_im, segments, y, state, H,
    C: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    COMPLEX_X: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """One program per (batch, chunk, head) and tile of channels: grid (B nc H, ceil(D / BLOCK_D)).

    All tensors are contiguous, float32 but for ``segments`` (int64). b, c: (B, nc, C, H, N) pairs;
    x: (B, nc, C, H, D) pair, the imaginary part None unless COMPLEX_X; a, decay: (B, nc, C, H)
    pairs; segments: (B, nc, C), None unless HAS_SEGMENTS; y: (B, nc, C, H, D), interleaved complex
    numbers if COMPLEX_X; state: (B, nc, H, N, D), interleaved complex numbers.
    """
    # The product of three sizes goes on axis 0, the only one that takes more than 65,535 blocks.
    program = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for l0 in range(0, C, BLOCK_T):
        _output_tile(
            l0, b_re, b_im, c_re, c_im, x_re, x_im, a_re, a_im, segments, y, program, d, H,
            C, N, D, BLOCK_T, BLOCK_N, BLOCK_D, COMPLEX_X, HAS_SEGMENTS,
        )  # fmt: skip
    for n0 in range(0, N, BLOCK_N):
        _state_tile(
            n0, b_re, b_im, x_re, x_im, decay_re, decay_im, state, program, d, H,
            C, N, D, BLOCK_T, BLOCK_N, BLOCK_D, COMPLEX_X,
        )  # fmt: skip
