// Whole steps of decoding one sequence, by programs that stay on their multiprocessors.
//
// A step is a chain of 5 operations a layer. Kernels that follow each other hand on results and
// turns in one microsecond or two, and what they load comes in bursts. Here one program a
// multiprocessor runs all of it: a warp of its own keeps a ring in shared memory full of the
// weights that come next, whatever the others are waiting for, and results travel as words that
// say which layer of which step they belong to, so a reader waits for values and never for a
// barrier.
//
//   word      16 bits of tag over 16 bits of value. Tags count layers; a stale word has another.
//   unit      UNIT columns of a row of weights; a row of K columns is K / UNIT units.
//   phase     what one program takes of one product: its rows, in tiles of 8 units for `mma`.
//
// Each of the 8 warps takes an eighth of every unit's columns, for all rows of the program, and
// holds them in registers before x is there. x is the second operand of the `mma`, piece k of UNIT
// columns in its columns 2 k and 2 k + 1, so that unit k of a row finds its product there. Partial
// sums of the warps meet in shared memory.
//
// A mailbox is written again only when all who read it have read it, since each phase needs, by
// way of the phases between, the results of all readers (every program has rows of in_proj).
//
// Nothing is accumulated in memory, and no sum's order depends on time: equal inputs give equal
// bits.
//
// Given by the host as macros: STATE_IS_BF16, UNIT, D (d_model), I (H P), F (ffn_dim),
// V (vocabulary), LAYERS (at most), H, P, N, PROGRAMS, SLOTS (units that the ring holds, an even
// number), BURST and REST (units asked for at once, and clocks between), EPS.
//
// Weights and results are bfloat16: x goes through the scales of a norm before it is divided by its
// size, which float16 would not always hold.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define WARPS 8
#define THREADS (32 * WARPS)
#define W (H * (P + 4 * N + 1))
#define PIECE (UNIT / WARPS)           // columns of a unit that a warp takes
#define BLOCKS (PIECE / 32)            // of 32 columns
#define WORDS (PIECE / 32)             // words of x that a lane fetches, of each piece
#define UNIT_BYTES (2 * UNIT + 64)     // the rest keeps rows on different banks
#define IN_D (D / UNIT)
#define IN_I (I / UNIT)
#define IN_F (F / UNIT)
#define CEIL(a, b) (((a) + (b) - 1) / (b))
#define ROWS_PROJ CEIL(W, PROGRAMS)
#define ROWS_D CEIL(D, PROGRAMS)
#define ROWS_F CEIL(F, PROGRAMS)
#define ROWS_V CEIL(V, PROGRAMS)
#define HEAD_TILES 6
#define HEAD_ROWS (8 * HEAD_TILES / IN_D)
#define ROUNDS CEIL(ROWS_V, HEAD_ROWS)
#define TILES(units) CEIL(units, 8)
#define MOST(a, b) ((a) > (b) ? (a) : (b))
#define TILES_PROJ TILES(ROWS_PROJ * IN_D)
#define TILES_MIXER TILES(ROWS_D * IN_I)
#define TILES_GATE_UP TILES(2 * ROWS_F * IN_D)
#define TILES_DOWN TILES(ROWS_D * IN_F)
#define MOST_TILES                                                                                 \
    MOST(MOST(MOST(TILES_PROJ, HEAD_TILES), MOST(TILES_MIXER, TILES_DOWN)), TILES_GATE_UP)
#define PHASES(layers) (4 * (layers) + ROUNDS)  // of a step
#define BARRIERS 8
#define CHANNELS (2 * THREADS / N)     // of a head, that a program takes: a thread has two
#define LANES_P (CHANNELS / 2)
#define SLICES (P / CHANNELS)
#define MOST_IN MOST(MOST(IN_D, IN_I), IN_F)

// Mailboxes, in words.
#define BOX_XA 0
#define BOX_PROJ (BOX_XA + D)
#define BOX_Y (BOX_PROJ + CEIL(W, 4) * 4)
#define BOX_XB (BOX_Y + I)
#define BOX_ACT (BOX_XB + D)
#define BOX_BEST (BOX_ACT + F)         // two u64 a program

struct Layer {
    const u16 *norm1, *in_proj;
    const float *a;
    const u16 *mixer, *norm2, *gate_up, *down;
};

#ifdef STATE_IS_BF16
typedef u16 State;
#else
typedef float State;
#endif

struct Shared {
    u64 full[BARRIERS], empty[BARRIERS];
    float part[2][WARPS][8 * MOST_TILES + 4];
    float squares[2][WARPS];
    float best_value[WARPS];
    int best_place[WARPS];
    uint4 x[WARPS][MOST_IN * PIECE / 8];
    uint4 scale[WARPS][IN_D * PIECE / 8];
    State state[2 * N * CHANNELS];
    float3 decay[LAYERS];              // of this program's head: real part, and in_turns()
};

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(u64 *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u64 *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64 *b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64 *b, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
    } while (!__all_sync(~0u, done));  // so that the compiler knows the warp to be one
}

__device__ __forceinline__ void bulk_copy(u32 to, const void *from, u32 bytes, u64 *b, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}

// A copy that holds no register while it is under way.
__device__ __forceinline__ void copy_async(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void close_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// All but the warp that loads.
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ __forceinline__ float wide(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ u32 narrow(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ void mma(float (&acc)[4], const uint4 &a, const uint2 &b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Words

__device__ __forceinline__ void post(u32 *at, float value, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(tag | narrow(value))
                 : "memory");
}

__device__ __forceinline__ u32 read_word(const u32 *at) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}

template <int COUNT> __device__ __forceinline__ void read_words(const u32 *at, u32 (&word)[COUNT]) {
    if constexpr (COUNT == 4)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(at) : "memory");
    else if constexpr (COUNT == 2)
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
                     : "=r"(word[0]), "=r"(word[1]) : "l"(at) : "memory");
    else
        word[0] = read_word(at);
}

__device__ __forceinline__ bool stale(u32 word, u32 tag) { return (word ^ tag) >> 16; }

// The lane's words of IN pieces, once all of them are there.
template <int IN>
__device__ __forceinline__ void receive(const u32 *box, u32 tag, u32 (&word)[IN][WORDS]) {
    bool again;
    do {
        again = false;
#pragma unroll
        for (int k = 0; k < IN; k++)
            read_words<WORDS>(box + k * UNIT + threadIdx.x * WORDS, word[k]);
#pragma unroll
        for (int k = 0; k < IN; k++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) again |= stale(word[k][i], tag);
    } while (__any_sync(~0u, again));
}

// Products

// Weights of a phase in registers, this lane's columns. Of a tile of 8 units the `mma` sees 16
// rows: one has the columns 0, 1, 4 and 5 of each 8, the other the rest, so that what a lane loads
// at once is an operand as it stands.
template <int T> struct Held {
    uint4 of[T][BLOCKS];
};

struct Ring {
    u32 base;
    int slot;
    u32 phase;
};

template <int T>
__device__ __forceinline__ void take(Held<T> &w, Shared &s, Ring &ring, int units) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    barrier_wait(&s.full[ring.phase % BARRIERS], ring.phase / BARRIERS & 1);
    const u32 offset = ring.base + warp * PIECE * 2 + lane % 4 * 16;
#pragma unroll
    for (int t = 0; t < T; t++) {
        const int unit = 8 * t + lane / 4;
        int slot = ring.slot + unit;
        slot = slot >= SLOTS ? slot - SLOTS : slot;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            uint4 &v = w.of[t][j];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(offset + slot * UNIT_BYTES + j * 64));
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.empty[ring.phase % BARRIERS]);
    ring.phase++;
    ring.slot += units;
    ring.slot = ring.slot >= SLOTS ? ring.slot - SLOTS : ring.slot;
}

// x of this warp's columns as the second operand: piece k in the columns 2 k and 2 k + 1. What
// stands behind the last ends in columns of the result that nobody reads.
typedef uint2 Operand[BLOCKS];

template <int IN>
__device__ __forceinline__ void spread(Shared &s, const u32 (&value)[IN][WORDS], Operand &x) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane / 4;
    u16 *to = (u16 *)s.x[warp] + lane * WORDS;
#pragma unroll
    for (int k = 0; k < IN; k++) {
        if constexpr (WORDS == 4) {
            uint2 pair = make_uint2(__byte_perm(value[k][0], value[k][1], 0x5410),
                                    __byte_perm(value[k][2], value[k][3], 0x5410));
            *(uint2 *)(to + k * PIECE) = pair;
        } else if constexpr (WORDS == 2) {
            *(u32 *)(to + k * PIECE) = __byte_perm(value[k][0], value[k][1], 0x5410);
        } else {
            to[k * PIECE] = (u16)value[k][0];
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const uint4 v = s.x[warp][column / 2 % IN * (PIECE / 8) + j * 4 + lane % 4];
        x[j] = column % 2 ? make_uint2(v.y, v.w) : make_uint2(v.x, v.z);
    }
}

// The scales of this warp's columns, asked for.
__device__ __forceinline__ void ask_scales(Shared &s, const u16 *row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int turn = 0; turn < CEIL(IN_D * PIECE / 8, 32); turn++) {
        const int i = lane + turn * 32;
        if (i < IN_D * PIECE / 8)
            copy_async(&s.scale[warp][i],
                       row + i / (PIECE / 8) * UNIT + warp * PIECE + i % (PIECE / 8) * 8);
    }
    close_group();
}

// x times the scales of a norm; the sum of squares of this lane's values.
__device__ __forceinline__ float scaled(const Shared &s, u32 (&x)[IN_D][WORDS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    struct __align__(2 * WORDS) Scales { u16 of[WORDS]; };
    const Scales *scale = (const Scales *)s.scale[warp] + lane;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < IN_D; k++) {
        const Scales here = scale[k * 32];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const float v = wide(x[k][i] & 0xffff);
            sum += v * v;
            x[k][i] = narrow(v * wide(here.of[i]));
        }
    }
    return sum;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

// This warp's part of every unit's sum to shared memory, then all meet.
template <int T, int IN>
__device__ __forceinline__ void multiply(Shared &s, int turn, const Held<T> &w, const Operand &x,
                                         float squares, bool normed) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float acc[T][4];
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[t][i] = 0;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int t = 0; t < T; t++) mma(acc[t], w.of[t][j], x[j]);
    if (normed) {
        squares = warp_sum(squares);
        if (lane == 0) s.squares[turn][warp] = squares;
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        // A unit of piece k has one half in row and column of k, one in those behind them.
        const int unit = 8 * t + lane / 4;
        if (lane % 4 == unit % IN) s.part[turn][warp][unit] = acc[t][0] + acc[t][3];
    }
    meet();
}

// Of what the warps left in shared memory: eight lanes add a row, so every warp is done at once.
#define GROUPS (THREADS / 8)

__device__ __forceinline__ float sum_of_eight(float v) {
#pragma unroll
    for (int step = 4; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

// The sum of a row whose first unit this is; to all eight lanes.
template <int IN> __device__ __forceinline__ float sum_of(const Shared &s, int turn, int unit) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < IN; k++) sum += s.part[turn][threadIdx.x % 8][unit + k];
    return sum_of_eight(sum);
}

__device__ __forceinline__ float norm_factor(const Shared &s, int turn) {
    return rsqrtf(sum_of_eight(s.squares[turn][threadIdx.x % 8]) / D + (float)(EPS));
}

// The SSD step

// As kernels/decode.py: e^{(alpha + i omega) dt} is whole + real + i imag, whole being 1 near 1.
__device__ __forceinline__ void transition(float3 decay, float raw, float &whole,
                                           float &real, float &imag) {
    const float e = __expf(-fabsf(raw)), u = 1.0f + e;
    const float log1p = u == 1.0f ? e : __logf(u) * (e / (u - 1.0f));
    const float s = fmaxf(raw, 0.0f) + log1p;
    // The product's rounding error is kept, since many whole turns go.
    const float turns = decay.y * s;
    const float rest = fmaf(decay.y, s, -turns) + decay.z * s;
    const float angle = (turns - rintf(turns) + rest) * 3.14159265358979f;
    const float sq = angle * angle;
    float sine = -1.0f / 39916800.0f;
    sine = sine * sq + 1.0f / 362880.0f;
    sine = sine * sq - 1.0f / 5040.0f;
    sine = sine * sq + 1.0f / 120.0f;
    sine = sine * sq - 1.0f / 6.0f;
    float cosine = 1.0f / 479001600.0f;
    cosine = cosine * sq - 1.0f / 3628800.0f;
    cosine = cosine * sq + 1.0f / 40320.0f;
    cosine = cosine * sq - 1.0f / 720.0f;
    cosine = cosine * sq + 1.0f / 24.0f;
    cosine = cosine * sq - 0.5f;
    sine = angle + angle * sq * sine;
    cosine = 1.0f + sq * cosine;
    const float x = decay.x * s, size = __expf(x), below_one = 2.0f * sine * sine;
    float total = 1.0f + x * (1.0f / 8);
#pragma unroll
    for (int i = 7; i > 1; i--) total = 1.0f + total * (x * (1.0f / i));
    whole = x > -0.5f ? 1.0f : 0.0f;
    real = x > -0.5f ? total * x * (1.0f - below_one) - below_one : size * (1.0f - below_one);
    imag = size * (2.0f * sine * cosine);
}

#ifdef STATE_IS_BF16
__device__ __forceinline__ float2 two(const State *at) {
    const u32 v = *(const u32 *)at;
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000));
}
__device__ __forceinline__ void store_two(State *at, float a, float b) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
    __stcs((u32 *)at, v);
}
#else
__device__ __forceinline__ float2 two(const State *at) { return *(const float2 *)at; }
__device__ __forceinline__ void store_two(State *at, float a, float b) {
    __stcs((float2 *)at, make_float2(a, b));
}
#endif

// Turns a unit of time, and what rounding leaves of them.
__device__ __forceinline__ float2 in_turns(float omega) {
    const float first = omega * 0.15915494309189535f;
    return make_float2(first, fmaf(omega, 0.15915494309189535f, -first) + omega * 6.4206383e-9f);
}

// This program's channels of a head's state (2 N, P), asked for.
__device__ __forceinline__ void ask_state(Shared &s, const State *from) {
    constexpr int pieces = CHANNELS * sizeof(State) / 16, each = 16 / sizeof(State);
#pragma unroll
    for (int turn = 0; turn < CEIL(2 * N * pieces, THREADS); turn++) {
        const int i = threadIdx.x + turn * THREADS;
        if (i < 2 * N * pieces)
            copy_async(&s.state[i * each], from + i / pieces * P + i % pieces * each);
    }
    close_group();
}

// One token of a slice of a head; `state` is where that begins in memory.
__device__ __forceinline__ void ssd_step(Shared &s, int turn, const u32 *proj, u32 *y, u32 tag,
                                         float3 decay, State *state, int head, int slice) {
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int n = tid / LANES_P, channel = tid % LANES_P * 2, p = slice * CHANNELS + channel;
    const u32 *x_at = proj + head * P + p, *pair_at = proj + H * P + head * N + n;
    const u32 *dt_at = proj + H * (P + 4 * N) + head;
    u32 x[2], pair[4], dt;
    bool again;
    do {
        dt = read_word(dt_at);
        read_words<2>(x_at, x);
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = read_word(pair_at + i * H * N);
        again = stale(dt, tag) | stale(x[0], tag) | stale(x[1], tag);
#pragma unroll
        for (int i = 0; i < 4; i++) again |= stale(pair[i], tag);
    } while (__any_sync(~0u, again));
    float whole, real, imag;
    transition(decay, wide(dt & 0xffff), whole, real, imag);
    const float b_re = wide(pair[0] & 0xffff), b_im = wide(pair[1] & 0xffff);
    const float c_re = wide(pair[2] & 0xffff), c_im = wide(pair[3] & 0xffff);
    const float x0 = wide(x[0] & 0xffff), x1 = wide(x[1] & 0xffff);
    const float2 re = two(&s.state[n * CHANNELS + channel]);
    const float2 im = two(&s.state[(N + n) * CHANNELS + channel]);
    const float re0 = whole * re.x + (real * re.x - imag * im.x + b_re * x0);
    const float re1 = whole * re.y + (real * re.y - imag * im.y + b_re * x1);
    const float im0 = whole * im.x + (real * im.x + imag * re.x + b_im * x0);
    const float im1 = whole * im.y + (real * im.y + imag * re.y + b_im * x1);
    float y0 = c_re * re0 - c_im * im0, y1 = c_re * re1 - c_im * im1;
#pragma unroll
    for (int step = 16; step >= LANES_P; step /= 2) {
        y0 += __shfl_xor_sync(~0u, y0, step);
        y1 += __shfl_xor_sync(~0u, y1, step);
    }
    if (lane < LANES_P) {
        s.part[turn][warp][2 * lane] = y0;
        s.part[turn][warp][2 * lane + 1] = y1;
    }
    store_two(state + n * P + channel, re0, re1);
    store_two(state + (N + n) * P + channel, im0, im1);
    meet();
    const int sum_at = tid / 8;
    const float sum = sum_of<1>(s, turn, min(sum_at, CHANNELS - 1));
    if (tid % 8 == 0 && sum_at < CHANNELS)
        post(y + head * P + slice * CHANNELS + sum_at, sum, tag);
}

// The largest logit

#define NOTHING __int_as_float(0xff800000)

// The first of the largest; a NaN wins over all.
__device__ __forceinline__ void better(float &value, int &place, float other, int there) {
    const bool nan = isnan(value), worse = isnan(other);
    if (nan ? worse && there < place : worse || other > value || (other == value && there < place))
        value = other, place = there;
}

__device__ __forceinline__ void best_of_warp(float &value, int &place) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, value, step);
        const int there = __shfl_xor_sync(~0u, place, step);
        better(value, place, other, there);
    }
}

__device__ __forceinline__ void best_of_all(Shared &s, float &value, int &place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    best_of_warp(value, place);
    if (lane == 0) s.best_value[warp] = value, s.best_place[warp] = place;
    meet();
    value = s.best_value[lane % WARPS], place = s.best_place[lane % WARPS];
    best_of_warp(value, place);
    meet();
}

__device__ __forceinline__ u64 read_pair(const u64 *at) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void post_pair(u64 *at, u32 value, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((u64)tag << 32 | value)
                 : "memory");
}

// Of the programs' best ones the best, which all threads get.
__device__ __forceinline__ void exchange_best(Shared &s, u64 *box, u32 tag, float &value,
                                              int &place) {
    const int tid = threadIdx.x;
    best_of_all(s, value, place);
    if (tid == 0) {
        post_pair(box + 2 * blockIdx.x, __float_as_uint(value), tag);
        post_pair(box + 2 * blockIdx.x + 1, place, tag);
    }
    value = NOTHING, place = 0x7fffffff;
    for (int i = tid; i < PROGRAMS; i += THREADS) {
        u64 v, p;
        do v = read_pair(box + 2 * i), p = read_pair(box + 2 * i + 1);
        while ((u32)(v >> 32) != tag || (u32)(p >> 32) != tag);
        better(value, place, __uint_as_float((u32)v), (u32)p);
    }
    best_of_all(s, value, place);
}

// Weights

// What this program reads in phase `q` of a step: `units` from `first` on, then from `second` on.
struct Source {
    const u16 *first, *second;
    int units, split;
};

__device__ __forceinline__ int rows_of(int rows, int total) {
    return max(0, min(rows, total - (int)blockIdx.x * rows));
}

__device__ __forceinline__ int units_of(int q, int layers) {
    if (q >= 4 * layers)
        return max(0, min(HEAD_ROWS, rows_of(ROWS_V, V) - (q - 4 * layers) * HEAD_ROWS)) * IN_D;
    switch (q % 4) {
    case 0: return rows_of(ROWS_PROJ, W) * IN_D;
    case 1: return rows_of(ROWS_D, D) * IN_I;
    case 2: return 2 * rows_of(ROWS_F, F) * IN_D;
    default: return rows_of(ROWS_D, D) * IN_F;
    }
}

__device__ __forceinline__ Source source_of(int q, const Layer *table, int layers,
                                            const u16 *head) {
    Source s;
    s.units = s.split = units_of(q, layers);
    s.second = nullptr;
    const u64 program = blockIdx.x;
    if (q >= 4 * layers) {
        s.first = head + (program * ROWS_V + (q - 4 * layers) * HEAD_ROWS) * D;
        return s;
    }
    const Layer &layer = table[q / 4];
    switch (q % 4) {
    case 0: s.first = layer.in_proj + program * ROWS_PROJ * D; break;
    case 1: s.first = layer.mixer + program * ROWS_D * I; break;
    case 2:
        s.first = layer.gate_up + program * ROWS_F * D;
        s.second = s.first + (u64)F * D;
        s.split = s.units / 2;
        break;
    default: s.first = layer.down + program * ROWS_D * F;
    }
    return s;
}

// One warp: keeps the ring full until the last phase of the last step.
__device__ void load_weights(Shared &s, u32 ring, const Layer *table, int layers, const u16 *head,
                             int steps) {
    const int lane = threadIdx.x % 32;
    const u64 policy = read_once();
    const int phases = PHASES(layers), total = steps * phases;
    u32 last = 0;
    int oldest = 0, room = SLOTS, slot = 0;
    for (int phase = 0, q = 0, oldest_q = 0; phase < total; phase++) {
        const Source from = source_of(q, table, layers, head);
        while (room < from.units || phase - oldest >= BARRIERS) {
            barrier_wait(&s.empty[oldest % BARRIERS], oldest / BARRIERS & 1);
            room += units_of(oldest_q, layers);
            oldest++;
            oldest_q = oldest_q + 1 == phases ? 0 : oldest_q + 1;
        }
        u64 *full = &s.full[phase % BARRIERS];
        // Nothing waits for words while the head is read.
        const u32 rest = q < 4 * layers ? REST : 0;
        if (lane == 0) barrier_expect(full, from.units * (2 * UNIT));
        __syncwarp();
        for (int first = 0; first < from.units; first += BURST) {
            // What all ask for at once would stand in the way of the words.
            u32 now;
            do asm volatile("mov.u32 %0, %%clock;" : "=r"(now)); while (now - last < rest);
            last = now;
            const int i = first + lane;
            if (lane >= BURST || i >= from.units) continue;
            int to = slot + i;
            to = to >= SLOTS ? to - SLOTS : to;
            const u16 *at = i < from.split ? from.first + (u64)i * UNIT
                                           : from.second + (u64)(i - from.split) * UNIT;
            bulk_copy(ring + to * UNIT_BYTES, at, 2 * UNIT, full, policy);
        }
        room -= from.units;
        slot += from.units;
        slot = slot >= SLOTS ? slot - SLOTS : slot;
        q = q + 1 == phases ? 0 : q + 1;
    }
}

// Steps

struct Args {
    const Layer *table;
    const u16 *embed, *norm_f, *head;
    long long *ids;
    float *logits;
    double *found;
    State *state;
    u32 *boxes, *epoch;
    int layers, steps, keep_logits;
};

// Onto this group's row of the residual stream, and from there to all.
template <int T, int IN>
__device__ __forceinline__ void add_product(Shared &s, int turn, const Held<T> &w, const u32 *from,
                                            u32 *to, u32 tag, float &residual) {
    const int group = threadIdx.x / 8, rows = rows_of(ROWS_D, D);
    u32 x[IN][WORDS];
    Operand operand;
    receive<IN>(from, tag, x);
    spread<IN>(s, x, operand);
    multiply<T, IN>(s, turn, w, operand, 0.0f, false);
    residual = wide(narrow(residual + sum_of<IN>(s, turn, min(group, rows - 1) * IN)));
    if (threadIdx.x % 8 == 0 && group < rows)
        post(to + blockIdx.x * ROWS_D + group, residual, tag);
}

__device__ __forceinline__ void run_steps(const Args &args, Shared &s, const Layer *table,
                                          u32 ring_base) {
    const int tid = threadIdx.x, program = blockIdx.x;
    u32 *const boxes = args.boxes;
    const int head_of = program / SLICES, slice = program % SLICES;
    const bool has_state = head_of < H;
    State *const slice_at = args.state + head_of * (2 * N * P) + slice * CHANNELS;
    const int proj_row = program * ROWS_PROJ, d_row = program * ROWS_D, f_row = program * ROWS_F;
    const int proj_rows = rows_of(ROWS_PROJ, W), d_rows = rows_of(ROWS_D, D);
    const int f_rows = rows_of(ROWS_F, F), v_rows = rows_of(ROWS_V, V);
    const int group = tid / 8;
    const bool first_of_group = tid % 8 == 0;
    Ring ring = {ring_base, 0, 0};
    int turn = 0;
    u32 count = read_word(args.epoch);
    int id = (int)args.ids[0];
    for (int i = tid; has_state && i < args.layers; i += THREADS) {
        const float2 turns = in_turns(table[i].a[H + head_of]);
        s.decay[i] = make_float3(table[i].a[head_of], turns.x, turns.y);
    }
    if (has_state) ask_state(s, slice_at);

    for (int step = 0; step < args.steps; step++) {
        u32 x[IN_D][WORDS];
        Operand operand;
        Held<TILES_PROJ> in_proj;
        ask_scales(s, table[0].norm1);
        const u16 *row = args.embed + (u64)id * D;
#pragma unroll
        for (int k = 0; k < IN_D; k++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) x[k][i] = row[k * UNIT + tid * WORDS + i];
        float residual = group < d_rows ? wide(row[d_row + group]) : 0.0f;
        take(in_proj, s, ring, proj_rows * IN_D);
        u32 tag = 0;
        for (int layer = 0; layer < args.layers; layer++) {
            const bool last = layer + 1 == args.layers;
            const u32 before = tag;
            tag = count++ << 16;
            {   // in_proj
                if (layer) receive<IN_D>(boxes + BOX_XA, before, x);
                wait_groups<0>();
                __syncwarp();
                const float squares = scaled(s, x);
                spread<IN_D>(s, x, operand);
                multiply<TILES_PROJ, IN_D>(s, turn, in_proj, operand, squares, true);
                const float factor = norm_factor(s, turn);
#pragma unroll
                for (int i = 0; i < CEIL(ROWS_PROJ, GROUPS); i++) {
                    const int r = group + i * GROUPS;
                    const float sum = sum_of<IN_D>(s, turn, min(r, proj_rows - 1) * IN_D);
                    if (first_of_group && r < proj_rows)
                        post(boxes + BOX_PROJ + proj_row + r, sum * factor, tag);
                }
                turn ^= 1;
            }
            ask_scales(s, table[layer].norm2);
            // While the others' part of the projection is on its way.
            Held<TILES_MIXER> mixer;
            Held<TILES_GATE_UP> gate_up;
            Held<TILES_DOWN> down;
            take(mixer, s, ring, d_rows * IN_I);
            take(gate_up, s, ring, 2 * f_rows * IN_D);
            if (has_state) {
                ssd_step(s, turn, boxes + BOX_PROJ, boxes + BOX_Y, tag, s.decay[layer],
                         slice_at + (u64)layer * (H * 2 * N * P), head_of, slice);
                turn ^= 1;
                ask_state(s, slice_at + (u64)(last ? 0 : layer + 1) * (H * 2 * N * P));
            }
            if (d_rows) {
                add_product<TILES_MIXER, IN_I>(s, turn, mixer, boxes + BOX_Y, boxes + BOX_XB, tag,
                                            residual);
                turn ^= 1;
            }
            take(down, s, ring, d_rows * IN_F);
            // The scales; a state that was asked for behind them may still be on its way.
            if (has_state) wait_groups<1>();
            else wait_groups<0>();
            if (f_rows) {   // gate_up
                receive<IN_D>(boxes + BOX_XB, tag, x);
                __syncwarp();
                const float squares = scaled(s, x);
                spread<IN_D>(s, x, operand);
                multiply<TILES_GATE_UP, IN_D>(s, turn, gate_up, operand, squares, true);
                const float factor = norm_factor(s, turn);
                const int r = min(group, f_rows - 1);
                const float gate = sum_of<IN_D>(s, turn, r * IN_D) * factor;
                const float up = sum_of<IN_D>(s, turn, (f_rows + r) * IN_D) * factor;
                if (first_of_group && group < f_rows)
                    post(boxes + BOX_ACT + f_row + group,
                         __fdividef(gate, 1.0f + __expf(-gate)) * up, tag);
                turn ^= 1;
            }
            ask_scales(s, last ? args.norm_f : table[layer + 1].norm1);
            if (!last) take(in_proj, s, ring, proj_rows * IN_D);
            if (d_rows) {
                add_product<TILES_DOWN, IN_F>(s, turn, down, boxes + BOX_ACT, boxes + BOX_XA, tag,
                                            residual);
                turn ^= 1;
            }
        }
        // head
        receive<IN_D>(boxes + BOX_XA, tag, x);
        wait_groups<0>();
        __syncwarp();
        const float squares = scaled(s, x);
        spread<IN_D>(s, x, operand);
        float value = NOTHING;
        int place = 0x7fffffff;
        for (int round = 0; round < ROUNDS; round++) {
            const int rows = max(0, min(HEAD_ROWS, v_rows - round * HEAD_ROWS));
            Held<HEAD_TILES> w;
            take(w, s, ring, rows * IN_D);
            multiply<HEAD_TILES, IN_D>(s, turn, w, operand, squares, true);
            const float factor = norm_factor(s, turn);
#pragma unroll
            for (int i = 0; i < CEIL(HEAD_ROWS, GROUPS); i++) {
                const int r = group + i * GROUPS;
                const int column = program * ROWS_V + round * HEAD_ROWS + r;
                const float logit = sum_of<IN_D>(s, turn, min(r, HEAD_ROWS - 1) * IN_D) * factor;
                if (r < rows) {
                    if (args.keep_logits && first_of_group) args.logits[column] = logit;
                    better(value, place, logit, column);
                }
            }
            turn ^= 1;
        }
        exchange_best(s, (u64 *)(boxes + BOX_BEST), count, value, place);
        id = place;
        if (program == 0 && tid == 0) {
            args.found[2 * step] = place;
            args.found[2 * step + 1] = value;
        }
    }
    if (program == 0 && tid == 0) {
        args.ids[0] = id;
        *args.epoch = count;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decode_steps(const Args args) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Shared s;
    __shared__ Layer table[LAYERS];
    const u32 ring_base = shared_address(memory);
    for (int i = threadIdx.x; i < args.layers * (int)(sizeof(Layer) / 8); i += THREADS + 128)
        ((u64 *)table)[i] = ((const u64 *)args.table)[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // By way of a shuffle, so that the compiler sees that a warp does not part here.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= WARPS) {
        // Four warps hand on registers together; one of them has work.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == WARPS) load_weights(s, ring_base, table, args.layers, args.head, args.steps);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        run_steps(args, s, table, ring_base);
    }
}
