// The attention of coded prefixes behind one plain C function.
#include "call.cuh"
#include "coded_prefix.cuh"

namespace {

using namespace prefix;

struct Call {
    const char *q, *k, *v;
    const uint8_t* mask;
    int64_t mask_step;
    char* out;
    const float *by, *multiplier;
    double scale;
    int64_t robots, rows, keys, width, groups, ctas;  // width: of a row of values, in keys
};

#ifndef STRETTO_ON_HOST
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) attention(const __grid_constant__ Given a) {
    extern __shared__ __align__(1024) char shared[];
    run<C>(a, shared);
}

template <class C>
const char* launch(const Given& given, int ctas, void* stream) {
    attention<C><<<ctas, C::THREADS, C::BYTES, static_cast<cudaStream_t>(stream)>>>(given);
    const cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

template <class C>
cudaError_t prepare() {
    return cudaFuncSetAttribute(attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::BYTES);
}
#else
template <class C>
const char* launch(const Given& given, int ctas, void*) {
    return host::launch(ctas, C::THREADS, C::BYTES, [&given](char* shared) { run<C>(given, shared); });
}
#endif

template <class C>
const char* start(const Call& c, void* stream) {
    // Rows of codes are seen as half as many numbers in bf16: copies only care for bytes.
    const uint64_t rows = uint64_t(c.rows), keys = uint64_t(c.keys), robots = uint64_t(c.robots), width = uint64_t(c.width);
    Given a{};
    a.q = device::map_of(c.q, {HEAD / 2, rows, robots, 1, 1}, {HEAD, HEAD * rows, HEAD * rows * robots, HEAD * rows * robots}, {64, C::TILE, 1, 1, 1});
    a.k = device::map_of(c.k, {HEAD / 2, keys, robots, 1, 1}, {HEAD, HEAD * keys, HEAD * keys * robots, HEAD * keys * robots}, {64, KEYS, 1, 1, 1});
    a.v = device::map_of(c.v, {width / 2, HEAD, robots, 1, 1}, {width, HEAD * width, HEAD * width * robots, HEAD * width * robots}, {64, HEAD, 1, 1, 1});
    a.mask = c.mask, a.mask_step = c.mask_step, a.out = c.out, a.by = c.by, a.multiplier = c.multiplier, a.scale = float(c.scale);
    a.robots = int(c.robots), a.rows = int(c.rows), a.keys = int(c.keys);
    return launch<C>(a, int(c.ctas), stream);
}

}  // namespace

// How many multiprocessors the device has; null, or what went wrong.
extern "C" const char* stretto_prefix_prepare(int device, int* multiprocessors) {
    *multiprocessors = 132;
#ifndef STRETTO_ON_HOST
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess) e = prepare<Cut<1>>();
    if (e == cudaSuccess) e = prepare<Cut<2>>();
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (device::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_prefix_launch(const int64_t* words, void* stream) {
    return device::called<Call, 15>(words, [=](const Call& c) { return c.groups == 1 ? start<Cut<1>>(c, stream) : start<Cut<2>>(c, stream); });
}
