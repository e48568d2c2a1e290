// The launch of the expert's kernel behind a plain C function.
#ifndef STRETTO_ON_HOST
#include "device.cuh"
#endif
#include "expert_kernel.cuh"

#include <cstring>

namespace {

// Words in the order in which the caller lists them; each is one pointer or whole number.
struct Words {
    const int64_t* at;
    int64_t number() { return *at++; }
    template <class T>
    void to(T*& pointer) { pointer = reinterpret_cast<T*>(*at++); }
};

expert::Arguments read(const int64_t* words, const float* reals) {
    expert::Arguments a{};
    Words w{words};
    a.depth = int32_t(w.number()), a.phases = int32_t(w.number()), a.tokens = int32_t(w.number());
    a.prefix = int32_t(w.number()), a.square_parts = int32_t(w.number());
    w.to(a.k), w.to(a.v);
    a.slot_step = w.number(), a.layer_step = w.number(), a.token_step = w.number();
    w.to(a.slot), w.to(a.mask), w.to(a.length), w.to(a.start), w.to(a.table);
    a.line_step = w.number(), a.norm_step = w.number();
    w.to(a.line), w.to(a.residual), w.to(a.squares), w.to(a.scaled);
    w.to(a.residual_out), w.to(a.scaled_out), w.to(a.squares_out);
    w.to(a.board), w.to(a.stamps);
    for (int i = 0; i < a.depth && i < expert::MAX_LAYERS; ++i)
        w.to(a.layers[i].qkv), w.to(a.layers[i].out), w.to(a.layers[i].gate_up), w.to(a.layers[i].down);
    a.log2_theta = reals[0], a.eps = reals[1];
    return a;
}

}  // namespace

#ifndef STRETTO_ON_HOST
KERNEL __launch_bounds__(expert::THREADS, 1) stretto_expert(const __grid_constant__ expert::Arguments a) {
    extern __shared__ __align__(128) char shared[];
    expert::run(a, shared);
}

// Both return null, or what went wrong.
extern "C" const char* stretto_expert_prepare(int device) {
    int fits = 0, processors = 0;
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess) e = cudaFuncSetAttribute(stretto_expert, cudaFuncAttributeMaxDynamicSharedMemorySize, expert::SHARED_BYTES);
    if (e == cudaSuccess) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fits, stretto_expert, expert::THREADS, expert::SHARED_BYTES);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    return fits * processors >= expert::CTAS ? nullptr : "the device holds fewer CTAs at once than the kernel needs";
}

extern "C" const char* stretto_expert_launch(int device, const int64_t* words, const float* reals, void* stream) {
    expert::Arguments a = read(words, reals);
    void* all[] = {&a};
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaLaunchCooperativeKernel(
            stretto_expert, dim3(expert::CTAS), dim3(expert::THREADS), all, size_t(expert::SHARED_BYTES), static_cast<cudaStream_t>(stream));
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
#else
extern "C" const char* stretto_expert_prepare(int) { return nullptr; }

extern "C" const char* stretto_expert_launch(int, const int64_t* words, const float* reals, void*) {
    static expert::Arguments a;
    a = read(words, reals);
    return host::launch(expert::CTAS, expert::THREADS, expert::SHARED_BYTES, [](char* shared) { expert::run(a, shared); });
}
#endif

// Sizes that the caller checks and allocates by.
extern "C" void stretto_expert_sizes(int64_t* sizes) {
    const int64_t all[] = {expert::WIDTH, expert::HEADS, expert::HEAD, expert::MLP, expert::MAX_LAYERS, expert::MAX_TOKENS,
                           expert::MAX_PREFIX, expert::TILES, expert::CTAS, int64_t(expert::CTAS) * expert::MAX_LAYERS * expert::PHASES * 8,
                           expert::WORDS, expert::OF_LAYER, expert::FRESH, expert::ATTENDED, expert::HIDDEN, expert::MIDDLE,
                           expert::END, expert::MIDDLE_SQUARES, expert::END_SQUARES};
    std::memcpy(sizes, all, sizeof all);
}
