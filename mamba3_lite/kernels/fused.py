"""The whole complex SSD, forward and backward, as a real SSD in a frame that turns with the phase.

Legend: B batch, T time, H heads, P (also D) channels of a head, N complex state width, C tokens of
a chunk, nc chunks. The projection is one tensor (B, T, W), W = H (P + 4 N + 1), whose columns are
x, Re B, Im B, Re C, Im C (head-major each) and dt; its gradient has the same layout, so nothing is
sliced, copied or concatenated outside.

With s = softplus(dt), A = alpha + i beta, theta_t = beta sum_{k<=t} s_k and a_t = alpha times the
sum inside the chunk (docs/concepts/ssd_theory.md):

    b = B e^{-i theta}, c = conj(C e^{i theta})        both as (real, imaginary) pairs
    S[t, j] = c_t . b_j + over imaginary parts,  M = S e^{a_t - a_j} for j <= t
    y_t = sum_j M[t, j] x_j + e^{a_t} c_t . h          h (2N, P): the state before the chunk
    h'  = e^{a_end} h + sum_j e^{a_end - a_j} b_j x_j^T

In that frame the carried state needs no rotation; it equals the true state turned by -theta. The
phase is a sum over the whole sequence, so it is kept in float64, as turns, and only the fraction of
a turn is rounded to float32: right at any length.

Four kernels: ``phase_kernel`` (one number a token and head), ``carry_kernel`` (walks the chunks
with the state on chip; backwards in time it carries the gradient of the state), ``output_kernel``
and ``gradient_kernel`` (every chunk at once). Nothing is accumulated in memory, so results are
bitwise repeatable. Products take bfloat16, float16 or float32 (as TF32) operands and add up in
float32.
"""

import triton
import triton.language as tl

# A token that decays the state by e^-30 has erased it; beyond that the prefix sums of its chunk
# would only lose digits.
_SMALLEST_LOG_DECAY = tl.constexpr(-30.0)
_TURNS_PER_RADIAN = tl.constexpr(0.15915494309189535)
_RADIANS_PER_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _dot(left, right, total):
    # A float32 product in three TF32 ones: a single one truncates its operands to 10 bits, which
    # would cost the float32 path three digits. Narrower operands are not touched.
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit
def _softplus(x):
    """log(1 + e^x) in float32 with a small relative error for every x."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log(u) e / (u - 1) is log1p(e) whatever 1 + e was rounded to.
    exact = u == 1.0
    log1p = tl.where(exact, e, tl.log(u) * (e / tl.where(exact, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit(do_not_specialize=["T", "padded", "tokens_per_span"])
def phase_kernel(
    proj, a_re, a_im, span_turns, log_decay, cos, sin, T, padded, tokens_per_span,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    MAX_SPANS: tl.constexpr, HAS_SPANS: tl.constexpr, SUM_ONLY: tl.constexpr,
):  # fmt: skip
    """Grid (B H, spans of the sequence). Writes log_decay, cos and sin, (B, H, padded) float32.

    ``log_decay`` is the inclusive prefix sum of alpha s inside its chunk, cos and sin are those of
    theta. ``padded`` is nc C; tokens from T on have s = 0. BLOCK is a multiple of C, and
    ``tokens_per_span`` one of BLOCK. With SUM_ONLY, ``span_turns`` (B, H, MAX_SPANS) float64 takes
    what theta turns inside each span; with HAS_SPANS it is read to know where a span starts.
    """
    program = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    head = program % H
    alpha = tl.load(a_re + head).to(tl.float64)
    turns = tl.load(a_im + head).to(tl.float64) * tl.full((), _TURNS_PER_RADIAN, tl.float64)
    column = proj + (program // H) * T * (H * (P + 4 * N + 1)) + H * (P + 4 * N) + head
    base = tl.zeros((), tl.float64)
    if HAS_SPANS:
        spans = tl.arange(0, MAX_SPANS)
        before = tl.load(span_turns + program * MAX_SPANS + spans, mask=spans < span, other=0.0)
        base += tl.sum(before, 0)
    first = span * tokens_per_span
    for start in range(first, tl.minimum(first + tokens_per_span, padded), BLOCK):
        t = start + tl.arange(0, BLOCK)
        dt = tl.load(column + t.to(tl.int64) * (H * (P + 4 * N + 1)), mask=t < T, other=0.0)
        s = tl.where(t < T, _softplus(dt.to(tl.float32)), 0.0).to(tl.float64)
        if not SUM_ONLY:
            step = tl.maximum(alpha * s, tl.full((), _SMALLEST_LOG_DECAY, tl.float64))
            prefix = tl.cumsum(tl.reshape(step, (BLOCK // C, C)), 1)
            theta = base + tl.cumsum(turns * s, 0)
            angle = (theta - tl.floor(theta + 0.5)).to(tl.float32) * _RADIANS_PER_TURN
            out = program * padded + t
            keep = t < padded
            tl.store(log_decay + out, tl.reshape(prefix, (BLOCK,)).to(tl.float32), mask=keep)
            tl.store(cos + out, tl.cos(angle), mask=keep)
            tl.store(sin + out, tl.sin(angle), mask=keep)
        base += tl.sum(turns * s, 0)
    if SUM_ONLY:
        tl.store(span_turns + program * MAX_SPANS + span, base)


@triton.jit
def _load_rows(
    base, tokens, left, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tile (C, columns) from ``base``; rows from ``left`` and columns from WIDTH on are 0."""
    pointers = base + tokens[:, None] * STRIDE + columns[None, :]
    if ALL_ROWS and ALL_COLUMNS:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tokens < left)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_rows(
    base, tokens, left, columns, tile, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    pointers = base + tokens[:, None] * STRIDE + columns[None, :]
    tile = tile.to(base.dtype.element_ty)
    if ALL_ROWS and ALL_COLUMNS:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=(tokens < left)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _state_rows(n0, TILE_N: tl.constexpr, N: tl.constexpr):
    """Rows of a tile of a state (2, N, P): TILE_N real ones from n0 on, then the imaginary ones."""
    rows = tl.arange(0, 2 * TILE_N)
    n = n0 + rows % TILE_N
    return n + (rows // TILE_N) * N, n < N


@triton.jit
def _load_state(
    base, n0, p, TILE_N: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ALL: tl.constexpr
):
    """Tile (2 TILE_N, p) of a state (2, N, P)."""
    rows, inside = _state_rows(n0, TILE_N, N)
    pointers = base + rows[:, None] * P + p[None, :]
    if ALL:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside[:, None] & (p < P)[None, :], other=0.0)


@triton.jit
def _store_state(
    base, n0, p, tile, TILE_N: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ALL: tl.constexpr
):
    rows, inside = _state_rows(n0, TILE_N, N)
    pointers = base + rows[:, None] * P + p[None, :]
    tile = tile.to(base.dtype.element_ty)
    if ALL:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=inside[:, None] & (p < P)[None, :])


@triton.jit
def _beside(re, im):
    """(R, N) twice -> (R, 2 N)."""
    both = tl.permute(tl.join(re, im), (0, 2, 1))
    return tl.reshape(both, (re.shape[0], 2 * re.shape[1]))


@triton.jit
def _apart(both):
    """(R, 2 N) -> (R, N) twice."""
    return tl.split(tl.permute(tl.reshape(both, (both.shape[0], 2, both.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _turn(re, im, cos, sin):
    """(re + i im)(cos - i sin), row by row."""
    re = re.to(tl.float32)
    im = im.to(tl.float32)
    return re * cos[:, None] + im * sin[:, None], im * cos[:, None] - re * sin[:, None]


@triton.jit
def _load_pair(
    base, tokens, left, n, W: tl.constexpr, HN: tl.constexpr, N: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_N: tl.constexpr,
):  # fmt: skip
    """Columns n of B or C, whose real parts begin at ``base``."""
    re = _load_rows(base, tokens, left, n, W, N, ALL_ROWS, ALL_N)
    im = _load_rows(base + HN, tokens, left, n, W, N, ALL_ROWS, ALL_N)
    return re, im


@triton.jit
def _turned(re, im, cos, sin, SIGN: tl.constexpr):
    """b (SIGN 1) or c (SIGN -1), (C, 2 N), from the columns of B or C, rounded as they were."""
    turned_re, turned_im = _turn(re, SIGN * im.to(tl.float32), cos, sin)
    return _beside(turned_re.to(re.dtype), turned_im.to(re.dtype))


@triton.jit
def _load_turned(
    base, tokens, left, n, cos, sin, SIGN: tl.constexpr,
    W: tl.constexpr, HN: tl.constexpr, N: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_N: tl.constexpr,
):  # fmt: skip
    re, im = _load_pair(base, tokens, left, n, W, HN, N, ALL_ROWS, ALL_N)
    return _turned(re, im, cos, sin, SIGN)


@triton.jit
def _segments_of(segments, batch, chunk, tokens, T, C: tl.constexpr):
    """Document of each token of a chunk, of its last one, and of the token before the chunk."""
    first = segments + batch * T
    own = tl.load(first + tl.minimum(chunk * C + tokens, T - 1))
    last = tl.load(first + tl.minimum(chunk * C + C - 1, T - 1))
    before = tl.load(first + tl.maximum(chunk * C - 1, 0))
    return own, last, before


@triton.jit(do_not_specialize=["T", "n_chunks", "chunks_per_split"])
def carry_kernel(
    proj, values, log_decay, cos, sin, segments, initial, states, last_state, kept,
    T, n_chunks, chunks_per_split,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, BACKWARD: tl.constexpr, ALL_ROWS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_STATES: tl.constexpr, STORE_LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B H, tiles of the state, splits of the sequence).

    Forward, states (B, H, nc, 2, N, P) takes the state before each chunk. Backward in time, with
    values = dy and the turned C in the place of B, states (B, H, nc + 1, 2, N, P) takes the
    gradient of the state before each chunk, and of the last one.

    A split starts from ``initial`` (B, H, splits, 2, N, P) float32, or zero, and leaves the state
    after its last chunk in ``last_state`` (the same shape) and the factor that it put on what it
    started from in ``kept`` (B, H, splits). values: x inside proj, or dy (B, T, H, P).
    """
    W: tl.constexpr = H * (P + 4 * N + 1)
    VALUE_STRIDE: tl.constexpr = H * P if BACKWARD else W
    COL: tl.constexpr = H * (P + 2 * N) if BACKWARD else H * P
    SIGN: tl.constexpr = -1 if BACKWARD else 1
    ALL_N: tl.constexpr = N % TILE_N == 0
    ALL_P: tl.constexpr = P % TILE_P == 0
    P_TILES: tl.constexpr = (P + TILE_P - 1) // TILE_P
    program = tl.program_id(0).to(tl.int64)
    batch = program // H
    head = program % H
    split = tl.program_id(2)
    n0 = (tl.program_id(1) // P_TILES) * TILE_N
    n = n0 + tl.arange(0, TILE_N)
    p = (tl.program_id(1) % P_TILES) * TILE_P + tl.arange(0, TILE_P)
    tokens = tl.arange(0, C)
    own_split = program * tl.num_programs(2) + split
    if HAS_INITIAL:
        h = _load_state(initial + own_split * (2 * N * P), n0, p, TILE_N, N, P, ALL_N and ALL_P)
    else:
        h = tl.zeros((2 * TILE_N, TILE_P), tl.float32)
    whole = 1.0
    decay_row = program * n_chunks * C
    first = split * chunks_per_split
    for i in range(first, tl.minimum(first + chunks_per_split, n_chunks)):
        chunk = n_chunks - 1 - i if BACKWARD else i
        if STORE_STATES:
            slot = program * (n_chunks + 1) + chunk + 1 if BACKWARD else program * n_chunks + chunk
            _store_state(states + slot * (2 * N * P), n0, p, h, TILE_N, N, P, ALL_N and ALL_P)
        here = decay_row + chunk * C
        a = tl.load(log_decay + here + tokens)
        a_end = tl.load(log_decay + here + C - 1)
        weight = tl.exp(a) if BACKWARD else tl.exp(a_end - a)
        over = tl.exp(a_end)
        if HAS_SEGMENTS:
            own, last, before = _segments_of(segments, batch, chunk, tokens, T, C)
            weight = tl.where(own == (before if BACKWARD else last), weight, 0.0)
            over = tl.where(before == last, over, 0.0)
        row = batch * T + chunk * C
        left = T - chunk * C
        b = _load_turned(
            proj + row * W + COL + head * N, tokens, left, n,
            tl.load(cos + here + tokens) * weight, tl.load(sin + here + tokens) * weight,
            SIGN, W, H * N, N, ALL_ROWS, ALL_N,
        )  # fmt: skip
        v = _load_rows(
            values + row * VALUE_STRIDE + head * P,
            tokens,
            left,
            p,
            VALUE_STRIDE,
            P,
            ALL_ROWS,
            ALL_P,
        )
        h = _dot(tl.trans(b), v, h * over)
        whole *= over
    if STORE_STATES and BACKWARD and split == tl.num_programs(2) - 1:
        out = states + program * (n_chunks + 1) * (2 * N * P)
        _store_state(out, n0, p, h, TILE_N, N, P, ALL_N and ALL_P)
    if STORE_LAST:
        out = last_state + own_split * (2 * N * P)
        _store_state(out, n0, p, h, TILE_N, N, P, ALL_N and ALL_P)
        tl.store(kept + own_split, whole)


@triton.jit(do_not_specialize=["T", "n_chunks"])
def output_kernel(
    proj, log_decay, cos, sin, segments, states, y, T, n_chunks,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, ALL_ROWS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Grid (B nc H, tiles of P): y (B, T, H, P) from the projection and the states."""
    W: tl.constexpr = H * (P + 4 * N + 1)
    ALL_N: tl.constexpr = N % TILE_N == 0
    ALL_P: tl.constexpr = P % TILE_P == 0
    # Heads are neighbours in memory, so they are neighbours in the grid.
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    chunk = program // H % n_chunks
    batch = program // (H * n_chunks)
    stream = batch * H + head
    p = tl.program_id(1) * TILE_P + tl.arange(0, TILE_P)
    tokens = tl.arange(0, C)
    here = (stream * n_chunks + chunk) * C + tokens
    a = tl.load(log_decay + here)
    cos_t = tl.load(cos + here)
    sin_t = tl.load(sin + here)
    row = proj + (batch * T + chunk * C) * W
    left = T - chunk * C
    x = _load_rows(row + head * P, tokens, left, p, W, P, ALL_ROWS, ALL_P)
    scores = tl.zeros((C, C), tl.float32)
    acc = tl.zeros((C, TILE_P), tl.float32)
    for n0 in range(0, N, TILE_N):
        n = n0 + tl.arange(0, TILE_N)
        b = _load_turned(
            row + H * P + head * N, tokens, left, n, cos_t, sin_t,
            1, W, H * N, N, ALL_ROWS, ALL_N,
        )  # fmt: skip
        c = _load_turned(
            row + H * (P + 2 * N) + head * N, tokens, left, n, cos_t, sin_t,
            -1, W, H * N, N, ALL_ROWS, ALL_N,
        )  # fmt: skip
        state = states + (stream * n_chunks + chunk) * (2 * N * P)
        h = _load_state(state, n0, p, TILE_N, N, P, ALL_N and ALL_P)
        scores = _dot(c, tl.trans(b), scores)
        acc = _dot(c, h, acc)
    reads = tl.exp(a)
    counts = tokens[:, None] >= tokens[None, :]
    if HAS_SEGMENTS:
        own, _, before = _segments_of(segments, batch, chunk, tokens, T, C)
        reads = tl.where(own == before, reads, 0.0)
        counts = counts & (own[:, None] == own[None, :])
    scores *= tl.exp(tl.where(counts, a[:, None] - a[None, :], float("-inf")))
    acc = _dot(scores.to(x.dtype), x, acc * reads[:, None])
    out = y + ((batch * T + chunk * C) * H + head) * P
    _store_rows(out, tokens, left, p, acc, H * P, P, ALL_ROWS, ALL_P)


@triton.jit
def _pair_sums(both, d_both):
    """Per row, the derivative of the loss as the pairs of (R, 2 N) grow, and as they turn further.

    Further means by e^{-i angle}.
    """
    both = both.to(tl.float32)
    re, im = _apart(both)
    d_re, d_im = _apart(d_both)
    return tl.sum(both * d_both, 1), tl.sum(im * d_re - re * d_im, 1)


@triton.jit
def _unturn(d_both, cos, sin):
    """The gradient before the turn from that after it, (R, 2 N) -> (R, N) twice."""
    d_re, d_im = _apart(d_both)
    return _turn(d_re, d_im, cos, -sin)


@triton.jit
def _decay(a, tokens, own, READERS_FIRST: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """e^{a_t - a_j} for j <= t in one document, else 0; rows are t (READERS_FIRST) or j."""
    if READERS_FIRST:
        counts = tokens[:, None] >= tokens[None, :]
        exponent = a[:, None] - a[None, :]
    else:
        counts = tokens[:, None] <= tokens[None, :]
        exponent = a[None, :] - a[:, None]
    if HAS_SEGMENTS:
        counts = counts & (own[:, None] == own[None, :])
    return tl.exp(tl.where(counts, exponent, float("-inf")))


@triton.jit
def _pair_tile(
    whole, base, tokens, left, n, cos, sin, SIGN: tl.constexpr,
    W: tl.constexpr, HN: tl.constexpr, N: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_N: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Columns n of b or c: the tile that is there already, if it is the only one."""
    if ONE_TILE:
        return whole
    return _load_turned(base, tokens, left, n, cos, sin, SIGN, W, HN, N, ALL_ROWS, ALL_N)


@triton.jit
def _row_tile(
    whole, base, tokens, left, p, STRIDE: tl.constexpr, P: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_P: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Channels p of x or dy, likewise."""
    if ONE_TILE:
        return whole
    return _load_rows(base, tokens, left, p, STRIDE, P, ALL_ROWS, ALL_P)


@triton.jit
def _writer_gradients(
    all_b, all_c, all_x, all_dy, all_g,
    b_row, c_row, x_row, dy_row, d_after, d_b_row, d_x_row,
    tokens, left, a, writes, cos, sin, own,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, ALL_ROWS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """dx and dB of a chunk: of what its tokens write. Returns -b . db and b's turn, each (C,).

    all_*: the tiles, if there is one of each; g is the gradient of the state after the chunk. Rows
    are the token that writes: S^T and dM^T.
    """
    W: tl.constexpr = H * (P + 4 * N + 1)
    HN: tl.constexpr = H * N
    ALL_N: tl.constexpr = N % TILE_N == 0
    ALL_P: tl.constexpr = P % TILE_P == 0
    ONE: tl.constexpr = KEEP and N <= TILE_N and P <= TILE_P
    scores = tl.zeros((C, C), tl.float32)
    d_scores = tl.zeros((C, C), tl.float32)
    for n0 in range(0, N, TILE_N):
        n = n0 + tl.arange(0, TILE_N)
        b = _pair_tile(all_b, b_row, tokens, left, n, cos, sin, 1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        c = _pair_tile(all_c, c_row, tokens, left, n, cos, sin, -1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        scores = _dot(b, tl.trans(c), scores)
    for p0 in range(0, P, TILE_P):
        p = p0 + tl.arange(0, TILE_P)
        x = _row_tile(all_x, x_row, tokens, left, p, W, P, ALL_ROWS, ALL_P, ONE)
        dy = _row_tile(all_dy, dy_row, tokens, left, p, H * P, P, ALL_ROWS, ALL_P, ONE)
        d_scores = _dot(x, tl.trans(dy), d_scores)
    decay = _decay(a, tokens, own, False, HAS_SEGMENTS)
    mixed = (scores * decay).to(d_x_row.dtype.element_ty)
    d_mixed = (d_scores * decay).to(d_x_row.dtype.element_ty)
    for p0 in range(0, P, TILE_P):
        p = p0 + tl.arange(0, TILE_P)
        dx = tl.zeros((C, TILE_P), tl.float32)
        for n0 in range(0, N, TILE_N):
            n = n0 + tl.arange(0, TILE_N)
            b = _pair_tile(
                all_b, b_row, tokens, left, n, cos, sin, 1, W, HN, N, ALL_ROWS, ALL_N, ONE
            )
            g = all_g if ONE else _load_state(d_after, n0, p, TILE_N, N, P, ALL_N and ALL_P)
            dx = _dot(b, g, dx)
        dy = _row_tile(all_dy, dy_row, tokens, left, p, H * P, P, ALL_ROWS, ALL_P, ONE)
        dx = _dot(mixed, dy, dx * writes[:, None])
        _store_rows(d_x_row, tokens, left, p, dx, W, P, ALL_ROWS, ALL_P)
    growth = tl.zeros((C,), tl.float32)
    turn = tl.zeros((C,), tl.float32)
    for n0 in range(0, N, TILE_N):
        n = n0 + tl.arange(0, TILE_N)
        db = tl.zeros((C, 2 * TILE_N), tl.float32)
        for p0 in range(0, P, TILE_P):
            p = p0 + tl.arange(0, TILE_P)
            x = _row_tile(all_x, x_row, tokens, left, p, W, P, ALL_ROWS, ALL_P, ONE)
            g = all_g if ONE else _load_state(d_after, n0, p, TILE_N, N, P, ALL_N and ALL_P)
            db = _dot(x, tl.trans(g), db)
        b = _pair_tile(all_b, b_row, tokens, left, n, cos, sin, 1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        c = _pair_tile(all_c, c_row, tokens, left, n, cos, sin, -1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        db = _dot(d_mixed, c, db * writes[:, None])
        grown, turned = _pair_sums(b, db)
        growth -= grown
        turn += turned
        re, im = _unturn(db, cos, sin)
        _store_rows(d_b_row, tokens, left, n, re, W, N, ALL_ROWS, ALL_N)
        _store_rows(d_b_row + HN, tokens, left, n, im, W, N, ALL_ROWS, ALL_N)
    return growth, turn


@triton.jit
def _reader_gradients(
    all_b, all_c, all_x, all_dy,
    b_row, c_row, x_row, dy_row, state, d_before, d_c_row, edge,
    tokens, left, a, reads, cos, sin, own,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, ALL_ROWS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """dC of a chunk: of what its tokens read. Returns c . dc and c's turn, each (C,).

    all_*: the tiles, if there is one of each. Writes <h, dh> before the chunk, and its derivative
    along the turn, to ``edge``.
    """
    W: tl.constexpr = H * (P + 4 * N + 1)
    HN: tl.constexpr = H * N
    ALL_N: tl.constexpr = N % TILE_N == 0
    ALL_P: tl.constexpr = P % TILE_P == 0
    ONE: tl.constexpr = KEEP and N <= TILE_N and P <= TILE_P
    d_scores = tl.zeros((C, C), tl.float32)
    for p0 in range(0, P, TILE_P):
        p = p0 + tl.arange(0, TILE_P)
        x = _row_tile(all_x, x_row, tokens, left, p, W, P, ALL_ROWS, ALL_P, ONE)
        dy = _row_tile(all_dy, dy_row, tokens, left, p, H * P, P, ALL_ROWS, ALL_P, ONE)
        d_scores = _dot(dy, tl.trans(x), d_scores)
    d_mixed = d_scores * _decay(a, tokens, own, True, HAS_SEGMENTS)
    d_mixed = d_mixed.to(d_c_row.dtype.element_ty)
    growth = tl.zeros((C,), tl.float32)
    turn = tl.zeros((C,), tl.float32)
    edge_growth = tl.zeros((TILE_P,), tl.float32)
    edge_turn = tl.zeros((TILE_P,), tl.float32)
    for n0 in range(0, N, TILE_N):
        n = n0 + tl.arange(0, TILE_N)
        dc = tl.zeros((C, 2 * TILE_N), tl.float32)
        for p0 in range(0, P, TILE_P):
            p = p0 + tl.arange(0, TILE_P)
            dy = _row_tile(all_dy, dy_row, tokens, left, p, H * P, P, ALL_ROWS, ALL_P, ONE)
            h = _load_state(state, n0, p, TILE_N, N, P, ALL_N and ALL_P)
            dh = _load_state(d_before, n0, p, TILE_N, N, P, ALL_N and ALL_P)
            dc = _dot(dy, tl.trans(h), dc)
            grown, turned = _pair_sums(tl.trans(h), tl.trans(dh.to(tl.float32)))
            edge_growth += grown
            edge_turn -= turned
        b = _pair_tile(all_b, b_row, tokens, left, n, cos, sin, 1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        c = _pair_tile(all_c, c_row, tokens, left, n, cos, sin, -1, W, HN, N, ALL_ROWS, ALL_N, ONE)
        dc = _dot(d_mixed, b, dc * reads[:, None])
        c_growth, c_turn = _pair_sums(c, dc)
        growth += c_growth
        turn += c_turn
        re, im = _unturn(dc, cos, sin)
        _store_rows(d_c_row, tokens, left, n, re, W, N, ALL_ROWS, ALL_N)
        _store_rows(d_c_row + HN, tokens, left, n, -im, W, N, ALL_ROWS, ALL_N)
    tl.store(edge, tl.sum(edge_growth, 0))
    tl.store(edge + 1, tl.sum(edge_turn, 0))
    return growth, turn


@triton.jit(do_not_specialize=["T", "n_chunks"])
def gradient_kernel(
    proj, log_decay, cos, sin, segments, states, d_states, dy, d_proj, growth, turn, edges,
    T, n_chunks,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, ALL_ROWS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (B nc H,): the gradient of x, B and C, and what ``decay_gradient_kernel`` needs for dt.

    states and d_states: what ``carry_kernel`` left forward and backward, dy (B, T, H, P), d_proj
    like proj. growth and turn, (B, H, nc C) float32, take c . dc - b . db of each token and the
    same with the derivative along the turn; edges (B, H, nc, 2) float32 takes <h, dh> before the
    chunk, likewise twice. KEEP holds what both halves need, where one tile is all of it; that pays
    where products read their operands from shared memory, and elsewhere overflows the registers.
    """
    W: tl.constexpr = H * (P + 4 * N + 1)
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    chunk = program // H % n_chunks
    batch = program // (H * n_chunks)
    stream = batch * H + head
    tokens = tl.arange(0, C)
    edge = stream * n_chunks + chunk
    here = edge * C + tokens
    row = proj + (batch * T + chunk * C) * W
    left = T - chunk * C
    b_row = row + H * P + head * N
    c_row = b_row + 2 * H * N
    x_row = row + head * P
    dy_row = dy + ((batch * T + chunk * C) * H + head) * P
    d_row = d_proj + (batch * T + chunk * C) * W
    d_b_row = d_row + H * P + head * N
    d_before = d_states + (edge + stream) * (2 * N * P)
    a = tl.load(log_decay + here)
    a_end = tl.load(log_decay + edge * C + C - 1)
    cos_t = tl.load(cos + here)
    sin_t = tl.load(sin + here)
    reads = tl.exp(a)
    writes = tl.exp(a_end - a)
    own = tokens
    if HAS_SEGMENTS:
        own, last, before = _segments_of(segments, batch, chunk, tokens, T, C)
        reads = tl.where(own == before, reads, 0.0)
        writes = tl.where(own == last, writes, 0.0)
    if KEEP and N <= TILE_N and P <= TILE_P:
        # One tile holds the whole state at the usual sizes: its tokens are then read only once.
        n = tl.arange(0, TILE_N)
        p = tl.arange(0, TILE_P)
        ALL_N: tl.constexpr = N == TILE_N
        ALL_P: tl.constexpr = P == TILE_P
        b = _load_turned(b_row, tokens, left, n, cos_t, sin_t, 1, W, H * N, N, ALL_ROWS, ALL_N)
        c = _load_turned(c_row, tokens, left, n, cos_t, sin_t, -1, W, H * N, N, ALL_ROWS, ALL_N)
        x = _load_rows(x_row, tokens, left, p, W, P, ALL_ROWS, ALL_P)
        dy_p = _load_rows(dy_row, tokens, left, p, H * P, P, ALL_ROWS, ALL_P)
        g = _load_state(d_before + 2 * N * P, 0, p, TILE_N, N, P, ALL_N and ALL_P)
    else:
        b = tokens
        c = tokens
        x = tokens
        dy_p = tokens
        g = tokens
    b_growth, b_turn = _writer_gradients(
        b, c, x, dy_p, g,
        b_row, c_row, x_row, dy_row, d_before + 2 * N * P, d_b_row, d_row + head * P,
        tokens, left, a, writes, cos_t, sin_t, own,
        H, N, P, C, TILE_N, TILE_P, ALL_ROWS, HAS_SEGMENTS, KEEP,
    )  # fmt: skip
    c_growth, c_turn = _reader_gradients(
        b, c, x, dy_p, b_row, c_row, x_row, dy_row, states + edge * (2 * N * P), d_before,
        d_b_row + 2 * H * N, edges + 2 * edge, tokens, left, a, reads, cos_t, sin_t, own,
        H, N, P, C, TILE_N, TILE_P, ALL_ROWS, HAS_SEGMENTS, KEEP,
    )  # fmt: skip
    tl.store(growth + here, b_growth + c_growth)
    tl.store(turn + here, b_turn + c_turn)


@triton.jit(do_not_specialize=["T", "n_chunks"])
def decay_gradient_kernel(
    proj, a_re, a_im, growth, turn, edges, d_proj, d_a, T, n_chunks,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid (B nc H,): the gradient of dt, and each chunk's share of dA, (H, 2, B, nc) float32.

    dt acts through a and theta alone. The loss depends on the step of a chunk's token k through
    every pair of tokens that spans it, before, in and after the chunk. All pairs that span the
    chunk's edge add up to <h, dh> there; each token t in between ends those that it reads and
    begins those that it writes:

        X_k = <h, dh> - sum_{t<k} (c_t . dc_t - b_t . db_t)

    for a; and the same with the derivative along the turn for theta. The sums stay inside the
    chunk, where their cancellation costs no digits (theory page, gradients).
    """
    W: tl.constexpr = H * (P + 4 * N + 1)
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    chunk = program // H % n_chunks
    batch = program // (H * n_chunks)
    here = (batch * H + head) * n_chunks + chunk
    tokens = tl.arange(0, C)
    inside = tokens < T - chunk * C
    columns = (batch * T + chunk * C + tokens) * W + H * (P + 4 * N) + head
    dt = tl.load(proj + columns, mask=inside, other=0.0).to(tl.float32)
    grown = tl.load(growth + here * C + tokens)
    turned = tl.load(turn + here * C + tokens)
    alpha = tl.load(a_re + head)
    beta = tl.load(a_im + head)
    s = tl.where(inside, _softplus(dt), 0.0)
    # Nothing crosses a token that erased the state; what is left of the sums is rounding.
    alive = alpha * s > _SMALLEST_LOG_DECAY
    grown = tl.where(alive, tl.load(edges + 2 * here) - (tl.cumsum(grown, 0) - grown), 0.0)
    turned = tl.where(alive, tl.load(edges + 2 * here + 1) - (tl.cumsum(turned, 0) - turned), 0.0)
    d_dt = (alpha * grown + beta * turned) / (1.0 + tl.exp(-dt))
    tl.store(d_proj + columns, d_dt.to(d_proj.dtype.element_ty), mask=inside)
    shares = tl.num_programs(0) // H
    share = d_a + 2 * head * shares + batch * n_chunks + chunk
    tl.store(share, tl.sum(s * grown, 0))
    tl.store(share + shares, tl.sum(s * turned, 0))
