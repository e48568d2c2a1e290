// Attention of a prefix to itself in e4m3: any number of query heads share one key/value head of 256 channels, keys are masked one by
// one. Queries and keys are coded by rows; values by columns, so that products sum over keys that lie side by side.
//
// A group of threads has 64 packed query rows. It asks for the scores of the next keys, then for the weighted values of the last ones,
// and works on the softmax while the tensor cores have the second product. One warp copies what comes next.
#pragma once

#ifndef STRETTO_ON_HOST
#include "attention_device.cuh"
#endif

namespace prefix {

constexpr int GROUP = 128, HEAD = 256, ROWS = 64, KEYS = 128, STAGES = 2, Q_PLACES = 2;
// Rows of queries and keys are kept in parts of 128 bytes; keys of one part lie together, then those of the other.
constexpr int PARTS = HEAD / 128, KEY_BYTES = KEYS * HEAD, WORDS = KEYS / 32;
// Weights are up to this power of two, so that few of them are below the smallest code.
constexpr float LARGEST = 8.0f;

template <int GROUPS_>
struct Cut {
    static constexpr int GROUPS = GROUPS_, THREADS = (GROUPS + 1) * GROUP, TILE = GROUPS * ROWS;
    static constexpr int Q_PART = TILE * 128, Q_BYTES = PARTS * Q_PART;
    static constexpr int Q_AT = 2 * STAGES * KEY_BYTES, MASKS_AT = Q_AT + Q_PLACES * Q_BYTES;
    static constexpr int BARRIERS_AT = MASKS_AT + STAGES * 4 * WORDS, BYTES = BARRIERS_AT + (4 * STAGES + 2 * Q_PLACES + GROUPS) * 8;
    static_assert(BYTES <= 227 * 1024);
};

struct Given {
    device::Map q, k, v;
    const uint8_t* mask;
    int64_t mask_step;
    char* out;
    // What queries, keys and values were multiplied by before they were coded, and what the result is.
    const float *by, *multiplier;
    float scale;  // of scores, to base 2
    int robots, rows, keys;
};

template <class C>
struct Room {
    char* base;

    ON_DEVICE char* k(int stage) const { return base + 2 * stage * KEY_BYTES; }
    ON_DEVICE char* v(int stage) const { return k(stage) + KEY_BYTES; }
    // Of all groups, part after part.
    ON_DEVICE char* q(int place) const { return base + C::Q_AT + place * C::Q_BYTES; }
    ON_DEVICE uint32_t* mask(int stage) const { return reinterpret_cast<uint32_t*>(base + C::MASKS_AT) + WORDS * stage; }
    ON_DEVICE device::Barrier* barrier(int i) const { return reinterpret_cast<device::Barrier*>(base + C::BARRIERS_AT) + i; }
    ON_DEVICE device::Barrier* k_full(int stage) const { return barrier(stage); }
    ON_DEVICE device::Barrier* k_free(int stage) const { return barrier(STAGES + stage); }
    ON_DEVICE device::Barrier* v_full(int stage) const { return barrier(2 * STAGES + stage); }
    ON_DEVICE device::Barrier* v_free(int stage) const { return barrier(3 * STAGES + stage); }
    ON_DEVICE device::Barrier* q_full(int place) const { return barrier(4 * STAGES + place); }
    ON_DEVICE device::Barrier* q_free(int place) const { return barrier(4 * STAGES + Q_PLACES + place); }
    ON_DEVICE device::Barrier* turn(int group) const { return barrier(4 * STAGES + 2 * Q_PLACES + group); }
};

// Tiles of a CTA: robot after robot, so that those which run at once read the same keys.
template <class C>
struct Order {
    int each, all, blocks;

    ON_DEVICE explicit Order(const Given& a) {
        each = (a.rows + C::TILE - 1) / C::TILE, all = each * a.robots, blocks = (a.keys + KEYS - 1) / KEYS;
    }
    ON_DEVICE int robot(int i) const { return i / each; }
    ON_DEVICE int row(int i) const { return i % each * C::TILE; }
};

// One warp brings block after block of tile after tile, and says which keys count.
template <class C>
ON_DEVICE void bring(const Given& a, const Room<C>& room, const Order<C>& order, int lane) {
    int count = 0, turn = 0;
#pragma unroll 1
    for (int tile = device::block_id(); tile < order.all; tile += device::clusters(1), ++turn) {
        const int robot = order.robot(tile), row = order.row(tile), place = turn % Q_PLACES;
        const uint8_t* mask = a.mask + robot * a.mask_step;
        if (lane == 0) {
            device::barrier_wait(room.q_free(place), uint32_t(turn / Q_PLACES & 1) ^ 1);
            device::barrier_arrive_expecting(room.q_full(place), C::Q_BYTES);
            for (int i = 0; i < PARTS; ++i)
                device::copy_tile(room.q(place) + i * C::Q_PART, a.q, {{i * 64, row, robot, 0, 0}}, room.q_full(place));
        }
#pragma unroll 1
        for (int block = 0; block < order.blocks; ++block, ++count) {
            const int stage = count % STAGES, key = block * KEYS;
            const uint32_t parity = uint32_t(count / STAGES & 1) ^ 1;
            // On their way before there is room for the keys.
            bool counts[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const int at = i * 32 + lane;
                counts[i] = key + at < a.keys && device::at(mask + key + at) != 0;
            }
            if (lane == 0) {
                device::barrier_wait(room.k_free(stage), parity);
                device::barrier_arrive_expecting(room.k_full(stage), KEY_BYTES);
                for (int i = 0; i < PARTS; ++i)
                    device::copy_tile(room.k(stage) + i * KEYS * 128, a.k, {{i * 64, key, robot, 0, 0}}, room.k_full(stage));
            }
            device::sync_warp();
            uint32_t words[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words[i] = device::ballot(counts[i]);
            if (lane == 0) {
                for (int i = 0; i < WORDS; ++i) room.mask(stage)[i] = words[i];
                device::barrier_arrive(room.k_full(stage));
                // Keys do not wait for the place of their values.
                device::barrier_wait(room.v_free(stage), parity);
                device::barrier_arrive_expecting(room.v_full(stage), KEY_BYTES);
                device::copy_tile(room.v(stage), a.v, {{key / 2, 0, robot, 0, 0}}, room.v_full(stage));
            }
        }
    }
}

// The softmax of rows g and g + 8 over blocks of keys, as far as it has come.
struct Softmax {
    static constexpr int CHAINS = 4;
    float top[2] = {-1.0e30f, -1.0e30f}, total[2] = {}, shrink[2];

    // Turn scores into weights.
    ON_DEVICE void weigh(float (&s)[KEYS / 2], const uint32_t* mask, float scale, int t) {
        uint32_t words[WORDS], all = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) all &= words[i] = mask[i];
        if (all != 0xffffffffu) {
            // Infinite, so that a row whose first keys are all masked weighs them with 0 exactly.
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (!(words[i / 16] >> (i / 4 % 4 * 8 + i % 2 + 2 * t) & 1)) s[i] = -device::INFINITE;
        }
        float tops[2][CHAINS];
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            float& its = tops[i / 2 % 2][i / 4 % CHAINS];
            its = i / 4 < CHAINS && i % 2 == 0 ? s[i] : fmaxf(its, s[i]);
        }
        float sums[2][CHAINS] = {}, away[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float best = fmaxf(fmaxf(tops[half][0], tops[half][1]), fmaxf(tops[half][2], tops[half][3]));
            best = fmaxf(best, device::from_lane_xor(best, 1));
            best = fmaxf(best, device::from_lane_xor(best, 2));
            // A whole number changes seldom.
            const float now = fmaxf(top[half], ceilf(best * scale));
            shrink[half] = device::power_of_two(top[half] - now);
            top[half] = now, away[half] = LARGEST - now;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            s[i] = device::power_of_two(fmaf(s[i], scale, away[i / 2 % 2]));
            sums[i / 2 % 2][i / 4 % CHAINS] += s[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            total[half] = total[half] * shrink[half] + ((sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]));
    }
    // Rows without any valid key give zeros.
    ON_DEVICE float share(int half) const {
        float sum = total[half];
        sum += device::from_lane_xor(sum, 1);
        sum += device::from_lane_xor(sum, 2);
        return sum > 0.0f ? 1.0f / sum : 1.0f;
    }
};

// Weights as the left factor of a product.
ON_DEVICE void pack(const float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 8]) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
        const float* w = s + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
        p[i] = uint32_t(device::pack_coded(w[0], w[1])) | uint32_t(device::pack_coded(w[4], w[5])) << 16;
    }
}

template <class C>
ON_DEVICE void ask_scores(float (&s)[KEYS / 2], const char* q, const char* k) {
#pragma unroll
    for (int n = 0; n < HEAD / 32; ++n)
        device::Product<128, true>::add_to(s, q + n / 4 * C::Q_PART + n % 4 * 32, k + n / 4 * (KEYS * 128) + n % 4 * 32, n > 0);
    device::products_end();
}

ON_DEVICE void ask_values(float (&acc)[HEAD / 2], const uint32_t (&p)[KEYS / 8], const char* v, bool add) {
#pragma unroll
    for (int n = 0; n < KEYS / 32; ++n) {
        const uint32_t part[4] = {p[4 * n], p[4 * n + 1], p[4 * n + 2], p[4 * n + 3]};
        device::multiply_coded_256(acc, part, v + n * 32, add || n > 0);
    }
    device::products_end();
}

// Write a group's rows: by way of the place of its queries, so that rows are written in whole.
template <class C>
ON_DEVICE void store(const Given& a, char* q, int robot, int row, int group, int index, const float (&acc)[HEAD / 2], const float2& share) {
    const int warp = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
    const float multiplier = device::at(a.multiplier);
    device::sync_group(group);
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 4 * n + 2 * half, line = warp * 16 + half * 8 + g;
            const float its = half == 0 ? share.x : share.y;
            // Rounded as a tensor in between would be, so that the code is of it.
            const uint32_t both = device::pack(acc[i] * its, acc[i + 1] * its);
            char* to = q + n / 16 * C::Q_PART + line * 128 + ((n / 2 % 8 ^ line % 8) * 16) + n % 2 * 8 + 2 * t;
            *reinterpret_cast<uint16_t*>(to) = device::pack_coded(device::as_float(both << 16) * multiplier, device::as_float(both & 0xffff0000u) * multiplier);
        }
    device::sync_group(group);
    char* out = a.out + (int64_t(robot) * a.rows + row) * HEAD;
#pragma unroll 4
    for (int i = index; i < ROWS * HEAD / 16; i += GROUP) {
        const int line = i / 16, piece = i % 16;
        if (row + line < a.rows)
            *reinterpret_cast<float4*>(out + line * HEAD + piece * 16) = *reinterpret_cast<const float4*>(q + piece / 8 * C::Q_PART + line * 128 + ((piece % 8 ^ line % 8) * 16));
    }
    // The next queries come here by the copy engine.
    device::before_products();
    device::sync_group(group);
}

// Two groups take turns at the tensor cores, so that one is at its softmax while the other's products run.
template <class C>
struct Turns {
    device::Barrier *mine, *other;
    uint32_t parity;

    ON_DEVICE Turns(const Room<C>& room, int group) : mine(room.turn(group)), other(room.turn(1 - group)), parity(group == 0) {}
    ON_DEVICE void begin() {
        if constexpr (C::GROUPS == 2) device::barrier_wait(mine, parity), parity ^= 1;
    }
    ON_DEVICE void end(int index) {
        if constexpr (C::GROUPS == 2)
            if (index % 32 == 0) device::barrier_arrive(other);
    }
};

template <class C>
ON_DEVICE void attend(const Given& a, const Room<C>& room, const Order<C>& order, int group, int index) {
    int count = 0, turn = 0;
    const float scale = a.scale / (device::at(a.by) * device::at(a.by + 1)), by = 1.0f / device::at(a.by + 2);
    const int t = index % 4;
    Turns<C> turns(room, group);
#pragma unroll 1
    for (int tile = device::block_id(); tile < order.all; tile += device::clusters(1), ++turn) {
        const int robot = order.robot(tile), row = order.row(tile) + group * ROWS, place = turn % Q_PLACES;
        char* q = room.q(place) + group * ROWS * 128;
        float s[KEYS / 2], acc[HEAD / 2];
        uint32_t p[KEYS / 8];
        Softmax softmax;
        device::barrier_wait(room.q_full(place), uint32_t(turn / Q_PLACES & 1));
        device::barrier_wait(room.k_full(count % STAGES), uint32_t(count / STAGES & 1));
        turns.begin();
        device::products_begin();
        ask_scores<C>(s, q, room.k(count % STAGES));
        turns.end(index);
        device::await_products<0>();
        device::settle(s);
        softmax.weigh(s, room.mask(count % STAGES), scale, t);
        pack(s, p);
        device::sync_warp();
        if (index % 32 == 0) device::barrier_arrive(room.k_free(count % STAGES));
        device::barrier_wait(room.v_full(count % STAGES), uint32_t(count / STAGES & 1));
#pragma unroll 1
        for (int block = 1; block < order.blocks; ++block) {
            const int before = count % STAGES;
            ++count;
            const int stage = count % STAGES;
            const uint32_t parity = uint32_t(count / STAGES & 1);
            device::barrier_wait(room.k_full(stage), parity);
            turns.begin();
            device::products_begin();
            ask_scores<C>(s, q, room.k(stage));
            ask_values(acc, p, room.v(before), block > 1);
            turns.end(index);
            device::await_products<1>();
            device::settle(s);
            softmax.weigh(s, room.mask(stage), scale, t);
            device::sync_warp();
            if (index % 32 == 0) device::barrier_arrive(room.k_free(stage));
            // A loop that stands between the softmax and the wait for the product keeps them side by side.
            device::barrier_wait(room.v_full(stage), parity);
            device::await_products<0>();
            device::settle(acc);
            if (index % 32 == 0) device::barrier_arrive(room.v_free(before));
            if (device::ballot(softmax.shrink[0] != 1.0f || softmax.shrink[1] != 1.0f) != 0) {
#pragma unroll
                for (int i = 0; i < HEAD / 2; ++i) acc[i] *= softmax.shrink[i / 2 % 2];
            }
            // Behind the wait for what reads the last ones.
            device::settle(s);
            pack(s, p);
        }
        device::products_begin();
        ask_values(acc, p, room.v(count % STAGES), order.blocks > 1);
        device::await_products<0>();
        device::settle(acc);
        if (index % 32 == 0) device::barrier_arrive(room.v_free(count % STAGES));
        ++count;
        store<C>(a, q, robot, row, group, index, acc, {softmax.share(0) * by, softmax.share(1) * by});
        if (index % 32 == 0) device::barrier_arrive(room.q_free(place));
    }
}

template <class C>
ON_DEVICE void run(const Given& a, char* shared) {
    const Room<C> room{shared};
    const Order<C> order(a);
    const int thread = device::thread_id();
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            device::barrier_init(room.k_full(stage), 2);
            device::barrier_init(room.k_free(stage), 4 * C::GROUPS);
            device::barrier_init(room.v_full(stage), 1);
            device::barrier_init(room.v_free(stage), 4 * C::GROUPS);
        }
        for (int place = 0; place < Q_PLACES; ++place) {
            device::barrier_init(room.q_full(place), 1);
            device::barrier_init(room.q_free(place), 4 * C::GROUPS);
        }
        for (int group = 0; group < C::GROUPS; ++group) device::barrier_init(room.turn(group), 4);
        device::barriers_ready();
    }
    device::sync_all();
    if (thread >= C::GROUPS * GROUP) {
        if constexpr (C::GROUPS == 2) device::give_most_registers();
        if (thread < C::GROUPS * GROUP + 32) bring(a, room, order, thread % 32);
    } else {
        if constexpr (C::GROUPS == 2) device::take_most_registers();
        attend(a, room, order, thread / GROUP, thread % GROUP);
    }
}

}  // namespace prefix
