"""All layers of one token in one launch, for a single sequence: programs wait for values, not ends.

Legend as in ``kernels/decode.py``. Every program holds a slice of each product's rows. A result
travels as 32-bit words, a bfloat16 value above the 16-bit number of the token, so whoever needs it
reads the words until all of them are of this token: the value and the news that it is there arrive
at once, without a fence, a barrier or the end of a kernel. What does not depend on it, the weights
of the slice, is loaded before, and the slice after the next one is asked into the L2 cache.

Every value of a layer has a word of its own, so nothing is overwritten before the next token; and
the programs have to run all at once (a cooperative launch), since they wait for each other.
"""

import torch
import triton
import triton.language as tl

from mamba3_lite.kernels.decode import _silu, _to_l2, ssd_of_one_token

# Operations of a layer: in_proj, SSD step, mixer, gate and up, down.
OPERATIONS_OF_A_LAYER = 5
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
# Columns of the table of addresses, a row a layer.
NORM1, IN_PROJ, DECAY, MIXER, NORM2, GATE_UP, DOWN, STATE = map(tl.constexpr, range(8))

# Reads until the lower halves are ``turn``: four words side by side, and six anywhere.
_FOUR_WORDS = tl.constexpr("""{
.reg .pred late; .reg .b32 a, b, c, d;
again:
ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];
xor.b32 a, $0, $5; xor.b32 b, $1, $5; xor.b32 c, $2, $5; xor.b32 d, $3, $5;
or.b32 a, a, b; or.b32 c, c, d; or.b32 a, a, c; and.b32 a, a, 0xffff;
setp.ne.b32 late, a, 0;
@late bra again;
}""")
_SIX_WORDS = tl.constexpr("""{
.reg .pred late; .reg .b32 a, b;
again:
ld.relaxed.gpu.global.b32 $0, [$6]; ld.relaxed.gpu.global.b32 $1, [$7];
ld.relaxed.gpu.global.b32 $2, [$8]; ld.relaxed.gpu.global.b32 $3, [$9];
ld.relaxed.gpu.global.b32 $4, [$10]; ld.relaxed.gpu.global.b32 $5, [$11];
xor.b32 a, $0, $12; xor.b32 b, $1, $12; or.b32 a, a, b;
xor.b32 b, $2, $12; or.b32 a, a, b; xor.b32 b, $3, $12; or.b32 a, a, b;
xor.b32 b, $4, $12; or.b32 a, a, b; xor.b32 b, $5, $12; or.b32 a, a, b;
and.b32 a, a, 0xffff;
setp.ne.b32 late, a, 0;
@late bra again;
}""")


@triton.jit
def _value(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _put(at, value, turn, mask):
    """Words for others to find."""
    bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(at, (bits << 16) | turn, mask=mask, cache_modifier=".cg")


@triton.jit
def _take(at, turn, K: tl.constexpr, BLOCK: tl.constexpr, MEET: tl.constexpr):
    """The K values at these words, once they are of this turn; zeros up to BLOCK."""
    k = tl.arange(0, BLOCK)
    if MEET:
        first = tl.minimum(tl.arange(0, BLOCK // 4) * 4, K - 4)
        a, b, c, d = tl.inline_asm_elementwise(
            _FOUR_WORDS, "=&r,=&r,=&r,=&r,l,r", [(at + first).to(tl.int64), turn],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    else:
        word = tl.load(at + k, mask=k < K, other=0)
    return tl.where(k < K, _value(word), 0.0)


@triton.jit
def _take_six(a, b, c, d, e, f, turn, MEET: tl.constexpr):
    """The values at six tiles of words of one shape, once they are of this turn."""
    if MEET:
        kind: tl.constexpr = tl.int64
        a, b, c, d, e, f = tl.inline_asm_elementwise(
            _SIX_WORDS, "=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,l,l,r",
            [a.to(kind), b.to(kind), c.to(kind), d.to(kind), e.to(kind), f.to(kind), turn],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d, e, f = tl.load(a), tl.load(b), tl.load(c), tl.load(d), tl.load(e), tl.load(f)
    return _value(a), _value(b), _value(c), _value(d), _value(e), _value(f)


@triton.jit
def _program(MEET: tl.constexpr):
    """This program's number, new in every turn of a loop: what is made of it is not kept.

    The compiler would hold the addresses of all operations at once, and registers are for weights.
    """
    pid = tl.program_id(0)
    if MEET:
        pid = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
        )
    return pid


@triton.jit
def _matrix(table, at, DTYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + at).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _own(pid, M, PER: tl.constexpr, START: tl.constexpr, ROWS: tl.constexpr):
    """The rows START to START + ROWS of this program's slice of M, PER rows or fewer: which, and
    whether there are such.
    """
    i = START + tl.arange(0, ROWS)
    row = pid * PER + i
    return row, (i < PER) & (row < M)


@triton.jit
def _rows(
    pid, weight, M, K: tl.constexpr, PER: tl.constexpr, START: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, own = _own(pid, M, PER, START, ROWS)
    k = tl.arange(0, BLOCK_K)
    mask = own[:, None] & (k < K)[None, :]
    return tl.load(weight + row[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def _slice(
    pid, weight, M, K: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """This program's rows of (M, K) as two tiles, since PER is seldom a power of two.

    Rows that are none are 0. MORE of 0: the second tile is not used.
    """
    w = _rows(pid, weight, M, K, PER, 0, ROWS, BLOCK_K)
    return w, _rows(pid, weight, M, K, PER, ROWS, MORE if MORE > 0 else 1, BLOCK_K)


@triton.jit
def _ask(pid, weight, M, K: tl.constexpr, PER: tl.constexpr, LINES: tl.constexpr, ON: tl.constexpr):
    """Asks the lines of this program's rows of (M, K) into the L2 cache."""
    ELEMENT: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    first = pid * PER
    end = tl.minimum(first + PER, M).to(tl.int64) * (K * ELEMENT)
    begin = tl.minimum(first, M).to(tl.int64) * (K * ELEMENT)
    offset = begin + tl.arange(0, LINES) * 128
    if ON:  # noqa: SIM102  (known when compiled; the next one is not)
        if begin < end:
            _to_l2(weight.to(tl.int64) + tl.minimum(offset, end - 128))


@triton.jit
def _scales(at, K: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    return tl.load(at + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _put_own(pid, words, value, turn, M, PER: tl.constexpr, START: tl.constexpr):
    row, own = _own(pid, M, PER, START, value.shape[0])
    _put(words + row, value, turn, own)


@triton.jit
def _times(w, v):
    return tl.sum(w.to(tl.float32) * v[None, :], 1)


@triton.jit
def _gated(gate, up, v, factor):
    return _silu(_times(gate, v) * factor) * (_times(up, v) * factor)


@triton.jit
def _add(
    pid, w, old_words, v, words, x, turn, K: tl.constexpr, PER: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """x and words <- what this program has put at ``old_words``, plus w v."""
    row, own = _own(pid, K, PER, START, w.shape[0])
    old = _value(tl.load(old_words + row, mask=own, other=0, cache_modifier=".cg"))
    new = old + _times(w, v)
    _put(words + row, new, turn, own)
    tl.store(x + row, new.to(x.dtype.element_ty), mask=own)


@triton.jit
def layers_kernel(
    table, x, words, turns, layers, first_operation, last_operation, eps,
    K: tl.constexpr, F: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    PER_IN: tl.constexpr, PER_OUT: tl.constexpr, PER_UP: tl.constexpr,
    ROWS_IN: tl.constexpr, ROWS_OUT: tl.constexpr, ROWS_UP: tl.constexpr,
    MORE_IN: tl.constexpr, MORE_OUT: tl.constexpr, MORE_UP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_F: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, LINES: tl.constexpr,
    STATE_DTYPE: tl.constexpr, MEET: tl.constexpr,
    OPERATIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): x (K,) through operations ``first`` to ``last`` of all layers, in place.

    table (layers, COLUMNS) int64 has the addresses. words (layers + 1, 2 K + W + Y + F) int32 has
    a layer's x, projection, y, x behind the mixer, and activations. turns (2,) int32 are tokens so
    far and programs that are done with this one; both start as zeros. Without MEET a launch may
    hold one operation only, for whoever runs programs one after the other.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    programs = tl.num_programs(0)
    W: tl.constexpr = H * (P + 4 * N + 1)
    Y: tl.constexpr = H * P
    WIDTH: tl.constexpr = 2 * K + W + Y + F
    tokens = tl.load(turns)
    turn = (tokens + 1) & 0xFFFF
    if first_operation == 0:
        row, mine = _own(tl.program_id(0), K, PER_OUT, 0, 2 * ROWS_OUT)
        _put(words + row, tl.load(x + row, mask=mine, other=0.0).to(tl.float32), turn, mine)
    for operation in range(first_operation, last_operation):
        pid = _program(MEET)
        layer = operation // OPERATIONS
        kind = operation % OPERATIONS
        of = table + layer * COLUMNS
        at_x = words + layer * WIDTH
        at_proj = at_x + K
        at_y = at_proj + W
        at_mixed = at_y + Y
        at_act = at_mixed + K
        if kind == 0:
            weight = _matrix(of, IN_PROJ, DTYPE)
            w, more = _slice(pid, weight, W, K, PER_IN, ROWS_IN, MORE_IN, BLOCK_K)
            scale = _scales(_matrix(of, NORM1, DTYPE), K, BLOCK_K)
            _ask(pid, _matrix(of, MIXER, DTYPE), K, Y, PER_OUT, LINES, MEET)
            v = _take(at_x, turn, K, BLOCK_K, MEET)
            factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
            v = v * scale
            _put_own(pid, at_proj, _times(w, v) * factor, turn, W, PER_IN, 0)
            if MORE_IN > 0:
                _put_own(pid, at_proj, _times(more, v) * factor, turn, W, PER_IN, ROWS_IN)
        elif kind == 1:
            _ask(pid, _matrix(of, GATE_UP, DTYPE), F, K, PER_UP, LINES, MEET)
            _ask(pid, _matrix(of, GATE_UP, DTYPE) + F * K, F, K, PER_UP, LINES, MEET)
            tiles: tl.constexpr = (P + TILE_P - 1) // TILE_P
            if pid < H * tiles:
                head = pid // tiles
                decay = tl.load(of + DECAY).to(tl.pointer_type(tl.float32))
                # What lies beyond the state is computed from its last row and column.
                n = tl.arange(0, TILE_N)
                p = pid % tiles * TILE_P + tl.arange(0, TILE_P)
                inside = (n < N)[:, None] & (p < P)[None, :]
                state = _matrix(of, STATE, STATE_DTYPE) + head * (2 * N * P)
                at = state + n[:, None] * P + p[None, :]
                h_re = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                h_im = tl.load(at + N * P, mask=inside, other=0.0).to(tl.float32)
                alpha = tl.load(decay + head)
                omega = tl.load(decay + H + head)
                zero = tl.zeros((TILE_N, TILE_P), tl.int32)
                pairs = at_proj + H * P + head * N + tl.minimum(n, N - 1)[:, None] + zero
                channels = at_proj + head * P + tl.minimum(p, P - 1)[None, :] + zero
                x_p, b_re, b_im, c_re, c_im, raw_dt = _take_six(
                    channels, pairs, pairs + H * N, pairs + 2 * H * N, pairs + 3 * H * N,
                    at_proj + H * (P + 4 * N) + head + zero, turn, MEET,
                )  # fmt: skip
                new_re, new_im, read = ssd_of_one_token(
                    h_re, h_im, alpha, omega, x_p, b_re, b_im, c_re, c_im, raw_dt
                )
                tl.store(at, new_re.to(STATE_DTYPE), mask=inside)
                tl.store(at + N * P, new_im.to(STATE_DTYPE), mask=inside)
                read = tl.sum(tl.where((n < N)[:, None], read, 0.0), 0)
                _put(at_y + head * P + p, read, turn, p < P)
        elif kind == 2:
            mix = _matrix(of, MIXER, DTYPE)
            mix, more_mix = _slice(pid, mix, K, Y, PER_OUT, ROWS_OUT, MORE_OUT, BLOCK_Y)
            _ask(pid, _matrix(of, DOWN, DTYPE), K, F, PER_OUT, LINES, MEET)
            y = _take(at_y, turn, Y, BLOCK_Y, MEET)
            _add(pid, mix, at_x, y, at_mixed, x, turn, K, PER_OUT, 0)
            if MORE_OUT > 0:
                _add(pid, more_mix, at_x, y, at_mixed, x, turn, K, PER_OUT, ROWS_OUT)
        elif kind == 3:
            weight = _matrix(of, GATE_UP, DTYPE)
            gate, more_gate = _slice(pid, weight, F, K, PER_UP, ROWS_UP, MORE_UP, BLOCK_K)
            weight += F * K
            up, more_up = _slice(pid, weight, F, K, PER_UP, ROWS_UP, MORE_UP, BLOCK_K)
            scale = _scales(_matrix(of, NORM2, DTYPE), K, BLOCK_K)
            if layer + 1 < layers:
                following = _matrix(of + COLUMNS, IN_PROJ, DTYPE)
                _ask(pid, following, W, K, PER_IN, LINES, MEET)
            v = _take(at_mixed, turn, K, BLOCK_K, MEET)
            factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
            v = v * scale
            _put_own(pid, at_act, _gated(gate, up, v, factor), turn, F, PER_UP, 0)
            if MORE_UP > 0:
                more = _gated(more_gate, more_up, v, factor)
                _put_own(pid, at_act, more, turn, F, PER_UP, ROWS_UP)
        else:
            down = _matrix(of, DOWN, DTYPE)
            down, more_down = _slice(pid, down, K, F, PER_OUT, ROWS_OUT, MORE_OUT, BLOCK_F)
            act = _take(at_act, turn, F, BLOCK_F, MEET)
            _add(pid, down, at_mixed, act, at_x + WIDTH, x, turn, K, PER_OUT, 0)
            if MORE_OUT > 0:
                _add(pid, more_down, at_mixed, act, at_x + WIDTH, x, turn, K, PER_OUT, ROWS_OUT)
    if MEET:
        done = tl.atomic_add(turns + 1, 1, sem="relaxed")
        if done == programs - 1:
            tl.store(turns + 1, 0)
            tl.store(turns, tokens + 1)
