// Products of the tokens' rows with 64 rows of weights a warp group, cut along their input over the CTAs of a cluster.
#pragma once

#include "chain_plan.cuh"

namespace chain {

// E: of which numbers. CUTS: CTAs of a cluster. BLOCKS: warp groups, of 64 weight rows each. CHUNKS: of input columns, a CTA's
// cut; so many of the weights' and of the tokens' are in shared memory at once. SHIFTED: each CTA also gets the token tile with
// the shift's row.
template <class E, int INPUT_, int CUTS_, int BLOCKS_, int WEIGHT_PLACES_, int PLACES_, bool SHIFTED_>
struct Shape {
    using Element = E;
    static constexpr int INPUT = INPUT_, CUTS = CUTS_, BLOCKS = BLOCKS_, WEIGHT_PLACES = WEIGHT_PLACES_, PLACES = PLACES_;
    static constexpr int ALL_CHUNKS = INPUT / E::COLUMNS, CHUNKS = (ALL_CHUNKS + CUTS - 1) / CUTS;
    static constexpr int THREADS = BLOCKS * GROUP;
    static constexpr bool SHIFTED = SHIFTED_;
    // A rank ends with EACH token tiles, 16 bytes a thread.
    static constexpr int EACH = (TOKEN_TILES + CUTS - 1) / CUTS, SLOTS = EACH + SHIFTED, SLOT_BYTES = GROUP * 16;
    static constexpr int WEIGHT_CHUNK = BLOCKS * 64 * 128;
    static constexpr int X_AT = WEIGHT_PLACES * WEIGHT_CHUNK, SUMS_AT = X_AT + PLACES * CHUNK_BYTES;
    static constexpr int FACTORS_AT = SUMS_AT + (CUTS - 1) * BLOCKS * SLOTS * SLOT_BYTES, BARRIERS_AT = FACTORS_AT + 64 * 4;
    static constexpr int BYTES = BARRIERS_AT + (WEIGHT_PLACES + PLACES + 1) * 8;
    // The last cut may be shorter.
    ON_DEVICE static int chunks(int rank) { return ALL_CHUNKS % CUTS == 0 ? CHUNKS : min(CHUNKS, ALL_CHUNKS - rank * CHUNKS); }
    static_assert(CHUNKS % PLACES == 0 && CHUNKS % WEIGHT_PLACES == 0 && WEIGHT_PLACES >= PLACES && BYTES <= 227 * 1024 && X_AT % 1024 == 0 && CHUNK_BYTES % 1024 == 0);
};
#ifndef STRETTO_QKV_CUTS
#define STRETTO_QKV_CUTS 4
#endif
#ifndef STRETTO_GATE_PLACES
#define STRETTO_GATE_PLACES 4
#endif
constexpr int QKV_CHUNKS = (16 + STRETTO_QKV_CUTS - 1) / STRETTO_QKV_CUTS;
// The shapes of a layer's products.
struct PlainShapes {
    using Element = Plain;
    using Qkv = Shape<Plain, WIDTH, STRETTO_QKV_CUTS, 1, QKV_CHUNKS, STRETTO_QKV_CUTS == 3 ? 3 : QKV_CHUNKS, true>;
    using Out = Shape<Plain, INNER, 8, 1, 4, 4, false>;
    using GateUp = Shape<Plain, WIDTH, 2, 2, STRETTO_GATE_PLACES, STRETTO_GATE_PLACES, true>;
    using Down = Shape<Plain, MLP, 8, 1, 8, 4, false>;
};
#ifndef STRETTO_CODED_QKV_CUTS
#define STRETTO_CODED_QKV_CUTS 4
#endif
#ifndef STRETTO_CODED_GATE_CUTS
#define STRETTO_CODED_GATE_CUTS 1
#endif
// Shifts come from a table, and all of a CTA's cut is in shared memory at once.
struct CodedShapes {
    using Element = Coded;
    static constexpr int QKV_CHUNKS = 8 / STRETTO_CODED_QKV_CUTS, GATE_CHUNKS = 8 / STRETTO_CODED_GATE_CUTS;
    using Qkv = Shape<Coded, WIDTH, STRETTO_CODED_QKV_CUTS, 1, QKV_CHUNKS, QKV_CHUNKS, false>;
    using Out = Shape<Coded, INNER, 8, 1, 2, 2, false>;
    using GateUp = Shape<Coded, WIDTH, STRETTO_CODED_GATE_CUTS, STRETTO_CODED_GATE_CUTS, GATE_CHUNKS, GATE_CHUNKS, false>;
    using Down = Shape<Coded, MLP, 8, 1, 4, 4, false>;
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
static_assert((STRETTO_GATE_PLACES > 4 || neighbours_fit<PlainShapes>()) && neighbours_fit<CodedShapes>());

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
ON_DEVICE void ask_for_tokens(const Room<S>& room, const Factors& f, int chunk) {
    const int place = chunk % S::PLACES;
    const char* from = f.x + int64_t(device::rank_in_cluster() * S::CHUNKS + chunk) * CHUNK_BYTES;
    device::barrier_arrive_expecting(room.x_there(place), CHUNK_BYTES);
    device::copy_row(room.x(place), from, CHUNK_BYTES, room.x_there(place));
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
    device::cluster_arrive();
}

// The same for rows as they are, by all threads; in e4m3 by factors that are in shared memory.
template <class S>
ON_DEVICE void fetch_given(const Who& who, const Common& all, const Room<S>& room, const Factors& f, int chunk) {
    const int rank = device::rank_in_cluster();
    if (chunk >= S::chunks(rank)) return;
    if constexpr (S::Element::CODED) {
        constexpr int TIMES = (ROWS * 8 + S::THREADS - 1) / S::THREADS;
        float4 from[TIMES][2];
#pragma unroll
        for (int n = 0; n < TIMES; ++n) {
            const int i = n * S::THREADS + who.thread, row = min(i / 8, all.tokens - 1);
            const float4* at = reinterpret_cast<const float4*>(f.given + row * S::INPUT + (rank * S::CHUNKS + chunk) * 128 + i % 8 * 16);
            from[n][0] = at[0], from[n][1] = at[1];
        }
#pragma unroll
        for (int n = 0; n < TIMES; ++n) {
            const int i = n * S::THREADS + who.thread, row = i / 8;
            if (row >= ROWS) continue;
            const float4 codes = coded(from[n][0], from[n][1], row < all.tokens ? room.factors()[row] : 0.0f);
            *reinterpret_cast<float4*>(room.x(chunk % S::PLACES) + row * 128 + (i % 8 ^ row % 8) * 16) = codes;
        }
    } else {
#pragma unroll 1
        for (int i = who.thread; i < ROWS * 8; i += S::THREADS) {
            const int piece = i % 8, row = i / 8;
            const bool there = row <= all.tokens;
            const bf16* from = f.given + (there ? row : 0) * S::INPUT + (rank * S::CHUNKS + chunk) * 64 + piece * 8;
            device::fetch16(room.x(chunk % S::PLACES) + row * 128 + (piece ^ row % 8) * 16, from, there);
        }
    }
}
ON_DEVICE void given_there() {
    device::end_fetches();
    device::await_fetches<0>();
    device::before_products();
    device::sync_all();
}

// Sums of squares of the tokens' rows: two lanes have a row, of which each reads half. Read before products, summed up behind.
struct Rows {
    float4 part[2] = {};

    ON_DEVICE Rows(const Who& who, const Common& all, const Squares& squares) {
        const int row = who.thread / 2, half = who.thread % 2;
        if (row >= all.tokens) return;
        const float* at = squares.at + row * squares.parts;
        if (squares.parts == TILES) {
#pragma unroll
            for (int i = 0; i < 2; ++i) part[i] = reinterpret_cast<const float4*>(at)[half * 2 + i];
        } else {
#pragma unroll 1
            for (int i = half; i < squares.parts; i += 2) part[0].x += at[i];
        }
    }
    ON_DEVICE float sum() const {
        const float own = ((part[0].x + part[0].y) + (part[0].z + part[0].w)) + ((part[1].x + part[1].y) + (part[1].z + part[1].w));
        return own + device::from_lane_xor(own, 1);
    }
    ON_DEVICE void keep(const Who& who, float* factors, float factor) const {
        if (who.thread % 2 == 0 && who.thread < 2 * ROWS) factors[who.thread / 2] = factor;
    }
};

template <class S>
ON_DEVICE void await_others(const Who& who, const Common& all, const Room<S>& room, const Factors& f) {
    stamp(all, 1);
    device::await_previous();
    stamp(all, 2);
    if (f.given == nullptr) {
        if (who.thread == 0)
#pragma unroll 1
            for (int chunk = 0; chunk < min(S::PLACES, S::chunks(device::rank_in_cluster())); ++chunk) ask_for_tokens(room, f, chunk);
        return;
    }
    if (S::Element::CODED) {
        const Rows rows(who, all, all.before);
        rows.keep(who, room.factors(), device::inverse_root(rows.sum() / WIDTH + all.eps));
        device::sync_all();
    }
    for (int chunk = 0; chunk < S::PLACES; ++chunk) fetch_given(who, all, room, f, chunk);
    given_there();
}

// Code is dear: what a launch runs is new to its multiprocessor. So loops are loops, but where registers must have names.
template <class S>
ON_DEVICE void multiply(const Who& who, const Common& all, const Room<S>& room, const Factors& f, float (&c)[28]) {
    const int chunks = S::chunks(device::rank_in_cluster());
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int weight_place = chunk % S::WEIGHT_PLACES, place = chunk % S::PLACES;
        device::barrier_wait(room.weights_there(weight_place), uint32_t(chunk / S::WEIGHT_PLACES & 1));
        if (f.given == nullptr) device::barrier_wait(room.x_there(place), uint32_t(chunk / S::PLACES & 1));
        if (chunk == 0) stamp(all, 3);
        const char *a = room.weights(weight_place) + who.group * 8192, *b = room.x(place);
        device::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) S::Element::multiply(c, a + k * 32, b + k * 32, chunk + k > 0);
        device::products_end();
        if (S::PLACES < S::CHUNKS && chunk >= 1 && chunk - 1 + S::PLACES < chunks) {
            // The chunk before this one has been read: others take its place.
            device::await_products<1>();
            device::sync_all();
            if (who.thread == 0) {
                if (S::WEIGHT_PLACES == S::PLACES) ask_for_weights(room, f, chunk - 1 + S::WEIGHT_PLACES);
                if (f.given == nullptr) ask_for_tokens(room, f, chunk - 1 + S::PLACES);
            }
            if (f.given != nullptr) fetch_given(who, all, room, f, chunk - 1 + S::PLACES), given_there();
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

// Wait for what the others send.
template <class S>
ON_DEVICE void await_sent(const Room<S>& room) {
    if (S::CUTS > 1) device::barrier_wait(room.sent(), 0);
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

// What a token's product is multiplied by: 1 / rms of its row, and in e4m3 what makes numbers of codes. Read while products run,
// in shared memory after the next barrier.
template <class E>
struct Factor {
    Rows rows, before;
    float by = 1.0f;

    ON_DEVICE Factor(const Who& who, const Common& all) : rows(who, all, all.squares), before(E::CODED ? Rows(who, all, all.before) : rows) {
        if (E::CODED) by = *all.by;
    }
    ON_DEVICE void keep(const Who& who, const Common& all, float* factors) const {
        const float mean = rows.sum() / WIDTH + all.eps;
        rows.keep(who, factors, E::CODED ? device::inverse_root(mean / (before.sum() / WIDTH + all.eps)) * by : device::inverse_root(mean));
    }
};

// Two columns' share of the shift.
ON_DEVICE float2 tabled(const Shift& s, int one, int other) {
    const float* line = s.table + (s.line == nullptr ? 0 : *s.line) * s.step;
    return {line[one], line[other]};
}

// Of a token tile that holds the shift's row: the shift of this thread's two weight rows.
ON_DEVICE float2 shift_of(const Who& who, int tokens, const float4& tile) {
    const int lane = who.g * 4 + tokens % 8 / 2;
    const bool odd = tokens % 2;
    return {device::from_lane(odd ? tile.y : tile.x, lane), device::from_lane(odd ? tile.w : tile.z, lane)};
}

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
    const Who who;
    const Room<S> room{shared};
    const int tile = device::block_id() / S::CUTS, head = tile / 4, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    const Factors f = {a.weight, {0, 0, 0, tile % 4 * 4, head}, {}, a.x, a.given};
    begin(who, a.all, room, f);
    const int pair = tile % 4 * 32 + who.w * 8 + who.g;
    const float turns = head <= HEADS ? device::power_of_two(-a.log2_theta / HALF * float(pair)) : 0.0f, start = float(*a.start);
    float2 turn[S::EACH][2];
#pragma unroll
    for (int i = 0; i < S::EACH; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) turn[i][j] = cos_sin((start + float((rank * S::EACH + i) * 8 + who.t * 2 + j)) * turns);
    // The first layer's table may still be waited for by the launch before.
    const int row = head * HEAD + pair;
    float2 shift;
    if (S::Element::CODED && a.given == nullptr) shift = tabled(a.shift, row, row + HALF);
    await_others(who, a.all, room, f);
    if (S::Element::CODED && a.given != nullptr) shift = tabled(a.shift, row, row + HALF);
    const Factor<typename S::Element> factor_of(who, a.all);
    float c[28];
    multiply(who, a.all, room, f, c);
    factor_of.keep(who, a.all, room.factors());
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    await_sent(room);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    if (S::SHIFTED) shift = shift_of(who, tokens, tiles.sum[S::SLOTS - 1]);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        const float low[2] = {tiles.sum[i].x, tiles.sum[i].y}, high[2] = {tiles.sum[i].z, tiles.sum[i].w};
        const int n = rank * S::EACH + i;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = n * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[token], l = low[j] * factor + shift.x, h = high[j] * factor + shift.y;
            const float2 by = turn[i][j];
            const bf16 first = rounded<Plain>(l * by.x - h * by.y), second = rounded<Plain>(h * by.x + l * by.y);
            if (head < HEADS) {
                // Blocks of 8 tokens, four chunks of 64 columns; rows are (token, head).
                char* at = a.q + n * (4 * 8192) + pair / 64 * 8192;
                const int query = token % 8 * 8 + head;
                *reinterpret_cast<bf16*>(at + in_chunk(query, pair % 64)) = first;
                *reinterpret_cast<bf16*>(at + 2 * 8192 + in_chunk(query, pair % 64)) = second;
            } else {
                bf16* at = a.kv[head - HEADS] + token * HEAD + pair;
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
    const Who who;
    const Room<S> room{shared};
    const int first = device::block_id() / S::CUTS * S::BLOCKS * 32, rank = device::rank_in_cluster(), tokens = a.all.tokens;
    const Factors f = {a.weight, {0, 0, 0, first / 8, 0}, {0, 0, 0, first / 8 + 4, 0}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = first + who.group * 32 + who.w * 8 + who.g;
    float2 shift;
    if (E::CODED) shift = tabled(a.shift, column, MLP + column);
    const float to = E::CODED ? *a.all.to : 1.0f;
    await_others(who, a.all, room, f);
    const Factor<E> factor_of(who, a.all);
    float c[28];
    multiply(who, a.all, room, f, c);
    factor_of.keep(who, a.all, room.factors());
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    device::sync_all();
    await_sent(room);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    if (S::SHIFTED) shift = shift_of(who, tokens, tiles.sum[S::SLOTS - 1]);
#pragma unroll
    for (int i = 0; i < S::EACH; ++i) {
        const float gate[2] = {tiles.sum[i].x, tiles.sum[i].y}, up[2] = {tiles.sum[i].z, tiles.sum[i].w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = (rank * S::EACH + i) * 8 + who.t * 2 + j;
            if (token >= tokens) continue;
            const float factor = room.factors()[token];
            float out = gelu(gate[j] * factor + shift.x) * (up[j] * factor + shift.y);
            if (E::CODED) out *= to;
            *in_chunks<E>(a.hidden, token, column) = rounded<E>(out);
        }
    }
    stamp(a.all, 7);
}

// What the norms do to two columns of the stream.
struct Lines {
    float gate[2], scale[2], shift[2];

    ON_DEVICE Lines(const Add& a, int column) {
        const float *line = a.table + (a.line == nullptr ? 0 : *a.line) * a.line_step, *next = line + a.norm_step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = column + i * 8;
            gate[i] = line[2 * WIDTH + at], scale[i] = 1.0f + next[at], shift[i] = next[WIDTH + at];
        }
    }
};

// The residual of a thread's two tokens and two columns.
ON_DEVICE float4 residual_of(const Add& a, int token, int column, const float4* kept) {
    if (a.given == nullptr) return *kept;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* at = a.given + token * WIDTH + column;
    if (token < a.all.tokens) before.x = at[0], before.z = at[8];
    if (token + 1 < a.all.tokens) before.y = at[WIDTH], before.w = at[WIDTH + 8];
    return before;
}

// 1 / rms of a thread's two tokens' rows one norm ago: lanes that have the same tokens read a part each.
struct Before {
    float part[2][2] = {};

    ON_DEVICE Before(const Who& who, const Common& all, int token, bool wanted) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (!wanted || token + j >= all.tokens) continue;
            const float* at = all.before.at + (token + j) * all.before.parts;
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (who.g + k * 8 < all.before.parts) part[j][k] = at[who.g + k * 8];
#pragma unroll 1
            for (int i = who.g + 16; i < all.before.parts; i += 8) part[j][0] += at[i];
        }
    }
    ON_DEVICE float root(const Common& all, int j) const {
        float sum = part[j][0] + part[j][1];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += device::from_lane_xor(sum, step);
        return device::inverse_root(sum / WIDTH + all.eps);
    }
};

// A cluster has 64 columns of the stream; each of its CTAs but the last ends with one token tile.
template <class S>
ON_DEVICE void add(const Add& a, char* shared) {
    using E = typename S::Element;
    const Who who;
    const Room<S> room{shared};
    const int tile = device::block_id() / S::CUTS, n = device::rank_in_cluster(), tokens = a.all.tokens;
    const bool owns = n < TOKEN_TILES, last = a.scaled_last != nullptr;
    const Factors f = {a.weight, {0, tile * TILE, 0, 0, 0}, {}, a.x, nullptr};
    begin(who, a.all, room, f);
    const int column = tile * TILE + who.w * 16 + who.g, token = n * 8 + who.t * 2;
    Lines lines(a, column);
    if (E::CODED)
#pragma unroll
        for (int i = 0; i < 2; ++i) lines.gate[i] *= *a.all.by;
    await_others(who, a.all, room, f);
    const Before of_before(who, a.all, token, E::CODED && owns && !last);
    float4* kept = reinterpret_cast<float4*>(a.residual) + (tile * TOKEN_TILES + n) * GROUP + who.index;
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    if (owns) before = residual_of(a, token, column, kept);
    float c[28];
    multiply(who, a.all, room, f, c);
    float over[2] = {1.0f, 1.0f};
    if (E::CODED)
#pragma unroll
        for (int j = 0; j < 2; ++j) over[j] = of_before.root(a.all, j);
    device::cluster_wait();
    Tiles<S> tiles(who, room, c, tokens);
    if (!owns) return;
    await_sent(room);
    stamp(a.all, 5);
    tiles.add_up(who, room);
    const float4 sum = tiles.sum[0];
    const float4 now = {before.x + lines.gate[0] * sum.x, before.y + lines.gate[0] * sum.y,
                        before.z + lines.gate[1] * sum.z, before.w + lines.gate[1] * sum.w};
    const float value[2][2] = {{now.x, now.z}, {now.y, now.w}};
    if (!last) *kept = now;
    float square[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        square[j] = value[j][0] * value[j][0] + value[j][1] * value[j][1];
        if (token + j > tokens) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float out = token + j == tokens ? lines.shift[i] : value[j][i] * lines.scale[i];
            const int at = (token + j) * WIDTH + column + i * 8;
            if (last) {
                a.scaled_last[at] = out;
                if (token + j < tokens) a.residual_last[at] = value[j][i];
            } else {
                if (E::CODED) out *= over[j];
                *in_chunks<E>(a.scaled, token + j, column + i * 8) = rounded<E>(out);
            }
        }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < 2; ++j) square[j] += device::from_lane_xor(square[j], step);
    float* parts = room.factors();
    if (who.g == 0)
#pragma unroll
        for (int j = 0; j < 2; ++j) parts[who.w * 8 + who.t * 2 + j] = square[j];
    device::sync_all();
    if (who.thread < 8 && n * 8 + who.thread < tokens) {
        const float* at = parts + who.thread;
        a.squares_out[(n * 8 + who.thread) * TILES + tile] = (at[0] + at[8]) + (at[16] + at[24]);
    }
    stamp(a.all, 7);
}

}  // namespace chain
