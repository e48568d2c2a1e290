// Queries, keys and values of many tokens: heads are rotated, queries go to a tensor, keys and values to their arena. A channel and
// the one half a head further, with which it is rotated, alternate by eights in the rows of a tile.
#pragma once

#include "wide_fold.cuh"

namespace rope {

using wide::GROUP;
constexpr int HEAD = 256, HALF = HEAD / 2, PAIRS = 32;  // pairs of channels of a block of 64 rows

struct Given : wide::Factors {
    device::Map cos, sin;  // rows of a token's angles in fp32
    char *q, *k, *v;
    const int64_t* slots;
    int64_t k_slot, k_token, v_slot, v_token;  // distances, in numbers
    int heads, kv_heads, row_tokens;
    wide::Left left;
};

template <class C>
struct Finish {
    using Known = wide::Known<C>;
    // A token's row: for each block, lower channels, then upper ones.
    static constexpr int ROW_BYTES = C::BLOCKS * 2 * PAIRS * 2, TRAY_BYTES = C::COLUMNS * ROW_BYTES;
    static constexpr int KNOWN_AT = C::GROUPS * TRAY_BYTES, BYTES = KNOWN_AT + Known::BYTES;
    // Cosines and sines come as tiles of tokens, behind the products.
    static constexpr int MORE = 2 * (C::ROWS / 64);
    // Threads that look something up.
    static constexpr int KNOWERS = 32 + C::GROUPS * GROUP;
    static constexpr bool WAITS = false;
    static_assert(!C::LASTING && HEAD % C::ROWS == 0 && C::STAGES >= MORE);
    using Tray = wide::Tray<ROW_BYTES>;
    using Room = wide::Room<C, Finish>;

    const Given& a;
    char* base;
    Tray tray;
    Known known;
    int group, index;

    ON_DEVICE Finish(const Given& a, const Room& room, int rank, int group, int index)
        : a(a), base(room.base), tray{room.kept() + group * TRAY_BYTES}, known{room.kept() + KNOWN_AT}, group(group), index(index) {
        const wide::Tile tile = wide::Order<C>(a).at(device::cluster_id(C::CLUSTER), rank);
        known.note(a.left, a.tokens, tile, group * GROUP + index, [&](int token) { return place_of(a, tile.row / HEAD, token); });
        device::barrier_arrive(room.known());
    }

    static ON_DEVICE device::Place weight_at(const Given&, int column, int row) { return {{column, 0, 0, row % HEAD / 16, row / HEAD}}; }
    static ON_DEVICE bool turns(const Given& a, const wide::Tile& tile) { return tile.row / HEAD < a.heads + a.kv_heads; }
    static ON_DEVICE int more(const Given& a, const wide::Tile& tile) { return turns(a, tile) ? MORE : 0; }
    static ON_DEVICE void bring_more(const Given& a, const wide::Tile& tile, int j, char* to, device::Barrier* full) {
        const int pair = tile.row % HEAD / 2 + j / 2 * PAIRS;
        device::copy_tile(to, j % 2 ? a.sin : a.cos, {{pair * 2, tile.token, 0, 0, 0}}, full);
    }
    // Where a token's head begins, in numbers.
    static ON_DEVICE int64_t place_of(const Given& a, int head, int token) {
        if (head < a.heads) return (int64_t(token) * a.heads + head) * HEAD;
        const int64_t slot = a.slots[token / a.row_tokens];
        const int at = token % a.row_tokens, kept = head - a.heads;
        if (kept < a.kv_heads) return slot * a.k_slot + at * a.k_token + kept * HEAD;
        return slot * a.v_slot + at * a.v_token + (kept - a.kv_heads) * HEAD;
    }
    static ON_DEVICE void look_up(const Given& a, const Room& room, const wide::Tile& tile, int lane) {
        Known{room.kept() + KNOWN_AT}.fill(a.left, a.tokens, tile, lane, [&](int row) {
            return tile.row / HEAD * HEAD + tile.row % HEAD / 2 + wide::part_of(row) * HALF + wide::within_part(row);
        });
    }
    // A tile of cosines or sines: 32 numbers a token, of a run of 8.
    static ON_DEVICE float angle(const char* tile, int run, int token, int pair) {
        return *reinterpret_cast<const float*>(tile + run * 1024 + (token * 128 + ((pair / 4 ^ token) % 8) * 16 + pair % 4 * 4));
    }

    ON_DEVICE void operator()(const wide::Tile& tile, int count, float (&sums)[C::BLOCKS][C::COLUMNS / 2]) {
        const int warp = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
        const int row_part = group % C::BY_ROWS, first = group / C::BY_ROWS * C::COLUMNS, head = tile.row / HEAD;
        const bool turned = turns(a, tile);
        const Room room{base};
        constexpr int RUNS = C::COLUMNS / 8;
        device::barrier_wait(room.known(), 0);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; ++block) {
            const int row = (row_part * C::BLOCKS + block) * 64 + warp * 16 + g, pair = warp * 8 + g;
            const wide::Unfolded<C> unfold(known, a.left, tile, row, head * HEAD + tile.row % HEAD / 2 + wide::within_part(row), HALF);
            const int at = count + (row_part * C::BLOCKS + block) * 2;
            const char *cos = room.x(at % C::STAGES), *sin = room.x((at + 1) % C::STAGES);
            if (turned)
                for (int i = at; i < at + 2; ++i) device::barrier_wait(room.full(i % C::STAGES), uint32_t(i / C::STAGES & 1));
#pragma unroll
            for (int n = 0; n < RUNS; n += 4) {
                uint32_t low[4], high[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (n + i >= RUNS) break;
                    float* c = sums[block] + 4 * (n + i);
                    const int token = first + (n + i) * 8 + 2 * t;
                    unfold(token, c);
                    if (turned) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const int run = first / 8 + n + i;
                            const float x = c[j], y = c[2 + j], by = angle(cos, run, 2 * t + j, pair), into = angle(sin, run, 2 * t + j, pair);
                            c[j] = x * by - y * into, c[2 + j] = y * by + x * into;
                        }
                    }
                    low[i] = device::pack(c[0], c[1]), high[i] = device::pack(c[2], c[3]);
                }
                tray.template put<RUNS>(n, low, block * 8 + warp, lane);
                tray.template put<RUNS>(n, high, block * 8 + 4 + warp, lane);
            }
        }
        device::sync_group(group);
        char* to = head < a.heads ? a.q : head < a.heads + a.kv_heads ? a.k : a.v;
        to += (tile.row % HEAD / 2 + row_part * C::BLOCKS * PAIRS) * 2;
        tray.send(C::COLUMNS, index, [&](int token, int piece) -> char* {
            const int64_t at = known.place()[first + token];
            const int channel = piece / 8 * PAIRS + piece / 4 % 2 * HALF + piece % 4 * 8;
            return at < 0 ? nullptr : to + (at + channel) * 2;
        });
    }
};

}  // namespace rope
