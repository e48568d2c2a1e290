// The gated product of many rows behind one plain C function.
#include "gated_product.cuh"
#include "call.cuh"
#include "wide_launch.cuh"

namespace {

struct Call {
    const char *x, *weight;
    char* out;
    const float *x_scale, *weight_scale, *multiplier;
    int64_t tokens, rows, row_bytes, coded, clusters, early;
    wide::LeftWords left;
    int64_t cut[7];
};

template <class C>
const char* start(const Call& c, void* stream) {
    gated::Given a{};
    a.weight = wide::halves_of(c.weight, c.rows, c.rows / 2, c.row_bytes, C::ROWS);
    a.x = wide::rows_of(c.x, c.tokens, c.row_bytes, C::TOKENS);
    a.rows = int(c.rows), a.tokens = int(c.tokens), a.chunks = int(c.row_bytes / 128);
    a.out = c.out, a.x_scale = c.x_scale, a.weight_scale = c.weight_scale, a.multiplier = c.multiplier;
    a.left = c.left.read();
    const int clusters = C::LASTING ? int(c.clusters) : wide::clusters_of<C>(a);
    return wide::launch<C, gated::Finish<C>>(a, clusters, c.early, stream);
}

// Cuts that there are: rows, tokens, groups by rows, groups by tokens, blocks across, blocks along, stages. The lasting ones are for
// many more tokens.
#ifndef STRETTO_GATED_CUTS
#define STRETTO_GATED_CUTS(CUT)  \
    CUT(128, 56, 2, 1, 1, 1, 4)  \
    CUT(128, 104, 2, 1, 1, 2, 6) \
    CUT(128, 200, 2, 1, 1, 2, 4)
#define STRETTO_GATED_LASTING(CUT) \
    CUT(256, 112, 2, 1, 1, 2, 4)   \
    CUT(256, 128, 2, 1, 1, 2, 4)
#endif
#ifndef STRETTO_GATED_LASTING
#define STRETTO_GATED_LASTING(CUT)
#endif
template <bool CODED, int... CUT>
using Lasting = wide::Cut<CUT..., CODED, 1, true>;

const char* choose(const Call& c, void* stream) {
#define CUT(...)                                                                                                               \
    {                                                                                                                          \
        const int64_t its[] = {__VA_ARGS__};                                                                                   \
        if (std::memcmp(c.cut, its, sizeof its) == 0 && c.left.given)                                                          \
            return c.coded ? start<wide::Cut<__VA_ARGS__, true>>(c, stream) : start<wide::Cut<__VA_ARGS__, false>>(c, stream); \
    }
    STRETTO_GATED_CUTS(CUT)
#undef CUT
#define CUT(...)                                                                                                           \
    {                                                                                                                      \
        const int64_t its[] = {__VA_ARGS__};                                                                               \
        if (std::memcmp(c.cut, its, sizeof its) == 0 && !c.left.given)                                                     \
            return c.coded ? start<Lasting<true, __VA_ARGS__>>(c, stream) : start<Lasting<false, __VA_ARGS__>>(c, stream); \
    }
    STRETTO_GATED_LASTING(CUT)
#undef CUT
    return "there is no such cut";
}

}  // namespace

// How many pairs of CTAs of the lasting cuts the device holds at once; null, or what went wrong.
extern "C" const char* stretto_gated_prepare(int device, int* clusters) {
    *clusters = 66;
#ifndef STRETTO_ON_HOST
    cudaError_t e = cudaSetDevice(device);
#define CUT(...) \
    if (e == cudaSuccess) e = wide::held<Lasting<false, __VA_ARGS__>, gated::Finish<Lasting<false, __VA_ARGS__>>, gated::Given>(clusters);
    STRETTO_GATED_LASTING(CUT)
#undef CUT
    if (e != cudaSuccess) return cudaGetErrorString(e);
    if (wide::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_gated_launch(const int64_t* words, void* stream) {
    return device::called<Call, 19 + wide::LEFT_WORDS>(words, [=](const Call& c) { return choose(c, stream); });
}
