// One denoise step's layers of the expert in one launch: every CTA stays, and what it needs next is on its way to it.
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
    ON_DEVICE float* factors() const { return reinterpret_cast<float*>(base + FACTORS_AT); }
    ON_DEVICE float2* angles() const { return reinterpret_cast<float2*>(base + ANGLES_AT); }
    ON_DEVICE uint8_t* valid() const { return reinterpret_cast<uint8_t*>(base + VALID_AT); }
};

ON_DEVICE void sync() { device::sync_consumers<CONSUMERS>(); }

// All that threads of the CTAs behind `counter` wrote before is seen by all of them after.
ON_DEVICE void meet(uint32_t* counter, uint32_t target) {
    sync();
    if (device::thread_id() == 0) {
        device::count_up(counter);
        device::await_count(counter, target);
    }
    sync();
}

ON_DEVICE void stamp(const Arguments& a, int phase, int event) {
    if (a.stamps != nullptr && device::thread_id() == 0)
        a.stamps[(int64_t(device::block_id()) * MAX_LAYERS * PHASES + phase) * 8 + event] = device::ticks();
}

// Multiply the rows of `x` by the weight rows in the next stages; leave, per group of warps, sums over its input columns.
//
// A group has EACH input columns, a half of it 32 rows. Within 32 columns lane t of a quad has 8 adjacent ones, of both
// factors alike: which of them meets which does not matter to a sum. `meanwhile` runs while x is on its way.
template <int EACH, int ROW_STEP, int TILES_A_STAGE, int STEP, class Meanwhile>
ON_DEVICE void product(
    const Who& who, Ring& ring, float* sums, const bf16* x, int x_step, int rows, int stages, Meanwhile meanwhile) {
    constexpr int BLOCKS = EACH / 32;
    uint4 raw[BLOCKS][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int row = who.half * 32 + m * 8 + who.g;
        const bf16* at = x + row * x_step + who.group * EACH + who.t * 8;
#pragma unroll
        for (int s = 0; s < BLOCKS; ++s) raw[s][m] = row < rows ? device::load_fresh(at + s * 32) : uint4{0, 0, 0, 0};
    }
    meanwhile();
    device::Rows in[BLOCKS][2];
    const uint32_t zero = device::hidden_zero();
#pragma unroll
    for (int s = 0; s < BLOCKS; ++s)
#pragma unroll
        for (int m = 0; m < 2; ++m) in[s][m] = device::Rows(raw[s][2 * m], raw[s][2 * m + 1], zero);
    for (int stage = 0; stage < stages; ++stage) {
        const char* w = ring.await() + who.g * ROW_STEP + (who.group * EACH + who.t * 8) * 2;
#pragma unroll
        for (int tile = 0; tile < TILES_A_STAGE; ++tile) {
            float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
            for (int s = 0; s < BLOCKS; ++s) {
                const uint4 b = *reinterpret_cast<const uint4*>(w + tile * 8 * ROW_STEP + s * 64);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    device::multiply_first(even[m], in[s][m], b);
                    device::multiply_second(odd[m], in[s][m], b);
                }
            }
            const int column = (stage * TILES_A_STAGE + tile) * 8 + who.t * 2;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float* at = sums + (who.group * ROWS + who.half * 32 + m * 16 + who.g) * STEP + column;
                *reinterpret_cast<float2*>(at) = float2{even[m][0] + odd[m][0], even[m][1] + odd[m][1]};
                *reinterpret_cast<float2*>(at + 8 * STEP) = float2{even[m][2] + odd[m][2], even[m][3] + odd[m][3]};
            }
        }
        ring.release(who.lane);
    }
    sync();
}

template <int STEP>
ON_DEVICE float summed(const float* sums, int row, int column) {
    const float* at = sums + row * STEP + column;
    float sum = at[0];
#pragma unroll
    for (int g = 1; g < GROUPS; ++g) sum += at[g * ROWS * STEP];
    return sum;
}

// 1 / rms of each row, from the sums of squares of its parts.
ON_DEVICE void make_factors(const Who& who, const Arguments& a, float* factors, bool first) {
    if (who.thread >= a.tokens) return;
    const float* squares = first ? a.squares : a.stream_squares;
    const int parts = first ? a.square_parts : TILES;
    float total = 0.0f;
    for (int i = 0; i < parts; ++i) total += device::load_fresh1(squares + who.thread * parts + i);
    factors[who.thread] = device::inverse_root(total / WIDTH + a.eps);
}

ON_DEVICE void query_key_value(const Who& who, const Arguments& a, Ring& ring, const Room& room, int phase) {
    const bool first = phase == 0;
    float* sums = room.sums();
    const bf16* x = first ? a.scaled : a.stream;
    product<WIDTH / GROUPS, ROW_2048, 1, PAIR_STEP>(
        who, ring, sums, x, WIDTH, a.tokens + 1, 3, [&] { make_factors(who, a, room.factors(), first); });
    stamp(a, phase, 1);
    for (int i = who.thread; i < a.tokens * PAIRS; i += CONSUMERS) {
        const int row = i / PAIRS, p = i % PAIRS, pair = who.cta * PAIRS + p;
        const float factor = room.factors()[row];
        const float low = summed<PAIR_STEP>(sums, row, p) * factor + summed<PAIR_STEP>(sums, a.tokens, p);
        const float high = summed<PAIR_STEP>(sums, row, p + PAIRS) * factor + summed<PAIR_STEP>(sums, a.tokens, p + PAIRS);
        const float2 turn = room.angles()[i];
        bf16* out = a.fresh + int64_t(row) * QKV + column_of_pair(pair);
        const uint32_t both = device::pack(low * turn.x - high * turn.y, high * turn.x + low * turn.y);
        out[0] = bf16(both), out[HALF] = bf16(both >> 16);
    }
}

// Softmax of this span's scores, four rows a warp; weights go where the row's first scores were.
ON_DEVICE void soften(const Who& who, const Arguments& a, const Room& room, const Span& span) {
    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    float* scores = room.sums();
    for (int i = 0; i < QUERIES / WARPS; ++i) {
        const int row = who.warp * (QUERIES / WARPS) + i;
        float* at = scores + row * SCORE_STEP;
        float s[4] = {};
        for (int g = 0; g < GROUPS; ++g) {
            const float4 part = *reinterpret_cast<const float4*>(at + g * QUERIES * SCORE_STEP + who.lane * 4);
            s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
        }
        float top = -1.0e30f, total = 0.0f;
        for (int j = 0; j < 4; ++j) {
            s[j] = room.valid()[who.lane * 4 + j] ? s[j] * scale : -2.0e30f;
            top = fmaxf(top, s[j]);
        }
        for (int step = 16; step > 0; step /= 2) top = fmaxf(top, device::from_lane_xor(top, step));
        for (int j = 0; j < 4; ++j) {
            s[j] = s[j] < -1.5e30f ? 0.0f : device::power_of_two(s[j] - top);
            total += s[j];
        }
        for (int step = 16; step > 0; step /= 2) total += device::from_lane_xor(total, step);
        device::sync_warp();
        *reinterpret_cast<uint2*>(at + who.lane * 2) = uint2{device::pack(s[0], s[1]), device::pack(s[2], s[3])};
        if (who.lane == 0) {
            const int query = span.cut * ALL_QUERIES + span.block * QUERIES + row;
            a.tops[query] = top, a.totals[query] = total;
        }
    }
}

ON_DEVICE void score(const Who& who, const Arguments& a, Ring& ring, float* scores, const Span& span) {
    uint4 raw[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int query = span.block * QUERIES + who.half * 16 + m * 8 + who.g;
        const bf16* q = a.fresh + int64_t(query / HEADS) * QKV + query % HEADS * HEAD + who.group * (HEAD / GROUPS) + who.t * 8;
#pragma unroll
        for (int s = 0; s < 2; ++s)
            raw[s][m] = query < a.tokens * HEADS ? device::load_fresh(q + s * 32) : uint4{0, 0, 0, 0};
    }
    const uint32_t zero = device::hidden_zero();
    const device::Rows in[2] = {{raw[0][0], raw[0][1], zero}, {raw[1][0], raw[1][1], zero}};
    for (int stage = 0; stage < SPAN_KEYS / 32; ++stage) {
        const char* k = ring.await() + who.g * ROW_512 + (who.group * (HEAD / GROUPS) + who.t * 8) * 2;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
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
    for (int stage = 0; stage < SPAN_KEYS / 32; ++stage) {
        const int key = (who.lane / 8 % 2) * 8 + who.lane % 8, dim = who.warp * 32 + who.lane / 16 * 8;
        const char* v = ring.await() + key * ROW_TRANSPOSED + dim * 2;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            uint32_t b[2][4];
            device::load_transposed(b[0], v + s * 16 * ROW_TRANSPOSED);
            device::load_transposed(b[1], v + s * 16 * ROW_TRANSPOSED + 32);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint32_t x[4];
                for (int i = 0; i < 4; ++i)
                    x[i] = *reinterpret_cast<const uint32_t*>(
                        in + (m * 16 + i % 2 * 8) * (SCORE_STEP * 4) + (stage * 32 + s * 16 + i / 2 * 8) * 2);
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    device::multiply(c[m][n], x[0], x[1], x[2], x[3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
        ring.release(who.lane);
    }
    for (int m = 0; m < 4; ++m) {
        const int query = span.block * QUERIES + m * 8 + who.g;
        if (query >= a.tokens * HEADS) continue;
        float* out = a.query_parts + (int64_t(span.cut) * ALL_QUERIES + query) * HEAD + who.warp * 32 + who.t * 2;
        for (int n = 0; n < 4; ++n)
            *reinterpret_cast<float2*>(out + n * 8) = float2{c[m / 2][n][m % 2 * 2], c[m / 2][n][m % 2 * 2 + 1]};
    }
}

// Join the spans of this CTA's share of a query block: half a row a warp.
ON_DEVICE void join_spans(const Who& who, const Arguments& a, const Span& span) {
    const int row = span.cut + who.warp / 2 * SPANS, query = span.block * QUERIES + row;
    if (row >= QUERIES || query >= a.tokens * HEADS) return;
    const int dim = who.warp % 2 * HALF + who.lane * 4;
    float tops[SPANS], totals[SPANS], top = -2.0e30f, total = 0.0f;
    float4 parts[SPANS], sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        tops[s] = device::load_fresh1(a.tops + s * ALL_QUERIES + query);
        totals[s] = device::load_fresh1(a.totals + s * ALL_QUERIES + query);
        parts[s] = device::load_fresh4(a.query_parts + (int64_t(s) * ALL_QUERIES + query) * HEAD + dim);
    }
    for (int s = 0; s < SPANS; ++s) top = fmaxf(top, tops[s]);
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        const float share = device::power_of_two(tops[s] - top);
        total += totals[s] * share;
        sum.x += parts[s].x * share, sum.y += parts[s].y * share, sum.z += parts[s].z * share, sum.w += parts[s].w * share;
    }
    const float over = total > 0.0f ? 1.0f / total : 1.0f;
    const uint2 both = {device::pack(sum.x * over, sum.y * over), device::pack(sum.z * over, sum.w * over)};
    *reinterpret_cast<uint2*>(a.attended + int64_t(query) * HEAD + dim) = both;
}

ON_DEVICE void attend(const Who& who, const Arguments& a, Ring& ring, const Room& room, const Span& span, int phase) {
    if (!span.any) return;
    score(who, a, ring, room.sums(), span);
    stamp(a, phase, 1);
    soften(who, a, room, span);
    sync();
    stamp(a, phase, 2);
    weigh(who, a, ring, room.sums(), span);
    stamp(a, phase, 3);
    meet(a.counters + (QUERY_COUNTERS + span.block) * COUNTER_STEP, uint32_t(phase / PHASES + 1) * SPANS);
    stamp(a, phase, 4);
    join_spans(who, a, span);
}

// Two columns of one row of the residual stream.
struct Owned {
    float2 value;
    int row, column;

    ON_DEVICE Owned(const Who& who, const Arguments& a) {
        row = who.warp * CUTS + who.cta % CUTS, column = who.cta / CUTS * TILE + who.lane * 2;
        value = row < a.tokens ? device::load_fresh2(a.residual + int64_t(row) * WIDTH + column) : float2{0.0f, 0.0f};
    }
};

ON_DEVICE float2 of_line(const Arguments& a, const float* line, int norm, int part, int column) {
    return *reinterpret_cast<const float2*>(line + norm * a.norm_step + part * WIDTH + column);
}

// Write what the product behind the next norm reads. The last norm is read in fp32, outside.
ON_DEVICE void leave(const Who& who, const Arguments& a, const Owned& own, float2 factor, float2 shift, bool last) {
    const bool is_shift = own.row == a.tokens;
    if (own.row > a.tokens) return;
    const float2 scaled = is_shift ? shift : float2{own.value.x * (1.0f + factor.x), own.value.y * (1.0f + factor.y)};
    const int64_t at = int64_t(own.row) * WIDTH + own.column;
    if (last)
        *reinterpret_cast<float2*>(a.scaled_out + at) = scaled;
    else
        *reinterpret_cast<uint32_t*>(a.stream + at) = device::pack(scaled.x, scaled.y);
    if (is_shift) return;
    float square = own.value.x * own.value.x + own.value.y * own.value.y;
    for (int step = 16; step > 0; step /= 2) square += device::from_lane_xor(square, step);
    if (who.lane == 0) (last ? a.squares_out : a.stream_squares)[own.row * TILES + who.cta / CUTS] = square;
    if (last) *reinterpret_cast<float2*>(a.residual_out + at) = own.value;
}

// Residual += gate * product, whose cuts are in 8 CTAs: each adds up its share of the rows.
template <int INPUT, int ROW_STEP, int TILES_A_STAGE>
ON_DEVICE void add_product(
    const Who& who, const Arguments& a, Ring& ring, const Room& room, Owned& own, const float* line, const bf16* x, int phase) {
    constexpr int EACH = INPUT / CUTS;
    const int tile = who.cta / CUTS, cut = who.cta % CUTS;
    const int norm = phase / PHASES * 2 + (phase % PHASES == 4), sum_of = phase / PHASES * 2 + (phase % PHASES == 4) + 1;
    float2 gate, factor, shift;
    product<EACH / GROUPS, ROW_STEP, TILES_A_STAGE, SUM_STEP>(
        who, ring, room.sums(), x + cut * EACH, INPUT, a.tokens, TILE / 8 / TILES_A_STAGE, [&] {
            gate = of_line(a, line, norm, 2, own.column);
            factor = of_line(a, line, norm + 1, 0, own.column), shift = of_line(a, line, norm + 1, 1, own.column);
        });
    stamp(a, phase, 1);
    float* parts = a.tile_parts + int64_t(tile) * (CUTS * ROWS * TILE);
    for (int i = who.thread; i < a.tokens * (TILE / 2); i += CONSUMERS) {
        const int row = i / (TILE / 2), column = i % (TILE / 2) * 2;
        float2 sum = {0.0f, 0.0f};
        for (int g = 0; g < GROUPS; ++g) {
            const float2 part = *reinterpret_cast<const float2*>(room.sums() + (g * ROWS + row) * SUM_STEP + column);
            sum.x += part.x, sum.y += part.y;
        }
        *reinterpret_cast<float2*>(parts + (cut * ROWS + row) * TILE + column) = sum;
    }
    stamp(a, phase, 2);
    meet(a.counters + (TILE_COUNTERS + tile) * COUNTER_STEP, uint32_t(sum_of) * CUTS);
    stamp(a, phase, 3);
    if (own.row < a.tokens) {
        float2 part[CUTS], sum = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < CUTS; ++s) part[s] = device::load_fresh2(parts + (s * ROWS + own.row) * TILE + who.lane * 2);
#pragma unroll
        for (int s = 0; s < CUTS; ++s) sum.x += part[s].x, sum.y += part[s].y;
        own.value.x += gate.x * sum.x, own.value.y += gate.y * sum.y;
    }
    leave(who, a, own, factor, shift, phase == a.depth * PHASES - 1);
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

ON_DEVICE void gate_and_up(const Who& who, const Arguments& a, Ring& ring, const Room& room, int phase) {
    float* sums = room.sums();
    product<WIDTH / GROUPS, ROW_2048, 1, SUM_STEP>(
        who, ring, sums, a.stream, WIDTH, a.tokens + 1, TILE / 8, [&] { make_factors(who, a, room.factors(), false); });
    stamp(a, phase, 1);
    for (int i = who.thread; i < a.tokens * (GATES / 2); i += CONSUMERS) {
        const int row = i / (GATES / 2), column = i % (GATES / 2) * 2;
        const float factor = room.factors()[row];
        float out[2];
        for (int j = 0; j < 2; ++j) {
            const int c = column + j;
            const float gate = summed<SUM_STEP>(sums, row, c) * factor + summed<SUM_STEP>(sums, a.tokens, c);
            const float up = summed<SUM_STEP>(sums, row, GATES + c) * factor + summed<SUM_STEP>(sums, a.tokens, GATES + c);
            out[j] = gelu(gate) * up;
        }
        *reinterpret_cast<uint32_t*>(a.hidden + int64_t(row) * MLP + who.cta * GATES + column) = device::pack(out[0], out[1]);
    }
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
        switch (phase % PHASES) {
            case 0: query_key_value(who, a, ring, room, phase); break;
            case 1: attend(who, a, ring, room, span, phase); break;
            case 2: add_product<INNER, ROW_512, 4>(who, a, ring, room, own, line, a.attended, phase); break;
            case 3: gate_and_up(who, a, ring, room, phase); break;
            case 4: add_product<MLP, ROW_1024, 2>(who, a, ring, room, own, line, a.hidden, phase); break;
        }
        stamp(a, phase, 6);
        if (phase + 1 < a.phases) meet(a.counters, grid_target(phase + 1));
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
