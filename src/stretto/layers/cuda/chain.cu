// The launches of the expert's layers behind one plain C function.
#ifndef STRETTO_ON_HOST
#include <cuda.h>
#include <dlfcn.h>

#include "device.cuh"
#endif
#include "chain_attention.cuh"

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
    int64_t ahead;
    Layer layers[MAX_LAYERS];
};

// What launch `kind` asks for: bit `kind` of `wanted` says whether it does.
Ahead ahead_of(const void* from, int64_t bytes, int kind, int64_t wanted) {
    const bool asks = wanted >> kind & 1;
    return {static_cast<const char*>(from), asks ? int(bytes) : 0, int(bytes / (CTAS[kind] * 32) + 16) / 16 * 16};
}

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
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
#ifdef STRETTO_ONE_SPLIT
    if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
#endif
    return e;
}

// Not set anew where it is so: a thread may be at work in a part of its device.
cudaError_t set_device(int device) {
    int now = -1;
    const cudaError_t e = cudaGetDevice(&now);
    return e != cudaSuccess || now == device ? e : cudaSetDevice(device);
}

struct Queue {
    cudaStream_t stream;
    cudaError_t error = cudaSuccess;

    template <class Given>
    void launch(void (*kernel)(Given), int ctas, int cluster, int threads, int bytes, const Given& given) {
        if (error != cudaSuccess) return;
        cudaLaunchAttribute with[2];
        with[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
#ifdef STRETTO_APART
        with[0].val.programmaticStreamSerializationAllowed = 0;
#else
        with[0].val.programmaticStreamSerializationAllowed = 1;
#endif
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

template <class Q>
void run(Q& queue, const Call& c, const float* reals) {
    char* m = c.memory;
    int launch = 0;
    const auto common = [&](const float* squares, int64_t parts, Ahead ahead) {
        long long* stamps = c.stamps == nullptr ? nullptr : c.stamps + int64_t(launch) * MOST_CTAS * EVENTS;
        return Common{int(c.tokens), int(parts), reals[1], squares, ahead, stamps};
    };
    float *squares = reinterpret_cast<float*>(m + SQUARES_AT), *middle_squares = reinterpret_cast<float*>(m + MIDDLE_SQUARES_AT);
    bf16 *k_fresh = reinterpret_cast<bf16*>(m + K_MEMORY_AT), *v_fresh = reinterpret_cast<bf16*>(m + V_MEMORY_AT);
    for (int64_t i = 0; i < c.depth; ++i) {
        const Layer &w = c.layers[i], &next = c.layers[(i + 1) % c.depth];
        const bool first = i == 0, last = i == c.depth - 1;
        for (int kind = 0; kind < KINDS && launch < c.launches; ++kind, ++launch) {
            if (kind == 0) {
                Qkv a{};
                a.all = common(first ? c.squares : squares, first ? c.square_parts : TILES, ahead_of(w.gate_up, int64_t(MLP) * WIDTH * 2, kind, c.ahead));
                a.weight = map_of(w.qkv, {WIDTH, 8, 2, HALF / 8, HEADS + 2}, {ROW, HALF * ROW, 8 * ROW, HEAD * ROW}, {64, 8, 2, 4, 1});
                a.given = first ? c.scaled : nullptr, a.x = m + X_AT;
                a.q = m + Q_MEMORY_AT, a.kv[0] = k_fresh, a.kv[1] = v_fresh, a.start = c.start, a.log2_theta = reals[0];
                queue.launch(KERNEL_OF(stretto_chain_qkv, qkv), CTAS[kind], QkvShape::CUTS, QkvShape::THREADS, QkvShape::BYTES, a);
            } else if (kind == 1) {
                Attention a{};
                a.all = common(nullptr, 0, ahead_of(w.gate_up + int64_t(MLP) * WIDTH, int64_t(MLP) * WIDTH * 2, kind, c.ahead));
                a.q = m + Q_MEMORY_AT, a.k_fresh = k_fresh, a.v_fresh = v_fresh;
                const auto kept = [&](const bf16* arena) {
                    const uint64_t step = c.token_step * 2, slots = c.slots, of_slot = c.slot_step * 2, tokens = c.prefix, span = (c.prefix + KEY_CUTS - 1) / KEY_CUTS;
                    return map_of(arena + i * c.layer_step, {HEAD, tokens, slots, 1, 1}, {step, of_slot, slots * of_slot, slots * of_slot}, {64, uint32_t(span), 1, 1, 1});
                };
                a.k = kept(c.k), a.v = kept(c.v), a.slot_step = c.slot_step, a.token_step = c.token_step;
                if (c.ahead >> KINDS & 1) {
                    const int64_t next_at = (i + 1) % c.depth * c.layer_step;
                    a.k_next = c.k + next_at, a.v_next = c.v + next_at;
                }
                a.slot = c.slot, a.mask = c.mask, a.length = c.length, a.prefix = int(c.prefix), a.out = m + ATTENDED_AT;
                const int blocks = (int(c.tokens) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
                queue.launch(KERNEL_OF(stretto_chain_attention, attend), blocks * 2 * KEY_CUTS, KEY_CUTS, ATTENTION_THREADS, ATTENTION_BYTES, a);
            } else if (kind == 3) {
                GateUp a{};
                a.all = common(middle_squares, TILES, ahead_of(next.qkv, int64_t(QKV) * WIDTH * 2, kind, c.ahead));
                a.weight = map_of(w.gate_up, {WIDTH, 8, 2, MLP / 8, 1}, {ROW, MLP * ROW, 8 * ROW, 2 * MLP * ROW}, {64, 8, 2, 4, 1});
                a.x = m + MIDDLE_AT, a.hidden = m + HIDDEN_AT;
                queue.launch(KERNEL_OF(stretto_chain_gate_up, gate_up), CTAS[kind], GateUpShape::CUTS, GateUpShape::THREADS, GateUpShape::BYTES, a);
            } else {
                const bool down = kind == 4;
                Add a{};
                a.all = common(nullptr, 0, down ? ahead_of(next.out, int64_t(WIDTH) * INNER * 2, kind, c.ahead)
                                                   : ahead_of(w.down, int64_t(WIDTH) * MLP * 2, kind, c.ahead));
                const uint64_t input = down ? MLP : INNER, all = input * 2 * WIDTH;
                a.weight = map_of(down ? w.down : w.out, {input, WIDTH, 1, 1, 1}, {input * 2, all, all, all}, {64, 64, 1, 1, 1});
                a.x = m + (down ? HIDDEN_AT : ATTENDED_AT);
                a.table = c.table + (2 * i + down) * c.norm_step, a.line_step = c.line_step, a.norm_step = c.norm_step, a.line = c.line;
                a.given = first && !down ? c.residual : nullptr, a.residual = reinterpret_cast<float*>(m + RESIDUAL_AT);
                a.scaled = m + (down ? X_AT : MIDDLE_AT), a.squares_out = down ? (last ? c.squares_out : squares) : middle_squares;
                if (last && down) a.residual_last = c.residual_out, a.scaled_last = c.scaled_out;
                if (down)
                    queue.launch(KERNEL_OF(stretto_chain_down, add<DownShape>), CTAS[kind], DownShape::CUTS, DownShape::THREADS, DownShape::BYTES, a);
                else
                    queue.launch(KERNEL_OF(stretto_chain_out, add<OutShape>), CTAS[kind], OutShape::CUTS, OutShape::THREADS, OutShape::BYTES, a);
            }
        }
    }
}

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
    Queue queue{static_cast<cudaStream_t>(stream)};
    queue.error = set_device(device);
    try {
        run(queue, c, reals);
    } catch (CUresult) {
        return "the driver refuses a tensor's map";
    }
    return queue.error == cudaSuccess ? nullptr : cudaGetErrorString(queue.error);
#else
    Queue queue;
    run(queue, c, reals);
    return queue.error;
#endif
}

// Sizes that the caller checks and allocates by.
extern "C" void stretto_chain_sizes(int64_t* sizes) {
    const int64_t all[] = {WIDTH, HEADS, HEAD, MLP, MAX_LAYERS, MAX_TOKENS, MAX_PREFIX, TILES, MEMORY_BYTES,
                           X_AT, MIDDLE_AT, ATTENDED_AT, HIDDEN_AT, Q_MEMORY_AT, K_MEMORY_AT, V_MEMORY_AT, SQUARES_AT, MIDDLE_SQUARES_AT, ROWS, MOST_CTAS};
    std::memcpy(sizes, all, sizeof all);
}
