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
    ON_DEVICE float* squares() const { return reinterpret_cast<float*>(base + SQUARES_AT); }
    ON_DEVICE float2* angles() const { return reinterpret_cast<float2*>(base + ANGLES_AT); }
    ON_DEVICE uint8_t* valid() const { return reinterpret_cast<uint8_t*>(base + VALID_AT); }
};

ON_DEVICE void sync() { device::sync_consumers<CONSUMERS>(); }

ON_DEVICE void stamp(const Arguments& a, int phase, int event) {
#ifdef STRETTO_STAMPS
    if (a.stamps != nullptr && device::thread_id() == 0)
        a.stamps[(int64_t(device::block_id()) * MAX_LAYERS * PHASES + phase) * 8 + event] = device::ticks();
#endif
}

// A product of the rows of `x` with the weight rows in the next stages. A group of warps has 32 `blocks` columns of the input.
struct Product {
    const bf16* x;
    int x_step, rows, blocks, tiles, row_step, tiles_a_stage;
};

// Multiply; leave, per group of warps, sums over its input columns.
//
// Within 32 columns lane t of a quad has 8 adjacent ones, of both factors alike: which of them meets which does not matter to
// a sum. The input stays in registers while tiles of 8 weight rows pass, so stages are free for what comes next one by one.
ON_DEVICE void multiply(const Who& who, const Arguments& a, Ring& ring, float* sums, const Product& p, int phase) {
    constexpr int MOST = WIDTH / GROUPS / 32;
    uint4 raw[MOST][4];
    const int row = who.half * 32 + who.g;
    const bf16* x_at = p.x + row * p.x_step + (who.group * p.blocks * 4 + who.t) * 8;
#pragma unroll
    for (int s = 0; s < MOST; ++s)
#pragma unroll
        for (int m = 0; m < 4; ++m) raw[s][m] = {0, 0, 0, 0};
    device::until_there(
        [&] {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                if (row + m * 8 >= p.rows) break;
                const bf16* at = x_at + m * 8 * p.x_step;
#pragma unroll
                for (int s = 0; s < MOST; ++s) {
                    if (s >= p.blocks) break;
                    raw[s][m] = device::peek4(at + s * 32);
                }
            }
        },
        [&] {
            bool any = false;
#pragma unroll
            for (int s = 0; s < MOST; ++s)
#pragma unroll
                for (int m = 0; m < 4; ++m) any = any | device::absent(raw[s][m]);
            return any;
        });
    device::sync_warp();
    const uint32_t zero = device::hidden_zero();
    device::Rows in[MOST][2];
#pragma unroll
    for (int s = 0; s < MOST; ++s)
#pragma unroll
        for (int m = 0; m < 2; ++m) in[s][m] = device::Rows(raw[s][2 * m], raw[s][2 * m + 1], zero);
    stamp(a, phase, 2);
    const int start = who.g * p.row_step + (who.group * p.blocks * 4 + who.t) * 16;
    float* out = sums + (who.group * ROWS + row) * SUM_STEP + who.t * 2;
    int in_stage = 0;
    const char* w = ring.await() + start;
#pragma unroll 1
    for (int tile = 0; tile < p.tiles; ++tile, out += 8) {
        float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
        for (int s = 0; s < MOST; ++s) {
            if (s >= p.blocks) break;
            const uint4 b = *reinterpret_cast<const uint4*>(w + s * 64);
#pragma unroll
            for (int m = 0; m < 2; ++m) device::multiply_first(even[m], in[s][m], b), device::multiply_second(odd[m], in[s][m], b);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float* at = out + m * 16 * SUM_STEP;
            *reinterpret_cast<float2*>(at) = float2{even[m][0] + odd[m][0], even[m][1] + odd[m][1]};
            *reinterpret_cast<float2*>(at + 8 * SUM_STEP) = float2{even[m][2] + odd[m][2], even[m][3] + odd[m][3]};
        }
        w += 8 * p.row_step;
        if (++in_stage == p.tiles_a_stage) {
            ring.release(who.lane);
            in_stage = 0;
            if (tile + 1 < p.tiles) w = ring.await() + start;
        }
    }
    sync();
}

ON_DEVICE float2 summed(const float* sums, int row, int column) {
    const float* at = sums + row * SUM_STEP + column;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const float2 part = *reinterpret_cast<const float2*>(at + g * ROWS * SUM_STEP);
        sum.x += part.x, sum.y += part.y;
    }
    return sum;
}

// Two columns of a product behind a norm, where `shift` is what came of the row of shifts.
ON_DEVICE float2 normed(const float* sums, int row, int column, float factor, float2 shift) {
    const float2 sum = summed(sums, row, column);
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

// Wait for a stream, by the sums of squares that are written after its parts: a warp does so for what it will read, 32 rows
// of the parts of its group's columns, and leaves those parts' sum. Layer 0 reads the stream that was given, of any parts.
ON_DEVICE void await_stream(const Who& who, const Arguments& a, const Room& room, const uint32_t* squares, bool given) {
    const int row = who.half * 32 + who.lane;
    if (row < a.tokens) {
        static_assert(TILES / GROUPS == 4);
        float total = 0.0f;
        if (given) {
#pragma unroll 1
            for (int i = who.group; i < a.square_parts; i += GROUPS) total += a.squares[row * a.square_parts + i];
        } else {
            uint4 raw;
            device::until_there(
                [&] { raw = device::peek4(squares + row * TILES + who.group * 4); }, [&] { return device::absent(raw); });
            total = (device::as_float(raw.x) + device::as_float(raw.y)) + (device::as_float(raw.z) + device::as_float(raw.w));
        }
        room.squares()[who.group * ROWS + row] = total;
    }
    device::sync_warp();
}

// 1 / rms of a row.
ON_DEVICE float factor_of(const Arguments& a, const Room& room, int row) {
    const float* at = room.squares() + row;
    return device::inverse_root((at[0] + at[ROWS] + at[2 * ROWS] + at[3 * ROWS]) / WIDTH + a.eps);
}

// Clear, of the layer before, what this thread wrote and all have read.
ON_DEVICE void clear_layer(const Who& who, const Arguments& a, const Span& span, const Owned& own, int layer) {
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int column = column_of_pair(who.cta * PAIRS + i % (PAIRS / 2) * 2);
        bf16* at = a.fresh(layer) + i / (PAIRS / 2) * QKV + column;
        device::post1(at, device::ABSENT), device::post1(at + HALF, device::ABSENT);
    }
    const int query = span.shared_query(who.warp);
    if (span.any && span.shares(who.warp) && query < a.tokens * HEADS)
        device::post2(a.attended(layer) + query * HEAD + who.warp % 2 * HALF + who.lane * 4, ABSENT_PAIR);
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (GATES / 2); i += CONSUMERS)
        device::post1(a.hidden(layer) + i / (GATES / 2) * MLP + who.cta * GATES + i % (GATES / 2) * 2, device::ABSENT);
    own.clear(who, a, a.middle(layer), a.middle_squares(layer));
}

// Turn queries and keys, and hand them and the values on.
ON_DEVICE void rotate(const Who& who, const Arguments& a, const Room& room, bf16* fresh) {
    const float* sums = room.sums();
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int row = i / (PAIRS / 2), p = i % (PAIRS / 2) * 2;
        const float factor = factor_of(a, room, row);
        const float2 low = normed(sums, row, p, factor, summed(sums, a.tokens, p));
        const float2 high = normed(sums, row, p + PAIRS, factor, summed(sums, a.tokens, p + PAIRS));
        const float2 one = room.angles()[row * PAIRS + p], other = room.angles()[row * PAIRS + p + 1];
        bf16* out = fresh + row * QKV + column_of_pair(who.cta * PAIRS + p);
        device::post1(out, device::pack(low.x * one.x - high.x * one.y, low.y * other.x - high.y * other.y));
        device::post1(out + HALF, device::pack(high.x * one.x + low.x * one.y, high.y * other.x + low.y * other.y));
    }
}

// Softmax of two rows of this span's scores by one warp; weights go where a row's first scores were.
ON_DEVICE void soften_two(const Who& who, const Arguments& a, const Room& room, const Span& span, int row) {
    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    constexpr int EACH = 2;
    float* at = room.sums() + row * SCORE_STEP;
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
            const int query = span.block * QUERIES + row + i;
            const uint2 both = {device::bits_of(top[i]), device::bits_of(total[i])};
            if (query < a.tokens * HEADS) device::post2(span.tops(a, who.lane, span.cut, query), both);
        }
}

ON_DEVICE void soften(const Who& who, const Arguments& a, const Room& room, const Span& span) {
#pragma unroll 1
    for (int i = 0; i < QUERIES / WARPS; i += 2) soften_two(who, a, room, span, who.warp * (QUERIES / WARPS) + i);
}

// Put the suffix's keys and values into the stages that are kept for them. All spans of a block wait for this one.
ON_DEVICE void place_suffix(const Who& who, const Arguments& a, Ring ring, const bf16* fresh) {
    // A warp has every eighth row, a lane 16 bytes of its key and of its value.
    constexpr int EACH = MAX_TOKENS / WARPS, KIND = SPAN_KEYS / 32;
    const bf16* at = fresh + who.warp * QKV + HEADS * HEAD + who.lane * 8;
    uint4 raw[2][EACH];
    device::until_there(
        [&] {
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int kind = 0; kind < 2; ++kind)
                    raw[kind][i] = who.warp + i * WARPS < a.tokens ? device::peek4(at + i * WARPS * QKV + kind * HEAD) : uint4{0, 0, 0, 0};
        },
        [&] {
            bool any = false;
#pragma unroll
            for (int i = 0; i < EACH; ++i) any = any || device::absent(raw[0][i]) || device::absent(raw[1][i]);
            return any;
        });
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int row = who.warp + i * WARPS;
        const Ring keys = ring.ahead(i * WARPS / 32), values = ring.ahead(i * WARPS / 32 + KIND);
        if (i * WARPS % 32 == 0) keys.await(), values.await();
        if (row >= a.tokens) break;
        *reinterpret_cast<uint4*>(keys.data() + row % 32 * ROW_512 + who.lane * 16) = raw[0][i];
        *reinterpret_cast<uint4*>(values.data() + row % 32 * ROW_TRANSPOSED + who.lane * 16) = raw[1][i];
    }
    device::before_copies();
    sync();
}

ON_DEVICE void score(
    const Who& who, const Arguments& a, Ring& ring, float* scores, const Span& span, const bf16* fresh, int phase) {
    uint4 raw[2][2] = {};
    const int query = span.block * QUERIES + who.half * 16 + who.g;
    const auto ask = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int q = query + m * 8;
            const bf16* at = fresh + q / HEADS * QKV + q % HEADS * HEAD + who.group * (HEAD / GROUPS) + who.t * 8;
            if (q < a.tokens * HEADS) raw[0][m] = device::peek4(at), raw[1][m] = device::peek4(at + 32);
        }
    };
    ask();
    if (span.suffix) place_suffix(who, a, ring, fresh);
    while (device::absent(raw[0][0]) || device::absent(raw[0][1]) || device::absent(raw[1][0]) || device::absent(raw[1][1])) {
        device::pause();
        ask();
    }
    stamp(a, phase, 1);
    device::sync_warp();
    const uint32_t zero = device::hidden_zero();
    const device::Rows in[2] = {{raw[0][0], raw[0][1], zero}, {raw[1][0], raw[1][1], zero}};
#pragma unroll 1
    for (int stage = 0; stage < SPAN_KEYS / 32; ++stage) {
        const char* k = ring.await() + who.g * ROW_512 + (who.group * (HEAD / GROUPS) + who.t * 8) * 2;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            if (stage * 32 >= span.keys) break;
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
    float c[2][4][4] = {};
    const char* in = reinterpret_cast<const char*>(weights + who.g * SCORE_STEP) + who.t * 4;
    const int key = who.lane / 8 % 2 * 8 + who.lane % 8, dim = who.warp * 32 + who.lane / 16 * 8;
#pragma unroll 1
    for (int stage = 0; stage < SPAN_KEYS / 32; ++stage, in += 64) {
        const char* v = ring.await() + key * ROW_TRANSPOSED + dim * 2;
        if (stage * 32 < span.keys) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                uint32_t b[2][4], x[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) device::load_transposed(b[n], v + s * 16 * ROW_TRANSPOSED + n * 32);
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[m][i] = *reinterpret_cast<const uint32_t*>(in + (m * 16 + i % 2 * 8) * (SCORE_STEP * 4) + (s * 16 + i / 2 * 8) * 2);
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        device::multiply(
                            c[m][n], x[m][0], x[m][1], x[m][2], x[m][3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
        ring.release(who.lane);
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
    uint32_t *sums = span.sums(a, 0, query) + dim, *tops_at = span.tops(a, half, 0, query);
    uint4 parts[SPANS];
    uint2 tops[SPANS];
    device::until_there(
        [&] {
#pragma unroll
            for (int s = 0; s < SPANS; ++s)
                parts[s] = device::peek4(sums + s * (ALL_QUERIES * HEAD)), tops[s] = device::peek2(tops_at + s * (ALL_QUERIES * 2));
        },
        [&] {
            bool any = false;
#pragma unroll
            for (int s = 0; s < SPANS; ++s) any = any || device::absent(parts[s]) || device::absent(tops[s]);
            return any;
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
        device::post4(sums + s * (ALL_QUERIES * HEAD), {device::ABSENT, device::ABSENT, device::ABSENT, device::ABSENT});
        if (who.lane == 0) device::post2(tops_at + s * (ALL_QUERIES * 2), ABSENT_PAIR);
    }
}

ON_DEVICE void attend(const Who& who, const Arguments& a, Ring& ring, const Room& room, const Span& span, int phase) {
    const bf16* fresh = a.fresh(phase / PHASES);
    score(who, a, ring, room.sums(), span, fresh, phase);
    stamp(a, phase, 2);
    soften(who, a, room, span);
    sync();
    stamp(a, phase, 3);
    weigh(who, a, ring, room.sums(), span);
    stamp(a, phase, 4);
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

// What a phase that adds to the stream needs of the norms' table: its gate, and scale and shift of the next norm.
struct Lines {
    float2 gate, scale, shift;

    ON_DEVICE Lines(const Arguments& a, const float* line, int norm, int column) {
        gate = of_line(a, line, norm, 2, column);
        scale = of_line(a, line, norm + 1, 0, column), shift = of_line(a, line, norm + 1, 1, column);
    }
};

// Residual += gate * product, whose cuts are in 8 CTAs: each adds up its share of the rows.
ON_DEVICE void add(
    const Who& who, const Arguments& a, const Room& room, Owned& own, const Lines& lines, uint32_t* parts, Left left, int phase) {
    const int column = who.thread % (TILE / 4) * 4;
    parts += who.cta / CUTS * (CUTS * MAX_TOKENS * TILE);
    uint32_t* out = parts + who.cta % CUTS * (MAX_TOKENS * TILE) + column;
#pragma unroll 2
    for (int row = who.thread / (TILE / 4); row < a.tokens; row += CONSUMERS / (TILE / 4)) {
        const float2 low = summed(room.sums(), row, column), high = summed(room.sums(), row, column + 2);
        device::post4(out + row * TILE, {device::bits_of(low.x), device::bits_of(low.y), device::bits_of(high.x), device::bits_of(high.y)});
    }
    stamp(a, phase, 4);
    const bool last = phase == a.depth * PHASES - 1;
    if (own.row < a.tokens) {
        uint2 part[CUTS];
        parts += own.row * TILE + who.lane * 2;
        device::until_there(
            [&] {
#pragma unroll
                for (int s = 0; s < CUTS; ++s) part[s] = device::peek2(parts + s * (MAX_TOKENS * TILE));
            },
            [&] {
                bool any = false;
#pragma unroll
                for (int s = 0; s < CUTS; ++s) any = any || device::absent(part[s]);
                return any;
            });
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < CUTS; ++s) sum.x += device::as_float(part[s].x), sum.y += device::as_float(part[s].y);
        own.value.x += lines.gate.x * sum.x, own.value.y += lines.gate.y * sum.y;
    }
    device::sync_warp();
    stamp(a, phase, 5);
    leave(who, a, own, lines.scale, lines.shift, left, last);
    if (own.row < a.tokens)
#pragma unroll
        for (int s = 0; s < CUTS; ++s) device::post2(parts + s * (MAX_TOKENS * TILE), ABSENT_PAIR);
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

ON_DEVICE void gate(const Who& who, const Arguments& a, const Room& room, bf16* hidden) {
    const float* sums = room.sums();
    // A thread has the same two columns in all its rows.
    const int column = who.thread % (GATES / 2) * 2;
    const float2 gate_shift = summed(sums, a.tokens, column), up_shift = summed(sums, a.tokens, GATES + column);
    bf16* out = hidden + who.cta * GATES + column;
#pragma unroll 2
    for (int row = who.thread / (GATES / 2); row < a.tokens; row += CONSUMERS / (GATES / 2)) {
        const float factor = factor_of(a, room, row);
        const float2 gate = normed(sums, row, column, factor, gate_shift);
        const float2 up = normed(sums, row, GATES + column, factor, up_shift);
        device::post1(out + row * MLP, device::pack(gelu(gate.x) * up.x, gelu(gate.y) * up.y));
    }
}

// What stays the same through all layers: the angles of this CTA's pairs, and which keys of its span are there.
ON_DEVICE void prepare(const Who& who, const Arguments& a, const Room& room, const Span& span) {
    for (int i = who.thread; i < a.tokens * PAIRS; i += CONSUMERS) {
        const int pair = who.cta * PAIRS + i % PAIRS;
        const float power = -a.log2_theta / HALF * float(pair % HALF);
        const float angle = float(*a.start + i / PAIRS) * exp2f(power);
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
#pragma unroll 1
    for (int phase = 0; phase < a.phases; ++phase) {
        const Who who;
        const int layer = phase / PHASES, kind = phase % PHASES, cut = who.cta % CUTS;
        stamp(a, phase, 0);
        if (kind == 1) {
            if (span.any) attend(who, a, ring, room, span, phase);
            // While others still attend. The suffix's span comes last, and joins first.
            if (layer > 0 && !span.suffix) clear_layer(who, a, span, own, layer - 1);
            stamp(a, phase, 5);
            if (span.any) join_spans(who, a, span, a.attended(layer));
            if (layer > 0 && span.suffix) clear_layer(who, a, span, own, layer - 1);
        } else {
            const bool first = kind == 0, adds = kind == 2 || kind == 4, down = kind == 4;
            Product p = {a.middle(layer), WIDTH, a.tokens + 1, WIDTH / GROUPS / 32, first ? 3 : TILE / 8, ROW_2048, 1};
            if (first) p.x = phase == 0 ? a.scaled : a.end(layer - 1);
            if (kind == 2) p = {a.attended(layer) + cut * (INNER / CUTS), INNER, a.tokens, INNER / CUTS / GROUPS / 32, TILE / 8, ROW_512, 4};
            if (down) p = {a.hidden(layer) + cut * (MLP / CUTS), MLP, a.tokens, MLP / CUTS / GROUPS / 32, TILE / 8, ROW_1024, 2};
            const Lines lines(a, line, layer * 2 + down, own.column);
            if (!adds) await_stream(who, a, room, first ? a.end_squares(max(layer - 1, 0)) : a.middle_squares(layer), phase == 0);
            stamp(a, phase, 1);
            multiply(who, a, ring, room.sums(), p, phase);
            stamp(a, phase, 3);
            if (first) {
                rotate(who, a, room, a.fresh(layer));
            } else if (adds) {
                uint32_t* parts = a.board + PRODUCTS + down * OF_PRODUCT;
                const Left left = {down ? a.end(layer) : a.middle(layer), down ? a.end_squares(layer) : a.middle_squares(layer)};
                add(who, a, room, own, lines, parts, left, phase);
            } else {
                gate(who, a, room, a.hidden(layer));
                if (layer > 0) own.clear(who, a, a.end(layer - 1), a.end_squares(layer - 1));
            }
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
