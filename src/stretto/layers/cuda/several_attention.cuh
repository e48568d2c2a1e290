// Attention of 8 tokens' query heads, 64 rows, over one or two of 8 cuts of the keys; the CTAs of a cluster join their cuts.
//
// For one robot there are CTAs for both halves of the values' columns, which multiply queries and keys twice. For many robots one
// CTA has all columns, and values take the place of keys.
#pragma once

#include "several_multiply.cuh"

namespace chain {

constexpr int KEY_CUTS = 8, KEYS = 128, BLOCK_TOKENS = 8, QUERIES = BLOCK_TOKENS * HEADS;
// A cut is a part of the prefix, and behind it, in the second half of its keys, a part of the suffix.
constexpr int SUFFIX_KEYS = (MAX_TOKENS + KEY_CUTS - 1) / KEY_CUTS, MAX_PREFIX = KEY_CUTS * (KEYS - SUFFIX_KEYS);
static_assert(QUERIES == 64 && MAX_PREFIX == 968);

constexpr int KEY_CHUNK = KEYS * 128, QUERY_CHUNK = QUERIES * 128, HEAD_CHUNKS = HEAD / 64;
#ifndef STRETTO_HELD_4
#define STRETTO_HELD_4 2
#endif
// HELD: cuts of a CTA, each of two warp groups. E: of which numbers the product behind it is made.
template <bool MANY_, int HELD_, class E>
struct Cut {
    using Element = E;
    static constexpr bool MANY = MANY_;
    static constexpr int HELD = HELD_, CUT_THREADS = 2 * GROUP, THREADS = HELD * CUT_THREADS, RANKS = KEY_CUTS / HELD;
    // Of values: columns, in chunks of 64, of which each of two warp groups has SHARE.
    static constexpr int COLUMNS = MANY ? HEAD : HALF, CHUNKS = COLUMNS / 64, SHARE = CHUNKS / 2, HALVES = MANY ? 1 : 2;
    static constexpr int KEY_BYTES = HEAD_CHUNKS * KEY_CHUNK, CUT_BYTES = KEY_BYTES + (MANY ? 0 : CHUNKS * KEY_CHUNK);
    static constexpr int V_AT = MANY ? 0 : KEY_BYTES, Q_AT = HELD * CUT_BYTES, BIAS_AT = Q_AT + HEAD_CHUNKS * QUERY_CHUNK;
    static constexpr int TOPS_AT = BIAS_AT + HELD * KEYS * 4, OF_GROUPS_AT = TOPS_AT + HELD * KEY_CUTS * HEADS * 8;
    static constexpr int BARRIERS_AT = OF_GROUPS_AT + HELD * 4 * QUERIES * 4, BARRIERS = HEAD_CHUNKS + HELD * (HEAD_CHUNKS + 1) + 1;
    static constexpr int BYTES = BARRIERS_AT + BARRIERS * 8;
    // What ranks send each other takes the place of keys, or of values: averages of values, in fp16.
    static constexpr int SENT = HEADS * COLUMNS * 2;
    static_assert((MANY || HELD == 1) && HELD * KEY_CUTS * SENT <= HELD * KEY_BYTES && BYTES <= 227 * 1024);
};
// Of one to four robots.
constexpr int HELD[] = {1, 1, 2, STRETTO_HELD_4};
template <class All>
using CutOf = Cut<(All::ROBOTS > 1), HELD[All::ROBOTS - 1], typename All::Element>;

template <class C>
ON_DEVICE void attend(const Attention& a, char* shared) {
    const Who who;
    device::let_next_start();
    stamp(a.all, 0);
    const int cluster = device::block_id() / C::RANKS, half = C::MANY ? 0 : cluster % 2, rank = device::rank_in_cluster();
    const int tokens = a.all.tokens, blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int robot = C::MANY ? cluster / blocks : 0, block = C::MANY ? cluster % blocks : cluster / 2;
    // Which cut this thread works at, on which side of it.
    const int held = C::HELD == 1 ? 0 : who.group / 2, side = C::HELD == 1 ? who.group : who.group % 2, cut = rank * C::HELD + held;
    const int thread = C::HELD == 1 ? who.thread : who.thread % C::CUT_THREADS;
    const uint8_t* mask = a.mask + robot * a.mask_step;
    const bf16 *k_fresh = a.k_fresh + robot * ROWS * HEAD, *v_fresh = a.v_fresh + robot * ROWS * HEAD;
    const int span = (a.prefix + KEY_CUTS - 1) / KEY_CUTS, own = (tokens + KEY_CUTS - 1) / KEY_CUTS, suffix = max(span, KEYS / 2);
    char *keys = shared + held * C::CUT_BYTES, *values = keys + C::V_AT, *queries = shared + C::Q_AT;
    float* bias = reinterpret_cast<float*>(shared + C::BIAS_AT) + held * KEYS;
    device::Barrier* queries_there = reinterpret_cast<device::Barrier*>(shared + C::BARRIERS_AT);
    device::Barrier *keys_there = queries_there + HEAD_CHUNKS + held * (HEAD_CHUNKS + 1), *values_there = keys_there + HEAD_CHUNKS;
    device::Barrier* sent = queries_there + C::BARRIERS - 1;
    const int bound = min(max(a.length[robot], 0), a.prefix), there = min(max(bound - cut * span, 0), span);
    const int slot = int(a.slot[robot]);
    using E = typename C::Element;
    const float to = E::CODED ? *a.all.to : 1.0f;
    const auto ask_for_values = [&] {
        device::barrier_arrive_expecting(values_there, uint32_t(span * C::COLUMNS * 2));
#pragma unroll 1
        for (int c = 0; c < C::CHUNKS; ++c) device::copy_tile(values + c * KEY_CHUNK, a.v, {half * HALF + c * 64, cut * span, slot, 0, 0}, values_there);
    };
    if (who.thread == 0) {
#pragma unroll 1
        for (int i = 0; i < C::BARRIERS; ++i) device::barrier_init(queries_there + i, 1);
        device::barriers_ready();
        device::barrier_arrive_expecting(sent, C::HELD * KEY_CUTS * (C::SENT + HEADS * 8));
#pragma unroll
        for (int h = 0; h < C::HELD; ++h)
#pragma unroll 1
            for (int c = 0; c < HEAD_CHUNKS; ++c) {
                device::Barrier* there = keys_there + h * (HEAD_CHUNKS + 1) + c;
                device::barrier_arrive_expecting(there, uint32_t(span * 128));
                device::copy_tile(keys + h * C::CUT_BYTES + c * KEY_CHUNK, a.k, {c * 64, (cut + h) * span, slot, 0, 0}, there);
            }
        if (!C::MANY) ask_for_values();
    }
    if (thread < KEYS) {
        const int row = thread, key = cut * span + row;
        const bool valid = row < span ? key < bound && mask[key] : row >= suffix && row < suffix + own && cut * own + row - suffix < tokens;
        bias[row] = valid ? 0.0f : -2.0e30f;
    }
    if (!C::MANY && block == 0 && a.k_next != nullptr && a.token_step == HEAD && who.thread < 32) {
        // A lane asks for its part of this cut in the next layer.
        const int each = (span + 31) / 32, key = rank * span + who.thread * each, count = min(each, a.prefix - key);
        const bf16* from = (half == 0 ? a.k_next : a.v_next) + slot * a.slot_step + int64_t(key) * HEAD;
        if (who.thread * each < span && count > 0) device::ask_for(from, uint32_t(count * HEAD * 2));
    }
#ifndef STRETTO_AHEAD_LATE
    ask_ahead(a.all.ahead);
#endif
    device::sync_all();
    // Zeros where there is no key: what is masked must be a number.
    const auto place = [](int row, int piece) { return piece / 8 * KEY_CHUNK + row * 128 + (piece % 8 ^ row % 8) * 16; };
    constexpr int PIECES = C::MANY ? 32 : 48;
    const auto clear = [&](int first, int end) {
#pragma unroll 1
        for (int i = first * PIECES + thread; i < end * PIECES; i += C::CUT_THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            *reinterpret_cast<float4*>(piece < 32 ? keys + place(row, piece) : values + place(row, piece - 32)) = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    };
    if (there < span) {
#pragma unroll 1
        for (int i = 0; i < HEAD_CHUNKS + !C::MANY; ++i) device::barrier_wait(keys_there + i, 0);
        clear(there, span);
    }
    clear(span, suffix), clear(suffix + own, KEYS);
    device::before_products();
    device::sync_all();
    stamp(a.all, 1);
    device::await_previous();
    stamp(a.all, 2);
#ifdef STRETTO_AHEAD_LATE
    ask_ahead(a.all.ahead);
#endif
    if (who.thread == 0)
#pragma unroll 1
        for (int c = 0; c < HEAD_CHUNKS; ++c) {
            const char* from = a.q + int64_t(robot) * QUERY_BYTES + (block * HEAD_CHUNKS + c) * QUERY_CHUNK;
            device::barrier_arrive_expecting(queries_there + c, QUERY_CHUNK);
            device::copy_row(queries + c * QUERY_CHUNK, from, QUERY_CHUNK, queries_there + c);
        }
    // The suffix's keys are the second warp group's, which waits for them. Its values are needed later, by both.
    if (side == 1) {
#pragma unroll 1
        for (int i = who.index; i < own * PIECES; i += GROUP) {
            const int row = i / PIECES, piece = i % PIECES, key = cut * own + row;
            const bool there = key < tokens, value = piece >= 32;
            const bf16* from = (value ? v_fresh + half * HALF - 256 : k_fresh) + (there ? key : 0) * HEAD + piece * 8;
            device::fetch16(value ? values + place(suffix + row, piece - 32) : keys + place(suffix + row, piece), from, there);
        }
        device::end_fetches();
        device::await_fetches<0>();
        device::before_products();
        device::sync_group(who.group);
    }
    stamp(a.all, 3);

    // A warp group has half of the keys, and then half of the columns.
    float s[32];
#pragma unroll 1
    for (int c = 0; c < HEAD_CHUNKS; ++c) {
        device::barrier_wait(keys_there + c, 0);
        device::barrier_wait(queries_there + c, 0);
        const char *at = queries + c * QUERY_CHUNK, *by = keys + c * KEY_CHUNK + side * 8192;
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_64(s, at + k * 32, by + k * 32, c + k > 0);
    }
    device::products_end();
    device::await_products<0>();
    if (!C::MANY) device::cluster_arrive();  // this CTA's keys have been read
    stamp(a.all, 4);

    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    float* of_groups = reinterpret_cast<float*>(shared + C::OF_GROUPS_AT) + held * 4 * QUERIES;  // tops and totals of both, by row
    const int row = who.w * 16 + who.g;
    float top[2] = {-1.0e30f, -1.0e30f}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(bias + side * 64 + n * 8 + who.t * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[4 * n + i] = s[4 * n + i] * scale + (i % 2 ? both.y : both.x);
            top[i / 2] = fmaxf(top[i / 2], s[4 * n + i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], device::from_lane_xor(top[i], 1));
        top[i] = fmaxf(top[i], device::from_lane_xor(top[i], 2));
        if (who.t == 0) of_groups[side * QUERIES + row + i * 8] = top[i];
    }
    device::sync_all();
    if (C::MANY) {
        // All keys have been read: values take their place.
        if (thread == 0) ask_for_values();
        if (side == 1) {
#pragma unroll 1
            for (int i = who.index; i < own * 32; i += GROUP) {
                const int row = i / 32, piece = i % 32, key = cut * own + row;
                device::fetch16(values + place(suffix + row, piece), v_fresh + (key < tokens ? key : 0) * HEAD + piece * 8, key < tokens);
            }
            device::end_fetches();
        }
    }
    // Weights, which take the place of queries. Tops differ by powers of two only, so that cuts do not change what is rounded.
    char* weights = queries + who.group * QUERY_CHUNK;
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = ceilf(fmaxf(top[i], of_groups[(1 - side) * QUERIES + row + i * 8]));
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float one = device::power_of_two(s[4 * n + 2 * i] - top[i]), other = device::power_of_two(s[4 * n + 2 * i + 1] - top[i]);
            total[i] += one + other;
            *reinterpret_cast<uint32_t*>(weights + in_chunk(row + i * 8, n * 8 + who.t * 2)) = device::pack(one, other);
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += device::from_lane_xor(total[i], 1);
        total[i] += device::from_lane_xor(total[i], 2);
        if (who.t == 0) of_groups[(2 + side) * QUERIES + row + i * 8] = total[i];
    }
    if (C::MANY) {
        device::await_fetches<0>();
        if (there < span) {
            device::barrier_wait(values_there, 0);
            clear(there, span);
        }
    }
    device::before_products();
    device::sync_all();
    float out[C::SHARE][32];
    device::barrier_wait(values_there, 0);
    device::products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int c = 0; c < C::SHARE; ++c)
            device::multiply_by_rows(out[c], queries + (held * 2 + k / 4) * QUERY_CHUNK + k % 4 * 32, values + (side * C::SHARE + c) * KEY_CHUNK + k * 2048, k > 0);
    device::products_end();
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = of_groups[2 * QUERIES + row + i * 8] + of_groups[3 * QUERIES + row + i * 8];
    device::await_products<0>();
    if (C::MANY) device::cluster_arrive();
    stamp(a.all, 5);

    // Ranks get the block's tokens in order, as many as they have cuts: heads are the upper or lower eight rows of a warp.
    device::cluster_wait();
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int token = who.w * 2 + lower, to = token / C::HELD, of_rank = token % C::HELD * KEY_CUTS + cut;
        const device::Remote there = device::at_rank(shared + of_rank * C::SENT + side * (C::SHARE * 1024) + who.lane * 16, to);
        const device::Remote barrier = device::at_rank(sent, to);
        const float over = total[lower] > 0.0f ? 1.0f / total[lower] : 1.0f;
#pragma unroll
        for (int c = 0; c < C::SHARE; ++c) {
            uint32_t both[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) both[n] = device::pack_fine(out[c][4 * n + 2 * lower] * over, out[c][4 * n + 2 * lower + 1] * over);
            device::send4(there + c * 1024, barrier, both[0], both[1], both[2], both[3]);
            device::send4(there + c * 1024 + 512, barrier, both[4], both[5], both[6], both[7]);
        }
        if (side == 0 && who.t == 0)
            device::send2(device::at_rank(shared + C::TOPS_AT + (of_rank * HEADS + who.g) * 8, to), barrier, top[lower], total[lower]);
    }
    device::barrier_wait(sent, 0);
    stamp(a.all, 6);
    const int token = block * BLOCK_TOKENS + cut;
    if (token >= tokens) return;
    // A thread joins four columns: half of what a lane sent at once.
    const int part = thread / 32, lane = who.lane;
    const float2* tops = reinterpret_cast<const float2*>(shared + C::TOPS_AT) + held * KEY_CUTS * HEADS + who.g;
    float share[KEY_CUTS], best = -2.0e30f, sum = 0.0f;
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) best = fmaxf(best, tops[r * HEADS].x);
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        share[r] = tops[r * HEADS].y * device::power_of_two(tops[r * HEADS].x - best);
        sum += share[r];
    }
    float over = sum > 0.0f ? 1.0f / sum : 1.0f;
    if (E::CODED) over *= to;
    const int each = C::MANY ? a.all.robots.each : 1, group = robot / each, of_group = robot % each;
#pragma unroll 1
    for (int h = 0; h < C::COLUMNS / HALF; ++h) {
        float all[4] = {};
#pragma unroll
        for (int r = 0; r < KEY_CUTS; ++r) {
            const char* from = shared + (held * KEY_CUTS + r) * C::SENT + h * 2048 + part / 2 * 512 + lane * 16 + part % 2 * 8;
            const uint32_t* at = reinterpret_cast<const uint32_t*>(from);
            const float2 low = device::unpack_fine(at[0]), high = device::unpack_fine(at[1]);
            all[0] += low.x * share[r], all[1] += low.y * share[r], all[2] += high.x * share[r], all[3] += high.y * share[r];
        }
        const int at = who.g * HEAD + (half + h) * HALF + part * 16 + who.t * 2;
        const auto out_at = [&](int column) { return in_chunks<E, INNER>(a.out, each, group, of_group, token, column); };
        *reinterpret_cast<typename E::Pair*>(out_at(at)) = E::pair(all[0] * over, all[1] * over);
        *reinterpret_cast<typename E::Pair*>(out_at(at + 8)) = E::pair(all[2] * over, all[3] * over);
    }
    stamp(a.all, 7);
}

}  // namespace chain
