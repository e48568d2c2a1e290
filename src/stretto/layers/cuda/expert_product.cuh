// Threads, their shared memory, and the product of some rows with weights that pass through the ring.
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

}  // namespace expert
