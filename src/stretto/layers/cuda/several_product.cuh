// The products of a layer: queries, keys and values; gate and up; and those that are added to the stream.
#pragma once

#include "several_multiply.cuh"

namespace chain {

#ifndef STRETTO_QKV_CUTS
#define STRETTO_QKV_CUTS 4
#endif
#ifndef STRETTO_GATE_PLACES
#define STRETTO_GATE_PLACES 4
#endif
constexpr int QKV_CHUNKS = (16 + STRETTO_QKV_CUTS - 1) / STRETTO_QKV_CUTS;
// Places of tokens, for one to four robots.
constexpr int QKV_PLACES[] = {STRETTO_QKV_CUTS == 3 ? 3 : QKV_CHUNKS, 4, 3, 3}, PLACES[] = {4, 4, 3, 3}, GATE_PLACES[] = {STRETTO_GATE_PLACES, 4, 3, 3};

// The shapes of a layer's products for R robots, of numbers E.
template <int R, class E>
struct Shapes;
template <int R>
struct Shapes<R, Plain> {
    static constexpr int ROBOTS = R;
    using Element = Plain;
    using Qkv = Shape<Plain, WIDTH, STRETTO_QKV_CUTS, 1, R == 1 ? QKV_CHUNKS : QKV_PLACES[R - 1], QKV_PLACES[R - 1], true, R>;
    using Out = Shape<Plain, INNER, 8, 1, PLACES[R - 1], PLACES[R - 1], false, R>;
    using GateUp = Shape<Plain, WIDTH, 2, 2, GATE_PLACES[R - 1], GATE_PLACES[R - 1], true, R>;
    using Down = Shape<Plain, MLP, 8, 1, R == 1 ? 8 : PLACES[R - 1], PLACES[R - 1], false, R>;
};
#ifndef STRETTO_CODED_QKV_CUTS
#define STRETTO_CODED_QKV_CUTS 4
#endif
#ifndef STRETTO_CODED_GATE_CUTS
#define STRETTO_CODED_GATE_CUTS 1
#endif
// All of a CTA's cut of the weights is in shared memory at once, and of one robot's tokens.
template <int R>
struct Shapes<R, Coded> {
    static constexpr int ROBOTS = R;
    using Element = Coded;
    static constexpr int QKV_CHUNKS = 8 / STRETTO_CODED_QKV_CUTS, GATE_CHUNKS = 8 / STRETTO_CODED_GATE_CUTS;
    using Qkv = Shape<Coded, WIDTH, STRETTO_CODED_QKV_CUTS, 1, QKV_CHUNKS, R == 1 || QKV_CHUNKS < 3 ? QKV_CHUNKS : 3, true, R>;
    using Out = Shape<Coded, INNER, 8, 1, 2, 2, false, R>;
    using GateUp = Shape<Coded, WIDTH, STRETTO_CODED_GATE_CUTS, STRETTO_CODED_GATE_CUTS, GATE_CHUNKS, R == 1 || GATE_CHUNKS < 3 ? GATE_CHUNKS : 3, true, R>;
    using Down = Shape<Coded, MLP, 8, 1, 4, R == 1 ? 4 : 3, false, R>;
};

// A launch starts early only where its CTAs find room beside those of the one before. And where there is room for one CTA only,
// not all clusters of eight find eight multiprocessors of one kind.
constexpr int SHARED_OF_ALL = 228 * 1024, SHARED_OF_SYSTEM = 1024;
template <class A, class B>
constexpr bool side_by_side() { return A::BYTES + B::BYTES + 2 * SHARED_OF_SYSTEM <= SHARED_OF_ALL; }
template <class All>
constexpr bool neighbours_fit() {
    return side_by_side<typename All::Out, typename All::GateUp>() && side_by_side<typename All::GateUp, typename All::Down>() &&
           side_by_side<typename All::Down, typename All::Qkv>() && side_by_side<typename All::Down, typename All::Down>();
}
static_assert(neighbours_fit<Shapes<2, Plain>>() && neighbours_fit<Shapes<2, Coded>>());

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
template <class S>
ON_DEVICE void qkv(const Qkv& a, char* shared) {
    const Hand<S> who;
    const Work<S> work(a.all);
    const Room<S> room{shared};
    const int tile = work.tile, head = tile / 4, rank = device::rank_in_cluster(), tokens = a.all.tokens, robot = work.robot(who.robot);
    const Factors f = {a.weight, {0, 0, 0, tile % 4 * 4, head}, {}, a.x, a.given};
    begin(who, a.all, room, f);
    const int pair = tile % 4 * 32 + who.w * 8 + who.g;
    const float turns = head <= HEADS ? device::power_of_two(-a.log2_theta / HALF * float(pair)) : 0.0f, start = float(a.start[robot]);
    float2 turn[S::EACH][2];
#pragma unroll
    for (int i = 0; i < S::EACH; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) turn[i][j] = cos_sin((start + float((rank * S::EACH + i) * 8 + who.t * 2 + j)) * turns);
    // The first layer's table may still be waited for by the launch before.
    const int row = head * HEAD + pair;
    float2 shift;
    if (S::TABLED && a.given == nullptr) shift = tabled(a.shift, robot, row, row + HALF);
    await_others(who, a.all, room, f, work);
    if (S::TABLED && a.given != nullptr) shift = tabled(a.shift, robot, row, row + HALF);
    const Norm<S> norm(who, a.all, work);
    float c[S::SUMS];
    multiply(who, a.all, room, f, work, c);
    norm.keep(who, a.all, room.factors());
    device::cluster_wait();
    const Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    tiles.await(room);
    stamp(a.all, 5);
    if (who.robot >= work.robots) return;
    if (S::SHIFTED) shift = tiles.shift(who, room);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        const int n = rank * S::EACH + i;
        if (n >= TOKEN_TILES) continue;
        const float4 sum = tiles.sum(who, room, i);
        const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = n * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[who.robot * ROWS + token], l = low[j] * factor + shift.x, h = high[j] * factor + shift.y;
            const float2 by = turn[i][j];
            const bf16 first = rounded<Plain>(l * by.x - h * by.y), second = rounded<Plain>(h * by.x + l * by.y);
            if (head < HEADS) {
                // Blocks of 8 tokens, four chunks of 64 columns; rows are (token, head).
                char* at = a.q + int64_t(robot) * QUERY_BYTES + n * (4 * 8192) + pair / 64 * 8192;
                const int query = token % 8 * 8 + head;
                *reinterpret_cast<bf16*>(at + in_chunk(query, pair % 64)) = first;
                *reinterpret_cast<bf16*>(at + 2 * 8192 + in_chunk(query, pair % 64)) = second;
            } else {
                bf16* at = a.kv[head - HEADS] + (robot * ROWS + token) * HEAD + pair;
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
template <class S>
ON_DEVICE void gate_up(const GateUp& a, char* shared) {
    using E = typename S::Element;
    const Hand<S> who;
    const Work<S> work(a.all);
    const Room<S> room{shared};
    const int first = work.tile * S::BLOCKS * 32, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    const Factors f = {a.weight, {0, 0, 0, first / 8, 0}, {0, 0, 0, first / 8 + 4, 0}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = first + who.block * 32 + who.w * 8 + who.g;
    float2 shift;
    if (S::TABLED) shift = tabled(a.shift, work.robot(who.robot), column, MLP + column);
    const float to = E::CODED ? *a.all.to : 1.0f;
    await_others(who, a.all, room, f, work);
    const Norm<S> norm(who, a.all, work);
    float c[S::SUMS];
    multiply(who, a.all, room, f, work, c);
    norm.keep(who, a.all, room.factors());
    device::cluster_wait();
    const Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    tiles.await(room);
    stamp(a.all, 5);
    if (who.robot >= work.robots) return;
    if (S::SHIFTED) shift = tiles.shift(who, room);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        if (rank * S::EACH + i >= TOKEN_TILES) continue;
        const float4 sum = tiles.sum(who, room, i);
        const float gate[2] = {sum.x, sum.y}, up[2] = {sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = (rank * S::EACH + i) * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[who.robot * ROWS + token];
            const float out = gelu(gate[j] * factor + shift.x) * (up[j] * factor + shift.y);
            *in_chunks<E, MLP>(a.hidden, S::ROBOTS, work.group, who.robot, token, column) = rounded<E>(E::CODED ? out * to : out);
        }
    }
    stamp(a.all, 7);
}

// What the norms do to two columns of the stream.
struct Lines {
    float gate[2], scale[2], shift[2];
};
ON_DEVICE Lines lines_of(const Add& a, int robot, int column) {
    const float *line = a.table + (a.line == nullptr ? robot : a.line[robot]) * a.line_step, *next = line + a.norm_step;
    Lines lines;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = column + i * 8;
        lines.gate[i] = line[2 * WIDTH + at], lines.scale[i] = 1.0f + next[at], lines.shift[i] = next[WIDTH + at];
    }
    return lines;
}

// The residual of a thread's two tokens and two columns.
ON_DEVICE float4 residual_of(const Add& a, int robot, int token, int column, const float4* kept) {
    if (a.given == nullptr) return *kept;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* at = a.given + int64_t(robot * a.all.tokens + token) * WIDTH + column;
    if (token < a.all.tokens) before.x = at[0], before.z = at[8];
    if (token + 1 < a.all.tokens) before.y = at[WIDTH], before.w = at[WIDTH + 8];
    return before;
}

// Write what a thread's two tokens and two columns are now; return their squares' sums over a warp's 16 columns.
template <class S>
ON_DEVICE float2 put(const Add& a, const Hand<S>& who, const Work<S>& work, int token, int column, const float4& now, const Lines& lines, const float2& over) {
    using E = typename S::Element;
    const float value[2][2] = {{now.x, now.z}, {now.y, now.w}};
    const int tokens = a.all.tokens, robot = work.robot(who.robot);
    float square[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        square[j] = value[j][0] * value[j][0] + value[j][1] * value[j][1];
        if (token + j > tokens) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float out = token + j == tokens ? lines.shift[i] : value[j][i] * lines.scale[i];
            if (a.scaled_last != nullptr) {
                const int64_t at = int64_t(robot * (tokens + 1) + token + j) * WIDTH + column + i * 8;
                a.scaled_last[at] = out;
                if (token + j < tokens) a.residual_last[at - int64_t(robot) * WIDTH] = value[j][i];
            } else {
                *in_chunks<E, WIDTH>(a.scaled, S::ROBOTS, work.group, who.robot, token + j, column + i * 8) = rounded<E>(E::CODED ? out * (j ? over.y : over.x) : out);
            }
        }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < 2; ++j) square[j] += device::from_lane_xor(square[j], step);
    return {square[0], square[1]};
}

// 1 / rms of a token's row one norm ago, by the lanes that have the token.
ON_DEVICE float root_before(const Who& who, const Common& all, int robot, int token) {
    const Squares& before = all.before;
    float sum = 0.0f;
    if (token < all.tokens)
#pragma unroll 2
        for (int i = who.g; i < before.parts; i += 8) sum += before.at[int64_t(robot * before.step + token) * before.parts + i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += device::from_lane_xor(sum, step);
    return device::inverse_root(sum / WIDTH + all.eps);
}

// A cluster has 64 columns of the stream; each of its CTAs but the last ends with one token tile of each robot.
template <class S>
ON_DEVICE void add(const Add& a, char* shared) {
    static_assert(S::EACH == 1 && S::BLOCKS == 1);
    const Hand<S> who;
    const Work<S> work(a.all);
    const Room<S> room{shared};
    const int tile = work.tile, n = device::rank_in_cluster(), tokens = a.all.tokens, robot = work.robot(who.robot);
    const bool owns = n < TOKEN_TILES, there = who.robot < work.robots;
    const Factors f = {a.weight, {0, tile * TILE, 0, 0, 0}, {}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = tile * TILE + who.w * 16 + who.g, token = n * 8 + who.t * 2;
    Lines lines = lines_of(a, robot, column);
    if (S::Element::CODED) lines.gate[0] *= *a.all.by, lines.gate[1] *= *a.all.by;
    await_others(who, a.all, room, f, work);
    float2 over = {1.0f, 1.0f};
    if (S::Element::CODED && owns && a.scaled_last == nullptr) over = {root_before(who, a.all, robot, token), root_before(who, a.all, robot, token + 1)};
    float4* kept = reinterpret_cast<float4*>(a.residual) + ((int64_t(robot) * TILES + tile) * TOKEN_TILES + n) * GROUP + who.index;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    if (owns) before = residual_of(a, robot, token, column, kept);
    float c[S::SUMS];
    multiply(who, a.all, room, f, work, c);
    device::cluster_wait();
    const Tiles<S> tiles(who, room, c, tokens);
    if (!owns) return;
    tiles.await(room);
    stamp(a.all, 5);
    float* parts = room.factors() + who.robot * 32;
    if (there) {
        const float4 sum = tiles.sum(who, room, 0);
        const float* gate = lines.gate;
        const float4 now = {before.x + gate[0] * sum.x, before.y + gate[0] * sum.y, before.z + gate[1] * sum.z, before.w + gate[1] * sum.w};
        if (a.scaled_last == nullptr) *kept = now;
        const float2 squares = put(a, who, work, token, column, now, lines, over);
        if (who.g == 0) parts[who.w * 8 + who.t * 2] = squares.x, parts[who.w * 8 + who.t * 2 + 1] = squares.y;
    }
    device::sync_all();
    const int row = n * 8 + who.index;
    if (there && who.index < 8 && row < tokens) {
        const float* at = parts + who.index;
        a.squares_out[int64_t(robot * a.squares_step + row) * TILES + tile] = (at[0] + at[8]) + (at[16] + at[24]);
    }
    stamp(a.all, 7);
}

}  // namespace chain
