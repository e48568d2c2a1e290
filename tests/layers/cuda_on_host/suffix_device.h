// What suffix_device.cuh adds to wide_device.cuh, for the host: see device.h.
#pragma once

#include "wide_device.h"

namespace device {

inline void pin(float&) {}
inline void await_turn(int) {}
inline void let_group(int) {}
inline uint32_t ballot(bool x) {
    const uint32_t in = x;
    uint32_t out;
    host::together("ballot", &in, 1, &out, 1, [](host::Warp& w) {
        uint32_t all = 0;
        for (int l = 0; l < 32; ++l) all |= w.in[l][0] << l;
        for (int l = 0; l < 32; ++l) w.out[l][0] = all;
    });
    return out;
}
inline void barrier_await(Barrier* b, uint32_t parity) { barrier_wait(b, parity); }
inline void sync_groups() { host::meet(host::grid->all[block_id()], 256); }

inline void copy_tile_to(void* to, const Map& map, const Place& place, Barrier* b, uint32_t ranks) {
    for (int rank = 0; rank < host::grid->cluster; ++rank)
        if (ranks >> rank & 1) copy_tile(at_rank(to, rank), map, place, reinterpret_cast<Barrier*>(at_rank(b, rank)));
}

// Lanes of a row give each other what they hold of A.
inline void held_rows(float (&rows)[2][16], const uint32_t* a) {
    for (int i = 0; i < 4; ++i)
        for (int other = 0; other < 4; ++other) {
            const uint32_t both = bits_of(from_lane(as_float(a[i]), thread_id() % 32 / 4 * 4 + other));
            rows[i % 2][i / 2 * 8 + other * 2] = host::of_bf16(both & 0xffff), rows[i % 2][i / 2 * 8 + other * 2 + 1] = host::of_bf16(both >> 16);
        }
}
inline void multiply_held_by_rows(float (&c)[128], const uint32_t* a, const void* b) {
    float rows[2][16];
    held_rows(rows, a);
    for (int n = 0; n < 32; ++n)
        for (int i = 0; i < 4; ++i) {
            const int column = n * 8 + thread_id() % 4 * 2 + i % 2;
            const char* piece = static_cast<const char*>(b) + column / 64 * 8192;
            for (int k = 0; k < 16; ++k) c[4 * n + i] += rows[i / 2][k] * in_tile(piece, k, column % 64 * 2);
        }
}
inline void multiply_64_held(float (&c)[32], const uint32_t* a, const void* b, bool add) {
    float rows[2][16];
    held_rows(rows, a);
    for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 16; ++k) sum += rows[i / 2][k] * in_tile(b, n * 8 + thread_id() % 4 * 2 + i % 2, k * 2);
            c[4 * n + i] = sum;
        }
}

}  // namespace device
