// What attention_device.cuh adds to wide_device.cuh, for the host: see device.h.
#pragma once

#include "wide_device.h"

namespace device {

constexpr float INFINITE = __builtin_huge_valf();
inline uint8_t at(const uint8_t* p) { return *p; }
template <int N>
void settle(float (&)[N]) {}
inline uint32_t ballot(bool x) {
    uint32_t in[2] = {x, 0}, out;
    host::together("ballot", in, 2, &out, 1, [](host::Warp& w) {
        uint32_t bits = 0;
        for (int l = 0; l < 32; ++l) bits |= w.in[l][0] << l;
        for (int l = 0; l < 32; ++l) w.out[l][0] = bits;
    });
    return out;
}
inline void multiply_coded_256(float (&c)[128], const uint32_t (&a)[4], const void* b, bool add) {
    const int lane = thread_id() % 32;
    float rows[2][32];
    for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 4; ++i) {
            const uint32_t codes = bits_of(from_lane(as_float(a[i]), lane / 4 * 4 + t));
            for (int j = 0; j < 4; ++j) rows[i % 2][i / 2 * 16 + 4 * t + j] = of_coded(uint8_t(codes >> 8 * j));
        }
    for (int n = 0; n < 32; ++n)
        for (int j = 0; j < 2; ++j) {
            float row[32];
            for (int k = 0; k < 32; ++k) row[k] = coded_in_tile(b, n * 8 + lane % 4 * 2 + j, k);
            for (int i = 0; i < 2; ++i) {
                float sum = add ? c[4 * n + 2 * i + j] : 0.0f;
                for (int k = 0; k < 32; ++k) sum += rows[i][k] * row[k];
                c[4 * n + 2 * i + j] = sum;
            }
        }
}

}  // namespace device
