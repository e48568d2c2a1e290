// gelu(x Wg^T) * (x Wu^T) for many rows x, in bf16 or from and to e4m3: weights are the tall side of the products and tokens the
// broad one, whose tiles may be of any multiple of 16 rows, so that none are wasted on rows that are not there.
//
// A CTA has 128 features (128 rows of Wg and of Wu) of TOKENS tokens. A pair of CTAs has the same features, of which each brings
// one half for both; or, where the number of token tiles is odd, the same last tokens, of which each brings one half.
#pragma once

#ifndef STRETTO_ON_HOST
#include "wide_device.cuh"
#endif

namespace gated {

constexpr int FEATURES = 128, GROUP = 128, GROUPS = 2, THREADS = (GROUPS + 1) * GROUP;
constexpr int WEIGHT_BYTES = 2 * FEATURES * 128, STRIP = 8;
constexpr int CLUSTER = 2;

template <int TOKENS_, int STAGES_, bool CODED_, bool FOLDED_ = false>
struct Cut {
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_;
    static constexpr bool CODED = CODED_, FOLDED = FOLDED_;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKENS * 128, OUT_AT = STAGES * STAGE_BYTES;
    // What a group stores: rows of 64 features.
    static constexpr int ROW_BYTES = CODED ? 64 : 128, OUT_BYTES = TOKENS * ROW_BYTES;
    static constexpr int BARRIERS_AT = OUT_AT + GROUPS * OUT_BYTES, BYTES = BARRIERS_AT + 2 * STAGES * 8;
    static_assert(TOKENS % 16 == 0 && STAGE_BYTES % 1024 == 0 && BYTES <= 227 * 1024);
};

struct Given {
    device::Map weight, x, half_x;
    char* out;
    const float *x_scale, *weight_scale, *multiplier;  // of coded factors and of a coded result
    // What is left of a norm: a factor of each row, and the line of a table that is added; `row_tokens` rows share a line's number.
    const float *factor, *table;
    const int64_t* lines;
    int64_t line_step;
    int row_tokens;
    int rows, features, chunks;  // chunks: of 128 bytes of a row of x
};

// What a CTA works on: which features and tokens, from where on, and which of them its pair shares.
struct Tile {
    int feature, token;
    bool shares_features;
};

// Pairs of tiles in their order: strips of STRIP pairs of token tiles, so that those which run at once share weights and tokens
// in the second-level cache.
template <class C>
struct Order {
    int pairs, odd, feature_pairs, strips, all;

    ON_DEVICE explicit Order(const Given& a) {
        const int tiles = (a.rows + C::TOKENS - 1) / C::TOKENS;
        pairs = tiles / 2, odd = tiles % 2, feature_pairs = a.features / FEATURES / 2;
        strips = max((pairs + STRIP - 1) / STRIP, 1);
        all = feature_pairs * tiles;
    }
    ON_DEVICE Tile at(int i, int rank) const {
        const int strip = min(i / (STRIP * 2 * feature_pairs), strips - 1);
        const bool last = strip == strips - 1;
        const int height = last ? pairs - strip * STRIP : STRIP, each = 2 * height + (last ? odd : 0);
        const int within = i - strip * STRIP * 2 * feature_pairs, features = within / each * 2, j = within % each;
        if (j < 2 * height) return {(features + j / height) * FEATURES, (2 * (strip * STRIP + j % height) + rank) * C::TOKENS, true};
        return {(features + rank) * FEATURES, 2 * pairs * C::TOKENS, false};
    }
};

template <class C>
struct Room {
    char* base;

    ON_DEVICE char* weights(int stage) const { return base + stage * C::STAGE_BYTES; }
    ON_DEVICE char* x(int stage) const { return weights(stage) + WEIGHT_BYTES; }
    ON_DEVICE char* out(int group) const { return base + C::OUT_AT + group * C::OUT_BYTES; }
    ON_DEVICE device::Barrier* full(int stage) const { return reinterpret_cast<device::Barrier*>(base + C::BARRIERS_AT) + stage; }
    ON_DEVICE device::Barrier* free(int stage) const { return full(stage) + C::STAGES; }
};

// One thread brings chunk after chunk of tile after tile.
template <class C>
ON_DEVICE void bring(const Given& a, const Room<C>& room, const Order<C>& order, int rank) {
    int count = 0;
#pragma unroll 1
    for (int i = device::cluster_id(CLUSTER); i < order.all; i += device::clusters(CLUSTER)) {
        const Tile tile = order.at(i, rank);
#pragma unroll 1
        for (int chunk = 0; chunk < a.chunks; ++chunk, ++count) {
            const int stage = count % C::STAGES, column = chunk * 64;
            device::Barrier* full = room.full(stage);
            // Both CTAs have read what was here.
            device::barrier_wait(room.free(stage), uint32_t(count / C::STAGES & 1) ^ 1);
            device::barrier_arrive_expecting(full, C::STAGE_BYTES);
            char *weights = room.weights(stage), *x = room.x(stage);
            if (tile.shares_features) {
                device::copy_tile_to_both(weights + rank * (WEIGHT_BYTES / 2), a.weight, {{column, tile.feature, rank, 0, 0}}, full);
                device::copy_tile(x, a.x, {{column, tile.token, 0, 0, 0}}, full);
            } else {
                const int mine = rank * (C::TOKENS / 2);
                device::copy_tile(weights, a.weight, {{column, tile.feature, 0, 0, 0}}, full);
                device::copy_tile(weights + WEIGHT_BYTES / 2, a.weight, {{column, tile.feature, 1, 0, 0}}, full);
                device::copy_tile_to_both(x + mine * 128, a.half_x, {{column, tile.token + mine, 0, 0, 0}}, full);
            }
        }
    }
}

template <int TOKENS, bool CODED>
ON_DEVICE void multiply(float (&c)[TOKENS / 2], const char* a, const char* b, bool add) {
    if constexpr (CODED && TOKENS == 112) device::multiply_coded_112(c, a, b, add);
    else if constexpr (CODED) device::multiply_coded_128(c, a, b, add);
    else if constexpr (TOKENS == 112) device::multiply_112(c, a, b, add);
    else device::multiply_128(c, a, b, add);
}

// Tell both CTAs that this group has read a stage.
template <class C>
ON_DEVICE void release(const Room<C>& room, int index, int stage) {
    if (index < CLUSTER) device::barrier_arrive_at(device::at_rank(room.free(stage), index));
}

// Where a 16-byte piece of a token's row lies: pieces change places so that neither writing nor reading meets itself.
template <class C>
ON_DEVICE int piece_at(int token, int piece) {
    return token * C::ROW_BYTES + (C::CODED ? piece ^ (token / 2 % 4) : piece ^ (token % 8)) * 16;
}

// Gate and up of a token and one further, for two features 8 apart, as the norm that was folded makes them.
template <class C>
struct Folded {
    const Given& a;
    int feature;
    int64_t line = -1;
    float gate_shift[2] = {}, up_shift[2] = {};

    ON_DEVICE void look_up(int row) {
        if (a.table == nullptr) return;
        const int64_t its = a.lines[row / a.row_tokens];
        if (its == line) return;
        line = its;
        const float* at = a.table + line * a.line_step + feature;
#pragma unroll
        for (int half = 0; half < 2; ++half) gate_shift[half] = device::at(at + half * 8), up_shift[half] = device::at(at + a.features + half * 8);
    }
    // c[0], c[1]: this token's and the next one's of the first feature; c[2], c[3] of the second.
    ON_DEVICE void apply(int row, float* gate, float* up) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int its = min(row + i, a.rows - 1);
            const float factor = device::at(a.factor + its);
            look_up(its);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                gate[i + 2 * half] = gate[i + 2 * half] * factor + gate_shift[half];
                up[i + 2 * half] = up[i + 2 * half] * factor + up_shift[half];
            }
        }
    }
};

template <class C>
ON_DEVICE void store(const Given& a, const Room<C>& room, const Tile& tile, int group, int index, float (&gate)[C::TOKENS / 2], float (&up)[C::TOKENS / 2]) {
    const int warp = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
    float scale = 1.0f, code = 1.0f;
    if constexpr (C::CODED) scale = device::at(a.x_scale) * device::at(a.weight_scale), code = scale * device::at(a.multiplier);
    char* out = room.out(group);
    Folded<C> folded{a, tile.feature + group * 64 + warp * 16 + g};
    // What was stored last has been read.
    device::sync_group(group);
#pragma unroll
    for (int n = 0; n < C::TOKENS / 8; ++n) {
        if constexpr (C::FOLDED) folded.apply(tile.token + n * 8 + 2 * t, gate + 4 * n, up + 4 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int feature = warp * 16 + half * 8 + g, token = n * 8 + 2 * t, i = 4 * n + 2 * half;
            if constexpr (C::CODED) {
                const float left = device::gated_for_codes(gate[i] * scale, up[i] * code), right = device::gated_for_codes(gate[i + 1] * scale, up[i + 1] * code);
                const uint32_t both = device::pack_coded(left, right);
                out[piece_at<C>(token, feature / 16) + feature % 16] = char(both);
                out[piece_at<C>(token + 1, feature / 16) + feature % 16] = char(both >> 8);
            } else {
                const uint32_t both = device::pack(device::gated(gate[i], up[i]), device::gated(gate[i + 1], up[i + 1]));
                *reinterpret_cast<uint16_t*>(out + piece_at<C>(token, feature / 8) + feature % 8 * 2) = uint16_t(both);
                *reinterpret_cast<uint16_t*>(out + piece_at<C>(token + 1, feature / 8) + feature % 8 * 2) = uint16_t(both >> 16);
            }
        }
    }
    device::sync_group(group);
    constexpr int PIECES = C::ROW_BYTES / 16;
    const int64_t row_bytes = int64_t(a.features) * (C::CODED ? 1 : 2);
    char* to = a.out + int64_t(tile.token) * row_bytes + (tile.feature + group * 64) * (C::CODED ? 1 : 2);
#pragma unroll 2
    for (int i = index; i < C::TOKENS * PIECES; i += GROUP) {
        const int token = i / PIECES, piece = i % PIECES;
        if (tile.token + token < a.rows)
            *reinterpret_cast<float4*>(to + token * row_bytes + piece * 16) = *reinterpret_cast<const float4*>(out + piece_at<C>(token, piece));
    }
}

template <class C>
ON_DEVICE void consume(const Given& a, const Room<C>& room, const Order<C>& order, int rank, int group, int index) {
    int count = 0;
#pragma unroll 1
    for (int i = device::cluster_id(CLUSTER); i < order.all; i += device::clusters(CLUSTER)) {
        const Tile tile = order.at(i, rank);
        float gate[C::TOKENS / 2], up[C::TOKENS / 2];
#pragma unroll 1
        for (int chunk = 0; chunk < a.chunks; ++chunk, ++count) {
            const int stage = count % C::STAGES;
            device::barrier_wait(room.full(stage), uint32_t(count / C::STAGES & 1));
            const char *weights = room.weights(stage) + group * 8192, *x = room.x(stage);
            device::products_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                multiply<C::TOKENS, C::CODED>(gate, weights + k * 32, x + k * 32, chunk + k > 0);
                multiply<C::TOKENS, C::CODED>(up, weights + WEIGHT_BYTES / 2 + k * 32, x + k * 32, chunk + k > 0);
            }
            device::products_end();
            if (chunk > 0) {
                device::await_products<1>();
                release(room, index, (count - 1) % C::STAGES);
            }
        }
        device::await_products<0>();
        release(room, index, (count - 1) % C::STAGES);
        store(a, room, tile, group, index, gate, up);
    }
}

template <class C>
ON_DEVICE void run(const Given& a, char* shared) {
    const Room<C> room{shared};
    const Order<C> order(a);
    const int thread = device::thread_id(), rank = device::rank_in_cluster();
    if (thread == 0) {
        for (int stage = 0; stage < C::STAGES; ++stage) {
            device::barrier_init(room.full(stage), 1);
            device::barrier_init(room.free(stage), CLUSTER * GROUPS);
        }
        device::barriers_ready();
    }
    device::sync_all();
    device::cluster_arrive();
    device::cluster_wait();
    if (thread >= GROUPS * GROUP) {
        device::give_registers();
        if (thread == GROUPS * GROUP) bring(a, room, order, rank);
        device::sync_warp();
    } else {
        device::take_registers();
        consume(a, room, order, rank, thread / GROUP, thread % GROUP);
    }
    // A CTA stays until its partner sends it nothing more.
    device::cluster_arrive();
    device::cluster_wait();
}

}  // namespace gated
