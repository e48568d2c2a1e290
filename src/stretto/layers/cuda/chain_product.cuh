// Products of the tokens' rows with 64 rows of weights a warp group, cut along their input over the CTAs of a cluster.
#pragma once

#include "chain_plan.cuh"

namespace chain {

// CUTS: CTAs of a cluster. BLOCKS: warp groups, of 64 weight rows each. CHUNKS: of 64 input columns, a CTA's cut; so many of the
// weights' and of the tokens' are in shared memory at once. SHIFTED: each CTA also gets the token tile with the shift's row.
template <int INPUT_, int CUTS_, int BLOCKS_, int WEIGHT_PLACES_, int PLACES_, bool SHIFTED_>
struct Shape {
    static constexpr int INPUT = INPUT_, CUTS = CUTS_, BLOCKS = BLOCKS_, WEIGHT_PLACES = WEIGHT_PLACES_, PLACES = PLACES_;
    static constexpr int CHUNKS = INPUT / 64 / CUTS;
    static constexpr int THREADS = BLOCKS * GROUP;
    static constexpr bool SHIFTED = SHIFTED_;
    // A rank ends with EACH token tiles, 16 bytes a thread.
    static constexpr int EACH = (TOKEN_TILES + CUTS - 1) / CUTS, SLOTS = EACH + SHIFTED, SLOT_BYTES = GROUP * 16;
    static constexpr int WEIGHT_CHUNK = BLOCKS * 64 * 128;
    static constexpr int X_AT = WEIGHT_PLACES * WEIGHT_CHUNK, SUMS_AT = X_AT + PLACES * CHUNK_BYTES;
    static constexpr int FACTORS_AT = SUMS_AT + (CUTS - 1) * BLOCKS * SLOTS * SLOT_BYTES, BARRIERS_AT = FACTORS_AT + 64 * 4;
    static constexpr int BYTES = BARRIERS_AT + (WEIGHT_PLACES + PLACES + 1) * 8;
    static_assert(INPUT == CUTS * CHUNKS * 64 && CHUNKS % PLACES == 0 && CHUNKS % WEIGHT_PLACES == 0 && WEIGHT_PLACES >= PLACES);
    static_assert(BYTES <= 227 * 1024 && X_AT % 1024 == 0 && CHUNK_BYTES % 1024 == 0);
};
using QkvShape = Shape<WIDTH, 4, 1, 4, 4, true>;
using OutShape = Shape<INNER, 8, 1, 4, 4, false>;
using GateUpShape = Shape<WIDTH, 2, 2, 4, 4, true>;
using DownShape = Shape<MLP, 8, 1, 8, 4, false>;

// A launch starts early only where its CTAs find room beside those of the one before. And where there is room for one CTA only,
// not all clusters of eight find eight multiprocessors of one kind.
constexpr int SHARED_OF_ALL = 228 * 1024, SHARED_OF_SYSTEM = 1024;
constexpr bool side_by_side(int a, int b) { return a + b + 2 * SHARED_OF_SYSTEM <= SHARED_OF_ALL; }
static_assert(side_by_side(OutShape::BYTES, GateUpShape::BYTES) && side_by_side(GateUpShape::BYTES, DownShape::BYTES));
static_assert(side_by_side(DownShape::BYTES, QkvShape::BYTES) && side_by_side(DownShape::BYTES, DownShape::BYTES));

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

    ON_DEVICE char* weights(int place) const { return base + place * S::WEIGHT_CHUNK; }
    ON_DEVICE char* x(int place) const { return base + S::X_AT + place * CHUNK_BYTES; }
    // What the `from`th of the other CTAs sent for token tile slot `slot`, by thread.
    ON_DEVICE float4* sums(int from, int group, int slot) const {
        return reinterpret_cast<float4*>(base + S::SUMS_AT + ((from * S::BLOCKS + group) * S::SLOTS + slot) * S::SLOT_BYTES);
    }
    ON_DEVICE float* factors() const { return reinterpret_cast<float*>(base + S::FACTORS_AT); }
    ON_DEVICE device::Barrier* barrier(int i) const { return reinterpret_cast<device::Barrier*>(base + S::BARRIERS_AT) + i; }
    ON_DEVICE device::Barrier* weights_there(int place) const { return barrier(place); }
    ON_DEVICE device::Barrier* x_there(int place) const { return barrier(S::WEIGHT_PLACES + place); }
    ON_DEVICE device::Barrier* sent() const { return barrier(S::WEIGHT_PLACES + S::PLACES); }
};

// How many bytes the others of its cluster send a CTA.
template <class S>
ON_DEVICE int sent_bytes(int rank) {
    const int tiles = min(S::EACH, max(TOKEN_TILES - rank * S::EACH, 0)) + S::SHIFTED;
    return (S::CUTS - 1) * S::BLOCKS * tiles * S::SLOT_BYTES;
}

// What a CTA multiplies: `tile` is where the weights of its first warp group are in their tensor, `next` of the second.
struct Factors {
    const device::Map& weight;
    device::Place tile, next;
    const char* x;
    const bf16* given;  // null, or rows as they are
};

// Start to copy a chunk of the weights, or of the tokens, by one thread.
template <class S>
ON_DEVICE void ask_for_weights(const Room<S>& room, const Factors& f, int chunk) {
    const int place = chunk % S::WEIGHT_PLACES;
    device::barrier_arrive_expecting(room.weights_there(place), S::WEIGHT_CHUNK);
#pragma unroll
    for (int group = 0; group < S::BLOCKS; ++group) {
        device::Place at = group == 0 ? f.tile : f.next;
        at.at[0] = (device::rank_in_cluster() * S::CHUNKS + chunk) * 64;
        device::copy_tile(room.weights(place) + group * 8192, f.weight, at, room.weights_there(place));
    }
}
template <class S>
ON_DEVICE void ask_for_tokens(const Room<S>& room, const Factors& f, int chunk) {
    const int place = chunk % S::PLACES;
    device::barrier_arrive_expecting(room.x_there(place), CHUNK_BYTES);
    device::copy_row(room.x(place), f.x + int64_t(device::rank_in_cluster() * S::CHUNKS + chunk) * CHUNK_BYTES, CHUNK_BYTES, room.x_there(place));
}

// What has no place yet comes to the second-level cache.
template <class S>
ON_DEVICE void ask_for_rest(const Room<S>& room, const Factors& f) {
#pragma unroll 1
    for (int chunk = S::WEIGHT_PLACES; chunk < S::CHUNKS; ++chunk)
#pragma unroll
        for (int group = 0; group < S::BLOCKS; ++group) {
            device::Place at = group == 0 ? f.tile : f.next;
            at.at[0] = (device::rank_in_cluster() * S::CHUNKS + chunk) * 64;
            device::ask_for_tile(f.weight, at);
        }
}

// Ask for this CTA's weights; then wait for the launch before, and ask for its cut of the tokens.
template <class S>
ON_DEVICE void begin(const Who& who, const Common& all, const Room<S>& room, const Factors& f) {
    device::let_next_start();
    stamp(all, 0);
    if (who.thread == 0) {
#pragma unroll 1
        for (int i = 0; i < S::WEIGHT_PLACES + S::PLACES + 1; ++i) device::barrier_init(room.barrier(i), 1);
        device::barriers_ready();
        const int bytes = sent_bytes<S>(device::rank_in_cluster());
        if (bytes > 0) device::barrier_arrive_expecting(room.sent(), uint32_t(bytes));
#pragma unroll 1
        for (int chunk = 0; chunk < S::WEIGHT_PLACES; ++chunk) ask_for_weights(room, f, chunk);
        ask_for_rest(room, f);
    }
    device::sync_all();
    device::cluster_arrive();
}

template <class S>
ON_DEVICE void await_others(const Who& who, const Common& all, const Room<S>& room, const Factors& f) {
    stamp(all, 1);
    device::await_previous();
    stamp(all, 2);
    if (f.given == nullptr) {
        if (who.thread == 0) {
#pragma unroll 1
            for (int chunk = 0; chunk < S::PLACES; ++chunk) ask_for_tokens(room, f, chunk);
        }
        return;
    }
    const int rank = device::rank_in_cluster();
#pragma unroll 1
    for (int i = who.thread; i < ROWS * S::CHUNKS * 8; i += S::THREADS) {
        const int piece = i % 8, chunk = i / 8 % S::CHUNKS, row = i / (8 * S::CHUNKS);
        const bool there = row <= all.tokens;
        const bf16* from = f.given + (there ? row : 0) * S::INPUT + (rank * S::CHUNKS + chunk) * 64 + piece * 8;
        device::fetch16(room.x(chunk) + row * 128 + (piece ^ row % 8) * 16, from, there);
    }
    device::end_fetches();
    device::await_fetches<0>();
    device::before_products();
    device::sync_all();
}

// Code is dear: what a launch runs is new to its multiprocessor. So loops are loops, but where registers must have names.
template <class S>
ON_DEVICE void multiply(const Who& who, const Common& all, const Room<S>& room, const Factors& f, float (&c)[28]) {
#pragma unroll 1
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
        const int weight_place = chunk % S::WEIGHT_PLACES, place = chunk % S::PLACES;
        device::barrier_wait(room.weights_there(weight_place), uint32_t(chunk / S::WEIGHT_PLACES & 1));
        if (f.given == nullptr) device::barrier_wait(room.x_there(place), uint32_t(chunk / S::PLACES & 1));
        if (chunk == 0) stamp(all, 3);
        const char *a = room.weights(weight_place) + who.group * 8192, *b = room.x(place);
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) device::multiply_56(c, a + k * 32, b + k * 32, chunk + k > 0);
        device::products_end();
        if (S::PLACES < S::CHUNKS && chunk >= 1 && chunk - 1 + S::PLACES < S::CHUNKS) {
            // The chunk before this one has been read: others take its place.
            device::await_products<1>();
            device::sync_all();
            if (who.thread == 0) {
                if (S::WEIGHT_PLACES == S::PLACES) ask_for_weights(room, f, chunk - 1 + S::WEIGHT_PLACES);
                ask_for_tokens(room, f, chunk - 1 + S::PLACES);
            }
        }
    }
    device::await_products<0>();
    stamp(all, 4);
}

ON_DEVICE float4 sum_of(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

template <class S>
ON_DEVICE void send(const Who& who, const Room<S>& room, int to, int slot, const float4& tile) {
    const int rank = device::rank_in_cluster();
    const device::Remote there = device::at_rank(room.sums(rank - (rank > to), who.group, slot) + who.index, to);
    device::send4(there, device::at_rank(room.sent(), to), tile.x, tile.y, tile.z, tile.w);
}

// The token tiles that a thread ends with: its own sums, and behind `add_up` the whole cluster's.
template <class S>
struct Tiles {
    float4 sum[S::SLOTS];

    // Send the others theirs.
    ON_DEVICE Tiles(const Who& who, const Room<S>& room, const float (&c)[28], int tokens) {
        const int rank = device::rank_in_cluster();
        float4 shifted = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const float4 tile = {c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]};
            if (n / S::EACH == rank)
                sum[n % S::EACH] = tile;
            else
                send(who, room, n / S::EACH, n % S::EACH, tile);
            if (n == tokens / 8) shifted = tile;
        }
        if (S::SHIFTED) {
            sum[S::SLOTS - 1] = shifted;
#pragma unroll 1
            for (int to = 0; to < S::CUTS; ++to)
                if (to != rank) send(who, room, to, S::EACH, shifted);
        }
    }
    // In the order of ranks, behind its own.
    ON_DEVICE void add_up(const Who& who, const Room<S>& room) {
#pragma unroll
        for (int from = 0; from < S::CUTS - 1; ++from)
#pragma unroll
            for (int slot = 0; slot < S::SLOTS; ++slot) sum[slot] = sum_of(sum[slot], room.sums(from, who.group, slot)[who.index]);
    }
};

// 1 / rms of the rows: read while products run, in shared memory after the next barrier.
ON_DEVICE float squares_of(const Who& who, const Common& all) {
    float sum = 0.0f;
    if (who.thread < all.tokens) {
        const float* at = all.squares + who.thread * all.square_parts;
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

}  // namespace chain
