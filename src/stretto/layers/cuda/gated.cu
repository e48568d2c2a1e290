// The gated product of many rows behind one plain C function.
#ifndef STRETTO_ON_HOST
#include "maps.cuh"
#endif
#include "gated_product.cuh"

#include <cstring>

namespace {

using namespace gated;

struct Call {
    const char *x, *weight;
    char* out;
    const float *x_scale, *weight_scale, *multiplier;
    int64_t rows, features, row_bytes, tokens, coded, clusters;
    const float *factor, *table;
    const int64_t* lines;
    int64_t line_step, row_tokens;
};

using Small = Cut<112, 4, false>;
using Large = Cut<128, 4, false>;
using SmallCoded = Cut<112, 4, true>;
using LargeCoded = Cut<128, 4, true>;
using SmallFolded = Cut<112, 4, false, true>;
using LargeFolded = Cut<128, 4, false, true>;

#ifndef STRETTO_ON_HOST
template <class C>
__global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) product(const __grid_constant__ Given a) {
    extern __shared__ __align__(1024) char shared[];
    run<C>(a, shared);
}

template <class C>
const char* launch(const Given& given, int clusters, void* stream) {
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(unsigned(clusters * CLUSTER)), how.blockDim = dim3(THREADS), how.dynamicSmemBytes = C::BYTES;
    how.stream = static_cast<cudaStream_t>(stream);
    const cudaError_t e = cudaLaunchKernelEx(&how, product<C>, given);
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

template <class C>
cudaError_t prepare(int* clusters) {
    cudaError_t e = cudaFuncSetAttribute(product<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::BYTES);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute with[1];
    with[0].id = cudaLaunchAttributeClusterDimension;
    with[0].val.clusterDim.x = CLUSTER, with[0].val.clusterDim.y = 1, with[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(CLUSTER), how.blockDim = dim3(THREADS), how.dynamicSmemBytes = C::BYTES, how.attrs = with, how.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(clusters, product<C>, &how);
}
#else
template <class C>
const char* launch(const Given& given, int clusters, void*) {
    return host::launch(clusters * CLUSTER, THREADS, C::BYTES, [&given](char* shared) { run<C>(given, shared); }, CLUSTER);
}
#endif

template <class C>
const char* start(const Call& c, void* stream) {
    // A coded row is seen as one of half as many numbers in bf16: copies only care for bytes.
    const uint64_t columns = uint64_t(c.row_bytes) / 2, step = uint64_t(c.row_bytes), rows = uint64_t(c.rows), features = uint64_t(c.features);
    Given a{};
    a.weight = device::map_of(c.weight, {columns, features, 2, 1, 1}, {step, features * step, 2 * features * step, 2 * features * step}, {64, FEATURES, 1, 1, 1});
    a.x = device::map_of(c.x, {columns, rows, 1, 1, 1}, {step, rows * step, rows * step, rows * step}, {64, C::TOKENS, 1, 1, 1});
    a.half_x = device::map_of(c.x, {columns, rows, 1, 1, 1}, {step, rows * step, rows * step, rows * step}, {64, C::TOKENS / 2, 1, 1, 1});
    a.out = c.out, a.x_scale = c.x_scale, a.weight_scale = c.weight_scale, a.multiplier = c.multiplier;
    a.factor = c.factor, a.table = c.table, a.lines = c.lines, a.line_step = c.line_step, a.row_tokens = int(c.row_tokens);
    a.rows = int(c.rows), a.features = int(c.features), a.chunks = int(c.row_bytes / 128);
    return launch<C>(a, int(c.clusters), stream);
}

}  // namespace

// How many pairs of CTAs the device holds at once; null, or what went wrong.
extern "C" const char* stretto_gated_prepare(int device, int* clusters) {
    *clusters = 66;
#ifndef STRETTO_ON_HOST
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess) e = prepare<Small>(clusters);
    if (e == cudaSuccess) e = prepare<Large>(clusters);
    if (e == cudaSuccess) e = prepare<SmallCoded>(clusters);
    if (e == cudaSuccess) e = prepare<LargeCoded>(clusters);
    if (e == cudaSuccess) e = prepare<SmallFolded>(clusters);
    if (e == cudaSuccess) e = prepare<LargeFolded>(clusters);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (device::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_gated_launch(const int64_t* words, void* stream) {
    Call c{};
    static_assert(sizeof(Call) == 17 * 8);
    std::memcpy(&c, words, sizeof c);
#ifndef STRETTO_ON_HOST
    try {
#endif
        if (c.coded) return c.tokens == 112 ? start<SmallCoded>(c, stream) : start<LargeCoded>(c, stream);
        if (c.factor != nullptr) return c.tokens == 112 ? start<SmallFolded>(c, stream) : start<LargeFolded>(c, stream);
        return c.tokens == 112 ? start<Small>(c, stream) : start<Large>(c, stream);
#ifndef STRETTO_ON_HOST
    } catch (CUresult) {
        return "the driver refuses a tensor's map";
    }
#endif
}
