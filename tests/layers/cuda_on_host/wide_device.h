// What wide_device.cuh adds to device.cuh, for the host: see device.h.
#pragma once

#include "device.h"

namespace device {

inline int cluster_id(int size) { return block_id() / size; }
inline int clusters(int size) { return int(host::grid->shared.size()) / size; }
inline void sync_warp() {}
inline void give_registers() {}
inline void take_registers() {}
inline float at(const float* p) { return *p; }

inline void copy_tile_to_both(void* to, const Map& map, const Place& place, Barrier* b) {
    for (int rank = 0; rank < 2; ++rank)
        copy_tile(at_rank(to, rank), map, place, reinterpret_cast<Barrier*>(at_rank(b, rank)));
}
inline void barrier_arrive_at(Remote barrier) { barrier_arrive(reinterpret_cast<Barrier*>(barrier)); }

inline float gated(float x, float y) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + std::exp(std::min(-2.0f * u, 80.0f))) * y;
}

inline float gated_for_codes(float x, float y) { return gated(x, y); }

template <int N>
void multiply_coded(float* c, const void* a, const void* b, bool add) {
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 32; ++k) sum += coded_in_tile(a, warp * 16 + lane / 4 + i / 2 * 8, k) * coded_in_tile(b, n * 8 + lane % 4 * 2 + i % 2, k);
            c[4 * n + i] = sum;
        }
}
inline void multiply_112(float (&c)[56], const void* a, const void* b, bool add) { multiply_tiles<112>(c, a, b, add); }
inline void multiply_128(float (&c)[64], const void* a, const void* b, bool add) { multiply_tiles<128>(c, a, b, add); }
inline void multiply_coded_112(float (&c)[56], const void* a, const void* b, bool add) { multiply_coded<112>(c, a, b, add); }
inline void multiply_coded_128(float (&c)[64], const void* a, const void* b, bool add) { multiply_coded<128>(c, a, b, add); }

}  // namespace device
