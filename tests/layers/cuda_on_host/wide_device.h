// What wide_device.cuh adds to device.cuh, for the host: see device.h.
#pragma once

#include "device.h"

namespace device {

inline int cluster_id() { return block_id() / 2; }
inline int clusters() { return int(host::grid->shared.size()) / 2; }
inline void sync_warp() {}
inline void give_registers() {}
inline void take_registers() {}
inline float at(const float* p) { return *p; }

inline void copy_tile_to_both(void* to, const Map& map, const Place& place, Barrier* b) {
    for (int rank = 0; rank < 2; ++rank)
        copy_tile(at_rank(to, rank), map, place, reinterpret_cast<Barrier*>(at_rank(b, rank)));
}
inline void barrier_arrive_at(Remote barrier) { barrier_arrive(reinterpret_cast<Barrier*>(barrier)); }
inline void barrier_wait_for_cluster(Barrier* b, uint32_t parity) { barrier_wait(b, parity); }

inline float gated(float x, float y) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + std::exp(std::min(-2.0f * u, 80.0f))) * y;
}

inline float of_e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return std::nanf("");
    const float size = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(1.0f + float(mantissa) / 8.0f, exponent - 7);
    return bits & 128 ? -size : size;
}
inline uint32_t to_e4m3(float x) {
    if (std::isnan(x)) return 0x7f;
    const uint32_t sign = std::signbit(x) ? 128 : 0;
    const float size = std::min(std::fabs(x), 448.0f);
    const int exponent = std::max(size == 0.0f ? -6 : std::ilogb(size), -6);
    int code = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // in eighths of the power of two
    return sign | uint32_t(code + (exponent + 6) * 8);
}
inline uint32_t pack_coded(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

template <int N>
void multiply_coded(float* c, const void* a, const void* b, bool add) {
    const auto in_row = [](const void* tile, int row, int column) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(tile) + row * 128 + column;
        return of_e4m3(*reinterpret_cast<const uint8_t*>(at ^ (at >> 7 & 7) << 4));
    };
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 32; ++k) sum += in_row(a, warp * 16 + lane / 4 + i / 2 * 8, k) * in_row(b, n * 8 + lane % 4 * 2 + i % 2, k);
            c[4 * n + i] = sum;
        }
}
inline void multiply_112(float (&c)[56], const void* a, const void* b, bool add) { multiply_tiles<112>(c, a, b, add); }
inline void multiply_128(float (&c)[64], const void* a, const void* b, bool add) { multiply_tiles<128>(c, a, b, add); }
inline void multiply_coded_112(float (&c)[56], const void* a, const void* b, bool add) { multiply_coded<112>(c, a, b, add); }
inline void multiply_coded_128(float (&c)[64], const void* a, const void* b, bool add) { multiply_coded<128>(c, a, b, add); }

}  // namespace device
