// Products of weights and many tokens, in bf16 or e4m3: weights are the tall side and tokens the broad one, whose tiles may be of any
// multiple of 8 tokens, so that none are wasted on tokens that are not there. What is done to the sums is a template's matter.
//
// A CTA has ROWS rows of the weight and TOKENS tokens. A cluster has ACROSS blocks of rows by ALONG blocks of tokens: CTAs of the same
// rows bring them for each other, and so do those of the same tokens. It may have SPLITS such crowds, each for a run of the columns.
// Tokens that are left over when ALONG does not divide their tiles go to a crowd of different rows.
#pragma once

#ifndef STRETTO_ON_HOST
#include "wide_device.cuh"
#endif

namespace wide {

constexpr int GROUP = 128, STRIP = 8;

// BY_ROWS x BY_TOKENS groups of 128 threads share a CTA's sums. LASTING: CTAs take tile after tile, as many as the device holds;
// else each has one tile, and leaves room for a second CTA beside it where memory does.
template <int ROWS_, int TOKENS_, int BY_ROWS_, int BY_TOKENS_, int ACROSS_, int ALONG_, int STAGES_, bool CODED_, int SPLITS_ = 1,
          bool LASTING_ = false>
struct Cut {
    static constexpr int ROWS = ROWS_, TOKENS = TOKENS_, BY_ROWS = BY_ROWS_, BY_TOKENS = BY_TOKENS_, STAGES = STAGES_;
    static constexpr int ACROSS = ACROSS_, ALONG = ALONG_, SPLITS = SPLITS_, CROWD = ACROSS * ALONG, CLUSTER = CROWD * SPLITS;
    static constexpr bool CODED = CODED_, LASTING = LASTING_;
    static constexpr int GROUPS = BY_ROWS * BY_TOKENS;
    // Blocks of 64 rows, and tokens, of a group.
    static constexpr int BLOCKS = ROWS / 64 / BY_ROWS, COLUMNS = TOKENS / BY_TOKENS;
    // Behind the groups: a warp that copies and one that looks things up; whole groups where registers are given away.
    static constexpr int THREADS = GROUPS * GROUP + (LASTING ? GROUP : 64);
    static constexpr int WEIGHT_BYTES = ROWS * 128, STAGE_BYTES = WEIGHT_BYTES + TOKENS * 128, STAGES_BYTES = STAGES * STAGE_BYTES;
    static_assert(ROWS % (64 * BY_ROWS) == 0 && TOKENS % (8 * BY_TOKENS) == 0 && (CROWD & (CROWD - 1)) == 0);
};

struct Factors {
    device::Map weight, x;
    int rows, tokens;       // rows of the weight
    int chunks;             // of 128 bytes of a row
};

// Who brings what: of `parts` CTAs each every `mine`th chunk, to those in the mask.
struct Sharing {
    int parts, mine;
    uint32_t mask;
};

// What a CTA works on.
struct Tile {
    int row, token, chunk, chunks;
    Sharing weights, x;
};

// Clusters of tiles in their order: strips of STRIP token tiles, so that those which run at once share weights and tokens in the
// second-level cache. Blocks of rows are a multiple of CROWD.
template <class C>
struct Order {
    int columns, odd, row_groups, strips, all, chunks;

    ON_DEVICE explicit Order(const Factors& a) {
        const int tiles = (a.tokens + C::TOKENS - 1) / C::TOKENS;
        columns = tiles / C::ALONG, odd = tiles % C::ALONG, row_groups = a.rows / C::ROWS / C::CROWD;
        strips = max((columns + STRIP - 1) / STRIP, 1);
        all = row_groups * tiles;
        chunks = a.chunks;
    }
    ON_DEVICE Tile at(int i, int rank) const {
        const int split = rank / C::CROWD, r = rank % C::CROWD, base = split * C::CROWD;
        const int strip = min(i / (STRIP * C::ALONG * row_groups), strips - 1);
        const bool last = strip == strips - 1;
        const int height = last ? columns - strip * STRIP : STRIP, each = C::ALONG * height + (last ? odd : 0);
        const int within = i - strip * STRIP * C::ALONG * row_groups, first = within / each * C::CROWD, j = within % each;
        Tile tile;
        tile.chunk = chunks * split / C::SPLITS, tile.chunks = chunks * (split + 1) / C::SPLITS - tile.chunk;
        if (j < C::ALONG * height) {
            const int row = r / C::ALONG, token = r % C::ALONG;
            tile.row = (first + j / height * C::ACROSS + row) * C::ROWS;
            tile.token = ((strip * STRIP + j % height) * C::ALONG + token) * C::TOKENS;
            tile.weights = {C::ALONG, token, ((1u << C::ALONG) - 1) << (base + row * C::ALONG)};
            uint32_t across = 0;
#pragma unroll
            for (int other = 0; other < C::ACROSS; ++other) across |= 1u << (base + other * C::ALONG + token);
            tile.x = {C::ACROSS, row, across};
        } else {
            tile.row = (first + r) * C::ROWS, tile.token = (columns * C::ALONG + j - C::ALONG * height) * C::TOKENS;
            tile.weights = {1, 0, 0}, tile.x = {C::CROWD, r, ((1u << C::CROWD) - 1) << base};
        }
        return tile;
    }
};

// Stages, what the finish keeps, barriers: full and free ones of the stages, and that of what was looked up.
template <class C, class Finish>
struct Room {
    static constexpr int BARRIERS_AT = C::STAGES_BYTES + Finish::BYTES, BYTES = BARRIERS_AT + (2 * C::STAGES + 1) * 8;
    static_assert(Finish::BYTES % 16 == 0 && BYTES <= 227 * 1024);
    char* base;

    ON_DEVICE char* weights(int stage) const { return base + stage * C::STAGE_BYTES; }
    ON_DEVICE char* x(int stage) const { return weights(stage) + C::WEIGHT_BYTES; }
    ON_DEVICE char* kept() const { return base + C::STAGES_BYTES; }
    ON_DEVICE device::Barrier* full(int stage) const { return reinterpret_cast<device::Barrier*>(base + BARRIERS_AT) + stage; }
    ON_DEVICE device::Barrier* free(int stage) const { return full(stage) + C::STAGES; }
    ON_DEVICE device::Barrier* known() const { return full(0) + 2 * C::STAGES; }
};

// How many CTAs run on a multiprocessor at once, which is what the compiler has to leave registers for.
template <class C, class Finish>
constexpr int BESIDE = !C::LASTING && C::BLOCKS * C::COLUMNS <= 128 && C::GROUPS <= 2 && Room<C, Finish>::BYTES <= 113 * 1024 ? 2 : 1;

// Bring a chunk if it is this CTA's turn.
ON_DEVICE void bring_shared(char* to, const device::Map& map, const Sharing& by, int chunk, device::Barrier* full, const device::Place& at) {
    if ((chunk & (by.parts - 1)) != by.mine) return;
    if (by.parts == 1) device::copy_tile(to, map, at, full);
    else device::copy_tile_to_many(to, map, at, full, by.mask);
}

template <class C, class Finish, class Given>
ON_DEVICE void bring_weights(const Given& a, const Room<C, Finish>& room, const Tile& tile, int chunk, int stage) {
    bring_shared(room.weights(stage), a.weight, tile.weights, chunk, room.full(stage), Finish::weight_at(a, (tile.chunk + chunk) * 64, tile.row));
}

template <class C, class Finish, class Given>
ON_DEVICE void bring_tokens(const Given& a, const Room<C, Finish>& room, const Tile& tile, int chunk, int stage) {
    bring_shared(room.x(stage), a.x, tile.x, chunk, room.full(stage), {{(tile.chunk + chunk) * 64, tile.token, 0, 0, 0}});
}

// One thread brings chunk after chunk of tile after tile. Weights of the first ones do not wait for the launch before.
template <class C, class Finish, class Given>
ON_DEVICE void bring(const Given& a, const Room<C, Finish>& room, const Order<C>& order, int rank) {
    int count = 0;
#pragma unroll 1
    for (int i = device::cluster_id(C::CLUSTER); i < order.all; i += device::clusters(C::CLUSTER)) {
        const Tile tile = order.at(i, rank);
        int chunk = 0;
        if (count == 0) {
            const int ahead = min(C::STAGES, tile.chunks);
#pragma unroll 1
            for (; count < ahead; ++count) {
                device::barrier_arrive_expecting(room.full(count), C::STAGE_BYTES);
                bring_weights(a, room, tile, count, count);
            }
            device::await_previous();
#pragma unroll 1
            for (; chunk < ahead; ++chunk) bring_tokens(a, room, tile, chunk, chunk);
        }
#pragma unroll 1
        for (; chunk < tile.chunks; ++chunk, ++count) {
            const int stage = count % C::STAGES;
            // All that share the stage have read what was here.
            device::barrier_wait(room.free(stage), uint32_t(count / C::STAGES & 1) ^ 1);
            device::barrier_arrive_expecting(room.full(stage), C::STAGE_BYTES);
            bring_weights(a, room, tile, chunk, stage);
            bring_tokens(a, room, tile, chunk, stage);
        }
        const int more = Finish::more(a, tile);
#pragma unroll 1
        for (int j = 0; j < more; ++j, ++count) {
            const int stage = count % C::STAGES;
            device::barrier_wait(room.free(stage), uint32_t(count / C::STAGES & 1) ^ 1);
            device::barrier_arrive_expecting(room.full(stage), C::TOKENS * 128);
            Finish::bring_more(a, tile, j, room.x(stage), room.full(stage));
        }
    }
}

// Tell all CTAs of the crowd that this group has read a stage.
template <class C, class Finish>
ON_DEVICE void release(const Room<C, Finish>& room, int rank, int index, int stage) {
    if (index < C::CROWD) device::barrier_arrive_at(device::at_rank(room.free(stage), rank / C::CROWD * C::CROWD + index));
}

template <class C, class Finish, class Given>
ON_DEVICE void consume(const Given& a, const Room<C, Finish>& room, const Order<C>& order, int rank, int group, int index) {
    const int row_part = group % C::BY_ROWS, token_part = group / C::BY_ROWS;
    Finish finish(a, room, rank, group, index);
    int count = 0;
#pragma unroll 1
    for (int i = device::cluster_id(C::CLUSTER); i < order.all; i += device::clusters(C::CLUSTER)) {
        const Tile tile = order.at(i, rank);
        float sums[C::BLOCKS][C::COLUMNS / 2];
#pragma unroll 1
        for (int chunk = 0; chunk < tile.chunks; ++chunk, ++count) {
            const int stage = count % C::STAGES;
            device::barrier_wait(room.full(stage), uint32_t(count / C::STAGES & 1));
            const char *weights = room.weights(stage) + row_part * C::BLOCKS * 8192, *x = room.x(stage) + token_part * C::COLUMNS * 128;
            device::products_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int block = 0; block < C::BLOCKS; ++block)
                    device::Product<C::COLUMNS, C::CODED>::add_to(sums[block], weights + block * 8192 + k * 32, x + k * 32, chunk + k > 0);
            device::products_end();
            if (chunk > 0) {
                device::await_products<1>();
                release(room, rank, index, (count - 1) % C::STAGES);
            }
        }
        device::await_products<0>();
        release(room, rank, index, (count - 1) % C::STAGES);
        // `count`: of the stage where what the finish has brought begins.
        finish(tile, count, sums);
        count += Finish::more(a, tile);
    }
}

template <class C, class Finish, class Given>
ON_DEVICE void run(const Given& a, char* shared) {
    const Room<C, Finish> room{shared};
    const Order<C> order(a);
    const int thread = device::thread_id(), rank = device::rank_in_cluster();
    if (!C::LASTING) device::let_next_start();
    if (thread == C::GROUPS * GROUP) device::ask_for_map(a.weight), device::ask_for_map(a.x);
    if (thread == 0) {
        for (int stage = 0; stage < C::STAGES; ++stage) {
            device::barrier_init(room.full(stage), 1);
            device::barrier_init(room.free(stage), C::CROWD * C::GROUPS);
        }
        device::barrier_init(room.known(), Finish::KNOWERS);
        device::barriers_ready();
    }
    device::sync_all();
    // Partners bring chunks to each other; where they only send sums, it is the finish that waits for them.
    if (C::CLUSTER > 1) device::cluster_arrive();
    if (C::CROWD > 1) device::cluster_wait();
    if (thread >= C::GROUPS * GROUP) {
        if (C::LASTING) device::give_registers();
        const int other = thread - C::GROUPS * GROUP;
        if (other == 0) bring(a, room, order, rank);
        if constexpr (!C::LASTING) {
            if (other >= 32) {
                device::await_previous();
                Finish::look_up(a, room, order.at(device::cluster_id(C::CLUSTER), rank), other - 32);
                device::barrier_arrive(room.known());
            }
        }
        device::sync_warp();
        if (C::CLUSTER > C::CROWD && C::CROWD == 1) device::cluster_wait();
    } else {
        if (C::LASTING) device::take_registers();
        if (!Finish::WAITS) device::await_previous();
        consume(a, room, order, rank, thread / GROUP, thread % GROUP);
    }
    // A CTA stays until its partners send it nothing more.
    if (C::CLUSTER > 1) {
        device::cluster_arrive();
        device::cluster_wait();
    }
}

}  // namespace wide
