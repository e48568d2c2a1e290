// The launches of the expert's layers behind one plain C function.
#ifndef STRETTO_ON_HOST
#include "maps.cuh"
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
constexpr int KINDS = 5, MOST_CTAS = 160;

struct Layer {
    const void *qkv, *out, *gate_up, *down;
};

// Of a layer in e4m3: what its products are multiplied by, and between them what is written for the next.
enum Scale { BY_QKV, TO_OUT, BY_OUT, BY_GATE_UP, TO_DOWN, BY_DOWN, SCALES };

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
    // In e4m3, or null: scales by layer, and shifts' shares of both products behind norms by line and layer.
    const float *scales, *qkv_shift, *gate_up_shift;
    int64_t qkv_shift_step, gate_up_shift_step;
    Layer layers[MAX_LAYERS];
};
constexpr int WORDS = 33;

// How a launch of each kind is cut.
struct How {
    int ctas, cluster, threads, bytes;
};
template <class All>
constexpr How how_of(int kind) {
    using Q = typename All::Qkv;
    using O = typename All::Out;
    using G = typename All::GateUp;
    using D = typename All::Down;
    constexpr How all[KINDS] = {{QKV / 64 * Q::CUTS, Q::CUTS, Q::THREADS, Q::BYTES},
                                {TOKEN_TILES * 2 * KEY_CUTS, KEY_CUTS, ATTENTION_THREADS, ATTENTION_BYTES},
                                {TILES * O::CUTS, O::CUTS, O::THREADS, O::BYTES},
                                {MLP / 32 / G::BLOCKS * G::CUTS, G::CUTS, G::THREADS, G::BYTES},
                                {TILES * D::CUTS, D::CUTS, D::THREADS, D::BYTES}};
    return all[kind];
}

// What launch `kind` asks for: bit `kind` of `wanted` says whether it does.
template <class All>
Ahead ahead_of(const void* from, int64_t numbers, int kind, int64_t wanted) {
    const bool asks = wanted >> kind & 1;
    const int64_t bytes = numbers * int64_t(sizeof(typename All::Element::Number));
    return {static_cast<const char*>(from), asks ? int(bytes) : 0, int(bytes / (how_of<All>(kind).ctas * 32) + 16) / 16 * 16};
}

}  // namespace

#ifndef STRETTO_ON_HOST
#define LAUNCHED(name, bounds, Given, body) \
    KERNEL __launch_bounds__(bounds) name(const __grid_constant__ Given a) { \
        extern __shared__ __align__(1024) char shared[]; \
        body; \
    }
#define ALL_LAUNCHED(suffix, All) \
    LAUNCHED(stretto_chain_qkv##suffix, All::Qkv::THREADS, Qkv, qkv<All::Qkv>(a, shared)) \
    LAUNCHED(stretto_chain_attention##suffix, ATTENTION_THREADS, Attention, attend<All::Element>(a, shared)) \
    LAUNCHED(stretto_chain_out##suffix, All::Out::THREADS, Add, add<All::Out>(a, shared)) \
    LAUNCHED(stretto_chain_gate_up##suffix, All::GateUp::THREADS, GateUp, gate_up<All::GateUp>(a, shared)) \
    LAUNCHED(stretto_chain_down##suffix, All::Down::THREADS, Add, add<All::Down>(a, shared))
ALL_LAUNCHED(, PlainShapes)
ALL_LAUNCHED(_coded, CodedShapes)

namespace {

// All launches want one split of the cache: a multiprocessor is empty before it takes another.
cudaError_t prepare(const void* kernel, int bytes) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return e == cudaSuccess ? cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) : e;
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
    void launch(void (*kernel)(Given), const How& by, const Given& given) {
        if (error != cudaSuccess) return;
        cudaLaunchAttribute with[2];
        with[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
#ifdef STRETTO_APART
        with[0].val.programmaticStreamSerializationAllowed = 0;
#else
        with[0].val.programmaticStreamSerializationAllowed = 1;
#endif
        with[1].id = cudaLaunchAttributeClusterDimension;
        with[1].val.clusterDim.x = unsigned(by.cluster), with[1].val.clusterDim.y = 1, with[1].val.clusterDim.z = 1;
        cudaLaunchConfig_t how{};
        how.gridDim = dim3(unsigned(by.ctas)), how.blockDim = dim3(unsigned(by.threads)), how.dynamicSmemBytes = size_t(by.bytes);
        how.stream = stream, how.attrs = with, how.numAttrs = 2;
        error = cudaLaunchKernelEx(&how, kernel, given);
    }
};

template <class All>
struct Kernels;
#define KERNELS_OF(suffix, All) \
    template <> \
    struct Kernels<All> { \
        static constexpr auto qkv = stretto_chain_qkv##suffix; \
        static constexpr auto attention = stretto_chain_attention##suffix; \
        static constexpr auto out = stretto_chain_out##suffix; \
        static constexpr auto gate_up = stretto_chain_gate_up##suffix; \
        static constexpr auto down = stretto_chain_down##suffix; \
        static const void* of(int kind) { \
            const void* all[KINDS] = {reinterpret_cast<const void*>(qkv), reinterpret_cast<const void*>(attention), reinterpret_cast<const void*>(out), \
                                      reinterpret_cast<const void*>(gate_up), reinterpret_cast<const void*>(down)}; \
            return all[kind]; \
        } \
    };
KERNELS_OF(, PlainShapes)
KERNELS_OF(_coded, CodedShapes)
#else
struct Queue {
    const char* error = nullptr;

    template <class Given, class Kernel>
    void launch(Kernel kernel, const How& by, const Given& given) {
        if (error == nullptr)
            error = host::launch(by.ctas, by.threads, by.bytes, [&given, kernel](char* shared) { kernel(given, shared); }, by.cluster);
    }
};
template <class All>
struct Kernels {
    static constexpr auto qkv = chain::qkv<typename All::Qkv>;
    static constexpr auto attention = attend<typename All::Element>;
    static constexpr auto out = add<typename All::Out>, gate_up = chain::gate_up<typename All::GateUp>, down = add<typename All::Down>;
};
namespace {
#endif

template <class E>
device::Map map_of(const void* from, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    return device::map_of(from, sizeof(typename E::Number), sizes, steps, tile);
}

template <class All, class Q>
void run(Q& queue, const Call& c, const float* reals) {
    using E = typename All::Element;
    using Kernel = Kernels<All>;
    constexpr uint64_t EACH = sizeof(typename E::Number), ROW = WIDTH * EACH;
    constexpr uint32_t COLUMNS = E::COLUMNS;
    char* m = c.memory;
    int launch = 0;
    const auto common = [&](Squares squares, Squares before, Ahead ahead) {
        long long* stamps = c.stamps == nullptr ? nullptr : c.stamps + int64_t(launch) * MOST_CTAS * EVENTS;
        Common all{int(c.tokens), reals[1], squares, before};
        all.ahead = ahead, all.stamps = stamps;
        return all;
    };
    float *squares = reinterpret_cast<float*>(m + SQUARES_AT), *middle_squares = reinterpret_cast<float*>(m + MIDDLE_SQUARES_AT);
    bf16 *k_fresh = reinterpret_cast<bf16*>(m + K_MEMORY_AT), *v_fresh = reinterpret_cast<bf16*>(m + V_MEMORY_AT);
    for (int64_t i = 0; i < c.depth; ++i) {
        const Layer &w = c.layers[i], &next = c.layers[(i + 1) % c.depth];
        const bool first = i == 0, last = i == c.depth - 1;
        // Of the stream ahead of the layer, and between its halves.
        const Squares begin = first ? Squares{c.squares, int(c.square_parts)} : Squares{squares, TILES}, middle = {middle_squares, TILES};
        const float* scales = c.scales + i * SCALES;
        for (int kind = 0; kind < KINDS && launch < c.launches; ++kind, ++launch) {
            if (kind == 0) {
                Qkv a{};
                a.all = common(begin, first ? begin : middle, ahead_of<All>(w.gate_up, int64_t(MLP) * WIDTH, kind, c.ahead));
                if (E::CODED) a.all.by = scales + BY_QKV, a.shift = {c.qkv_shift + i * QKV, c.qkv_shift_step, c.line};
                a.weight = map_of<E>(w.qkv, {WIDTH, 8, 2, HALF / 8, HEADS + 2}, {ROW, HALF * ROW, 8 * ROW, HEAD * ROW}, {COLUMNS, 8, 2, 4, 1});
                a.given = first ? c.scaled : nullptr, a.x = m + X_AT;
                a.q = m + Q_MEMORY_AT, a.kv[0] = k_fresh, a.kv[1] = v_fresh, a.start = c.start, a.log2_theta = reals[0];
                queue.launch(Kernel::qkv, how_of<All>(kind), a);
            } else if (kind == 1) {
                Attention a{};
                a.all = common({}, {}, ahead_of<All>(static_cast<const char*>(w.gate_up) + MLP * ROW, int64_t(MLP) * WIDTH, kind, c.ahead));
                if (E::CODED) a.all.to = scales + TO_OUT;
                a.q = m + Q_MEMORY_AT, a.k_fresh = k_fresh, a.v_fresh = v_fresh;
                const auto kept = [&](const bf16* arena) {
                    const uint64_t step = c.token_step * 2, slots = c.slots, of_slot = c.slot_step * 2, tokens = c.prefix, span = (c.prefix + KEY_CUTS - 1) / KEY_CUTS;
                    return map_of<Plain>(arena + i * c.layer_step, {HEAD, tokens, slots, 1, 1}, {step, of_slot, slots * of_slot, slots * of_slot}, {64, uint32_t(span), 1, 1, 1});
                };
                a.k = kept(c.k), a.v = kept(c.v), a.slot_step = c.slot_step, a.token_step = c.token_step;
                if (c.ahead >> KINDS & 1) {
                    const int64_t next_at = (i + 1) % c.depth * c.layer_step;
                    a.k_next = c.k + next_at, a.v_next = c.v + next_at;
                }
                a.slot = c.slot, a.mask = c.mask, a.length = c.length, a.prefix = int(c.prefix), a.out = m + ATTENDED_AT;
                const int blocks = (int(c.tokens) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
                How by = how_of<All>(kind);
                by.ctas = blocks * 2 * KEY_CUTS;
                queue.launch(Kernel::attention, by, a);
            } else if (kind == 3) {
                GateUp a{};
                a.all = common(middle, begin, ahead_of<All>(next.qkv, int64_t(QKV) * WIDTH, kind, c.ahead));
                if (E::CODED) a.all.by = scales + BY_GATE_UP, a.all.to = scales + TO_DOWN, a.shift = {c.gate_up_shift + i * 2 * MLP, c.gate_up_shift_step, c.line};
                a.weight = map_of<E>(w.gate_up, {WIDTH, 8, 2, MLP / 8, 1}, {ROW, MLP * ROW, 8 * ROW, 2 * MLP * ROW}, {COLUMNS, 8, 2, 4, 1});
                a.x = m + MIDDLE_AT, a.hidden = m + HIDDEN_AT;
                queue.launch(Kernel::gate_up, how_of<All>(kind), a);
            } else {
                const bool down = kind == 4;
                Add a{};
                a.all = common({}, down ? middle : begin, down ? ahead_of<All>(next.out, int64_t(WIDTH) * INNER, kind, c.ahead)
                                                               : ahead_of<All>(w.down, int64_t(WIDTH) * MLP, kind, c.ahead));
                if (E::CODED) a.all.by = scales + (down ? BY_DOWN : BY_OUT);
                const uint64_t input = down ? MLP : INNER, all = input * EACH * WIDTH;
                a.weight = map_of<E>(down ? w.down : w.out, {input, WIDTH, 1, 1, 1}, {input * EACH, all, all, all}, {COLUMNS, 64, 1, 1, 1});
                a.x = m + (down ? HIDDEN_AT : ATTENDED_AT);
                a.table = c.table + (2 * i + down) * c.norm_step, a.line_step = c.line_step, a.norm_step = c.norm_step, a.line = c.line;
                a.given = first && !down ? c.residual : nullptr, a.residual = reinterpret_cast<float*>(m + RESIDUAL_AT);
                a.scaled = m + (down ? X_AT : MIDDLE_AT), a.squares_out = down ? (last ? c.squares_out : squares) : middle_squares;
                if (last && down) a.residual_last = c.residual_out, a.scaled_last = c.scaled_out;
                queue.launch(down ? Kernel::down : Kernel::out, how_of<All>(kind), a);
            }
        }
    }
}

// Words in the order in which the caller lists them; each is one pointer or whole number.
Call read(const int64_t* words) {
    static_assert(sizeof(Call) == (WORDS + 4 * MAX_LAYERS) * 8);
    Call c{};
    const int64_t depth = words[0];
    std::memcpy(&c, words, size_t(WORDS + 4 * (depth < MAX_LAYERS ? depth : MAX_LAYERS)) * 8);
    return c;
}

template <class Q>
void run_any(Q& queue, const Call& c, const float* reals) {
    if (c.scales == nullptr)
        run<PlainShapes>(queue, c, reals);
    else
        run<CodedShapes>(queue, c, reals);
}

#ifndef STRETTO_ON_HOST
template <class All>
cudaError_t prepare_all() {
    cudaError_t e = cudaSuccess;
    for (int kind = 0; kind < KINDS && e == cudaSuccess; ++kind) e = prepare(Kernels<All>::of(kind), how_of<All>(kind).bytes);
    return e;
}

template <class All>
cudaError_t count_clusters(int* counts) {
    cudaError_t e = cudaSuccess;
    for (int kind = 0; kind < KINDS && e == cudaSuccess; ++kind) {
        const How by = how_of<All>(kind);
        cudaLaunchAttribute with[1];
        with[0].id = cudaLaunchAttributeClusterDimension;
        with[0].val.clusterDim.x = unsigned(by.cluster), with[0].val.clusterDim.y = 1, with[0].val.clusterDim.z = 1;
        cudaLaunchConfig_t how{};
        how.gridDim = dim3(unsigned(by.ctas)), how.blockDim = dim3(unsigned(by.threads)), how.dynamicSmemBytes = size_t(by.bytes);
        how.attrs = with, how.numAttrs = 1;
        e = cudaOccupancyMaxActiveClusters(counts + kind, Kernels<All>::of(kind), &how);
    }
    return e;
}
#endif

}  // namespace

// Both return null, or what went wrong.
extern "C" const char* stretto_chain_prepare(int device) {
#ifndef STRETTO_ON_HOST
    cudaError_t e = set_device(device);
    if (e == cudaSuccess) e = prepare_all<PlainShapes>();
    if (e == cudaSuccess) e = prepare_all<CodedShapes>();
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (device::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// How many clusters of each launch the device holds at once, in bf16 and behind them in e4m3.
extern "C" const char* stretto_chain_fits(int* counts) {
#ifndef STRETTO_ON_HOST
    cudaError_t e = count_clusters<PlainShapes>(counts);
    if (e == cudaSuccess) e = count_clusters<CodedShapes>(counts + KINDS);
    if (e != cudaSuccess) return cudaGetErrorString(e);
#endif
    return nullptr;
}

extern "C" const char* stretto_chain_launch(int device, const int64_t* words, const float* reals, void* stream) {
    const Call c = read(words);
#ifndef STRETTO_ON_HOST
    Queue queue{static_cast<cudaStream_t>(stream)};
    queue.error = set_device(device);
    try {
        run_any(queue, c, reals);
    } catch (CUresult) {
        return "the driver refuses a tensor's map";
    }
    return queue.error == cudaSuccess ? nullptr : cudaGetErrorString(queue.error);
#else
    Queue queue;
    run_any(queue, c, reals);
    return queue.error;
#endif
}

// Sizes that the caller checks and allocates by.
extern "C" void stretto_chain_sizes(int64_t* sizes) {
    const int64_t all[] = {WIDTH, HEADS, HEAD, MLP, MAX_LAYERS, MAX_TOKENS, MAX_PREFIX, TILES, MEMORY_BYTES,
                           X_AT, MIDDLE_AT, ATTENDED_AT, HIDDEN_AT, Q_MEMORY_AT, K_MEMORY_AT, V_MEMORY_AT, SQUARES_AT, MIDDLE_SQUARES_AT, ROWS, MOST_CTAS};
    std::memcpy(sizes, all, sizeof all);
}
