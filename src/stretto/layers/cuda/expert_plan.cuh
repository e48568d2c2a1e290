// Sizes of the expert's kernel, how its work is cut over CTAs, and its arguments.
//
// A layer is five phases: query, key and value (0); attention (1); output (2); gate and up (3); down (4). What is static,
// weights and the prefix's keys and values, comes through a ring of stages in shared memory that one warp keeps filling,
// phases ahead of the eight warps that compute. What CTAs make for each other goes over a board in memory, whose words say
// of themselves whether they are there.
#pragma once

#include <cstdint>

namespace expert {

constexpr int WIDTH = 1024, HEADS = 8, HEAD = 256, MLP = 4096;
constexpr int HALF = HEAD / 2, QKV = (HEADS + 2) * HEAD, INNER = HEADS * HEAD;

constexpr int CTAS = 128, WARPS = 8, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 128;
constexpr int PHASES = 5, MAX_LAYERS = 32, MAX_TOKENS = 56, ROWS = 64;

// A stage of the ring, and the steps between rows in it. 64 over a multiple of 128 bytes keeps reads of a quad of lanes a
// row free of bank conflicts; 16 over does so for transposed reads.
constexpr int STAGES = 8, STAGE_BYTES = 18432;
constexpr int ROW_2048 = 2112, ROW_1024 = 1088, ROW_512 = 576, ROW_TRANSPOSED = 528;

// Products: a CTA has 20 columns of query, key and value as 10 pairs that RoPE turns; 32 columns of gate and the same of
// up; or a tile of 64 columns along one of 8 cuts of the input, whose partial sums 8 CTAs add up.
constexpr int PAIRS = QKV / 2 / CTAS, GATES = MLP / CTAS, TILE = 64, TILES = WIDTH / TILE, CUTS = CTAS / TILES;
static_assert(PAIRS * 2 * CTAS == QKV && PAIRS * 2 <= 24 && GATES == 32 && CUTS == 8);

// Attention: a CTA has 32 packed query rows (4 tokens of 8 heads) and one of 8 cuts of the prefix, or the suffix.
constexpr int QUERIES = 32, KEY_CUTS = 8, SPANS = KEY_CUTS + 1, SPAN_KEYS = 128, MAX_PREFIX = KEY_CUTS * SPAN_KEYS;
constexpr int ALL_QUERIES = MAX_TOKENS * HEADS;
static_assert(ALL_QUERIES / QUERIES * SPANS <= CTAS);

// Shared memory: the ring; sums of the four groups of warps that share the input of a product; small tables; barriers.
constexpr int GROUPS = 4, SUM_STEP = TILE + 8, SCORE_STEP = SPAN_KEYS + 8;
constexpr int SUM_BYTES = GROUPS * ROWS * SUM_STEP * 4;
static_assert(GROUPS * QUERIES * SCORE_STEP * 4 <= SUM_BYTES);
constexpr int SQUARES_AT = STAGES * STAGE_BYTES + SUM_BYTES, ANGLES_AT = SQUARES_AT + GROUPS * ROWS * 4;
constexpr int VALID_AT = ANGLES_AT + ROWS * PAIRS * 8, BARRIERS_AT = VALID_AT + SPAN_KEYS;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * STAGES * 8;
static_assert(SHARED_BYTES <= 227 * 1024 && BARRIERS_AT % 8 == 0);

// The board, in words. What many read is there twice, for even and odd layers: a layer's is cleared by who wrote it during
// the next layer, when all have read it. What one thread reads is cleared by that thread.
constexpr int64_t FRESH = 0, ATTENDED = FRESH + MAX_TOKENS * QKV / 2, HIDDEN = ATTENDED + MAX_TOKENS * INNER / 2;
constexpr int64_t MIDDLE = HIDDEN + MAX_TOKENS * MLP / 2, END = MIDDLE + (MAX_TOKENS + 1) * WIDTH / 2;
constexpr int64_t MIDDLE_SQUARES = END + (MAX_TOKENS + 1) * WIDTH / 2, END_SQUARES = MIDDLE_SQUARES + ROWS * TILES;
constexpr int64_t OF_LAYER = END_SQUARES + ROWS * TILES;
constexpr int64_t PRODUCTS = 2 * OF_LAYER, OF_PRODUCT = int64_t(TILES) * CUTS * MAX_TOKENS * TILE;
constexpr int64_t SPAN_SUMS = PRODUCTS + 2 * OF_PRODUCT, SPAN_TOPS = SPAN_SUMS + int64_t(SPANS) * ALL_QUERIES * HEAD;
constexpr int64_t WORDS = SPAN_TOPS + 2 * SPANS * ALL_QUERIES * 2;
static_assert(OF_LAYER % 4 == 0 && HIDDEN % 4 == 0 && MIDDLE % 4 == 0 && SPAN_SUMS % 4 == 0 && SPAN_TOPS % 4 == 0);

using bf16 = uint16_t;

struct Layer {
    const bf16 *qkv, *out, *gate_up, *down;
};

// Strides count elements. Rows of a product's input are those of `tokens`, and for a norm's one more: its shift.
struct Arguments {
    Layer layers[MAX_LAYERS];
    const bf16 *k, *v;
    int64_t slot_step, layer_step, token_step;
    const int64_t* slot;
    const uint8_t* mask;
    const int32_t *length, *start;
    const float* table;  // scale, shift, gate of every norm, by line
    int64_t line_step, norm_step;
    const int64_t* line;  // null: the first
    const float *residual, *squares;
    const bf16* scaled;
    float *residual_out, *scaled_out, *squares_out;
    uint32_t* board;    // all absent at first
    long long* stamps;  // null: none are taken
    int32_t depth, phases, tokens, prefix, square_parts;
    float log2_theta, eps;

    ON_DEVICE uint32_t* of_layer(int layer, int64_t at) const { return board + ((layer & 1) != 0 ? OF_LAYER + at : at); }
    // [tokens, 10, 256], [tokens, 8, 256], [tokens, 4096], [tokens + 1, 1024] twice; [tokens, tiles] twice
    ON_DEVICE bf16* fresh(int layer) const { return reinterpret_cast<bf16*>(of_layer(layer, FRESH)); }
    ON_DEVICE bf16* attended(int layer) const { return reinterpret_cast<bf16*>(of_layer(layer, ATTENDED)); }
    ON_DEVICE bf16* hidden(int layer) const { return reinterpret_cast<bf16*>(of_layer(layer, HIDDEN)); }
    ON_DEVICE bf16* middle(int layer) const { return reinterpret_cast<bf16*>(of_layer(layer, MIDDLE)); }
    ON_DEVICE bf16* end(int layer) const { return reinterpret_cast<bf16*>(of_layer(layer, END)); }
    ON_DEVICE uint32_t* middle_squares(int layer) const { return of_layer(layer, MIDDLE_SQUARES); }
    ON_DEVICE uint32_t* end_squares(int layer) const { return of_layer(layer, END_SQUARES); }
};

}  // namespace expert
