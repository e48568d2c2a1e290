// Products of the tokens' rows with 64 rows of weights a warp group, cut along their input over the CTAs of a cluster.
#pragma once

#include "several_plan.cuh"

namespace chain {

// E: of which numbers. CUTS: CTAs of a cluster. BLOCKS: of 64 weight rows each. CHUNKS: of input columns, a CTA's cut; so many of the
// weights' and of the tokens' are in shared memory at once. NORMED: a norm is ahead of the product, whose shift is one more row,
// of which each CTA gets the products (SHIFTED), or a table (TABLED). ROBOTS: whose rows a CTA multiplies, each with sums in the
// order that it has alone; a warp group has one block of one robot.
template <class E, int INPUT_, int CUTS_, int BLOCKS_, int WEIGHT_PLACES_, int PLACES_, bool NORMED_, int ROBOTS_>
struct Shape {
    using Element = E;
    static constexpr int INPUT = INPUT_, CUTS = CUTS_, BLOCKS = BLOCKS_, WEIGHT_PLACES = WEIGHT_PLACES_, PLACES = PLACES_;
    static constexpr int ROBOTS = ROBOTS_, ALL_CHUNKS = INPUT / E::COLUMNS, CHUNKS = (ALL_CHUNKS + CUTS - 1) / CUTS;
    static constexpr int THREADS = BLOCKS * ROBOTS * GROUP, SUMS = TOKEN_TILES * 4;
    static constexpr bool SHIFTED = NORMED_ && !E::CODED, TABLED = NORMED_ && E::CODED;
    // A rank ends with EACH token tiles of a robot, 16 bytes a thread.
    static constexpr int EACH = (TOKEN_TILES + CUTS - 1) / CUTS, SLOTS = ROBOTS * EACH, SLOT_BYTES = GROUP * 16;
    static constexpr int SHIFT_BYTES = SHIFTED ? CUTS * BLOCKS * ROBOTS * 64 * 4 : 0;
    static constexpr int WEIGHT_CHUNK = BLOCKS * 64 * 128, X_CHUNK = ROBOTS * CHUNK_BYTES;
    static constexpr int X_AT = WEIGHT_PLACES * WEIGHT_CHUNK, X_END = X_AT + PLACES * X_CHUNK;
    // Sums of many robots take the place of their factors.
    static constexpr bool IN_PLACE = ROBOTS > 1;
    static constexpr int SUMS_AT = IN_PLACE ? 0 : X_END, SHIFTS_AT = SUMS_AT + (CUTS - 1) * BLOCKS * SLOTS * SLOT_BYTES;
    static constexpr int SUMS_END = SHIFTS_AT + SHIFT_BYTES, FACTORS_AT = SUMS_END > X_END ? SUMS_END : X_END;
    static constexpr int BARRIERS_AT = FACTORS_AT + ROBOTS * 64 * 4;
    static constexpr int BARRIERS = WEIGHT_PLACES + PLACES + 1, BYTES = BARRIERS_AT + BARRIERS * 8;
    // The last cut may be shorter.
    ON_DEVICE static int chunks(int rank) { return ALL_CHUNKS % CUTS == 0 ? CHUNKS : min(CHUNKS, ALL_CHUNKS - rank * CHUNKS); }
    static_assert(WEIGHT_PLACES <= CHUNKS && PLACES <= CHUNKS && BYTES <= 227 * 1024 && X_AT % 1024 == 0 && CHUNK_BYTES % 1024 == 0);
};

// Who a thread is: of its product it has the weight rows `w * 16 + g` and 8 further, and tokens `2 t` and one further of a tile.
struct Who {
    int thread, group, index, w, lane, g, t;

    ON_DEVICE Who() {
        thread = device::thread_id(), group = thread / GROUP, index = thread % GROUP;
        w = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
    }
};

// And whose sums it has: of which 64 rows of the CTA's weights, and of which robot of a group.
template <class S>
struct Hand : Who {
    int block, robot;

    ON_DEVICE Hand() { block = S::ROBOTS == 1 ? group : group % S::BLOCKS, robot = S::ROBOTS == 1 ? 0 : group / S::BLOCKS; }
};

// What a cluster works at: a tile of the weights' rows, and a group of robots. Groups that read the same weights are neighbours.
template <class S>
struct Work {
    int tile, group = 0, first = 0, robots = 1;

    ON_DEVICE explicit Work(const Common& all) {
        tile = device::block_id() / S::CUTS;
        if (S::ROBOTS == 1) return;
        const int groups = (all.robots.batch + S::ROBOTS - 1) / S::ROBOTS;
        group = tile % groups, tile /= groups, first = group * S::ROBOTS, robots = min(S::ROBOTS, all.robots.batch - first);
    }
    // Where a robot is in the batch: one that is not there stands for the last.
    ON_DEVICE int robot(int r) const { return S::ROBOTS == 1 ? 0 : first + min(r, robots - 1); }
};

template <class S>
struct Room {
    char* base;

    ON_DEVICE char* weights(int place) const { return base + place * S::WEIGHT_CHUNK; }
    ON_DEVICE char* x(int place) const { return base + S::X_AT + place * S::X_CHUNK; }
    // What the `from`th of the other CTAs sent for token tile slot `slot`, by thread.
    ON_DEVICE float4* sums(int from, int group, int slot) const {
        return reinterpret_cast<float4*>(base + S::SUMS_AT + ((from * S::BLOCKS + group) * S::SLOTS + slot) * S::SLOT_BYTES);
    }
    // The same for shifts, by pairs of weight rows; the CTA's own are the last.
    ON_DEVICE float2* shifts(int from, int group, int robot) const {
        return reinterpret_cast<float2*>(base + S::SHIFTS_AT + ((from * S::BLOCKS + group) * S::ROBOTS + robot) * (64 * 4));
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
    const int tiles = min(S::EACH, max(TOKEN_TILES - rank * S::EACH, 0));
    return (S::CUTS - 1) * S::BLOCKS * S::ROBOTS * (tiles * S::SLOT_BYTES + S::SHIFTED * 64 * 4);
}

ON_DEVICE float squares_of(const Squares& squares, int row) {
    float sum = 0.0f;
    const float* at = squares.at + int64_t(row) * squares.parts;
    if (squares.parts == TILES) {
        float4 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = reinterpret_cast<const float4*>(at)[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += (part[i].x + part[i].y) + (part[i].z + part[i].w);
    } else {
#pragma unroll 1
        for (int i = 0; i < squares.parts; ++i) sum += at[i];
    }
    return sum;
}

// What a token's product is multiplied by: 1 / rms of its row, and in e4m3 what makes numbers of codes. Read while products run,
// in shared memory after the next barrier.
template <class S>
struct Norm {
    static constexpr bool CODED = S::Element::CODED;
    static constexpr int MOST = (S::ROBOTS * ROWS + S::THREADS - 1) / S::THREADS;
    float sum[MOST], before[CODED ? MOST : 1], by = 1.0f;

    ON_DEVICE Norm(const Who& who, const Common& all, const Work<S>& work) {
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int at = who.thread + m * S::THREADS, robot = at / ROWS, token = at % ROWS;
            const bool there = token < all.tokens && robot < work.robots;
            sum[m] = there ? squares_of(all.squares, (work.first + robot) * all.squares.step + token) : 0.0f;
            if (CODED) before[m] = there ? squares_of(all.before, (work.first + robot) * all.before.step + token) : 0.0f;
        }
        if (CODED) by = *all.by;
    }
    ON_DEVICE void keep(const Who& who, const Common& all, float* factors, bool of_codes = CODED) const {
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int at = who.thread + m * S::THREADS;
            const float mean = sum[m] / WIDTH + all.eps;
            if (at < S::ROBOTS * ROWS) factors[at] = of_codes ? device::inverse_root(mean / (before[CODED ? m : 0] / WIDTH + all.eps)) * by : device::inverse_root(mean);
        }
    }
};

// The shift's share of a thread's two columns, from a table.
ON_DEVICE float2 tabled(const Shift& s, int robot, int one, int other) {
    const float* line = s.table + s.line[robot] * s.step;
    return {line[one], line[other]};
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
        at.at[0] = (device::rank_in_cluster() * S::CHUNKS + chunk) * S::Element::COLUMNS;
        device::copy_tile(room.weights(place) + group * 8192, f.weight, at, room.weights_there(place));
    }
}
template <class S>
ON_DEVICE void ask_for_tokens(const Room<S>& room, const Factors& f, const Work<S>& work, int chunk) {
    const int place = chunk % S::PLACES;
    const int64_t at = work.group * S::ALL_CHUNKS + device::rank_in_cluster() * S::CHUNKS + chunk;
    device::barrier_arrive_expecting(room.x_there(place), S::X_CHUNK);
    device::copy_row(room.x(place), f.x + at * S::X_CHUNK, S::X_CHUNK, room.x_there(place));
}

// Ask for this CTA's weights; then wait for the launch before, and ask for its cut of the tokens.
template <class S>
ON_DEVICE void begin(const Hand<S>& who, const Common& all, const Room<S>& room, const Factors& f) {
    device::let_next_start();
    stamp(all, 0);
    if (who.thread == 0) {
#pragma unroll 1
        for (int i = 0; i < S::BARRIERS; ++i) device::barrier_init(room.barrier(i), 1);
        device::barriers_ready();
        const int bytes = sent_bytes<S>(device::rank_in_cluster());
        if (bytes > 0) device::barrier_arrive_expecting(room.sent(), uint32_t(bytes));
#pragma unroll 1
        for (int chunk = 0; chunk < min(S::WEIGHT_PLACES, S::chunks(device::rank_in_cluster())); ++chunk) ask_for_weights(room, f, chunk);
#ifndef STRETTO_ASK_LESS
        // What has no place yet comes to the second-level cache.
#pragma unroll 1
        for (int chunk = S::WEIGHT_PLACES; chunk < S::CHUNKS; ++chunk)
#pragma unroll
            for (int group = 0; group < S::BLOCKS; ++group) {
                device::Place at = group == 0 ? f.tile : f.next;
                at.at[0] = (device::rank_in_cluster() * S::CHUNKS + chunk) * S::Element::COLUMNS;
                device::ask_for_tile(f.weight, at);
            }
#endif
    }
    ask_ahead(all.ahead);
    device::sync_all();
    // The others may send from here on; sums that take a place in use, from the end of all products on.
    if (!S::IN_PLACE) device::cluster_arrive();
}

// Sixteen numbers of bf16 as e4m3.
ON_DEVICE float4 coded(const float4& a, const float4& b, float factor) {
    const float of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t bits = device::bits_of(of[i]), both = device::pack_coded(device::as_float(bits << 16) * factor, device::as_float(bits & 0xffff0000u) * factor);
        codes[i / 2] = i % 2 ? codes[i / 2] | both << 16 : both;
    }
    return {device::as_float(codes[0]), device::as_float(codes[1]), device::as_float(codes[2]), device::as_float(codes[3])};
}

// The same for rows as they are, by all threads; in e4m3 by factors that are in shared memory.
template <class S>
ON_DEVICE void fetch_given(const Hand<S>& who, const Common& all, const Room<S>& room, const Factors& f, const Work<S>& work, int chunk) {
    const int rank = device::rank_in_cluster();
    if (chunk >= S::chunks(rank)) return;
#pragma unroll(S::Element::CODED ? 4 : 1)
    for (int i = who.thread; i < S::ROBOTS * ROWS * 8; i += S::THREADS) {
        const int piece = i % 8, at = i / 8, robot = at / ROWS, row = at % ROWS;
        const bool there = row < all.tokens + !S::Element::CODED && robot < work.robots;
        const int64_t from = there ? (work.first + robot) * (all.tokens + 1) + row : 0;
        char* to = room.x(chunk % S::PLACES) + at * 128 + (piece ^ row % 8) * 16;
        const bf16* columns = f.given + from * S::INPUT + (rank * S::CHUNKS + chunk) * S::Element::COLUMNS + piece * (S::Element::COLUMNS / 8);
        if constexpr (S::Element::CODED) {
            const float4* both = reinterpret_cast<const float4*>(columns);
            *reinterpret_cast<float4*>(to) = coded(both[0], both[1], there ? room.factors()[at] : 0.0f);
        } else {
            device::fetch16(to, columns, there);
        }
    }
}
ON_DEVICE void given_there() {
    device::end_fetches();
    device::await_fetches<0>();
    device::before_products();
    device::sync_all();
}

template <class S>
ON_DEVICE void await_others(const Hand<S>& who, const Common& all, const Room<S>& room, const Factors& f, const Work<S>& work) {
    stamp(all, 1);
    device::await_previous();
    stamp(all, 2);
    if (f.given == nullptr) {
        if (who.thread == 0)
#pragma unroll 1
            for (int chunk = 0; chunk < min(S::PLACES, S::chunks(device::rank_in_cluster())); ++chunk) ask_for_tokens(room, f, work, chunk);
        return;
    }
    if constexpr (S::Element::CODED) {
        // What is ahead of this norm is what was.
        Norm<S>(who, all, work).keep(who, all, room.factors(), false);
        device::sync_all();
    }
    for (int chunk = 0; chunk < S::PLACES; ++chunk) fetch_given(who, all, room, f, work, chunk);
    given_there();
}

// Code is dear: what a launch runs is new to its multiprocessor. So loops are loops, but where registers must have names.
template <class S>
ON_DEVICE void multiply(const Hand<S>& who, const Common& all, const Room<S>& room, const Factors& f, const Work<S>& work, float (&c)[S::SUMS]) {
    const int chunks = S::chunks(device::rank_in_cluster());
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int weight_place = chunk % S::WEIGHT_PLACES, place = chunk % S::PLACES;
        device::barrier_wait(room.weights_there(weight_place), uint32_t(chunk / S::WEIGHT_PLACES & 1));
        if (f.given == nullptr) device::barrier_wait(room.x_there(place), uint32_t(chunk / S::PLACES & 1));
        if (chunk == 0) stamp(all, 3);
        const char *a = room.weights(weight_place) + who.block * 8192, *b = room.x(place) + who.robot * CHUNK_BYTES;
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) S::Element::multiply(c, a + k * 32, b + k * 32, chunk + k > 0);
        device::products_end();
        const int weights_next = chunk - 1 + S::WEIGHT_PLACES, next = chunk - 1 + S::PLACES;
        const bool more_weights = S::WEIGHT_PLACES < S::CHUNKS && weights_next < chunks, more = S::PLACES < S::CHUNKS && next < chunks;
        if (chunk >= 1 && (more_weights || more)) {
            // The chunk before this one has been read: others take its place.
            device::await_products<1>();
            device::sync_all();
            if (who.thread == 0) {
                if (more_weights) ask_for_weights(room, f, weights_next);
                if (more && f.given == nullptr) ask_for_tokens(room, f, work, next);
            }
            if (more && f.given != nullptr) fetch_given(who, all, room, f, work, next), given_there();
        }
    }
    device::await_products<0>();
    if (S::IN_PLACE) device::cluster_arrive();
    stamp(all, 4);
}

ON_DEVICE float4 sum_of(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The token tiles that a thread ends with, and the shifts of its weight rows: its own sums, and those of the others.
template <class S>
struct Tiles {
    float4 own[S::EACH];

    // Send the others theirs. They have come when the barrier says so and all threads of this CTA are here.
    ON_DEVICE Tiles(const Hand<S>& who, const Room<S>& room, const float (&c)[S::SUMS], int tokens) {
        const int rank = device::rank_in_cluster();
#pragma unroll
        for (int to = 0; to < S::CUTS; ++to) {
            const bool mine = to == rank;
            const int from = mine ? 0 : rank - (rank > to);
            const device::Remote there = device::at_rank(room.sums(from, who.block, who.robot * S::EACH) + who.index, to), sent = device::at_rank(room.sent(), to);
#pragma unroll
            for (int i = 0; i < S::EACH; ++i) {
                const int n = to * S::EACH + i, at = n * 4;
                if (n >= TOKEN_TILES) continue;
                const float4 tile = {c[at], c[at + 1], c[at + 2], c[at + 3]};
                if (mine)
                    own[i] = tile;
                else
                    device::send4(there + i * S::SLOT_BYTES, sent, tile.x, tile.y, tile.z, tile.w);
            }
        }
        if (S::SHIFTED) send_shifts(who, room, c, tokens, rank);
    }
    ON_DEVICE static void await(const Room<S>& room) {
        if (S::CUTS > 1) device::barrier_wait(room.sent(), 0);
    }

    // A quarter of the lanes has the shift's row.
    ON_DEVICE void send_shifts(const Hand<S>& who, const Room<S>& room, const float (&c)[S::SUMS], int tokens, int rank) {
        const bool odd = tokens % 2;
        float2 shift = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
            if (n == tokens / 8) shift = {odd ? c[n * 4 + 1] : c[n * 4], odd ? c[n * 4 + 3] : c[n * 4 + 2]};
        if (who.t != tokens % 8 / 2) return;
#pragma unroll 1
        for (int to = 0; to < S::CUTS; ++to) {
            float2* here = room.shifts(to == rank ? S::CUTS - 1 : rank - (rank > to), who.block, who.robot) + who.w * 8 + who.g;
            if (to == rank)
                *here = shift;
            else
                device::send2(device::at_rank(here, to), device::at_rank(room.sent(), to), shift.x, shift.y);
        }
    }

    // In the order of ranks, behind its own.
    ON_DEVICE float4 sum(const Hand<S>& who, const Room<S>& room, int i) const {
        float4 all = own[i];
#pragma unroll
        for (int from = 0; from < S::CUTS - 1; ++from) all = sum_of(all, room.sums(from, who.block, who.robot * S::EACH + i)[who.index]);
        return all;
    }
    ON_DEVICE float2 shift(const Hand<S>& who, const Room<S>& room) const {
        const int at = who.w * 8 + who.g;
        float2 all = room.shifts(S::CUTS - 1, who.block, who.robot)[at];
#pragma unroll
        for (int from = 0; from < S::CUTS - 1; ++from) {
            const float2 one = room.shifts(from, who.block, who.robot)[at];
            all.x += one.x, all.y += one.y;
        }
        return all;
    }
};

}  // namespace chain
