// gelu(x Wg^T) * (x Wu^T) for many tokens, in bf16 or from and to e4m3; gates alternate with their values in the rows of a tile.
#pragma once

#include "wide_fold.cuh"

namespace gated {

using wide::GROUP;

struct Given : wide::Factors {
    char* out;
    const float *x_scale, *weight_scale, *multiplier;  // of coded factors of whole norms, and of a coded result
    wide::Left left;
};

// A product that lasts is of whole norms; else what is left of one is done here, to codes too.
template <class C>
struct Finish {
    static constexpr bool FOLDED = !C::LASTING;
    using Known = wide::Known<C>;
    static constexpr int EACH = C::CODED ? 1 : 2;
    // A group has 32 features for each of its blocks.
    static constexpr int FEATURES = C::BLOCKS * 32, ROW_BYTES = FEATURES * EACH, TRAY_BYTES = C::COLUMNS * ROW_BYTES;
    static constexpr int KNOWN_AT = C::GROUPS * TRAY_BYTES, BYTES = KNOWN_AT + (C::LASTING ? 0 : Known::BYTES);
    // Threads that look something up.
    static constexpr int KNOWERS = 32 + C::GROUPS * GROUP;
    static constexpr bool WAITS = false;
    using Tray = wide::Tray<ROW_BYTES>;
    using Room = wide::Room<C, Finish>;

    const Given& a;
    Tray tray;
    Known known;
    device::Barrier* ready;
    int group, index;
    float scale = 1.0f, code = 1.0f;

    ON_DEVICE Finish(const Given& a, const Room& room, int rank, int group, int index)
        : a(a), tray{room.kept() + group * TRAY_BYTES}, known{room.kept() + KNOWN_AT}, ready(room.known()), group(group), index(index) {
        if constexpr (C::CODED && !FOLDED) scale = device::at(a.x_scale) * device::at(a.weight_scale);
        if constexpr (C::CODED) code = scale * device::at(a.multiplier);
        if constexpr (!C::LASTING) {
            const wide::Tile tile = wide::Order<C>(a).at(device::cluster_id(C::CLUSTER), rank);
            known.note(a.left, a.tokens, tile, group * GROUP + index, [&](int token) { return int64_t(token) * (a.rows / 2); });
            device::barrier_arrive(ready);
        }
    }

    static ON_DEVICE device::Place weight_at(const Given&, int column, int row) { return {{column, 0, 0, row / 16, 0}}; }
    static ON_DEVICE int more(const Given&, const wide::Tile&) { return 0; }
    static ON_DEVICE void bring_more(const Given&, const wide::Tile&, int, char*, device::Barrier*) {}
    static ON_DEVICE void look_up(const Given& a, const Room& room, const wide::Tile& tile, int lane) {
        Known{room.kept() + KNOWN_AT}.fill(a.left, a.tokens, tile, lane, [&](int row) {
            return wide::part_of(row) * (a.rows / 2) + tile.row / 2 + wide::within_part(row);
        });
    }

    ON_DEVICE void operator()(const wide::Tile& tile, int, float (&sums)[C::BLOCKS][C::COLUMNS / 2]) {
        const int warp = index / 32, lane = index % 32, g = lane / 4, t = lane % 4;
        const int row_part = group % C::BY_ROWS, first = group / C::BY_ROWS * C::COLUMNS;
        if constexpr (C::LASTING) device::sync_group(group);  // what was stored last has been read
        else device::barrier_wait(ready, 0);
        constexpr int RUNS = C::COLUMNS / 8;
#pragma unroll
        for (int block = 0; block < C::BLOCKS; ++block) {
            const int row = (row_part * C::BLOCKS + block) * 64 + warp * 16 + g, feature = block * 32 + warp * 8;
            wide::Unfolded<C> unfold;
            if constexpr (FOLDED) unfold = {known, a.left, tile, row, tile.row / 2 + wide::within_part(row), a.rows / 2};
#pragma unroll
            for (int n = 0; n < RUNS; n += 4) {
                uint32_t packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (n + i >= RUNS) break;
                    float* c = sums[block] + 4 * (n + i);
                    const int token = (n + i) * 8 + 2 * t;
                    if constexpr (FOLDED) unfold(first + token, c);
                    if constexpr (C::CODED) {
                        const uint32_t both = device::pack_coded(device::gated_for_codes(c[0] * scale, c[2] * code), device::gated_for_codes(c[1] * scale, c[3] * code));
                        // Two features of one token from this lane and the one that has the feature beside.
                        const uint32_t beside = device::bits_from_lane_xor(both, 4);
                        const uint32_t pair = g % 2 ? (beside >> 8 & 0xff) | (both & 0xff00) : (both & 0xff) | (beside << 8 & 0xff00);
                        *reinterpret_cast<uint16_t*>(tray.at(n + i, 2 * t + g % 2, feature / 16) + feature % 16 + g / 2 * 2) = uint16_t(pair);
                    } else {
                        packed[i] = device::pack(device::gated(c[0], c[2]), device::gated(c[1], c[3]));
                    }
                }
                if constexpr (!C::CODED) tray.template put<RUNS>(n, packed, feature / 8, lane);
            }
        }
        device::sync_group(group);
        const int features = a.rows / 2, from = tile.row / 2 + row_part * FEATURES;
        tray.send(C::COLUMNS, index, [&](int token, int piece) -> char* {
            int64_t at;
            if constexpr (C::LASTING) at = tile.token + first + token < a.tokens ? int64_t(tile.token + first + token) * features : -1;
            else at = known.place()[first + token];
            return at < 0 ? nullptr : a.out + (at + from) * EACH + piece * 16;
        });
    }
};

}  // namespace gated
