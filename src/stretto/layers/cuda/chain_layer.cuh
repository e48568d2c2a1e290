// The launches of a layer around its products: queries, keys and values; gate and up; sums into the stream.
#pragma once

#include "chain_product.cuh"

namespace chain {

ON_DEVICE bf16 rounded(float x) { return bf16(device::pack(x, 0.0f) & 0xffff); }

// Of a token tile that holds the shift's row: the shift of this thread's two weight rows.
ON_DEVICE float2 shift_of(const Who& who, int tokens, const float4& tile) {
    const int lane = who.g * 4 + tokens % 8 / 2;
    const bool odd = tokens % 2;
    return {device::from_lane(odd ? tile.y : tile.x, lane), device::from_lane(odd ? tile.w : tile.z, lane)};
}

// Cosine and sine of an angle from 0 to some thousands.
ON_DEVICE float2 cos_sin(float angle) {
    const float quarter = floorf(angle * 0.6366197723675814f + 0.5f);
    // pi / 2 in three parts, the first two short enough that their products are exact.
    const float r = ((angle - quarter * 1.5703125f) - quarter * 4.837512969970703125e-4f) - quarter * 7.549789948768648e-8f;
    const float z = r * r;
    const float sin = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
    const float cos = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
    const int turn = int(quarter) & 3;
    const float a = turn & 1 ? sin : cos, b = turn & 1 ? cos : sin;
    return {turn == 1 || turn == 2 ? -a : a, turn >= 2 ? -b : b};
}

// A cluster has 32 pairs of columns of one head: in a warp's rows, the low ones and then the high ones.
ON_DEVICE void qkv(const Qkv& a, char* shared) {
    using S = QkvShape;
    const Who who;
    const Room<S> room{shared};
    const int tile = device::block_id() / S::CUTS, head = tile / 4, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    const Factors f = {a.weight, {0, 0, 0, tile % 4 * 4, head}, {}, a.x, a.given};
    begin(who, a.all, room, f);
    const int pair = tile % 4 * 32 + who.w * 8 + who.g;
    const float turns = head <= HEADS ? device::power_of_two(-a.log2_theta / HALF * float(pair)) : 0.0f, start = float(*a.start);
    float2 turn[S::EACH][2];
#pragma unroll
    for (int i = 0; i < S::EACH; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) turn[i][j] = cos_sin((start + float((rank * S::EACH + i) * 8 + who.t * 2 + j)) * turns);
    await_others(who, a.all, room, f);
    const float squares = squares_of(who, a.all);
    float c[28];
    multiply(who, a.all, room, f, c);
    keep_factor(who, a.all, room.factors(), squares);
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    device::barrier_wait(room.sent(), 0);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    const float2 shift = shift_of(who, tokens, tiles.sum[S::EACH]);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        const float low[2] = {tiles.sum[i].x, tiles.sum[i].y}, high[2] = {tiles.sum[i].z, tiles.sum[i].w};
        const int n = rank * S::EACH + i;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = n * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[token], l = low[j] * factor + shift.x, h = high[j] * factor + shift.y;
            const float2 by = turn[i][j];
            const bf16 first = rounded(l * by.x - h * by.y), second = rounded(h * by.x + l * by.y);
            if (head < HEADS) {
                // Blocks of 8 tokens, four chunks of 64 columns; rows are (token, head).
                char* at = a.q + n * (4 * 8192) + pair / 64 * 8192;
                const int query = token % 8 * 8 + head;
                *reinterpret_cast<bf16*>(at + in_chunk(query, pair % 64)) = first;
                *reinterpret_cast<bf16*>(at + 2 * 8192 + in_chunk(query, pair % 64)) = second;
            } else {
                bf16* at = a.kv[head - HEADS] + token * HEAD + pair;
                at[0] = first, at[HALF] = second;
            }
        }
    }
    stamp(a.all, 7);
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

// A warp group has 32 columns: in a warp's rows, their gates and then their ups.
ON_DEVICE void gate_up(const GateUp& a, char* shared) {
    using S = GateUpShape;
    const Who who;
    const Room<S> room{shared};
    const int first = device::block_id() / S::CUTS * S::BLOCKS * 32, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    const Factors f = {a.weight, {0, 0, 0, first / 8, 0}, {0, 0, 0, first / 8 + 4, 0}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = first + who.group * 32 + who.w * 8 + who.g;
    await_others(who, a.all, room, f);
    const float squares = squares_of(who, a.all);
    float c[28];
    multiply(who, a.all, room, f, c);
    keep_factor(who, a.all, room.factors(), squares);
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    device::barrier_wait(room.sent(), 0);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    const float2 shift = shift_of(who, tokens, tiles.sum[S::EACH]);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        const float gate[2] = {tiles.sum[i].x, tiles.sum[i].y}, up[2] = {tiles.sum[i].z, tiles.sum[i].w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = (rank * S::EACH + i) * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[token];
            *in_chunks(a.hidden, token, column) = rounded(gelu(gate[j] * factor + shift.x) * (up[j] * factor + shift.y));
        }
    }
    stamp(a.all, 7);
}

// What the norms do to two columns of the stream.
struct Lines {
    float gate[2], scale[2], shift[2];

    ON_DEVICE Lines(const Add& a, int column) {
        const float *line = a.table + (a.line == nullptr ? 0 : *a.line) * a.line_step, *next = line + a.norm_step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = column + i * 8;
            gate[i] = line[2 * WIDTH + at], scale[i] = 1.0f + next[at], shift[i] = next[WIDTH + at];
        }
    }
};

// The residual of a thread's two tokens and two columns.
ON_DEVICE float4 residual_of(const Add& a, int token, int column, const float4* kept) {
    if (a.given == nullptr) return *kept;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* at = a.given + token * WIDTH + column;
    if (token < a.all.tokens) before.x = at[0], before.z = at[8];
    if (token + 1 < a.all.tokens) before.y = at[WIDTH], before.w = at[WIDTH + 8];
    return before;
}

// A cluster has 64 columns of the stream; each of its CTAs but the last ends with one token tile.
template <class S>
ON_DEVICE void add(const Add& a, char* shared) {
    const Who who;
    const Room<S> room{shared};
    const int tile = device::block_id() / S::CUTS, n = device::rank_in_cluster(), tokens = a.all.tokens;
    const bool owns = n < TOKEN_TILES, last = a.scaled_last != nullptr;
    const Factors f = {a.weight, {0, tile * TILE, 0, 0, 0}, {}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = tile * TILE + who.w * 16 + who.g, token = n * 8 + who.t * 2;
    const Lines lines(a, column);
    await_others(who, a.all, room, f);
    float4* kept = reinterpret_cast<float4*>(a.residual) + (tile * TOKEN_TILES + n) * GROUP + who.index;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    if (owns) before = residual_of(a, token, column, kept);
    float c[28];
    multiply(who, a.all, room, f, c);
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    if (!owns) return;
    device::barrier_wait(room.sent(), 0);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    const float4 sum = tiles.sum[0];
    const float4 now = {before.x + lines.gate[0] * sum.x, before.y + lines.gate[0] * sum.y,
                        before.z + lines.gate[1] * sum.z, before.w + lines.gate[1] * sum.w};
    const float value[2][2] = {{now.x, now.z}, {now.y, now.w}};
    if (!last) *kept = now;
    float square[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        square[j] = value[j][0] * value[j][0] + value[j][1] * value[j][1];
        if (token + j > tokens) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float out = token + j == tokens ? lines.shift[i] : value[j][i] * lines.scale[i];
            const int at = (token + j) * WIDTH + column + i * 8;
            if (last) {
                a.scaled_last[at] = out;
                if (token + j < tokens) a.residual_last[at] = value[j][i];
            } else {
                *in_chunks(a.scaled, token + j, column + i * 8) = rounded(out);
            }
        }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < 2; ++j) square[j] += device::from_lane_xor(square[j], step);
    float* parts = room.factors();
    if (who.g == 0)
#pragma unroll
        for (int j = 0; j < 2; ++j) parts[who.w * 8 + who.t * 2 + j] = square[j];
    device::sync_all();
    if (who.thread < 8 && n * 8 + who.thread < tokens) {
        const float* at = parts + who.thread;
        a.squares_out[(n * 8 + who.thread) * TILES + tile] = (at[0] + at[8]) + (at[16] + at[24]);
    }
    stamp(a.all, 7);
}

}  // namespace chain
