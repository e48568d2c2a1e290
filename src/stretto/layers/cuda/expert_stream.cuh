// The residual stream: its registers, its norms, and sums of the cuts of a product into it.
#pragma once

#include "expert_product.cuh"

namespace expert {

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

}  // namespace expert
