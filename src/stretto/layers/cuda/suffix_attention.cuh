// Attention of a few query tokens of many robots over a prefix in an arena and a suffix, one key/value head of 256 channels.
//
// Query heads of a token are rows. A group of four warps has 64 of them: they stay in shared memory, and the sums of values in
// registers. Keys and values come in blocks of 64, the suffix right behind the prefix, through places that a warp fills in the
// order in which they are read. Two groups of a CTA have rows of their own (TALL), or the same rows and blocks by turns, whose sums
// they join at the end. Keys may be cut over a cluster: then its CTAs send each other averages, and each ends up with some rows.
// CTAs of a cluster that have the same keys may also bring them for each other.
#pragma once

#ifndef STRETTO_ON_HOST
#include "suffix_device.cuh"
#endif

namespace suffix {

constexpr int HEAD = 256, ROWS = 64, KEYS = 64, GROUP = 128, GROUPS = 2, WARPS = GROUPS * GROUP / 32, THREADS = (GROUPS + 1) * GROUP;
constexpr int CHUNK_BYTES = KEYS * 128, CHUNKS = HEAD / 64, TILE_BYTES = CHUNKS * CHUNK_BYTES, PLACES = 7, MOST_BLOCKS = 64;
// Runs of 16 channels of the queries that threads hold.
constexpr int HELD = 8;
constexpr float NONE = -1.0e30f;
// What eight rows are in when they are sent: averages as fp16, and a top and a total of each.
constexpr int UNIT_BYTES = 8 * HEAD * 2, UNIT_TOPS = 8 * 8;

template <bool TALL_, int CUTS_, int SHARED_>
struct Cut {
    static constexpr bool TALL = TALL_;
    static constexpr int CUTS = CUTS_, SHARED = SHARED_, CLUSTER = CUTS * SHARED;
    static constexpr int Q_TILES = TALL ? GROUPS : 1, STAGES = PLACES - Q_TILES, UNITS = Q_TILES * 8, MINE = UNITS / CUTS;
    static constexpr int RING_AT = Q_TILES * TILE_BYTES, BARRIERS_AT = PLACES * TILE_BYTES, SEEN_AT = BARRIERS_AT + (2 * STAGES + 2) * 8;
    static constexpr int TOPS_AT = SEEN_AT + MOST_BLOCKS * 8, BYTES = TOPS_AT + GROUPS * ROWS * 8 + UNITS * UNIT_TOPS;
    static_assert(BYTES <= 227 * 1024 && UNITS % CUTS == 0 && CHUNKS % SHARED == 0);
};

struct Given {
    // Tiles of the queries; of keys and values of the arena and of the suffix: whole blocks, and eight keys of 64 channels.
    device::Map q, k, v, few_k, few_v, fresh_k, fresh_v;
    const int64_t* slots;
    const int32_t* length;  // or null
    const uint8_t* mask;
    int64_t mask_step;
    char* out;
    const float* multiplier;  // of a coded result, or null
    int rows, row_tiles, prefix, suffix;
    float scale;  // times log2(e)
    // What a launch behind this one reads, to be brought to the second-level cache, or nothing.
    const char* ahead;
    int64_t ahead_bytes;
};

// Which rows and blocks a CTA has.
template <class C>
struct Task {
    int robot, row, first, count, bound, whole, rank, cut, share;

    ON_DEVICE explicit Task(const Given& a) {
        rank = C::CLUSTER > 1 ? device::rank_in_cluster() : 0, cut = rank / C::SHARED, share = rank % C::SHARED;
        const int cluster = device::block_id() / C::CLUSTER, shares = a.row_tiles / C::SHARED;
        robot = cluster / shares, row = (cluster % shares * C::SHARED + share) * C::Q_TILES * ROWS;
        bound = a.length == nullptr ? a.prefix : min(max(a.length[robot], 0), a.prefix);
        whole = (bound + 7) / 8 * 8;  // where the suffix begins
        const int blocks = (whole + a.suffix + KEYS - 1) / KEYS;
        first = blocks * cut / C::CUTS, count = blocks * (cut + 1) / C::CUTS - first;
    }
};

template <class C>
struct Room {
    char* base;

    ON_DEVICE char* queries(int group) const { return base + (C::TALL ? group * TILE_BYTES : 0); }
    ON_DEVICE char* place(int i) const { return base + C::RING_AT + i % C::STAGES * TILE_BYTES; }
    ON_DEVICE device::Barrier* full(int i) const { return reinterpret_cast<device::Barrier*>(base + C::BARRIERS_AT) + i % C::STAGES; }
    ON_DEVICE device::Barrier* free(int i) const { return full(i) + C::STAGES; }
    ON_DEVICE device::Barrier* queries_there() const { return reinterpret_cast<device::Barrier*>(base + C::BARRIERS_AT) + 2 * C::STAGES; }
    ON_DEVICE device::Barrier* sent() const { return queries_there() + 1; }
    ON_DEVICE uint32_t* seen() const { return reinterpret_cast<uint32_t*>(base + C::SEEN_AT); }
    ON_DEVICE float2* tops(int group) const { return reinterpret_cast<float2*>(base + C::TOPS_AT) + group * ROWS; }
    ON_DEVICE char* sent_tops() const { return base + C::TOPS_AT + GROUPS * ROWS * 8; }
};

// The order in which tiles come, which is that in which they are read: scores are one step ahead of values. In a step the groups
// have one block, or two, one each.
template <class C>
struct Turn {
    static constexpr int EACH = C::TALL ? 1 : GROUPS;

    ON_DEVICE static int of(int block, bool values) {
        const int step = block / EACH, turn = values ? 2 * step + 2 : max(2 * step - 1, 0);
        return turn * EACH + block % EACH;
    }
    ON_DEVICE static bool values(int i) { return i / EACH > 0 && i / EACH % 2 == 0; }
    ON_DEVICE static int block(int i) {
        const int turn = i / EACH, step = values(i) ? turn / 2 - 1 : (turn + 1) / 2;
        return step * EACH + i % EACH;
    }
    ON_DEVICE static int all(int count) { return count == 0 ? 0 : (2 * ((count + EACH - 1) / EACH) + 1) * EACH; }
};

template <class C>
ON_DEVICE void copy(void* to, const device::Map& map, const device::Place& place, device::Barrier* full, int rank) {
    if constexpr (C::SHARED == 1) device::copy_tile(to, map, place, full);
    else device::copy_tile_to(to, map, place, full, ((1u << C::SHARED) - 1) << (rank / C::SHARED * C::SHARED));
}

// One warp brings tile after tile. What the launch ahead writes, queries and the suffix, is asked for when that is complete; the
// arena's keys and values are older than all launches that may still run.
template <class C>
ON_DEVICE void bring(const Given& a, const Task<C>& task, const Room<C>& room, int lane) {
    const int slot = int(a.slots[task.robot]), turns = Turn<C>::all(task.count);
    bool awaited = false;
    const auto await = [&] {
        awaited = true;
        device::await_previous();
        if (lane != 0) return;
        device::barrier_arrive_expecting(room.queries_there(), C::Q_TILES * TILE_BYTES);
#pragma unroll
        for (int group = 0; group < C::Q_TILES; ++group)
            device::copy_tile(room.queries(group), a.q, {{0, task.row + group * ROWS, 0, task.robot, 0}}, room.queries_there());
    };
#pragma unroll 1
    for (int i = 0; i < turns; ++i) {
        if (Turn<C>::block(i) >= task.count) continue;
        const int key = (task.first + Turn<C>::block(i)) * KEYS;
        const bool values = Turn<C>::values(i), plain = key + KEYS <= task.whole;
        if (!awaited && (i >= C::STAGES || !plain)) await();
        char* to = room.place(i);
        if (i >= C::STAGES) device::barrier_await(room.free(i), uint32_t(i / C::STAGES & 1) ^ 1);
        if (lane == 0) device::barrier_arrive_expecting(room.full(i), TILE_BYTES);
        constexpr int EACH = CHUNKS / C::SHARED;
        const int begin = task.share * EACH;
        if (plain) {
            if (lane == 0) copy<C>(to + begin * CHUNK_BYTES, values ? a.v : a.k, {{0, key, begin, slot, 0}}, room.full(i), task.rank);
        } else if (lane < EACH * 8) {
            // Eight keys of a chunk by each lane; there are zeros behind the suffix.
            const int chunk = begin + lane / 8, at = key + lane % 8 * 8;
            char* its = to + chunk * CHUNK_BYTES + lane % 8 * 1024;
            if (at < task.whole) copy<C>(its, values ? a.few_v : a.few_k, {{0, at, chunk, slot, 0}}, room.full(i), task.rank);
            else copy<C>(its, values ? a.fresh_v : a.fresh_k, {{0, at - task.whole, chunk, task.robot, 0}}, room.full(i), task.rank);
        }
        device::sync_warp();
    }
    if (!awaited) await();
}

// A warp asks for this CTA's part of what is wanted next, once its own keys are under way.
ON_DEVICE void ask_ahead(const Given& a, int lane) {
    const int64_t each = (a.ahead_bytes / (device::clusters(1) * 32) + 16) / 16 * 16, from = (int64_t(device::block_id()) * 32 + lane) * each;
    device::await_previous();
    if (from < a.ahead_bytes) device::ask_for(a.ahead + from, uint32_t(each < a.ahead_bytes - from ? each : a.ahead_bytes - from));
}

// Which keys of each block count, as bits.
template <class C>
ON_DEVICE void look(const Given& a, const Task<C>& task, const Room<C>& room, int warp, int lane) {
#pragma unroll 1
    for (int word = warp; word < 2 * task.count; word += WARPS) {
        const int key = task.first * KEYS + word * 32 + lane;
        const bool old = key < task.bound && a.mask[task.robot * a.mask_step + min(key, a.prefix - 1)] != 0;
        const uint32_t bits = device::ballot(old || (key >= task.whole && key < task.whole + a.suffix));
        if (lane == 0) room.seen()[word] = bits;
    }
}

// Tell all CTAs that bring this tile that a group has read it.
template <class C>
ON_DEVICE void release(const Task<C>& task, const Room<C>& room, int index, int i) {
    if constexpr (C::SHARED == 1) {
        if (index == 0) device::barrier_arrive_at(device::at_rank(room.free(i), task.rank));
    } else {
        if (index < C::SHARED) device::barrier_arrive_at(device::at_rank(room.free(i), task.cut * C::SHARED + index));
    }
}

// What a thread has of two rows, 8 apart: tops, totals and sums of values.
struct Sums {
    float acc[128], top[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f};
};

// Scores become weights. Tops are whole numbers: weights that were rounded under
// different ones then differ by powers of two only, so that cuts do not change what is rounded.
ON_DEVICE void soften(float (&s)[32], Sums& sums, float (&shrink)[2], const uint32_t* seen, float scale, int t) {
    const uint32_t words[2] = {seen[0], seen[1]};
    if ((words[0] & words[1]) != 0xffffffffu)
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int column = i / 4 * 8 + i % 2;
            if ((words[column / 32] >> (2 * t) >> (column % 32) & 1) == 0) s[i] = -3.0e38f;
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float best = s[2 * half];
#pragma unroll
        for (int i = 0; i < 16; ++i) best = fmaxf(best, s[i / 2 * 4 + 2 * half + i % 2]);
        best = fmaxf(best, device::from_lane_xor(best, 1));
        best = fmaxf(best, device::from_lane_xor(best, 2));
        const float top = fmaxf(sums.top[half], ceilf(best * scale));
        shrink[half] = device::power_of_two(sums.top[half] - top);
        sums.top[half] = top;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float* both = s + 4 * n + 2 * half;
            both[0] = device::power_of_two(fmaf(both[0], scale, -top)), both[1] = device::power_of_two(fmaf(both[1], scale, -top));
            total += both[0] + both[1];
        }
        sums.total[half] = sums.total[half] * shrink[half] + total;
    }
}

// A thread's part of the first channels of the queries: scores of 64 keys ask for both factors faster than shared memory gives them.
struct Held {
    uint32_t queries[4 * HELD];

    ON_DEVICE Held(const char* tile, int index) {
        const int lane = index % 32, g = lane / 4, row = index / 32 * 16 + g;
#pragma unroll
        for (int i = 0; i < 4 * HELD; ++i) {
            const int k = i / 4, piece = k % 4 * 2 + i / 2 % 2;
            queries[i] = *reinterpret_cast<const uint32_t*>(tile + k / 4 * CHUNK_BYTES + (row + i % 2 * 8) * 128 + (piece ^ g) * 16 + lane % 4 * 4);
        }
    }
    ON_DEVICE void score(float (&s)[32], const char* tile, const char* keys) const {
#pragma unroll
        for (int k = 0; k < HEAD / 16; ++k) {
            const int at = k / 4 * CHUNK_BYTES + k % 4 * 32;
            if (k < HELD) device::multiply_64_held(s, queries + 4 * min(k, HELD - 1), keys + at, k > 0);
            else device::multiply_64(s, tile + at, keys + at, k > 0);
        }
    }
};

template <class C>
ON_DEVICE void attend(const Given& a, const Task<C>& task, const Room<C>& room, Sums& sums, int group, int index) {
    const int t = index % 4;
    const char* queries = room.queries(group);
    constexpr int STEP = C::TALL ? 1 : GROUPS;
    const int begin = C::TALL ? 0 : group;
#pragma unroll
    for (int i = 0; i < 128; ++i) sums.acc[i] = 0.0f;
    const Held held(queries, index);
    uint32_t weights[16];
    float s[32], shrink[2];
    const auto ask_scores = [&](int block) {
        const int i = Turn<C>::of(block, false);
        device::barrier_await(room.full(i), uint32_t(i / C::STAGES & 1));
        device::products_begin();
        held.score(s, queries, room.place(i));
        device::products_end();
    };
    // Pairs as the second product takes them. They stand where that of the block before reads: not to be moved ahead of its end.
    const auto round = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) device::pin(s[i]);
#pragma unroll
        for (int i = 0; i < 16; ++i) weights[i] = device::pack(s[2 * i], s[2 * i + 1]);
    };
    const auto ask_values = [&](int block) {
        const int i = Turn<C>::of(block, true);
        device::barrier_await(room.full(i), uint32_t(i / C::STAGES & 1));
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_held_by_rows(sums.acc, weights + 4 * k, room.place(i) + k * 2048);
        device::products_end();
    };
    if (begin >= task.count) return;
    ask_scores(begin);
    device::await_products<0>();
    release(task, room, index, Turn<C>::of(begin, false));
    soften(s, sums, shrink, room.seen() + 2 * begin, a.scale, t);
    round();
    // Groups ask by turns: the one's softmax beside the other's products.
    const bool ordered = C::TALL && task.row + ROWS < a.rows;
    if (ordered && group == 1) device::let_group(0);
    int block = begin;
#pragma unroll 1
    for (int next = begin + STEP; next < task.count; block = next, next += STEP) {
        // The next scores and these values are asked for, and the next weights made while the matrix units have the values.
        if (ordered) device::await_turn(group);
        ask_scores(next);
        ask_values(block);
        if (ordered) device::let_group(1 - group);
        device::await_products<1>();
        release(task, room, index, Turn<C>::of(next, false));
        soften(s, sums, shrink, room.seen() + 2 * next, a.scale, t);
        device::await_products<0>();
        release(task, room, index, Turn<C>::of(block, true));
        // Tops change seldom behind the first blocks.
        if (device::ballot(shrink[0] != 1.0f || shrink[1] != 1.0f) != 0)
#pragma unroll
            for (int i = 0; i < 128; ++i) sums.acc[i] *= shrink[i / 2 % 2];
        round();
    }
    ask_values(block);
    device::await_products<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sums.total[half] += device::from_lane_xor(sums.total[half], 1);
        sums.total[half] += device::from_lane_xor(sums.total[half], 2);
    }
}

// A group without rows lets all tiles pass.
template <class C>
ON_DEVICE void pass(const Task<C>& task, const Room<C>& room, int index) {
#pragma unroll 1
    for (int i = 0; i < Turn<C>::all(task.count); ++i) {
        if (Turn<C>::block(i) >= task.count) continue;
        device::barrier_await(room.full(i), uint32_t(i / C::STAGES & 1));
        release(task, room, index, i);
    }
}

// Two groups with the same rows: each ends up with the sums of both, of half of the columns.
template <int MINE, class C>
ON_DEVICE void join_groups(const Room<C>& room, Sums& sums, int index) {
    const int row = index / 32 * 16 + index % 32 / 4;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (index % 4 == 0) room.tops(MINE)[row + half * 8] = {sums.top[half], sums.total[half]};
    device::sync_groups();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 other = room.tops(1 - MINE)[row + half * 8];
        const float top = fmaxf(sums.top[half], other.x);
        shrink[half] = device::power_of_two(sums.top[half] - top);
        sums.total[half] = sums.total[half] * shrink[half] + other.y * device::power_of_two(other.x - top);
        sums.top[half] = top;
    }
    if (device::ballot(shrink[0] != 1.0f || shrink[1] != 1.0f) != 0)
#pragma unroll
        for (int i = 0; i < 128; ++i) sums.acc[i] *= shrink[i / 2 % 2];
    float4* to = reinterpret_cast<float4*>(room.place(0) + (1 - MINE) * TILE_BYTES) + index;
    const float4* from = reinterpret_cast<const float4*>(room.place(0) + MINE * TILE_BYTES) + index;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const float* given = sums.acc + 64 * (1 - MINE) + 4 * n;
        to[n * GROUP] = {given[0], given[1], given[2], given[3]};
    }
    device::sync_groups();
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const float4 got = from[n * GROUP];
        float* kept = sums.acc + 64 * MINE + 4 * n;
        kept[0] += got.x, kept[1] += got.y, kept[2] += got.z, kept[3] += got.w;
    }
}

// A lane has pairs of numbers of four runs of eight columns, and gets one run of its row: the t-th of the four lanes of a row the t-th.
ON_DEVICE void turn(uint32_t (&both)[4], int t) {
#pragma unroll
    for (int far = 1; far < 3; ++far) {
        const bool upper = (t & far) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & far) continue;
            const uint32_t got = device::bits_of(device::from_lane_xor(device::as_float(upper ? both[i] : both[i + far]), far));
            (upper ? both[i] : both[i + far]) = got;
        }
    }
}

// Store 32 columns of a row by the four lanes that have them.
ON_DEVICE void store(const Given& a, int64_t row, bool there, int column, int t, uint32_t (&both)[4], float code) {
    turn(both, t);
    if (!there) return;
    const int64_t at = row * HEAD + column + t * 8;
    if (a.multiplier == nullptr) {
        *reinterpret_cast<float4*>(a.out + at * 2) = {device::as_float(both[0]), device::as_float(both[1]), device::as_float(both[2]), device::as_float(both[3])};
        return;
    }
    // Rounded as a tensor in between would be.
    uint32_t codes[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = device::as_float(both[i] << 16) * code, second = device::as_float(both[i] & 0xffff0000u) * code;
        codes[i / 2] |= uint32_t(device::pack_coded(first, second)) << (i % 2 * 16);
    }
    *reinterpret_cast<float2*>(a.out + at) = {device::as_float(codes[0]), device::as_float(codes[1])};
}

// FIRST, COUNT: which runs of eight columns this thread has.
template <int FIRST, int COUNT, class C>
ON_DEVICE void finish(const Given& a, const Task<C>& task, const Sums& sums, int group, int index, float code) {
    const int lane = index % 32, row = task.row + (C::TALL ? group * ROWS : 0) + index / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float over = sums.total[half] > 0.0f ? 1.0f / sums.total[half] : 1.0f;
        const int64_t at = int64_t(task.robot) * a.rows + row + half * 8;
#pragma unroll
        for (int n = FIRST; n < FIRST + COUNT; n += 4) {
            uint32_t both[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) both[i] = device::pack(sums.acc[4 * (n + i) + 2 * half] * over, sums.acc[4 * (n + i) + 2 * half + 1] * over);
            store(a, at, row + half * 8 < a.rows, n * 8, lane % 4, both, code);
        }
    }
}

// Send each CTA of the cluster its rows.
template <int FIRST, int COUNT, class C>
ON_DEVICE void send(const Task<C>& task, const Room<C>& room, const Sums& sums, int group, int index) {
    const int lane = index % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int unit = (C::TALL ? group * 8 : 0) + index / 32 * 2 + half, to = unit / C::MINE * C::SHARED + task.share;
        const int slot = task.cut * C::MINE + unit % C::MINE;
        const bool own = unit / C::MINE == task.cut;
        char* place = room.place(0) + slot * UNIT_BYTES + lane * 16;
        float2* top = reinterpret_cast<float2*>(room.sent_tops() + slot * UNIT_TOPS) + lane / 4;
        const device::Remote there = device::at_rank(place, to), barrier = device::at_rank(room.sent(), to);
        const float over = sums.total[half] > 0.0f ? 1.0f / sums.total[half] : 1.0f;
#pragma unroll
        for (int n = FIRST; n < FIRST + COUNT; n += 4) {
            uint32_t both[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) both[i] = device::pack_fine(sums.acc[4 * (n + i) + 2 * half] * over, sums.acc[4 * (n + i) + 2 * half + 1] * over);
            if (own) *reinterpret_cast<float4*>(place + n / 4 * 512) = {device::as_float(both[0]), device::as_float(both[1]), device::as_float(both[2]), device::as_float(both[3])};
            else device::send4(there + n / 4 * 512, barrier, both[0], both[1], both[2], both[3]);
        }
        if (FIRST == 0 && lane % 4 == 0) {
            if (own) *top = {sums.top[half], sums.total[half]};
            else device::send2(device::at_rank(top, to), barrier, sums.top[half], sums.total[half]);
        }
    }
}

// Join what came, in the order of cuts.
template <class C>
ON_DEVICE void join_cuts(const Given& a, const Task<C>& task, const Room<C>& room, int thread, float code) {
    const int lane = thread % 32, part = thread / 32;
    device::sync_groups();
    device::barrier_await(room.sent(), 0);
#pragma unroll 1
    for (int i = 0; i < C::MINE; ++i) {
        const int unit = task.cut * C::MINE + i, row = task.row + unit * 8 + lane / 4;
        float2 tops[C::CUTS];
        float best = NONE, sum = 0.0f, all[8] = {};
#pragma unroll
        for (int c = 0; c < C::CUTS; ++c) {
            tops[c] = *reinterpret_cast<const float2*>(room.sent_tops() + (c * C::MINE + i) * UNIT_TOPS + lane / 4 * 8);
            best = fmaxf(best, tops[c].x);
        }
#pragma unroll
        for (int c = 0; c < C::CUTS; ++c) {
            const float share = tops[c].y * device::power_of_two(tops[c].x - best);
            const uint32_t* at = reinterpret_cast<const uint32_t*>(room.place(0) + (c * C::MINE + i) * UNIT_BYTES + part * 512 + lane * 16);
            sum += share;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 both = device::unpack_fine(at[n]);
                all[2 * n] += both.x * share, all[2 * n + 1] += both.y * share;
            }
        }
        const float over = sum > 0.0f ? 1.0f / sum : 1.0f;
        const int64_t at = int64_t(task.robot) * a.rows + row;
        uint32_t both[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) both[n] = device::pack(all[2 * n] * over, all[2 * n + 1] * over);
        store(a, at, row < a.rows, part * 32, lane % 4, both, code);
    }
}

template <int FIRST, int COUNT, class C>
ON_DEVICE void give(const Given& a, const Task<C>& task, const Room<C>& room, const Sums& sums, int group, int index, float code) {
    if constexpr (C::CUTS == 1) {
        finish<FIRST, COUNT>(a, task, sums, group, index, code);
    } else {
        // All CTAs have read the keys that stood where sums are sent to.
        device::cluster_arrive();
        device::cluster_wait();
        send<FIRST, COUNT>(task, room, sums, group, index);
        join_cuts(a, task, room, group * GROUP + index, code);
    }
}

// A CTA stays until its partners send it nothing more.
template <class C>
ON_DEVICE void leave() {
    if constexpr (C::CLUSTER > 1) {
        device::cluster_arrive();
        device::cluster_wait();
    }
}

template <class C>
ON_DEVICE void work(const Given& a, const Task<C>& task, const Room<C>& room, int group, int index) {
    const float code = a.multiplier == nullptr ? 1.0f : *a.multiplier;
    device::barrier_await(room.queries_there(), 0);
    // Complete by now: it is only said once more by those that write.
    device::await_previous();
    Sums sums;
    if (task.row + (C::TALL ? group * ROWS : 0) < a.rows) {
        attend(a, task, room, sums, group, index);
    } else {
        pass(task, room, index);
#pragma unroll
        for (int i = 0; i < 128; ++i) sums.acc[i] = 0.0f;
    }
    if constexpr (C::TALL) {
        give<0, 32>(a, task, room, sums, group, index, code);
    } else if (group == 0) {
        join_groups<0>(room, sums, index);
        give<0, 16>(a, task, room, sums, 0, index, code);
    } else {
        join_groups<1>(room, sums, index);
        give<16, 16>(a, task, room, sums, 1, index, code);
    }
}

template <class C>
ON_DEVICE void run(const Given& a, char* shared) {
    device::let_next_start();
    const Room<C> room{shared};
    const Task<C> task(a);
    const int thread = device::thread_id(), group = thread / GROUP, index = thread % GROUP;
    if (thread == GROUPS * GROUP) {
        for (int i = 0; i < C::STAGES; ++i) {
            device::barrier_init(room.full(i), 1);
            device::barrier_init(room.free(i), C::SHARED * C::Q_TILES);
        }
        device::barrier_init(room.queries_there(), 1);
        device::barrier_init(room.sent(), 1);
        device::barriers_ready();
        if (C::CUTS > 1) device::barrier_arrive_expecting(room.sent(), (C::UNITS - C::MINE) * (UNIT_BYTES + UNIT_TOPS));
    }
    if (group < GROUPS) look(a, task, room, thread / 32, thread % 32);
    device::sync_all();
    if constexpr (C::SHARED > 1) {
        device::cluster_arrive();
        device::cluster_wait();
    }
    if (group == GROUPS) {
        device::give_most_registers();
        if (index < 32) bring(a, task, room, index);
        else if (index < 64 && a.ahead_bytes > 0) ask_ahead(a, index - 32);
        device::sync_warp();
        if constexpr (C::CUTS > 1) {
            device::cluster_arrive();
            device::cluster_wait();
        }
        leave<C>();
    } else {
        device::take_most_registers();
        work(a, task, room, group, index);
        leave<C>();
    }
}

}  // namespace suffix
