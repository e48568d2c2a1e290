// Attention of 8 tokens' query heads, 64 rows, over one of 8 cuts of the keys; the CTAs of a cluster join their cuts.
#pragma once

#include "chain_product.cuh"

namespace chain {

constexpr int KEY_CUTS = 8, KEYS = 128, BLOCK_TOKENS = 8, QUERIES = BLOCK_TOKENS * HEADS;
// A cut is a part of the prefix, and behind it a part of the suffix.
constexpr int SUFFIX_KEYS = (MAX_TOKENS + KEY_CUTS - 1) / KEY_CUTS, MAX_PREFIX = KEY_CUTS * (KEYS - SUFFIX_KEYS);
static_assert(QUERIES == 64 && MAX_PREFIX == 968);

constexpr int KEY_CHUNK = KEYS * 128, QUERY_CHUNK = QUERIES * 128, HEAD_CHUNKS = HEAD / 64;
constexpr int V_AT = HEAD_CHUNKS * KEY_CHUNK, Q_AT = V_AT + HEAD_CHUNKS / 2 * KEY_CHUNK, BIAS_AT = Q_AT + HEAD_CHUNKS * QUERY_CHUNK;
constexpr int TOPS_AT = BIAS_AT + KEYS * 4, ATTENTION_BARRIERS_AT = TOPS_AT + KEY_CUTS * HEADS * 8;
constexpr int ATTENTION_BYTES = ATTENTION_BARRIERS_AT + (2 * HEAD_CHUNKS + 2) * 8;
// What ranks send each other takes the place of keys.
constexpr int SENT_BYTES = HEADS * HALF * 4;
static_assert(KEY_CUTS * SENT_BYTES <= V_AT && ATTENTION_BYTES <= 227 * 1024);

ON_DEVICE void attend(const Attention& a, char* shared) {
    const Who who;
    device::let_next_start();
    stamp(a.all, 0);
    const int cluster = device::block_id() / KEY_CUTS, half = cluster % 2, rank = device::rank_in_cluster();
    const int tokens = a.all.tokens, blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int row_of_batch = cluster / 2 / blocks, block = cluster / 2 % blocks;
    const int64_t at_row = row_of_batch * a.all.step;
    const int span = (a.prefix + KEY_CUTS - 1) / KEY_CUTS, own = (tokens + KEY_CUTS - 1) / KEY_CUTS;
    char *keys = shared, *values = shared + V_AT, *queries = shared + Q_AT;
    float* bias = reinterpret_cast<float*>(shared + BIAS_AT);
    device::Barrier* queries_there = reinterpret_cast<device::Barrier*>(shared + ATTENTION_BARRIERS_AT);
    device::Barrier *keys_there = queries_there + HEAD_CHUNKS, *values_there = keys_there + HEAD_CHUNKS, *sent = values_there + 1;
    const int bound = min(max(a.length[row_of_batch], 0), a.prefix), there = min(max(bound - rank * span, 0), span);
    const int slot = int(a.slot[row_of_batch]);
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
    {
        const int row = who.thread, key = rank * span + row;
        const bool valid = row < span ? key < bound && a.mask[row_of_batch * a.mask_step + key] : row < span + own && rank * own + row - span < tokens;
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
        for (int i = first * 48 + who.thread; i < end * 48; i += GROUP) {
            const int row = i / 48, piece = i % 48;
            *reinterpret_cast<float4*>(piece < 32 ? keys + place(row, piece) : values + place(row, piece - 32)) = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    };
    if (there < span) {
#pragma unroll 1
        for (int i = 0; i <= HEAD_CHUNKS; ++i) device::barrier_wait(keys_there + i, 0);
        clear(there, span);
    }
    clear(span + own, KEYS);
    stamp(a.all, 1);
    device::await_previous();
    stamp(a.all, 2);
#ifdef STRETTO_AHEAD_LATE
    ask_ahead(a.all.ahead);
#endif
    if (who.thread == 0)
#pragma unroll 1
        for (int c = 0; c < HEAD_CHUNKS; ++c) {
            const char* from = a.q + at_row + (block * HEAD_CHUNKS + c) * QUERY_CHUNK;
            device::barrier_arrive_expecting(queries_there + c, QUERY_CHUNK);
            device::copy_row(queries + c * QUERY_CHUNK, from, QUERY_CHUNK, queries_there + c);
        }
    for (int i = who.thread; i < own * 48; i += GROUP) {
        const int row = i / 48, piece = i % 48, key = rank * own + row;
        const bool there = key < tokens, value = piece >= 32;
        const bf16* from = moved(value ? a.v_fresh + half * HALF - 256 : a.k_fresh, at_row) + (there ? key : 0) * HEAD + piece * 8;
        device::fetch16(value ? values + place(span + row, piece - 32) : keys + place(span + row, piece), from, there);
    }
    device::end_fetches();
    device::await_fetches<0>();
    device::before_products();
    device::sync_all();
    stamp(a.all, 3);

    float s[64];
#pragma unroll 1
    for (int c = 0; c < HEAD_CHUNKS; ++c) {
        device::barrier_wait(keys_there + c, 0);
        device::barrier_wait(queries_there + c, 0);
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_128(s, queries + c * QUERY_CHUNK + k * 32, keys + c * KEY_CHUNK + k * 32, c + k > 0);
    }
    device::products_end();
    device::await_products<0>();
    device::cluster_arrive();  // this CTA's keys have been read
    stamp(a.all, 4);

    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    float top[2] = {-1.0e30f, -1.0e30f}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(bias + n * 8 + who.t * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[4 * n + i] = s[4 * n + i] * scale + (i % 2 ? both.y : both.x);
            top[i / 2] = fmaxf(top[i / 2], s[4 * n + i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], device::from_lane_xor(top[i], 1));
        // A whole number, as in split_attention.
        top[i] = ceilf(fmaxf(top[i], device::from_lane_xor(top[i], 2)));
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        s[i] = device::power_of_two(s[i] - top[i % 4 / 2]);
        total[i % 4 / 2] += s[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += device::from_lane_xor(total[i], 1);
        total[i] += device::from_lane_xor(total[i], 2);
    }
    float out[2][32];
    uint32_t p[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[j][i] = device::pack(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    device::barrier_wait(values_there, 0);
    device::products_begin();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) device::multiply_rows(out[h], p[j], values + h * KEY_CHUNK + j * 2048, j > 0);
    device::products_end();
    device::await_products<0>();
    stamp(a.all, 5);

    // Rank r gets token r of the block: its heads are the upper or lower eight rows of a warp.
    device::cluster_wait();
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const int to = who.w * 2 + upper;
        const device::Remote there = device::at_rank(shared + rank * SENT_BYTES + who.lane * 16, to), barrier = device::at_rank(sent, to);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float* c = out[j / 4] + j % 4 * 8 + upper * 2;
            device::send4(there + j * 512, barrier, c[0], c[1], c[4], c[5]);
        }
        if (who.t == 0) device::send2(device::at_rank(shared + TOPS_AT + (rank * HEADS + who.g) * 8, to), barrier, top[upper], total[upper]);
    }
    device::barrier_wait(sent, 0);
    stamp(a.all, 6);
    const int token = block * BLOCK_TOKENS + rank;
    if (token >= tokens) return;
    const float2* tops = reinterpret_cast<const float2*>(shared + TOPS_AT) + who.g;
    float share[KEY_CUTS], best = -2.0e30f, sum = 0.0f;
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) best = fmaxf(best, tops[r * HEADS].x);
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        share[r] = device::power_of_two(tops[r * HEADS].x - best);
        sum += tops[r * HEADS].y * share[r];
    }
    const float over = sum > 0.0f ? 1.0f / sum : 1.0f;
#pragma unroll 1
    for (int j = who.w; j < 8; j += 4) {
        float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int r = 0; r < KEY_CUTS; ++r) {
            const float4 part = *reinterpret_cast<const float4*>(shared + r * SENT_BYTES + j * 512 + who.lane * 16);
            all.x += part.x * share[r], all.y += part.y * share[r], all.z += part.z * share[r], all.w += part.w * share[r];
        }
        const int at = who.g * HEAD + half * HALF + j * 16 + who.t * 2;
        *reinterpret_cast<uint32_t*>(in_chunks(a.out + at_row, token, at)) = device::pack(all.x * over, all.y * over);
        *reinterpret_cast<uint32_t*>(in_chunks(a.out + at_row, token, at + 8)) = device::pack(all.z * over, all.w * over);
    }
    stamp(a.all, 7);
}

}  // namespace chain
