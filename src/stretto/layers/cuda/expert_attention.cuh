// Attention of a block of packed query rows over one span of keys, and the join of the spans.
#pragma once

#include "expert_stream.cuh"

namespace expert {

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

}  // namespace expert
