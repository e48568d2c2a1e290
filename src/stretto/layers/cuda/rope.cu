// Queries, keys and values of many tokens, rotated and written where they belong, behind one plain C function.
#include "rope_product.cuh"
#include "call.cuh"
#include "wide_launch.cuh"

namespace {

struct Call {
    const char *x, *weight, *cos, *sin;
    char *q, *k, *v;
    const int64_t* slots;
    int64_t k_slot, k_token, v_slot, v_token, heads, kv_heads, row_tokens;
    int64_t tokens, rows, row_bytes, coded, early;
    wide::LeftWords left;
    int64_t cut[7];
};

template <class C>
const char* start(const Call& c, void* stream) {
    rope::Given a{};
    a.weight = wide::halves_of(c.weight, c.rows, rope::HALF, c.row_bytes, C::ROWS);
    a.x = wide::rows_of(c.x, c.tokens, c.row_bytes, C::TOKENS);
    a.cos = wide::rows_of(c.cos, c.tokens, rope::HALF * 4, C::TOKENS), a.sin = wide::rows_of(c.sin, c.tokens, rope::HALF * 4, C::TOKENS);
    a.rows = int(c.rows), a.tokens = int(c.tokens), a.chunks = int(c.row_bytes / 128);
    a.q = c.q, a.k = c.k, a.v = c.v, a.slots = c.slots;
    a.k_slot = c.k_slot, a.k_token = c.k_token, a.v_slot = c.v_slot, a.v_token = c.v_token;
    a.heads = int(c.heads), a.kv_heads = int(c.kv_heads), a.row_tokens = int(c.row_tokens);
    a.left = c.left.read();
    return wide::launch<C, rope::Finish<C>>(a, wide::clusters_of<C>(a), c.early, stream);
}

// Cuts that there are: rows, tokens, groups by rows, groups by tokens, blocks across, blocks along, stages.
#ifndef STRETTO_ROPE_CUTS
#define STRETTO_ROPE_CUTS(CUT)  \
    CUT(64, 56, 1, 1, 1, 1, 6)  \
    CUT(64, 72, 1, 1, 2, 1, 8)  \
    CUT(64, 136, 1, 1, 2, 1, 6) \
    CUT(128, 72, 2, 1, 2, 2, 4)
#endif

const char* choose(const Call& c, void* stream) {
#define CUT(...)                                                                                                               \
    {                                                                                                                          \
        const int64_t its[] = {__VA_ARGS__};                                                                                   \
        if (std::memcmp(c.cut, its, sizeof its) == 0) {                                                                        \
            return c.coded ? start<wide::Cut<__VA_ARGS__, true>>(c, stream) : start<wide::Cut<__VA_ARGS__, false>>(c, stream); \
        }                                                                                                                      \
    }
    STRETTO_ROPE_CUTS(CUT)
#undef CUT
    return "there is no such cut";
}

}  // namespace

// Null, or what keeps the launches from being had.
extern "C" const char* stretto_rope_prepare() {
#ifndef STRETTO_ON_HOST
    if (wide::maker() == nullptr) return "the driver makes no maps of tensors";
#endif
    return nullptr;
}

// Words are those of `Call`, in its order; null, or what went wrong.
extern "C" const char* stretto_rope_launch(const int64_t* words, void* stream) {
    return device::called<Call, 20 + wide::LEFT_WORDS + 7>(words, [=](const Call& c) { return choose(c, stream); });
}
