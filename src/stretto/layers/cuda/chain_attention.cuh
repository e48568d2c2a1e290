// Attention of 8 tokens' query heads, 64 rows, over one of 8 cuts of the keys; the CTAs of a cluster join their cuts.
#pragma once

#include "chain_product.cuh"

namespace chain {

constexpr int KEY_CUTS = 8, KEYS = 128, BLOCK_TOKENS = 8, QUERIES = BLOCK_TOKENS * HEADS;
// A cut is a part of the prefix, and behind it, in the second half of its keys, a part of the suffix.
constexpr int SUFFIX_KEYS = (MAX_TOKENS + KEY_CUTS - 1) / KEY_CUTS, MAX_PREFIX = KEY_CUTS * (KEYS - SUFFIX_KEYS);
static_assert(QUERIES == 64 && MAX_PREFIX == 968);

constexpr int KEY_CHUNK = KEYS * 128, QUERY_CHUNK = QUERIES * 128, HEAD_CHUNKS = HEAD / 64;
constexpr int V_AT = HEAD_CHUNKS * KEY_CHUNK, Q_AT = V_AT + HEAD_CHUNKS / 2 * KEY_CHUNK, BIAS_AT = Q_AT + HEAD_CHUNKS * QUERY_CHUNK;
constexpr int TOPS_AT = BIAS_AT + KEYS * 4, OF_GROUPS_AT = TOPS_AT + KEY_CUTS * HEADS * 8;
constexpr int ATTENTION_BARRIERS_AT = OF_GROUPS_AT + 4 * QUERIES * 4, ATTENTION_THREADS = 2 * GROUP;
constexpr int ATTENTION_BYTES = ATTENTION_BARRIERS_AT + (2 * HEAD_CHUNKS + 2) * 8;
// What ranks send each other takes the place of keys: averages of values, in fp16.
constexpr int SENT_BYTES = HEADS * HALF * 2;
static_assert(KEY_CUTS * SENT_BYTES <= V_AT && ATTENTION_BYTES <= 227 * 1024);

// E: of which numbers the product behind it is made.
template <class E>
ON_DEVICE void attend(const Attention& a, char* shared) {
    const Who who;
    device::let_next_start();
    stamp(a.all, 0);
    const int cluster = device::block_id() / KEY_CUTS, half = cluster % 2, rank = device::rank_in_cluster();
    const int tokens = a.all.tokens, block = cluster / 2;
    const int span = (a.prefix + KEY_CUTS - 1) / KEY_CUTS, own = (tokens + KEY_CUTS - 1) / KEY_CUTS, suffix = max(span, KEYS / 2);
    char *keys = shared, *values = shared + V_AT, *queries = shared + Q_AT;
    float* bias = reinterpret_cast<float*>(shared + BIAS_AT);
    device::Barrier* queries_there = reinterpret_cast<device::Barrier*>(shared + ATTENTION_BARRIERS_AT);
    device::Barrier *keys_there = queries_there + HEAD_CHUNKS, *values_there = keys_there + HEAD_CHUNKS, *sent = values_there + 1;
    const int bound = min(max(*a.length, 0), a.prefix), there = min(max(bound - rank * span, 0), span);
    const int slot = int(*a.slot);
    const float to = E::CODED ? *a.all.to : 1.0f;
    if (who.thread == 0) {
#pragma unroll 1
        for (int i = 0; i < 2 * HEAD_CHUNKS + 2; ++i) device::barrier_init(queries_there + i, 1);
        device::barriers_ready();
        device::barrier_arrive_expecting(sent, KEY_CUTS * (SENT_BYTES + HEADS * 8));
#pragma unroll 1
        for (int c = 0; c < HEAD_CHUNKS; ++c) {
            device::barrier_arrive_expecting(keys_there + c, uint32_t(span * 128));
            device::copy_tile(keys + c * KEY_CHUNK, a.k, {c * 64, rank * span, slot, 0, 0}, keys_there + c);
        }
        device::barrier_arrive_expecting(values_there, uint32_t(span * 256));
#pragma unroll 1
        for (int c = 0; c < 2; ++c) device::copy_tile(values + c * KEY_CHUNK, a.v, {half * HALF + c * 64, rank * span, slot, 0, 0}, values_there);
    }
    if (who.thread < KEYS) {
        const int row = who.thread, key = rank * span + row;
        const bool valid = row < span ? key < bound && a.mask[key] : row >= suffix && row < suffix + own && rank * own + row - suffix < tokens;
        bias[row] = valid ? 0.0f : -2.0e30f;
    }
    if (block == 0 && a.k_next != nullptr && a.token_step == HEAD && who.thread < 32) {
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
    const auto clear = [&](int first, int end) {
#pragma unroll 1
        for (int i = first * 48 + who.thread; i < end * 48; i += ATTENTION_THREADS) {
            const int row = i / 48, piece = i % 48;
            *reinterpret_cast<float4*>(piece < 32 ? keys + place(row, piece) : values + place(row, piece - 32)) = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    };
    if (there < span) {
#pragma unroll 1
        for (int i = 0; i <= HEAD_CHUNKS; ++i) device::barrier_wait(keys_there + i, 0);
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
            const char* from = a.q + (block * HEAD_CHUNKS + c) * QUERY_CHUNK;
            device::barrier_arrive_expecting(queries_there + c, QUERY_CHUNK);
            device::copy_row(queries + c * QUERY_CHUNK, from, QUERY_CHUNK, queries_there + c);
        }
    // The suffix's keys are the second warp group's, which waits for them. Its values are needed later, by both.
    if (who.group == 1) {
#pragma unroll 1
        for (int i = who.index; i < own * 48; i += GROUP) {
            const int row = i / 48, piece = i % 48, key = rank * own + row;
            const bool there = key < tokens, value = piece >= 32;
            const bf16* from = (value ? a.v_fresh + half * HALF - 256 : a.k_fresh) + (there ? key : 0) * HEAD + piece * 8;
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
        const char *at = queries + c * QUERY_CHUNK, *by = keys + c * KEY_CHUNK + who.group * 8192;
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_64(s, at + k * 32, by + k * 32, c + k > 0);
    }
    device::products_end();
    device::await_products<0>();
    device::cluster_arrive();  // this CTA's keys have been read
    stamp(a.all, 4);

    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    float* of_groups = reinterpret_cast<float*>(shared + OF_GROUPS_AT);  // tops and totals of both, by row
    const int row = who.w * 16 + who.g;
    float top[2] = {-1.0e30f, -1.0e30f}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(bias + who.group * 64 + n * 8 + who.t * 2);
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
        if (who.t == 0) of_groups[who.group * QUERIES + row + i * 8] = top[i];
    }
    device::sync_all();
    // Weights, which take the place of queries. Tops differ by powers of two only, so that cuts do not change what is rounded.
    char* weights = queries + who.group * QUERY_CHUNK;
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = ceilf(fmaxf(top[i], of_groups[(1 - who.group) * QUERIES + row + i * 8]));
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
        if (who.t == 0) of_groups[(2 + who.group) * QUERIES + row + i * 8] = total[i];
    }
    device::before_products();
    device::sync_all();
    float out[32];
    device::barrier_wait(values_there, 0);
    device::products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
        device::multiply_by_rows(out, queries + k / 4 * QUERY_CHUNK + k % 4 * 32, values + who.group * KEY_CHUNK + k * 2048, k > 0);
    device::products_end();
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = of_groups[2 * QUERIES + row + i * 8] + of_groups[3 * QUERIES + row + i * 8];
    device::await_products<0>();
    stamp(a.all, 5);

    // Rank r gets token r of the block: its heads are the upper or lower eight rows of a warp.
    device::cluster_wait();
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int to = who.w * 2 + lower;
        const device::Remote there = device::at_rank(shared + rank * SENT_BYTES + who.group * 1024 + who.lane * 16, to);
        const device::Remote barrier = device::at_rank(sent, to);
        const float over = total[lower] > 0.0f ? 1.0f / total[lower] : 1.0f;
        uint32_t both[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) both[n] = device::pack_fine(out[4 * n + 2 * lower] * over, out[4 * n + 2 * lower + 1] * over);
        device::send4(there, barrier, both[0], both[1], both[2], both[3]);
        device::send4(there + 512, barrier, both[4], both[5], both[6], both[7]);
        if (who.group == 0 && who.t == 0)
            device::send2(device::at_rank(shared + TOPS_AT + (rank * HEADS + who.g) * 8, to), barrier, top[lower], total[lower]);
    }
    device::barrier_wait(sent, 0);
    stamp(a.all, 6);
    const int token = block * BLOCK_TOKENS + rank;
    if (token >= tokens) return;
    // A thread joins four columns: half of what a lane sent at once.
    const int part = who.thread / 32, lane = who.lane;
    const float2* tops = reinterpret_cast<const float2*>(shared + TOPS_AT) + who.g;
    float share[KEY_CUTS], best = -2.0e30f, sum = 0.0f, all[4] = {};
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) best = fmaxf(best, tops[r * HEADS].x);
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        share[r] = tops[r * HEADS].y * device::power_of_two(tops[r * HEADS].x - best);
        sum += share[r];
    }
    float over = sum > 0.0f ? 1.0f / sum : 1.0f;
    if (E::CODED) over *= to;
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(shared + r * SENT_BYTES + part / 2 * 512 + lane * 16 + part % 2 * 8);
        const float2 low = device::unpack_fine(at[0]), high = device::unpack_fine(at[1]);
        all[0] += low.x * share[r], all[1] += low.y * share[r], all[2] += high.x * share[r], all[3] += high.y * share[r];
    }
    const int at = who.g * HEAD + half * HALF + part * 16 + who.t * 2;
    *reinterpret_cast<typename E::Pair*>(in_chunks<E>(a.out, token, at)) = E::pair(all[0] * over, all[1] * over);
    *reinterpret_cast<typename E::Pair*>(in_chunks<E>(a.out, token, at + 8)) = E::pair(all[2] * over, all[3] * over);
    stamp(a.all, 7);
}

}  // namespace chain
