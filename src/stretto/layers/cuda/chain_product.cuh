// Products of the tokens' rows with 64 rows of weights a warp group, cut along their input over the CTAs of a cluster.
#pragma once

#include "chain_plan.cuh"

namespace chain {

// CUTS: CTAs of a cluster. BLOCKS: warp groups, of 64 weight rows each. CHUNKS: of 64 input columns, a CTA's cut.
// SLOTS: token tiles of 16 bytes a thread that a CTA gets from each of its cluster.
template <int CUTS_, int BLOCKS_, int CHUNKS_, int SLOTS_>
struct Shape {
    static constexpr int CUTS = CUTS_, BLOCKS = BLOCKS_, CHUNKS = CHUNKS_, SLOTS = SLOTS_, THREADS = BLOCKS * GROUP;
    static constexpr int INPUT = CUTS * CHUNKS * 64, WEIGHT_ROWS = BLOCKS * 64, WEIGHT_CHUNK = WEIGHT_ROWS * 128;
    static constexpr int X_AT = CHUNKS * WEIGHT_CHUNK, SUMS_AT = X_AT + CHUNKS * CHUNK_BYTES;
    static constexpr int SUMS_BYTES = CUTS * SLOTS * GROUP * 16, FACTORS_AT = SUMS_AT + SUMS_BYTES;
    static constexpr int BARRIERS_AT = FACTORS_AT + 64 * 4, BYTES = BARRIERS_AT + (CHUNKS + 1) * 8;
    static_assert(CHUNKS % 2 == 0 && BYTES <= 227 * 1024 && X_AT % 1024 == 0 && CHUNK_BYTES % 1024 == 0);
};
#ifndef STRETTO_QKV_CUTS
#define STRETTO_QKV_CUTS 4
#endif
// Token tiles that a rank of the first launch ends with; one slot more has the tile with the shift's row.
constexpr int QKV_CUTS = STRETTO_QKV_CUTS, QKV_TILES = (TOKEN_TILES + QKV_CUTS - 1) / QKV_CUTS;
using QkvShape = Shape<QKV_CUTS, 1, WIDTH / 64 / QKV_CUTS, QKV_TILES + 1>;
using OutShape = Shape<8, 1, 4, 1>;
using GateUpShape = Shape<2, 2, 8, TOKEN_TILES>;
using DownShape = Shape<8, 1, 8, 1>;
static_assert(QkvShape::INPUT == WIDTH && OutShape::INPUT == INNER && GateUpShape::INPUT == WIDTH && DownShape::INPUT == MLP);

// Who a thread is: of its product it has the weight rows `w * 16 + g` and 8 further, and tokens `2 t` and one further of a tile.
struct Who {
    int thread, group, index, w, lane, g, t;

    ON_DEVICE Who() {
        thread = device::thread_id(), group = thread / GROUP, index = thread % GROUP;
        w = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
    }
};

template <class S>
struct Room {
    char* base;

    ON_DEVICE char* weights(int chunk) const { return base + chunk * S::WEIGHT_CHUNK; }
    ON_DEVICE char* x(int chunk) const { return base + S::X_AT + chunk * CHUNK_BYTES; }
    // What the CTA of rank `from` sent for token tile slot `slot`, by thread.
    ON_DEVICE float4* sums(int from, int slot) const {
        return reinterpret_cast<float4*>(base + S::SUMS_AT + (from * S::SLOTS + slot) * GROUP * 16);
    }
    ON_DEVICE float* factors() const { return reinterpret_cast<float*>(base + S::FACTORS_AT); }
    ON_DEVICE device::Barrier* barrier(int chunk) const { return reinterpret_cast<device::Barrier*>(base + S::BARRIERS_AT) + chunk; }
    ON_DEVICE device::Barrier* sent() const { return barrier(S::CHUNKS); }
};

// Ask for this CTA's weights; in the end the cluster will send it `slots` token tiles. `row_of` says which weight row is in which row of the CTA's.
template <class S, class RowOf>
ON_DEVICE void begin(const Who& who, const Common& all, const Room<S>& room, const bf16* weight, int slots, RowOf row_of) {
#ifndef STRETTO_LATE
    device::let_next_start();
#endif
    stamp(all, 0);
    const int rank = device::rank_in_cluster();
    if (who.thread <= S::CHUNKS) device::barrier_init(room.barrier(who.thread), 1);
    if (who.thread == S::CHUNKS) device::barrier_arrive_expecting(room.sent(), uint32_t(S::CUTS * slots * GROUP * 16));
    device::barriers_ready();
    device::sync_all();
    device::cluster_arrive();
    constexpr int HALF_CHUNKS = S::CHUNKS / 2, PIECES = S::WEIGHT_ROWS * HALF_CHUNKS * 8;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 2
        for (int i = who.thread; i < PIECES; i += S::THREADS) {
            const int piece = i % 8, chunk = half * HALF_CHUNKS + i / 8 % HALF_CHUNKS, row = i / (8 * HALF_CHUNKS);
            const bf16* from = weight + int64_t(row_of(row)) * S::INPUT + (rank * S::CHUNKS + chunk) * 64 + piece * 8;
            device::fetch16(room.weights(chunk) + row * 128 + (piece ^ row % 8) * 16, from, true);
        }
        device::end_fetches();
    }
    ask_ahead(all.ahead, S::THREADS);
}

template <class S>
ON_DEVICE void await_others(const Common& all) {
    stamp(all, 1);
    device::await_previous();
    stamp(all, 2);
#ifdef STRETTO_LATE
    device::let_next_start();
#endif
}

// Ask for this CTA's cut of a row's tokens; nobody reads the row's before any more.
template <class S>
ON_DEVICE void ask_for_row(const Who& who, const Common& all, const Room<S>& room, const char* x, const bf16* given, int number) {
    if (number >= all.rows) return;
    x += number * all.step;
    if (given != nullptr) given += number * (all.tokens + 1) * WIDTH;
    const int rank = device::rank_in_cluster();
    if (given != nullptr) {
#pragma unroll 1
        for (int i = who.thread; i < ROWS * S::CHUNKS * 8; i += S::THREADS) {
            const int piece = i % 8, chunk = i / 8 % S::CHUNKS, row = i / (8 * S::CHUNKS);
            const bool there = row <= all.tokens;
            const bf16* from = given + (there ? row : 0) * S::INPUT + (rank * S::CHUNKS + chunk) * 64 + piece * 8;
            device::fetch16(room.x(chunk) + row * 128 + (piece ^ row % 8) * 16, from, there);
        }
        device::end_fetches();
    } else if (who.thread == 0) {
#pragma unroll 1
        for (int c = 0; c < S::CHUNKS; ++c) {
            device::barrier_arrive_expecting(room.barrier(c), CHUNK_BYTES);
            device::copy_row(room.x(c), x + int64_t(rank * S::CHUNKS + c) * CHUNK_BYTES, CHUNK_BYTES, room.barrier(c));
        }
    }
}

// Code is dear: what a launch runs is new to its multiprocessor. So loops are loops, but where registers must have names.
template <class S>
ON_DEVICE void multiply(const Who& who, const Common& all, const Room<S>& room, float (&c)[28], int row, bool given) {
    const char *a = room.weights(0) + who.group * 8192, *b = room.x(0);
#pragma unroll 1
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk, a += S::WEIGHT_CHUNK, b += CHUNK_BYTES) {
        if (chunk % (S::CHUNKS / 2) == 0) {
            if (chunk == 0 && row == 0 && !given)
                device::await_fetches<1>();
            else
                device::await_fetches<0>();
            device::before_products();
            device::sync_all();
        }
        if (!given) device::barrier_wait(room.barrier(chunk), uint32_t(row & 1));
        if (chunk == 0) stamp(all, 3);
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_56(c, a + k * 32, b + k * 32, chunk + k > 0);
    }
    device::products_end();
    stamp(all, 4);
    // The next row's tokens take the place of this one's, and its factors.
    device::sync_all();
}

ON_DEVICE float4 sum_of(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Sum over the ranks, in their order, of what a thread was sent for a slot.
template <class S>
ON_DEVICE float4 summed(const Who& who, const Room<S>& room, int slot) {
    float4 sum = room.sums(0, slot)[who.index];
#pragma unroll
    for (int from = 1; from < S::CUTS; ++from) sum = sum_of(sum, room.sums(from, slot)[who.index]);
    return sum;
}

template <class S>
ON_DEVICE void send(const Who& who, const Room<S>& room, int to, int slot, const float4& tile) {
    const device::Remote there = device::at_rank(room.sums(device::rank_in_cluster(), slot) + who.index, to);
    device::send4(there, device::at_rank(room.sent(), to), tile.x, tile.y, tile.z, tile.w);
}
ON_DEVICE float4 tile_of(const float (&c)[28], int n) { return {c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]}; }

// What the cluster sent has been read; what it sends for the next row is counted anew.
template <class S>
ON_DEVICE void row_ends(const Who& who, const Common& all, const Room<S>& room, int row, int slots) {
    if (row + 1 == all.rows) return;
    if (who.thread == 0 && slots > 0) device::barrier_arrive_expecting(room.sent(), uint32_t(S::CUTS * slots * GROUP * 16));
    device::cluster_arrive();
}

// 1 / rms of the rows: read while products run, in shared memory after the next barrier.
ON_DEVICE float squares_of(const Who& who, const Common& all, int row) {
    float sum = 0.0f;
    if (who.thread < all.tokens) {
        const float* at = moved(all.squares, row * all.squares_step) + who.thread * all.square_parts;
        if (all.square_parts == TILES) {
            float4 part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) part[i] = reinterpret_cast<const float4*>(at)[i];
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += (part[i].x + part[i].y) + (part[i].z + part[i].w);
        } else {
#pragma unroll 1
            for (int i = 0; i < all.square_parts; ++i) sum += at[i];
        }
    }
    return sum;
}
ON_DEVICE void keep_factor(const Who& who, const Common& all, float* factors, float squares) {
    if (who.thread < ROWS) factors[who.thread] = device::inverse_root(squares / WIDTH + all.eps);
}

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
    const int slots = min(QKV_TILES, max(TOKEN_TILES - rank * QKV_TILES, 0)) + 1;
    begin(who, a.all, room, a.weight, slots, [=](int row) { return head * HEAD + tile % 4 * 32 + row / 16 * 8 + row % 8 + row / 8 % 2 * HALF; });
    const int pair = tile % 4 * 32 + who.w * 8 + who.g;
    const float turns = head <= HEADS ? device::power_of_two(-a.log2_theta / HALF * float(pair)) : 0.0f;
    await_others<S>(a.all);
    ask_for_row(who, a.all, room, a.x, a.given, 0);
#pragma unroll 1
    for (int row = 0; row < a.all.rows; ++row) {
        const int64_t at_row = row * a.all.step;
        const float squares = squares_of(who, a.all, row), start = float(a.start[row]);
        float2 turn[QKV_TILES][2];
#pragma unroll
        for (int i = 0; i < QKV_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) turn[i][j] = cos_sin((start + float((rank * QKV_TILES + i) * 8 + who.t * 2 + j)) * turns);
        float c[28];
        multiply(who, a.all, room, c, row, a.given != nullptr);
        ask_for_row(who, a.all, room, a.x, a.given, row + 1);
        keep_factor(who, a.all, room.factors(), squares);
        device::cluster_wait();
        float4 with_shift = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const float4 sum = tile_of(c, n);
            send(who, room, n / QKV_TILES, n % QKV_TILES, sum);
            if (n == tokens / 8) with_shift = sum;
        }
#pragma unroll 1
        for (int to = 0; to < S::CUTS; ++to) send(who, room, to, QKV_TILES, with_shift);
        device::sync_all();
        device::barrier_wait(room.sent(), uint32_t(row & 1));
        stamp(a.all, 5);
        const float2 shift = shift_of(who, tokens, summed(who, room, QKV_TILES));
#pragma unroll
        for (int i = 0; i < QKV_TILES; ++i) {
            const int n = rank * QKV_TILES + i;
            if (n >= TOKEN_TILES) break;
            const float4 sum = summed(who, room, i);
            const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = n * 8 + who.t * 2 + j;
                if (token >= tokens) continue;
                const float factor = room.factors()[token], l = low[j] * factor + shift.x, h = high[j] * factor + shift.y;
                const float2 by = turn[i][j];
                const bf16 first = rounded(l * by.x - h * by.y), second = rounded(h * by.x + l * by.y);
                if (head < HEADS) {
                    // Blocks of 8 tokens, four chunks of 64 columns; rows are (token, head).
                    char* at = a.q + at_row + n * (4 * 8192) + pair / 64 * 8192;
                    const int query = token % 8 * 8 + head;
                    *reinterpret_cast<bf16*>(at + in_chunk(query, pair % 64)) = first;
                    *reinterpret_cast<bf16*>(at + 2 * 8192 + in_chunk(query, pair % 64)) = second;
                } else {
                    bf16* at = moved(a.kv[head - HEADS], at_row) + token * HEAD + pair;
                    at[0] = first, at[HALF] = second;
                }
            }
        }
        row_ends(who, a.all, room, row, slots);
    }
    stamp(a.all, 7);
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

// A warp group has 32 columns: in a warp's rows, their gates and then their ups. Each CTA ends with one warp group's.
ON_DEVICE void gate_up(const GateUp& a, char* shared) {
    using S = GateUpShape;
    static_assert(S::CUTS == S::BLOCKS);
    const Who who;
    const Room<S> room{shared};
    const int first = device::block_id() / S::CUTS * S::BLOCKS * 32, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    begin(who, a.all, room, a.weight, TOKEN_TILES, [=](int row) { return first + row / 16 * 8 + row % 8 + row / 8 % 2 * MLP; });
    const int column = first + who.group * 32 + who.w * 8 + who.g;
    await_others<S>(a.all);
    ask_for_row(who, a.all, room, a.x, nullptr, 0);
#pragma unroll 1
    for (int row = 0; row < a.all.rows; ++row) {
        const int64_t at_row = row * a.all.step;
        const float squares = squares_of(who, a.all, row);
        float c[28];
        multiply(who, a.all, room, c, row, false);
        ask_for_row(who, a.all, room, a.x, nullptr, row + 1);
        keep_factor(who, a.all, room.factors(), squares);
        device::cluster_wait();
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) send(who, room, who.group, n, tile_of(c, n));
        device::sync_all();
        device::barrier_wait(room.sent(), uint32_t(row & 1));
        stamp(a.all, 5);
        float2 shift = {0.0f, 0.0f};
#pragma unroll 1
        for (int n = who.group == rank ? tokens / 8 : -1; n >= 0; --n) {
            const float4 sum = summed(who, room, n);
            if (n == tokens / 8) shift = shift_of(who, tokens, sum);
            const float gate[2] = {sum.x, sum.y}, up[2] = {sum.z, sum.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = n * 8 + who.t * 2 + j;
                if (token >= tokens) continue;
                const float factor = room.factors()[token];
                *in_chunks(a.hidden + at_row, token, column) = rounded(gelu(gate[j] * factor + shift.x) * (up[j] * factor + shift.y));
            }
        }
        row_ends(who, a.all, room, row, TOKEN_TILES);
    }
    stamp(a.all, 7);
}

// What a row's norms do to two columns of the stream.
struct Lines {
    float gate[2], scale[2], shift[2];

    ON_DEVICE Lines(const Add& a, int row, int column) {
        const float *line = a.table + (a.line == nullptr ? row : a.line[row]) * a.line_step, *next = line + a.norm_step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = column + i * 8;
            gate[i] = line[2 * WIDTH + at], scale[i] = 1.0f + next[at], shift[i] = next[WIDTH + at];
        }
    }
};

// The residual of a thread's two tokens and two columns.
ON_DEVICE float4 residual_of(const Add& a, int row, int token, int column, const float4* kept) {
    if (a.given == nullptr) return *kept;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* at = a.given + (row * a.all.tokens + token) * WIDTH + column;
    if (token < a.all.tokens) before.x = at[0], before.z = at[8];
    if (token + 1 < a.all.tokens) before.y = at[WIDTH], before.w = at[WIDTH + 8];
    return before;
}

// A cluster has 64 columns of the stream; each of its CTAs ends with one token tile.
template <class S>
ON_DEVICE void add(const Add& a, char* shared) {
    const Who who;
    const Room<S> room{shared};
    const int tile = device::block_id() / S::CUTS, n = device::rank_in_cluster(), tokens = a.all.tokens;
    const bool owns = n < TOKEN_TILES, last = a.scaled_last != nullptr;
    begin(who, a.all, room, a.weight, owns, [=](int row) { return tile * TILE + row; });
    const int column = tile * TILE + who.w * 16 + who.g, token = n * 8 + who.t * 2;
    Lines lines(a, 0, column);
    await_others<S>(a.all);
    ask_for_row(who, a.all, room, a.x, nullptr, 0);
#pragma unroll 1
    for (int row = 0; row < a.all.rows; ++row) {
        const int64_t at_row = row * a.all.step;
        if (row > 0) lines = Lines(a, row, column);
        float4* kept = reinterpret_cast<float4*>(moved(a.residual, at_row)) + (tile * TOKEN_TILES + n) * GROUP + who.index;
        float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
        if (owns) before = residual_of(a, row, token, column, kept);
        float c[28];
        multiply(who, a.all, room, c, row, false);
        ask_for_row(who, a.all, room, a.x, nullptr, row + 1);
        device::cluster_wait();
#pragma unroll
        for (int to = 0; to < TOKEN_TILES; ++to) send(who, room, to, 0, tile_of(c, to));
        if (owns) {
            device::barrier_wait(room.sent(), uint32_t(row & 1));
            stamp(a.all, 5);
            const float4 sum = summed(who, room, 0);
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
                    if (last) {
                        a.scaled_last[(row * (tokens + 1) + token + j) * WIDTH + column + i * 8] = out;
                        if (token + j < tokens) a.residual_last[(row * tokens + token + j) * WIDTH + column + i * 8] = value[j][i];
                    } else {
                        *in_chunks(a.scaled + at_row, token + j, column + i * 8) = rounded(out);
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
                float* out = last ? a.squares_out + row * tokens * TILES : moved(a.squares_out, at_row);
                out[(n * 8 + who.thread) * TILES + tile] = (at[0] + at[8]) + (at[16] + at[24]);
            }
        }
        row_ends(who, a.all, room, row, owns);
    }
    stamp(a.all, 7);
}

}  // namespace chain
