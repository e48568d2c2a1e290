// The launches of the expert's layers behind one plain C function.
#ifndef STRETTO_ON_HOST
#include <cuda.h>
#include <dlfcn.h>

#include "device.cuh"
#endif
#include "chain_attention.cuh"
#include "chain_layer.cuh"

#include <cstring>

namespace {

using namespace chain;

// Memory between launches, in bytes; every part begins at a multiple of 1024.
constexpr int64_t X_AT = 0, MIDDLE_AT = X_AT + WIDTH / 64 * CHUNK_BYTES, ATTENDED_AT = MIDDLE_AT + WIDTH / 64 * CHUNK_BYTES;
constexpr int64_t HIDDEN_AT = ATTENDED_AT + INNER / 64 * CHUNK_BYTES, Q_MEMORY_AT = HIDDEN_AT + MLP / 64 * CHUNK_BYTES;
constexpr int64_t K_MEMORY_AT = Q_MEMORY_AT + TOKEN_TILES * HEAD_CHUNKS * QUERY_CHUNK, V_MEMORY_AT = K_MEMORY_AT + ROWS * HEAD * 2;
constexpr int64_t RESIDUAL_AT = V_MEMORY_AT + ROWS * HEAD * 2, SQUARES_AT = RESIDUAL_AT + ROWS * WIDTH * 4;
constexpr int64_t MIDDLE_SQUARES_AT = SQUARES_AT + 4096, MEMORY_BYTES = MIDDLE_SQUARES_AT + 4096;
static_assert(ROWS * TILES * 4 <= 4096);
constexpr int KINDS = 5, CTAS[KINDS] = {QKV / 64 * QkvShape::CUTS, TOKEN_TILES * 2 * KEY_CUTS, TILES * OutShape::CUTS,
                                        MLP / 32 / GateUpShape::BLOCKS * GateUpShape::CUTS, TILES * DownShape::CUTS};
constexpr int MOST_CTAS = 160;
constexpr uint64_t ROW = WIDTH * 2;

struct Layer {
    const bf16 *qkv, *out, *gate_up, *down;
};

struct Call {
    int64_t depth, launches, tokens, prefix, square_parts;
    const bf16 *k, *v;
    int64_t slots, slot_step, layer_step, token_step;
    const int64_t* slot;
    const uint8_t* mask;
    const int32_t *length, *start;
    const float* table;
    int64_t line_step, norm_step;
    const int64_t* line;
    const float *residual, *squares;
    const bf16* scaled;
    float *residual_out, *scaled_out, *squares_out;
    char* memory;
    long long* stamps;
    int64_t overlap;  // whether launches start early
    Layer layers[MAX_LAYERS];
};

}  // namespace

#ifndef STRETTO_ON_HOST
#define LAUNCHED(name, bounds, Given, body) \
    KERNEL __launch_bounds__(bounds) name(const __grid_constant__ Given a) { \
        extern __shared__ __align__(1024) char shared[]; \
        body; \
    }
LAUNCHED(stretto_chain_qkv, QkvShape::THREADS, Qkv, qkv(a, shared))
LAUNCHED(stretto_chain_attention, ATTENTION_THREADS, Attention, attend(a, shared))
LAUNCHED(stretto_chain_out, OutShape::THREADS, Add, add<OutShape>(a, shared))
LAUNCHED(stretto_chain_gate_up, GateUpShape::THREADS, GateUp, gate_up(a, shared))
LAUNCHED(stretto_chain_down, DownShape::THREADS, Add, add<DownShape>(a, shared))

namespace {

// A map of bf16 [.., n1, n0]: sizes and tile from the innermost axis on, steps in bytes from the second on.
using MakeMap = decltype(&cuTensorMapEncodeTiled);
MakeMap maker() {
    static const MakeMap found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        return driver == nullptr ? nullptr : reinterpret_cast<MakeMap>(dlsym(driver, "cuTensorMapEncodeTiled"));
    }();
    return found;
}

device::Map map_of(const void* from, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    static_assert(sizeof(device::Map) == sizeof(CUtensorMap));
    const uint32_t each[5] = {1, 1, 1, 1, 1};
    device::Map map{};
    const CUresult e = maker()(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(from), sizes, steps,
                               tile, each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e != CUDA_SUCCESS) throw e;
    return map;
}

cudaError_t prepare(const void* kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Not set anew where it is so: a thread may be at work in a part of its device.
cudaError_t set_device(int device) {
    int now = -1;
    const cudaError_t e = cudaGetDevice(&now);
    return e != cudaSuccess || now == device ? e : cudaSetDevice(device);
}

struct Queue {
    cudaStream_t stream;
    int overlap;
    cudaError_t error = cudaSuccess;

    template <class Given>
    void launch(void (*kernel)(Given), int ctas, int cluster, int threads, int bytes, const Given& given) {
        if (error != cudaSuccess) return;
        cudaLaunchAttribute with[2];
        with[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        with[0].val.programmaticStreamSerializationAllowed = overlap;
        with[1].id = cudaLaunchAttributeClusterDimension;
        with[1].val.clusterDim.x = unsigned(cluster), with[1].val.clusterDim.y = 1, with[1].val.clusterDim.z = 1;
        cudaLaunchConfig_t how{};
        how.gridDim = dim3(unsigned(ctas)), how.blockDim = dim3(unsigned(threads)), how.dynamicSmemBytes = size_t(bytes);
        how.stream = stream, how.attrs = with, how.numAttrs = 2;
        error = cudaLaunchKernelEx(&how, kernel, given);
    }
};
#define KERNEL_OF(name, body) name
#else
device::Map map_of(const void* from, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    return device::map_of(from, sizes, steps, tile);
}

struct Queue {
    const char* error = nullptr;

    template <class Given, class Kernel>
    void launch(Kernel kernel, int ctas, int cluster, int threads, int bytes, const Given& given) {
        if (error == nullptr)
            error = host::launch(ctas, threads, bytes, [&given, kernel](char* shared) { kernel(given, shared); }, cluster);
    }
};
#define KERNEL_OF(name, body) body
namespace {
#endif

// One call's launches, in their order.
template <class Q>
struct Launches {
    Q& queue;
    const Call& c;
    const float log2_theta, eps;
    char* const m = c.memory;
    float *const squares = reinterpret_cast<float*>(m + SQUARES_AT), *const middle_squares = reinterpret_cast<float*>(m + MIDDLE_SQUARES_AT);
    bf16 *const k_fresh = reinterpret_cast<bf16*>(m + K_MEMORY_AT), *const v_fresh = reinterpret_cast<bf16*>(m + V_MEMORY_AT);
    int done = 0;

    void run() {
        for (int64_t layer = 0; layer < c.depth; ++layer)
            for (int kind = 0; kind < KINDS && done < c.launches; ++kind, ++done) {
                if (kind == 0) query(layer);
                if (kind == 1) attention(layer);
                if (kind == 3) gate_and_up(layer);
                if (kind == 2 || kind == 4) sum(layer, kind == 4);
            }
    }

private:
    Common common(const float* read, int64_t parts) const {
        long long* stamps = c.stamps == nullptr ? nullptr : c.stamps + int64_t(done) * MOST_CTAS * EVENTS;
        return {int(c.tokens), int(parts), eps, read, stamps};
    }

    void query(int64_t layer) {
        Qkv a{};
        const bool first = layer == 0;
        a.all = first ? common(c.squares, c.square_parts) : common(squares, TILES);
        a.weight = map_of(c.layers[layer].qkv, {WIDTH, 8, 2, HALF / 8, HEADS + 2}, {ROW, HALF * ROW, 8 * ROW, HEAD * ROW}, {64, 8, 2, 4, 1});
        a.given = first ? c.scaled : nullptr, a.x = m + X_AT;
        a.q = m + Q_MEMORY_AT, a.kv[0] = k_fresh, a.kv[1] = v_fresh, a.start = c.start, a.log2_theta = log2_theta;
        queue.launch(KERNEL_OF(stretto_chain_qkv, qkv), CTAS[0], QkvShape::CUTS, QkvShape::THREADS, QkvShape::BYTES, a);
    }

    device::Map kept(const bf16* arena, int64_t layer) const {
        const uint64_t step = c.token_step * 2, slots = c.slots, of_slot = c.slot_step * 2, tokens = c.prefix;
        const uint32_t span = uint32_t(c.prefix + KEY_CUTS - 1) / KEY_CUTS;
        return map_of(arena + layer * c.layer_step, {HEAD, tokens, slots, 1, 1}, {step, of_slot, slots * of_slot, slots * of_slot}, {64, span, 1, 1, 1});
    }

    void attention(int64_t layer) {
        Attention a{};
        a.all = common(nullptr, 0);
        a.k = kept(c.k, layer), a.v = kept(c.v, layer);
        a.q = m + Q_MEMORY_AT, a.k_fresh = k_fresh, a.v_fresh = v_fresh;
        a.slot = c.slot, a.mask = c.mask, a.length = c.length, a.prefix = int(c.prefix), a.out = m + ATTENDED_AT;
        const int blocks = (int(c.tokens) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        queue.launch(KERNEL_OF(stretto_chain_attention, attend), blocks * 2 * KEY_CUTS, KEY_CUTS, ATTENTION_THREADS, ATTENTION_BYTES, a);
    }

    void gate_and_up(int64_t layer) {
        GateUp a{};
        a.all = common(middle_squares, TILES);
        a.weight = map_of(c.layers[layer].gate_up, {WIDTH, 8, 2, MLP / 8, 1}, {ROW, MLP * ROW, 8 * ROW, 2 * MLP * ROW}, {64, 8, 2, 4, 1});
        a.x = m + MIDDLE_AT, a.hidden = m + HIDDEN_AT;
        queue.launch(KERNEL_OF(stretto_chain_gate_up, gate_up), CTAS[3], GateUpShape::CUTS, GateUpShape::THREADS, GateUpShape::BYTES, a);
    }

    // The output's product, or `down`.
    void sum(int64_t layer, bool down) {
        Add a{};
        const bool last = down && layer == c.depth - 1;
        const uint64_t input = down ? MLP : INNER, all = input * 2 * WIDTH;
        a.all = common(nullptr, 0);
        a.weight = map_of(down ? c.layers[layer].down : c.layers[layer].out, {input, WIDTH, 1, 1, 1}, {input * 2, all, all, all}, {64, 64, 1, 1, 1});
        a.x = m + (down ? HIDDEN_AT : ATTENDED_AT);
        a.table = c.table + (2 * layer + down) * c.norm_step, a.line_step = c.line_step, a.norm_step = c.norm_step, a.line = c.line;
        a.given = layer == 0 && !down ? c.residual : nullptr, a.residual = reinterpret_cast<float*>(m + RESIDUAL_AT);
        a.scaled = m + (down ? X_AT : MIDDLE_AT), a.squares_out = last ? c.squares_out : down ? squares : middle_squares;
        if (last) a.residual_last = c.residual_out, a.scaled_last = c.scaled_out;
        if (down)
            queue.launch(KERNEL_OF(stretto_chain_down, add<DownShape>), CTAS[4], DownShape::CUTS, DownShape::THREADS, DownShape::BYTES, a);
        else
            queue.launch(KERNEL_OF(stretto_chain_out, add<OutShape>), CTAS[2], OutShape::CUTS, OutShape::THREADS, OutShape::BYTES, a);
    }
};

// Words in the order in which the caller lists them; each is one pointer or whole number.
Call read(const int64_t* words) {
    static_assert(sizeof(Call) == (28 + 4 * MAX_LAYERS) * 8);
    Call c{};
    const int64_t depth = words[0];
    std::memcpy(&c, words, size_t(28 + 4 * (depth < MAX_LAYERS ? depth : MAX_LAYERS)) * 8);
    return c;
}

}  // namespace

// Both return null, or what went wrong.
extern "C" const char* stretto_chain_prepare(int device) {
#ifndef STRETTO_ON_HOST
    cudaError_t e = set_device(device);
    if (e == cudaSuccess) e = prepare(reinterpret_cast<const void*>(stretto_chain_qkv), QkvShape::BYTES);
    if (e == cudaSuccess) e = prepare(reinterpret_cast<const void*>(stretto_chain_attention), ATTENTION_BYTES);
    if (e == cudaSuccess) e = prepare(reinterpret_cast<const void*>(stretto_chain_out), OutShape::BYTES);
    if (e == cudaSuccess) e = prepare(reinterpret_cast<const void*>(stretto_chain_gate_up), GateUpShape::BYTES);
    if (e == cudaSuccess) e = prepare(reinterpret_cast<const void*>(stretto_chain_down), DownShape::BYTES);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// How many clusters of each launch the device holds at once.
extern "C" const char* stretto_chain_fits(int* counts) {
#ifndef STRETTO_ON_HOST
    const void* kernels[KINDS] = {reinterpret_cast<const void*>(stretto_chain_qkv), reinterpret_cast<const void*>(stretto_chain_attention),
                                  reinterpret_cast<const void*>(stretto_chain_out), reinterpret_cast<const void*>(stretto_chain_gate_up),
                                  reinterpret_cast<const void*>(stretto_chain_down)};
    const int clusters[KINDS] = {QkvShape::CUTS, KEY_CUTS, OutShape::CUTS, GateUpShape::CUTS, DownShape::CUTS};
    const int threads[KINDS] = {QkvShape::THREADS, ATTENTION_THREADS, OutShape::THREADS, GateUpShape::THREADS, DownShape::THREADS};
    const int bytes[KINDS] = {QkvShape::BYTES, ATTENTION_BYTES, OutShape::BYTES, GateUpShape::BYTES, DownShape::BYTES};
    for (int i = 0; i < KINDS; ++i) {
        cudaLaunchAttribute with[1];
        with[0].id = cudaLaunchAttributeClusterDimension;
        with[0].val.clusterDim.x = unsigned(clusters[i]), with[0].val.clusterDim.y = 1, with[0].val.clusterDim.z = 1;
        cudaLaunchConfig_t how{};
        how.gridDim = dim3(unsigned(CTAS[i])), how.blockDim = dim3(unsigned(threads[i])), how.dynamicSmemBytes = size_t(bytes[i]);
        how.attrs = with, how.numAttrs = 1;
        const cudaError_t e = cudaOccupancyMaxActiveClusters(counts + i, kernels[i], &how);
        if (e != cudaSuccess) return cudaGetErrorString(e);
    }
#endif
    return nullptr;
}

extern "C" const char* stretto_chain_launch(int device, const int64_t* words, const float* reals, void* stream) {
    const Call c = read(words);
#ifndef STRETTO_ON_HOST
    Queue queue{static_cast<cudaStream_t>(stream), int(c.overlap)};
    queue.error = set_device(device);
    try {
        Launches<Queue>{queue, c, reals[0], reals[1]}.run();
    } catch (CUresult) {
        return "the driver refuses a tensor's map";
    }
    return queue.error == cudaSuccess ? nullptr : cudaGetErrorString(queue.error);
#else
    Queue queue;
    Launches<Queue>{queue, c, reals[0], reals[1]}.run();
    return queue.error;
#endif
}

// Sizes that the caller checks and allocates by.
extern "C" void stretto_chain_sizes(int64_t* sizes) {
    const int64_t all[] = {WIDTH, HEADS, HEAD, MLP, MAX_LAYERS, MAX_TOKENS, MAX_PREFIX, TILES, MEMORY_BYTES,
                           X_AT, MIDDLE_AT, ATTENDED_AT, HIDDEN_AT, Q_MEMORY_AT, K_MEMORY_AT, V_MEMORY_AT, SQUARES_AT, MIDDLE_SQUARES_AT, ROWS, MOST_CTAS};
    std::memcpy(sizes, all, sizeof all);
}
