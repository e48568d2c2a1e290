// Attention over a prefix and a suffix behind one plain C function.
#include "call.cuh"
#include "suffix_attention.cuh"

namespace {

using namespace suffix;

struct Call {
    const char *q, *k, *v, *fresh_k, *fresh_v;
    const int64_t* slots;
    const int32_t* length;
    const uint8_t* mask;
    char* out;
    const float* multiplier;
    // Steps in numbers, of a slot and a key, or of a robot and a key.
    int64_t mask_step, k_slot, k_key, v_slot, v_key, fresh_k_robot, fresh_k_key, fresh_v_robot, fresh_v_key;
    int64_t robots, rows, arena, prefix, suffix, tall, cuts, shared;
    const char* ahead;
    int64_t ahead_bytes, early;
    double scale;
};

#ifndef STRETTO_ON_HOST
template <class C>
__global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(C::CLUSTER, 1, 1) attention(const __grid_constant__ Given a) {
    extern __shared__ __align__(1024) char shared[];
    run<C>(a, shared);
}

template <class C>
const char* launch(const Given& given, int ctas, bool early, void* stream) {
    cudaLaunchConfig_t how{};
    cudaLaunchAttribute with[1];
    with[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    with[0].val.programmaticStreamSerializationAllowed = 1;
    how.gridDim = dim3(unsigned(ctas)), how.blockDim = dim3(THREADS), how.dynamicSmemBytes = C::BYTES;
    how.stream = static_cast<cudaStream_t>(stream), how.attrs = with, how.numAttrs = early ? 1 : 0;
    const cudaError_t e = cudaLaunchKernelEx(&how, attention<C>, given);
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
#else
template <class C>
const char* launch(const Given& given, int ctas, bool, void*) {
    return host::launch(ctas, THREADS, C::BYTES, [&given](char* shared) { run<C>(given, shared); }, C::CLUSTER);
}
#endif

// Rows of 256 numbers in `lines` of them, each line `line` numbers behind the last: tiles of `height` rows and `chunks` times 64 columns.
device::Map rows_of(const char* from, int64_t lines, int64_t rows, int64_t line, int64_t row, int height, int chunks) {
    const uint64_t beyond = uint64_t(lines * line * 2);
    return device::map_of(from, {64, uint64_t(rows), CHUNKS, uint64_t(lines), 1}, {uint64_t(row * 2), 128, uint64_t(line * 2), beyond},
                  {64, uint32_t(height), uint32_t(chunks), 1, 1});
}

template <class C>
const char* start(const Call& c, void* stream) {
    Given a{};
    a.q = rows_of(c.q, c.robots, c.rows, c.rows * HEAD, HEAD, ROWS, CHUNKS);
    a.k = rows_of(c.k, c.arena, c.prefix, c.k_slot, c.k_key, KEYS, CHUNKS / C::SHARED);
    a.v = rows_of(c.v, c.arena, c.prefix, c.v_slot, c.v_key, KEYS, CHUNKS / C::SHARED);
    a.few_k = rows_of(c.k, c.arena, c.prefix, c.k_slot, c.k_key, 8, 1);
    a.few_v = rows_of(c.v, c.arena, c.prefix, c.v_slot, c.v_key, 8, 1);
    a.fresh_k = rows_of(c.fresh_k, c.robots, c.suffix, c.fresh_k_robot, c.fresh_k_key, 8, 1);
    a.fresh_v = rows_of(c.fresh_v, c.robots, c.suffix, c.fresh_v_robot, c.fresh_v_key, 8, 1);
    a.slots = c.slots, a.length = c.length, a.mask = c.mask, a.mask_step = c.mask_step, a.out = c.out, a.multiplier = c.multiplier;
    a.rows = int(c.rows), a.prefix = int(c.prefix), a.suffix = int(c.suffix), a.scale = float(c.scale);
    a.ahead = c.ahead, a.ahead_bytes = c.ahead_bytes;
    constexpr int TILES = C::Q_TILES * ROWS * C::SHARED;
    a.row_tiles = (a.rows + TILES - 1) / TILES * C::SHARED;
    return launch<C>(a, int(c.robots) * a.row_tiles * C::CUTS, c.early != 0, stream);
}

// Calls `with` a cut that is compiled, if it is.
template <class With>
auto choose(int64_t tall, int64_t cuts, int64_t shared, With with) {
    if (!tall && shared == 1 && cuts == 4) return with(Cut<false, 4, 1>{});
    if (!tall && shared == 1 && cuts == 2) return with(Cut<false, 2, 1>{});
    if (!tall && shared == 1 && cuts == 1) return with(Cut<false, 1, 1>{});
    if (tall && shared == 2 && cuts == 1) return with(Cut<true, 1, 2>{});
    return with(nullptr);
}

template <class C>
const char* prepare_one() {
#ifndef STRETTO_ON_HOST
    cudaError_t e = cudaFuncSetAttribute(attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::BYTES);
    if (e == cudaSuccess) e = cudaFuncSetAttribute(attention<C>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (e != cudaSuccess) return cudaGetErrorString(e);
#endif
    return nullptr;
}

}  // namespace

// Prepares the launches of one cut on the device that is set; null, or what went wrong.
extern "C" const char* stretto_suffix_prepare(int64_t tall, int64_t cuts, int64_t shared) {
#ifndef STRETTO_ON_HOST
    if (device::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return choose(tall, cuts, shared, [](auto cut) -> const char* {
        if constexpr (std::is_same_v<decltype(cut), std::nullptr_t>) return "no such cut is compiled";
        else return prepare_one<decltype(cut)>();
    });
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_suffix_launch(const int64_t* words, void* stream) {
    return device::called<Call, 31>(words, [=](const Call& c) {
        return choose(c.tall, c.cuts, c.shared, [&](auto cut) -> const char* {
            if constexpr (std::is_same_v<decltype(cut), std::nullptr_t>) return "no such cut is compiled";
            else return start<decltype(cut)>(c, stream);
        });
    });
}
