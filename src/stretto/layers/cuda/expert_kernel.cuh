// One denoise step's layers of the expert in one launch: every CTA stays, and what it needs next is on its way to it.
//
// There is no barrier over the grid. A CTA goes on when the words that it reads are there (device.cuh), and clears those that
// all have read. That a word of the layer before may be cleared follows from what has been read since: the input of a layer
// is whole only when every CTA is through with the layer before, and the stream in the middle of a layer only when every
// CTA has read the input of that layer.
//
// Residuals live in registers: warp w of the CTA with cut s owns row 8 w + s, two columns of the CTA's tile a lane. As in
// the stream of the separate kernels, x (1 + scale) is rounded for the product behind a norm and 1 / rms multiplies its
// result; the row behind the last token carries shift. All sums have a fixed order.
#pragma once

#include "expert_feed.cuh"

#ifndef STRETTO_AHEAD
#define STRETTO_AHEAD 5
#endif
#ifndef STRETTO_WAIT
#define STRETTO_WAIT 1
#endif

namespace expert {

// Who a thread is: in a fragment of the matrix unit it has row `g` and the columns at `t`.
struct Who {
    int cta, thread, warp, lane, g, t, group, half;

    ON_DEVICE Who() {
        cta = device::block_id(), thread = device::thread_id_anew(), warp = thread / 32, lane = thread % 32;
        g = lane / 4, t = lane % 4, group = warp / 2, half = warp % 2;
    }
};

struct Room {
    char* base;

    ON_DEVICE float* sums() const { return reinterpret_cast<float*>(base + STAGES * STAGE_BYTES); }
    ON_DEVICE float* factors() const { return reinterpret_cast<float*>(base + FACTORS_AT); }
    ON_DEVICE float2* angles() const { return reinterpret_cast<float2*>(base + ANGLES_AT); }
    ON_DEVICE uint8_t* valid() const { return reinterpret_cast<uint8_t*>(base + VALID_AT); }
};

ON_DEVICE void sync() { device::sync_consumers<CONSUMERS>(); }

ON_DEVICE void stamp(const Arguments& a, int phase, int event) {
    if (a.stamps != nullptr && device::thread_id() == 0)
        a.stamps[(int64_t(device::block_id()) * MAX_LAYERS * PHASES + phase) * 8 + event] = device::ticks();
}

// Multiply the rows of `x` by the TILES_N x 8 weight rows in the next stages; leave, per group of warps, sums over its input
// columns.
//
// A group has EACH input columns, a half of it 32 rows. Within 32 columns lane t of a quad has 8 adjacent ones, of both
// factors alike: which of them meets which does not matter to a sum. `first` runs before x is asked for, `meanwhile` while
// it is on its way. Products with the columns that are there run while others come.
template <int EACH, int TILES_N, int ROW_STEP, int TILES_A_STAGE, int STEP, class First, class Meanwhile>
ON_DEVICE void product(
    const Who& who, Ring& ring, float* sums, const bf16* x, int x_step, int rows, First first, Meanwhile meanwhile) {
    constexpr int BLOCKS = EACH / 32, AHEAD = BLOCKS < STRETTO_AHEAD ? BLOCKS : STRETTO_AHEAD, USED = TILES_N / TILES_A_STAGE;
    static_assert(BLOCKS > 1 && USED <= STAGES);
    uint4 raw[BLOCKS][4];
    const int row = who.half * 32 + who.g;
    const bf16* x_at = x + row * x_step + who.group * EACH + who.t * 8;
    const auto ask = [&](int s) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
            raw[s][m] = row + m * 8 < rows ? device::peek4(x_at + m * 8 * x_step + s * 32) : uint4{0, 0, 0, 0};
    };
    first();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) ask(s);
    meanwhile();
    float c[TILES_N][2][4] = {};
    const uint32_t zero = device::hidden_zero();
#pragma unroll
    for (int s = 0; s < BLOCKS; ++s) {
        device::until_there("the input of a product", [&] {
            bool again = false;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                if (device::absent(raw[s][m])) raw[s][m] = device::peek4(x_at + m * 8 * x_step + s * 32), again = true;
            return again;
        });
        device::sync_warp();
        const device::Rows in[2] = {{raw[s][0], raw[s][1], zero}, {raw[s][2], raw[s][3], zero}};
        if (s + AHEAD < BLOCKS) ask(s + AHEAD);
#pragma unroll
        for (int stage = 0; stage < USED; ++stage) {
            const Ring here = s + 1 < BLOCKS ? ring.ahead(stage) : ring;
            if (s == 0) here.await();
            const char* w = here.data() + who.g * ROW_STEP + (who.group * EACH + who.t * 8) * 2 + s * 64;
#pragma unroll
            for (int i = 0; i < TILES_A_STAGE; ++i) {
                const uint4 b = *reinterpret_cast<const uint4*>(w + i * 8 * ROW_STEP);
                const int tile = stage * TILES_A_STAGE + i;
                device::multiply_first(c[tile][0], in[0], b), device::multiply_first(c[tile][1], in[1], b);
                device::multiply_second(c[tile][0], in[0], b), device::multiply_second(c[tile][1], in[1], b);
            }
            if (s + 1 == BLOCKS) ring.release(who.lane);
        }
    }
    float* out = sums + (who.group * ROWS + row) * STEP + who.t * 2;
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float* at = out + m * 16 * STEP + tile * 8;
            *reinterpret_cast<float2*>(at) = float2{c[tile][m][0], c[tile][m][1]};
            *reinterpret_cast<float2*>(at + 8 * STEP) = float2{c[tile][m][2], c[tile][m][3]};
        }
    sync();
}

template <int STEP>
ON_DEVICE float2 summed(const float* sums, int row, int column) {
    const float* at = sums + row * STEP + column;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const float2 part = *reinterpret_cast<const float2*>(at + g * ROWS * STEP);
        sum.x += part.x, sum.y += part.y;
    }
    return sum;
}

// Two columns of a product behind a norm, where `shift` is what came of the row of shifts.
template <int STEP>
ON_DEVICE float2 normed(const float* sums, int row, int column, float factor, float2 shift) {
    const float2 sum = summed<STEP>(sums, row, column);
    return {sum.x * factor + shift.x, sum.y * factor + shift.y};
}

constexpr uint2 ABSENT_PAIR = {device::ABSENT, device::ABSENT};

// Two columns of one row of the residual stream.
struct Owned {
    float2 value;
    int row, column;

    ON_DEVICE Owned(const Who& who, const Arguments& a) {
        row = who.warp * CUTS + who.cta % CUTS, column = who.cta / CUTS * TILE + who.lane * 2;
        const float* at = a.residual + row * WIDTH + column;
        value = row < a.tokens ? *reinterpret_cast<const float2*>(at) : float2{0.0f, 0.0f};
    }
    ON_DEVICE void clear(const Who& who, const Arguments& a, bf16* stream, uint32_t* squares) const {
        if (row > a.tokens) return;
        device::post1(stream + row * WIDTH + column, device::ABSENT);
        if (row < a.tokens && who.lane == 0) device::post1(squares + row * TILES + who.cta / CUTS, device::ABSENT);
    }
};

// 1 / rms of each row, from the sums of squares of its parts; thread i takes row i.
struct Factors {
    uint4 raw[TILES / 4];
    const uint32_t* at;
    bool mine;

    ON_DEVICE Factors(const Who& who, const Arguments& a, const uint32_t* squares) {
        at = squares + who.thread * TILES, mine = who.thread < a.tokens;
    }
    // A warp reads 32 rows of 4 parts of the stream. It asks for them when their sums are there, which were written after them.
    ON_DEVICE void await(const Who& who, const Arguments& a, const uint32_t* squares) {
        if (!STRETTO_WAIT) return;
        const int row = who.half * 32 + who.lane;
        if (row < a.tokens) {
            const uint32_t* at = squares + row * TILES + who.group * (TILES / GROUPS);
            static_assert(TILES / GROUPS == 4);
            device::until_there("a stream", [&] { return device::absent(device::peek4(at)); });
        }
        device::sync_warp();
    }
    ON_DEVICE void ask() {
        if (!mine) return;
#pragma unroll
        for (int i = 0; i < TILES / 4; ++i) raw[i] = device::peek4(at + i * 4);
    }
    ON_DEVICE void make(const Who& who, const Arguments& a, float* factors) {
        if (!mine) return;
        device::until_there("squares", [&] {
            bool again = false;
#pragma unroll
            for (int i = 0; i < TILES / 4; ++i)
                if (device::absent(raw[i])) raw[i] = device::peek4(at + i * 4), again = true;
            return again;
        });
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES / 4; ++i) {
            total += device::as_float(raw[i].x) + device::as_float(raw[i].y);
            total += device::as_float(raw[i].z) + device::as_float(raw[i].w);
        }
        factors[who.thread] = device::inverse_root(total / WIDTH + a.eps);
    }
    // Those of the stream that was given; it has any number of parts.
    ON_DEVICE void make_given(const Who& who, const Arguments& a, float* factors) {
        if (!mine) return;
        float total = 0.0f;
        for (int i = 0; i < a.square_parts; ++i) total += a.squares[who.thread * a.square_parts + i];
        factors[who.thread] = device::inverse_root(total / WIDTH + a.eps);
    }
};

// Clear, of the layer before, what this thread wrote and all have read.
ON_DEVICE void clear_layer(const Who& who, const Arguments& a, const Span& span, const Owned& own, int layer) {
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int column = column_of_pair(who.cta * PAIRS + i % (PAIRS / 2) * 2);
        bf16* at = a.fresh(layer) + i / (PAIRS / 2) * QKV + column;
        device::post1(at, device::ABSENT), device::post1(at + HALF, device::ABSENT);
    }
    const int query = span.shared_query(who.warp);
    if (span.any && span.shares(who.warp) && query < a.tokens * HEADS)
        device::post2(a.attended(layer) + query * HEAD + who.warp % 2 * HALF + who.lane * 4, ABSENT_PAIR);
    for (int i = who.thread; i < a.tokens * (GATES / 2); i += CONSUMERS)
        device::post1(a.hidden(layer) + i / (GATES / 2) * MLP + who.cta * GATES + i % (GATES / 2) * 2, device::ABSENT);
    own.clear(who, a, a.middle(layer), a.middle_squares(layer));
}

ON_DEVICE void query_key_value(
    const Who& who, const Arguments& a, Ring& ring, const Room& room, const Span& span, const Owned& own, int phase) {
    const int layer = phase / PHASES;
    const bf16* x = layer == 0 ? a.scaled : a.end(layer - 1);
    float* sums = room.sums();
    Factors factors(who, a, a.end_squares(max(layer - 1, 0)));
    const auto ask = [&] {
        if (layer == 0) return;
        factors.await(who, a, a.end_squares(layer - 1));
        factors.ask();
    };
    product<WIDTH / GROUPS, 3, ROW_2048, 1, PAIR_STEP>(who, ring, sums, x, WIDTH, a.tokens + 1, ask, [&] {
        layer > 0 ? factors.make(who, a, room.factors()) : factors.make_given(who, a, room.factors());
    });
    stamp(a, phase, 1);
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int row = i / (PAIRS / 2), p = i % (PAIRS / 2) * 2;
        const float factor = room.factors()[row];
        const float2 low = normed<PAIR_STEP>(sums, row, p, factor, summed<PAIR_STEP>(sums, a.tokens, p));
        const float2 high = normed<PAIR_STEP>(sums, row, p + PAIRS, factor, summed<PAIR_STEP>(sums, a.tokens, p + PAIRS));
        const float2 one = room.angles()[row * PAIRS + p], other = room.angles()[row * PAIRS + p + 1];
        bf16* out = a.fresh(layer) + row * QKV + column_of_pair(who.cta * PAIRS + p);
        device::post1(out, device::pack(low.x * one.x - high.x * one.y, low.y * other.x - high.y * other.y));
        device::post1(out + HALF, device::pack(high.x * one.x + low.x * one.y, high.y * other.x + low.y * other.y));
    }
    stamp(a, phase, 2);
    if (layer > 0) clear_layer(who, a, span, own, layer - 1);
}

// Softmax of this span's scores, four rows a warp; weights go where the row's first scores were.
ON_DEVICE void soften(const Who& who, const Arguments& a, const Room& room, const Span& span) {
    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    constexpr int EACH = QUERIES / WARPS;
    float* at = room.sums() + who.warp * EACH * SCORE_STEP;
    float s[EACH][4], top[EACH], total[EACH];
    const uchar4 valid = *reinterpret_cast<const uchar4*>(room.valid() + who.lane * 4);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float4 part = *reinterpret_cast<const float4*>(at + (g * QUERIES + i) * SCORE_STEP + who.lane * 4);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        s[i][0] = valid.x ? sum.x * scale : -2.0e30f, s[i][1] = valid.y ? sum.y * scale : -2.0e30f;
        s[i][2] = valid.z ? sum.z * scale : -2.0e30f, s[i][3] = valid.w ? sum.w * scale : -2.0e30f;
        top[i] = fmaxf(fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3])), -1.0e30f);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < EACH; ++i) top[i] = fmaxf(top[i], device::from_lane_xor(top[i], step));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = s[i][j] < -1.5e30f ? 0.0f : device::power_of_two(s[i][j] - top[i]);
        total[i] = s[i][0] + s[i][1] + s[i][2] + s[i][3];
    }
    // All lanes have read their scores by the first exchange; weights may take their place.
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const uint2 both = {device::pack(s[i][0], s[i][1]), device::pack(s[i][2], s[i][3])};
        *reinterpret_cast<uint2*>(at + i * SCORE_STEP + who.lane * 2) = both;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < EACH; ++i) total[i] += device::from_lane_xor(total[i], step);
    // Once for each of the two warps that will join a row.
    if (who.lane < 2)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int query = span.block * QUERIES + who.warp * EACH + i;
            const uint2 both = {device::bits_of(top[i]), device::bits_of(total[i])};
            if (query < a.tokens * HEADS) device::post2(span.tops(a, who.lane, span.cut, query), both);
        }
}

// Put the suffix's keys and values into the stages that are kept for them.
ON_DEVICE void place_suffix(const Who& who, const Arguments& a, Ring ring, const bf16* fresh) {
    constexpr int PIECES = HEAD * 2 / 16, MOST = (2 * MAX_TOKENS * PIECES + CONSUMERS - 1) / CONSUMERS;
    uint4 raw[MOST];
    const int kinds = a.tokens * PIECES;
    const auto from = [&](int i) {
        const int piece = (i * CONSUMERS + who.thread) % kinds, kind = (i * CONSUMERS + who.thread) / kinds;
        return fresh + piece / PIECES * QKV + (HEADS + kind) * HEAD + piece % PIECES * 8;
    };
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        raw[i] = i * CONSUMERS + who.thread < 2 * kinds ? device::peek4(from(i)) : uint4{0, 0, 0, 0};
    device::until_there("the suffix", [&] {
        bool again = false;
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (device::absent(raw[i])) raw[i] = device::peek4(from(i)), again = true;
        return again;
    });
    char* stages[2 * SPAN_KEYS / 32];
#pragma unroll
    for (int i = 0; i < 2 * SPAN_KEYS / 32; ++i, ring.next()) ring.await(), stages[i] = ring.data();
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int piece = (i * CONSUMERS + who.thread) % kinds, kind = (i * CONSUMERS + who.thread) / kinds;
        if (kind > 1) continue;
        const int row = piece / PIECES, at = row / 32 + kind * (SPAN_KEYS / 32);
        char* stage = at == 0 ? stages[0] : at == 1 ? stages[1] : at == 4 ? stages[4] : stages[5];
        *reinterpret_cast<uint4*>(stage + row % 32 * (kind == 0 ? ROW_512 : ROW_TRANSPOSED) + piece % PIECES * 16) = raw[i];
    }
    device::before_copies();
    sync();
}

ON_DEVICE void score(const Who& who, const Arguments& a, Ring& ring, float* scores, const Span& span, const bf16* fresh) {
    uint4 raw[2][2];
    const auto from = [&](int m, int s) {
        const int query = span.block * QUERIES + who.half * 16 + m * 8 + who.g;
        return fresh + query / HEADS * QKV + query % HEADS * HEAD + who.group * (HEAD / GROUPS) + who.t * 8 + s * 32;
    };
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const bool any = span.block * QUERIES + who.half * 16 + m * 8 + who.g < a.tokens * HEADS;
            raw[s][m] = any ? device::peek4(from(m, s)) : uint4{0, 0, 0, 0};
        }
    if (span.suffix) place_suffix(who, a, ring, fresh);
    device::until_there("queries", [&] {
        bool again = false;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (device::absent(raw[i / 2][i % 2])) raw[i / 2][i % 2] = device::peek4(from(i % 2, i / 2)), again = true;
        return again;
    });
    device::sync_warp();
    const uint32_t zero = device::hidden_zero();
    const device::Rows in[2] = {{raw[0][0], raw[0][1], zero}, {raw[1][0], raw[1][1], zero}};
#pragma unroll
    for (int stage = 0; stage < SPAN_KEYS / 32; ++stage) {
        const char* k = ring.await() + who.g * ROW_512 + (who.group * (HEAD / GROUPS) + who.t * 8) * 2;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            if (stage * 32 + tile * 8 >= span.keys) break;
            float c[4] = {};
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const uint4 b = *reinterpret_cast<const uint4*>(k + tile * 8 * ROW_512 + s * 64);
                device::multiply_first(c, in[s], b);
                device::multiply_second(c, in[s], b);
            }
            float* at = scores + (who.group * QUERIES + who.half * 16 + who.g) * SCORE_STEP + stage * 32 + tile * 8 + who.t * 2;
            *reinterpret_cast<float2*>(at) = float2{c[0], c[1]};
            *reinterpret_cast<float2*>(at + 8 * SCORE_STEP) = float2{c[2], c[3]};
        }
        ring.release(who.lane);
    }
    sync();
}

// Weights times values: all 32 rows, 32 dims a warp.
ON_DEVICE void weigh(const Who& who, const Arguments& a, Ring& ring, const float* weights, const Span& span) {
    constexpr int STEPS = SPAN_KEYS / 16;
    float c[2][4][4] = {};
    uint32_t x[STEPS][2][4];
    const char* in = reinterpret_cast<const char*>(weights + who.g * SCORE_STEP) + who.t * 4;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[s][m][i] = *reinterpret_cast<const uint32_t*>(in + (m * 16 + i % 2 * 8) * (SCORE_STEP * 4) + (s * 16 + i / 2 * 8) * 2);
    const int key = who.lane / 8 % 2 * 8 + who.lane % 8, dim = who.warp * 32 + who.lane / 16 * 8;
#pragma unroll
    for (int stage = 0; stage < STEPS / 2; ++stage) {
        const char* v = ring.await() + key * ROW_TRANSPOSED + dim * 2;
        if (stage * 32 >= span.keys) {
            ring.release(who.lane);
            continue;
        }
        uint32_t b[2][2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int n = 0; n < 2; ++n) device::load_transposed(b[s][n], v + s * 16 * ROW_TRANSPOSED + n * 32);
        ring.release(who.lane);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const uint32_t(&w)[4] = x[stage * 2 + s][m];
                    device::multiply(c[m][n], w[0], w[1], w[2], w[3], b[s][n / 2][n % 2 * 2], b[s][n / 2][n % 2 * 2 + 1]);
                }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int query = span.block * QUERIES + m * 8 + who.g;
        if (query >= a.tokens * HEADS) continue;
        uint32_t* out = span.sums(a, span.cut, query) + who.warp * 32 + who.t * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n)
            device::post2(out + n * 8, {device::bits_of(c[m / 2][n][m % 2 * 2]), device::bits_of(c[m / 2][n][m % 2 * 2 + 1])});
    }
}

// Join the spans of this CTA's share of a query block: half a row a warp.
ON_DEVICE void join_spans(const Who& who, const Arguments& a, const Span& span, bf16* attended) {
    const int query = span.shared_query(who.warp), half = who.warp % 2, dim = half * HALF + who.lane * 4;
    if (!span.shares(who.warp) || query >= a.tokens * HEADS) return;
    uint4 parts[SPANS];
    uint2 tops[SPANS];
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
        parts[s] = device::peek4(span.sums(a, s, query) + dim), tops[s] = device::peek2(span.tops(a, half, s, query));
    device::until_there("a span", [&] {
        bool again = false;
#pragma unroll
        for (int s = 0; s < SPANS; ++s) {
            if (device::absent(parts[s])) parts[s] = device::peek4(span.sums(a, s, query) + dim), again = true;
            if (device::absent(tops[s])) tops[s] = device::peek2(span.tops(a, half, s, query)), again = true;
        }
        return again;
    });
    float top = -2.0e30f, total = 0.0f, sum[4] = {};
#pragma unroll
    for (int s = 0; s < SPANS; ++s) top = fmaxf(top, device::as_float(tops[s].x));
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        const float share = device::power_of_two(device::as_float(tops[s].x) - top);
        total += device::as_float(tops[s].y) * share;
        sum[0] += device::as_float(parts[s].x) * share, sum[1] += device::as_float(parts[s].y) * share;
        sum[2] += device::as_float(parts[s].z) * share, sum[3] += device::as_float(parts[s].w) * share;
    }
    const float over = total > 0.0f ? 1.0f / total : 1.0f;
    device::post2(attended + query * HEAD + dim, {device::pack(sum[0] * over, sum[1] * over), device::pack(sum[2] * over, sum[3] * over)});
    device::sync_warp();
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        device::post4(span.sums(a, s, query) + dim, {device::ABSENT, device::ABSENT, device::ABSENT, device::ABSENT});
        if (who.lane == 0) device::post2(span.tops(a, half, s, query), ABSENT_PAIR);
    }
}

ON_DEVICE void attend(const Who& who, const Arguments& a, Ring& ring, const Room& room, const Span& span, int phase) {
    if (!span.any) return;
    const bf16* fresh = a.fresh(phase / PHASES);
    score(who, a, ring, room.sums(), span, fresh);
    stamp(a, phase, 1);
    soften(who, a, room, span);
    sync();
    stamp(a, phase, 2);
    weigh(who, a, ring, room.sums(), span);
    stamp(a, phase, 3);
    join_spans(who, a, span, a.attended(phase / PHASES));
}

ON_DEVICE float2 of_line(const Arguments& a, const float* line, int norm, int part, int column) {
    return *reinterpret_cast<const float2*>(line + norm * a.norm_step + part * WIDTH + column);
}

// Where a phase that adds to the stream leaves what the product behind the next norm reads.
struct Left {
    bf16* stream;
    uint32_t* squares;
};

// The last norm is read in fp32, outside.
ON_DEVICE void leave(const Who& who, const Arguments& a, const Owned& own, float2 factor, float2 shift, Left left, bool last) {
    const bool is_shift = own.row == a.tokens;
    if (own.row > a.tokens) return;
    const float2 scaled = is_shift ? shift : float2{own.value.x * (1.0f + factor.x), own.value.y * (1.0f + factor.y)};
    const int at = own.row * WIDTH + own.column;
    if (last)
        *reinterpret_cast<float2*>(a.scaled_out + at) = scaled;
    else
        device::post1(left.stream + at, device::pack(scaled.x, scaled.y));
    if (is_shift) return;
    float square = own.value.x * own.value.x + own.value.y * own.value.y;
    for (int step = 16; step > 0; step /= 2) square += device::from_lane_xor(square, step);
    const int part = own.row * TILES + who.cta / CUTS;
    if (last) {
        *reinterpret_cast<float2*>(a.residual_out + at) = own.value;
        if (who.lane == 0) a.squares_out[part] = square;
    } else if (who.lane == 0) {
        device::post1(left.squares + part, device::bits_of(square));
    }
}

// Residual += gate * product, whose cuts are in 8 CTAs: each adds up its share of the rows.
template <int INPUT, int ROW_STEP, int TILES_A_STAGE>
ON_DEVICE void add_product(
    const Who& who, const Arguments& a, Ring& ring, const Room& room, Owned& own, const float* line, const bf16* x, Left left,
    int phase) {
    constexpr int EACH = INPUT / CUTS;
    const int tile = who.cta / CUTS, cut = who.cta % CUTS, second = phase % PHASES == 4, norm = phase / PHASES * 2 + second;
    float2 gate, factor, shift;
    product<EACH / GROUPS, TILE / 8, ROW_STEP, TILES_A_STAGE, SUM_STEP>(
        who, ring, room.sums(), x + cut * EACH, INPUT, a.tokens,
        [&] {
            gate = of_line(a, line, norm, 2, own.column);
            factor = of_line(a, line, norm + 1, 0, own.column), shift = of_line(a, line, norm + 1, 1, own.column);
        },
        [] {});
    stamp(a, phase, 1);
    uint32_t* parts = a.board + PRODUCTS + second * OF_PRODUCT + tile * (CUTS * MAX_TOKENS * TILE);
    for (int i = who.thread; i < a.tokens * (TILE / 4); i += CONSUMERS) {
        const int row = i / (TILE / 4), column = i % (TILE / 4) * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float4 part = *reinterpret_cast<const float4*>(room.sums() + (g * ROWS + row) * SUM_STEP + column);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        const uint4 bits = {device::bits_of(sum.x), device::bits_of(sum.y), device::bits_of(sum.z), device::bits_of(sum.w)};
        device::post4(parts + (cut * MAX_TOKENS + row) * TILE + column, bits);
    }
    stamp(a, phase, 2);
    const bool last = phase == a.depth * PHASES - 1;
    if (own.row >= a.tokens) {
        leave(who, a, own, factor, shift, left, last);
        return;
    }
    uint2 part[CUTS];
    parts += own.row * TILE + who.lane * 2;
#pragma unroll
    for (int s = 0; s < CUTS; ++s) part[s] = device::peek2(parts + s * (MAX_TOKENS * TILE));
    device::until_there("a cut", [&] {
        bool again = false;
#pragma unroll
        for (int s = 0; s < CUTS; ++s)
            if (device::absent(part[s])) part[s] = device::peek2(parts + s * (MAX_TOKENS * TILE)), again = true;
        return again;
    });
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < CUTS; ++s) sum.x += device::as_float(part[s].x), sum.y += device::as_float(part[s].y);
    own.value.x += gate.x * sum.x, own.value.y += gate.y * sum.y;
    device::sync_warp();
    stamp(a, phase, 3);
    leave(who, a, own, factor, shift, left, last);
#pragma unroll
    for (int s = 0; s < CUTS; ++s) device::post2(parts + s * (MAX_TOKENS * TILE), ABSENT_PAIR);
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

ON_DEVICE void gate_and_up(const Who& who, const Arguments& a, Ring& ring, const Room& room, const Owned& own, int phase) {
    const int layer = phase / PHASES;
    float* sums = room.sums();
    Factors factors(who, a, a.middle_squares(layer));
    product<WIDTH / GROUPS, TILE / 8, ROW_2048, 1, SUM_STEP>(
        who, ring, sums, a.middle(layer), WIDTH, a.tokens + 1, [&] { factors.await(who, a, a.middle_squares(layer)), factors.ask(); },
        [&] { factors.make(who, a, room.factors()); });
    stamp(a, phase, 1);
    // A thread has the same two columns in all its rows.
    const int column = who.thread % (GATES / 2) * 2;
    const float2 gate_shift = summed<SUM_STEP>(sums, a.tokens, column), up_shift = summed<SUM_STEP>(sums, a.tokens, GATES + column);
    bf16* out = a.hidden(layer) + who.cta * GATES + column;
    for (int row = who.thread / (GATES / 2); row < a.tokens; row += CONSUMERS / (GATES / 2)) {
        const float factor = room.factors()[row];
        const float2 gate = normed<SUM_STEP>(sums, row, column, factor, gate_shift);
        const float2 up = normed<SUM_STEP>(sums, row, GATES + column, factor, up_shift);
        device::post1(out + row * MLP, device::pack(gelu(gate.x) * up.x, gelu(gate.y) * up.y));
    }
    stamp(a, phase, 2);
    if (layer > 0) own.clear(who, a, a.end(layer - 1), a.end_squares(layer - 1));
}

// What stays the same through all layers: the angles of this CTA's pairs, and which keys of its span are there.
ON_DEVICE void prepare(const Who& who, const Arguments& a, const Room& room, const Span& span) {
    for (int i = who.thread; i < a.tokens * PAIRS; i += CONSUMERS) {
        const int pair = who.cta * PAIRS + i % PAIRS;
        const float power = -a.log2_theta / HALF * float(pair % HALF);
        const float angle = float(*a.start + i / PAIRS) * device::power_of_two(power);
        const bool turned = pair / HALF <= HEADS;  // queries and keys are, values are not
        room.angles()[i] = turned ? float2{cosf(angle), sinf(angle)} : float2{1.0f, 0.0f};
    }
    for (int i = who.thread; i < SPAN_KEYS; i += CONSUMERS)
        room.valid()[i] = i < span.keys && (span.suffix || a.mask[span.first + i]);
}

ON_DEVICE void compute(const Arguments& a, char* shared) {
    const Room room{shared};
    const Span span(a);
    Ring ring(shared);
    Owned own(Who(), a);
    const float* line = a.table + (a.line == nullptr ? 0 : *a.line) * a.line_step;
    prepare(Who(), a, room, span);
    sync();
    for (int phase = 0; phase < a.phases; ++phase) {
        const Who who;
        stamp(a, phase, 0);
        const int layer = phase / PHASES;
        const Left middle = {a.middle(layer), a.middle_squares(layer)}, end = {a.end(layer), a.end_squares(layer)};
        switch (phase % PHASES) {
            case 0: query_key_value(who, a, ring, room, span, own, phase); break;
            case 1: attend(who, a, ring, room, span, phase); break;
            case 2: add_product<INNER, ROW_512, 4>(who, a, ring, room, own, line, a.attended(layer), middle, phase); break;
            case 3: gate_and_up(who, a, ring, room, own, phase); break;
            case 4: add_product<MLP, ROW_1024, 2>(who, a, ring, room, own, line, a.hidden(layer), end, phase); break;
        }
        stamp(a, phase, 6);
        // The next phase writes what this one still reads in shared memory.
        sync();
        stamp(a, phase, 7);
    }
}

ON_DEVICE void run(const Arguments& a, char* shared) {
    const int thread = device::thread_id();
    // Whatever lies in a stage is multiplied by zero where there is no key: it must be finite.
    for (int i = thread * 16; i < STAGES * STAGE_BYTES; i += THREADS * 16) *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    if (thread == 0) {
        Ring ring(shared);
        for (int s = 0; s < STAGES; ++s, ring.next()) {
            device::barrier_init(ring.full(), 1);
            device::barrier_init(ring.empty(), WARPS);
        }
        device::barriers_ready();
    }
    device::before_copies();
    device::sync_all();
    if (thread >= CONSUMERS) {
        device::give_registers();
        if (thread < CONSUMERS + 32) feed(a, shared, thread % 32);
    } else {
        device::take_registers();
        compute(a, shared);
    }
}

}  // namespace expert
