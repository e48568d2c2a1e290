// Launches of wide products: maps of their factors, and what the device has to be told once for each cut.
#pragma once

#ifndef STRETTO_ON_HOST
#include "maps.cuh"
#endif
#include "wide_product.cuh"

namespace wide {

using Sizes = uint64_t[5];

#ifndef STRETTO_ON_HOST
template <class C, class Finish, class Given>
__global__ void __launch_bounds__(C::THREADS, (BESIDE<C, Finish>)) product(const __grid_constant__ Given a) {
    extern __shared__ __align__(1024) char shared[];
    run<C, Finish>(a, shared);
}

using device::maker;
using device::map_of;

// Static, or libraries that are loaded side by side would share what they have prepared.
template <class C, class Finish, class Given>
static const char* launch(const Given& given, int clusters, bool early, void* stream) {
    constexpr int BYTES = Room<C, Finish>::BYTES;
    const auto kernel = product<C, Finish, Given>;
    // Once for each device and cut.
    static uint64_t prepared = 0;
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess && !(prepared >> device & 1)) {
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
        // All launches want one split of the cache: a multiprocessor is empty before it takes another.
        if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        prepared |= uint64_t(1) << device;
    }
    if (e != cudaSuccess) return cudaGetErrorString(e);
    cudaLaunchAttribute with[2];
    with[0].id = cudaLaunchAttributeClusterDimension;
    with[0].val.clusterDim.x = C::CLUSTER, with[0].val.clusterDim.y = 1, with[0].val.clusterDim.z = 1;
    with[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    with[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(unsigned(clusters * C::CLUSTER)), how.blockDim = dim3(C::THREADS), how.dynamicSmemBytes = BYTES;
    how.stream = static_cast<cudaStream_t>(stream), how.attrs = with, how.numAttrs = early ? 2 : 1;
    e = cudaLaunchKernelEx(&how, kernel, given);
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

// How many clusters the device holds at once.
template <class C, class Finish, class Given>
cudaError_t held(int* clusters) {
    constexpr int BYTES = Room<C, Finish>::BYTES;
    cudaError_t e = cudaFuncSetAttribute(product<C, Finish, Given>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute with[1];
    with[0].id = cudaLaunchAttributeClusterDimension;
    with[0].val.clusterDim.x = C::CLUSTER, with[0].val.clusterDim.y = 1, with[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(C::CLUSTER), how.blockDim = dim3(C::THREADS), how.dynamicSmemBytes = BYTES, how.attrs = with, how.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(clusters, product<C, Finish, Given>, &how);
}
#else
using device::map_of;

template <class C, class Finish, class Given>
const char* launch(const Given& given, int clusters, bool, void*) {
    return host::launch(clusters * C::CLUSTER, C::THREADS, Room<C, Finish>::BYTES, [&given](char* shared) { run<C, Finish>(given, shared); },
                        C::CLUSTER);
}
#endif

// The clusters that have one tile each: all of them, as `Order` counts them on the device.
template <class C>
int clusters_of(const Factors& a) { return a.rows / C::ROWS / C::CROWD * ((a.tokens + C::TOKENS - 1) / C::TOKENS); }

// Tokens, or rows of a weight as they are; a coded row is seen as one of half as many numbers: copies only care for bytes.
inline device::Map rows_of(const void* from, int64_t rows, int64_t row_bytes, int tile) {
    const uint64_t step = uint64_t(row_bytes), count = uint64_t(rows), all = count * step;
    return map_of(from, {step / 2, count, 1, 1, 1}, {step, all, all, all}, {64, uint32_t(tile), 1, 1, 1});
}
// Rows of a weight, `half` and half side by side by eights: by columns, rows of eight, halves, eights, pairs of halves.
inline device::Map halves_of(const void* from, int64_t rows, int64_t half, int64_t row_bytes, int tile) {
    const uint64_t step = uint64_t(row_bytes), h = uint64_t(half);
    return map_of(from, {step / 2, 8, 2, h / 8, uint64_t(rows) / (2 * h)}, {step, h * step, 8 * step, 2 * h * step}, {64, 8, 2, uint32_t(tile) / 16, 1});
}

}  // namespace wide
