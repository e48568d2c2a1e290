// Products that are gated and added to a residual, behind one plain C function.
#include "added_product.cuh"
#include "call.cuh"
#include "wide_launch.cuh"

namespace {

struct Call {
    const char *x, *weight;
    const float* residual;
    float* total;
    char* scaled;
    float* squares;
    const float* gate;
    const int64_t* gate_lines;
    int64_t gate_step, gate_tokens;
    const float* scale;
    const int64_t* scale_lines;
    int64_t scale_step, scale_tokens;
    const float *x_scale, *weight_scale, *before;
    int64_t before_parts, eps_bits, tokens, rows, row_bytes, coded, early;
    int64_t cut[8];
};

template <class C>
const char* start(const Call& c, void* stream) {
    added::Given a{};
    a.weight = wide::rows_of(c.weight, c.rows, c.row_bytes, C::ROWS);
    a.x = wide::rows_of(c.x, c.tokens, c.row_bytes, C::TOKENS);
    a.rows = int(c.rows), a.tokens = int(c.tokens), a.chunks = int(c.row_bytes / 128);
    a.residual = c.residual, a.total = c.total, a.scaled = c.scaled, a.squares = c.squares;
    a.gate = {c.gate, c.gate_lines, c.gate_step, int(c.gate_tokens)}, a.scale = {c.scale, c.scale_lines, c.scale_step, int(c.scale_tokens)};
    a.x_scale = c.x_scale, a.weight_scale = c.weight_scale, a.before = c.before, a.before_parts = int(c.before_parts);
    std::memcpy(&a.eps, &c.eps_bits, 4);
    return wide::launch<C, added::Finish<C>>(a, wide::clusters_of<C>(a), c.early, stream);
}

// Cuts that there are: rows, tokens, groups by rows, groups by tokens, blocks across, blocks along, stages, splits.
#ifndef STRETTO_ADDED_CUTS
#define STRETTO_ADDED_CUTS(CUT)      \
    CUT(64, 56, 1, 1, 1, 1, 6, 4)  \
    CUT(64, 80, 1, 1, 1, 1, 5, 4)  \
    CUT(64, 104, 1, 1, 1, 1, 4, 4) \
    CUT(64, 112, 1, 2, 1, 1, 4, 4) \
    CUT(64, 56, 1, 1, 1, 1, 6, 2)  \
    CUT(128, 104, 2, 1, 1, 1, 6, 2)
#endif

template <int ROWS, int TOKENS, int BY_ROWS, int BY_TOKENS, int ACROSS, int ALONG, int STAGES, int SPLITS>
const char* by_kind(const Call& c, void* stream) {
    if (c.coded) return start<wide::Cut<ROWS, TOKENS, BY_ROWS, BY_TOKENS, ACROSS, ALONG, STAGES, true, SPLITS>>(c, stream);
    return start<wide::Cut<ROWS, TOKENS, BY_ROWS, BY_TOKENS, ACROSS, ALONG, STAGES, false, SPLITS>>(c, stream);
}

const char* choose(const Call& c, void* stream) {
#define CUT(...)                                                                                 \
    {                                                                                            \
        const int64_t its[] = {__VA_ARGS__};                                                     \
        if (std::memcmp(c.cut, its, sizeof its) == 0) return by_kind<__VA_ARGS__>(c, stream);    \
    }
    STRETTO_ADDED_CUTS(CUT)
#undef CUT
    return "there is no such cut";
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* stretto_added_prepare(int device) {
#ifndef STRETTO_ON_HOST
    const cudaError_t e = cudaSetDevice(device);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (wide::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_added_launch(const int64_t* words, void* stream) {
    return device::called<Call, 32>(words, [=](const Call& c) { return choose(c, stream); });
}
