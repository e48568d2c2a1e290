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
static_assert(KEY_CUTS * SENT_BYTES <= V_AT);
static_assert(side_by_side(QkvShape::BYTES, ATTENTION_BYTES) && side_by_side(ATTENTION_BYTES, OutShape::BYTES));

// Which keys of which tokens a CTA has, and where things are in its shared memory.
struct Cut {
    char *keys, *values, *queries;
    float *bias, *of_groups;  // of_groups: tops and totals of both warp groups, by row
    float2* tops;
    device::Barrier *queries_there, *keys_there, *values_there, *sent;
    int block, half, rank, tokens, span, own, suffix, bound, there;

    ON_DEVICE Cut(const Attention& a, char* shared) {
        keys = shared, values = shared + V_AT, queries = shared + Q_AT, bias = reinterpret_cast<float*>(shared + BIAS_AT);
        of_groups = reinterpret_cast<float*>(shared + OF_GROUPS_AT), tops = reinterpret_cast<float2*>(shared + TOPS_AT);
        queries_there = reinterpret_cast<device::Barrier*>(shared + ATTENTION_BARRIERS_AT);
        keys_there = queries_there + HEAD_CHUNKS, values_there = keys_there + HEAD_CHUNKS, sent = values_there + 1;
        const int cluster = device::block_id() / KEY_CUTS;
        block = cluster / 2, half = cluster % 2, rank = device::rank_in_cluster(), tokens = a.all.tokens;
        // Of the prefix; of the suffix, and where those lie; what of the prefix is there.
        span = (a.prefix + KEY_CUTS - 1) / KEY_CUTS, own = (tokens + KEY_CUTS - 1) / KEY_CUTS, suffix = max(span, KEYS / 2);
        bound = min(max(*a.length, 0), a.prefix), there = min(max(bound - rank * span, 0), span);
    }
    ON_DEVICE bool valid(const Attention& a, int row) const {
        if (row < span) return rank * span + row < bound && a.mask[rank * span + row];
        return row >= suffix && row < suffix + own && rank * own + row - suffix < tokens;
    }
    ON_DEVICE static int place(int row, int piece) { return piece / 8 * KEY_CHUNK + row * 128 + (piece % 8 ^ row % 8) * 16; }
    // Zeros where there is no key: what is masked must be a number.
    ON_DEVICE void clear(int thread, int first, int end) const {
#pragma unroll 1
        for (int i = first * 48 + thread; i < end * 48; i += ATTENTION_THREADS) {
            const int row = i / 48, piece = i % 48;
            *reinterpret_cast<float4*>(piece < 32 ? keys + place(row, piece) : values + place(row, piece - 32)) = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    }
};

// Ask for the prefix's keys, in all columns, and its values, in half of them.
ON_DEVICE void ask_for_prefix(const Attention& a, const Cut& cut) {
    const int slot = int(*a.slot);
#pragma unroll 1
    for (int i = 0; i < 2 * HEAD_CHUNKS + 2; ++i) device::barrier_init(cut.queries_there + i, 1);
    device::barriers_ready();
    device::barrier_arrive_expecting(cut.sent, KEY_CUTS * (SENT_BYTES + HEADS * 8));
#pragma unroll 1
    for (int c = 0; c < HEAD_CHUNKS; ++c) {
        device::barrier_arrive_expecting(cut.keys_there + c, uint32_t(cut.span * 128));
        device::copy_tile(cut.keys + c * KEY_CHUNK, a.k, {c * 64, cut.rank * cut.span, slot, 0, 0}, cut.keys_there + c);
    }
    device::barrier_arrive_expecting(cut.values_there, uint32_t(cut.span * 256));
#pragma unroll 1
    for (int c = 0; c < 2; ++c)
        device::copy_tile(cut.values + c * KEY_CHUNK, a.v, {cut.half * HALF + c * 64, cut.rank * cut.span, slot, 0, 0}, cut.values_there);
}

ON_DEVICE void ask_for_queries(const Attention& a, const Cut& cut) {
#pragma unroll 1
    for (int c = 0; c < HEAD_CHUNKS; ++c) {
        const char* from = a.q + (cut.block * HEAD_CHUNKS + c) * QUERY_CHUNK;
        device::barrier_arrive_expecting(cut.queries_there + c, QUERY_CHUNK);
        device::copy_row(cut.queries + c * QUERY_CHUNK, from, QUERY_CHUNK, cut.queries_there + c);
    }
}

// The suffix's keys are the second warp group's, which waits for them. Its values are needed later, by both.
ON_DEVICE void fetch_suffix(const Who& who, const Attention& a, const Cut& cut) {
#pragma unroll 1
    for (int i = who.index; i < cut.own * 48; i += GROUP) {
        const int row = i / 48, piece = i % 48, key = cut.rank * cut.own + row;
        const bool there = key < cut.tokens, value = piece >= 32;
        const bf16* from = (value ? a.v_fresh + cut.half * HALF - 256 : a.k_fresh) + (there ? key : 0) * HEAD + piece * 8;
        char* to = value ? cut.values + Cut::place(cut.suffix + row, piece - 32) : cut.keys + Cut::place(cut.suffix + row, piece);
        device::fetch16(to, from, there);
    }
    device::end_fetches();
    device::await_fetches<0>();
    device::before_products();
    device::sync_group<1>();
}

// Scores of this warp group's half of the keys.
ON_DEVICE void score(const Who& who, const Cut& cut, float (&s)[32]) {
#pragma unroll 1
    for (int c = 0; c < HEAD_CHUNKS; ++c) {
        device::barrier_wait(cut.keys_there + c, 0);
        device::barrier_wait(cut.queries_there + c, 0);
        const char *at = cut.queries + c * QUERY_CHUNK, *by = cut.keys + c * KEY_CHUNK + who.group * 8192;
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_64(s, at + k * 32, by + k * 32, c + k > 0);
    }
    device::products_end();
    device::await_products<0>();
}

// The largest score of each of a thread's two rows; of this warp group's keys in shared memory.
ON_DEVICE void scale_and_top(const Who& who, const Cut& cut, float (&s)[32], float (&top)[2]) {
    const float scale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(HEAD), and e^x as a power of two
    top[0] = top[1] = -1.0e30f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(cut.bias + who.group * 64 + n * 8 + who.t * 2);
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
        if (who.t == 0) cut.of_groups[who.group * QUERIES + who.w * 16 + who.g + i * 8] = top[i];
    }
}

// Weights of this warp group's keys take the place of queries. Tops differ by powers of two only, so that cuts do not change what
// is rounded.
ON_DEVICE void soften(const Who& who, const Cut& cut, const float (&s)[32], float (&top)[2]) {
    const int row = who.w * 16 + who.g;
    float total[2] = {0.0f, 0.0f};
    char* weights = cut.queries + who.group * QUERY_CHUNK;
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = ceilf(fmaxf(top[i], cut.of_groups[(1 - who.group) * QUERIES + row + i * 8]));
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
        if (who.t == 0) cut.of_groups[(2 + who.group) * QUERIES + row + i * 8] = total[i];
    }
}

// Weights times values: this warp group's half of the columns.
ON_DEVICE void weigh(const Who& who, const Cut& cut, float (&out)[32]) {
    device::products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
        device::multiply_by_rows(out, cut.queries + k / 4 * QUERY_CHUNK + k % 4 * 32, cut.values + who.group * KEY_CHUNK + k * 2048, k > 0);
    device::products_end();
    device::await_products<0>();
}

// Rank r gets token r of the block: its heads are the upper or lower eight rows of a warp.
ON_DEVICE void hand_out(const Who& who, const Cut& cut, const float (&out)[32], const float (&top)[2]) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int to = who.w * 2 + lower, row = who.w * 16 + who.g + lower * 8;
        const float total = cut.of_groups[2 * QUERIES + row] + cut.of_groups[3 * QUERIES + row];
        const device::Remote there = device::at_rank(cut.keys + cut.rank * SENT_BYTES + who.group * 1024 + who.lane * 16, to);
        const device::Remote barrier = device::at_rank(cut.sent, to);
        const float over = total > 0.0f ? 1.0f / total : 1.0f;
        uint32_t both[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) both[n] = device::pack_fine(out[4 * n + 2 * lower] * over, out[4 * n + 2 * lower + 1] * over);
        device::send4(there, barrier, both[0], both[1], both[2], both[3]);
        device::send4(there + 512, barrier, both[4], both[5], both[6], both[7]);
        if (who.group == 0 && who.t == 0) device::send2(device::at_rank(cut.tops + cut.rank * HEADS + who.g, to), barrier, top[lower], total);
    }
}

// A thread joins four columns of this CTA's token: half of what a lane sent at once.
ON_DEVICE void join(const Who& who, const Attention& a, const Cut& cut) {
    const int token = cut.block * BLOCK_TOKENS + cut.rank, part = who.thread / 32;
    if (token >= cut.tokens) return;
    float share[KEY_CUTS], best = -2.0e30f, sum = 0.0f, all[4] = {};
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) best = fmaxf(best, cut.tops[r * HEADS + who.g].x);
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        const float2 of_rank = cut.tops[r * HEADS + who.g];
        share[r] = of_rank.y * device::power_of_two(of_rank.x - best);
        sum += share[r];
    }
    const float over = sum > 0.0f ? 1.0f / sum : 1.0f;
#pragma unroll
    for (int r = 0; r < KEY_CUTS; ++r) {
        const char* at = cut.keys + r * SENT_BYTES + part / 2 * 512 + who.lane * 16 + part % 2 * 8;
        const float2 low = device::unpack_fine(*reinterpret_cast<const uint32_t*>(at));
        const float2 high = device::unpack_fine(*reinterpret_cast<const uint32_t*>(at + 4));
        all[0] += low.x * share[r], all[1] += low.y * share[r], all[2] += high.x * share[r], all[3] += high.y * share[r];
    }
    const int at = who.g * HEAD + cut.half * HALF + part * 16 + who.t * 2;
    *reinterpret_cast<uint32_t*>(in_chunks(a.out, token, at)) = device::pack(all[0] * over, all[1] * over);
    *reinterpret_cast<uint32_t*>(in_chunks(a.out, token, at + 8)) = device::pack(all[2] * over, all[3] * over);
}

ON_DEVICE void attend(const Attention& a, char* shared) {
    const Who who;
    device::let_next_start();
    stamp(a.all, 0);
    const Cut cut(a, shared);
    if (who.thread == 0) ask_for_prefix(a, cut);
    if (who.thread < KEYS) cut.bias[who.thread] = cut.valid(a, who.thread) ? 0.0f : -2.0e30f;
    device::sync_all();
    if (cut.there < cut.span) {
#pragma unroll 1
        for (int i = 0; i <= HEAD_CHUNKS; ++i) device::barrier_wait(cut.keys_there + i, 0);
        cut.clear(who.thread, cut.there, cut.span);
    }
    cut.clear(who.thread, cut.span, cut.suffix), cut.clear(who.thread, cut.suffix + cut.own, KEYS);
    device::before_products();
    device::sync_all();
    stamp(a.all, 1);
    device::await_previous();
    stamp(a.all, 2);
    if (who.thread == 0) ask_for_queries(a, cut);
    if (who.group == 1) fetch_suffix(who, a, cut);
    stamp(a.all, 3);
    float s[32], top[2], out[32];
    score(who, cut, s);
    device::cluster_arrive();  // this CTA's keys have been read
    stamp(a.all, 4);
    scale_and_top(who, cut, s, top);
    device::sync_all();
    soften(who, cut, s, top);
    device::before_products();
    device::sync_all();
    device::barrier_wait(cut.values_there, 0);
    weigh(who, cut, out);
    stamp(a.all, 5);
    device::cluster_wait();
    hand_out(who, cut, out, top);
    device::barrier_wait(cut.sent, 0);
    stamp(a.all, 6);
    join(who, a, cut);
    stamp(a.all, 7);
}

}  // namespace chain
