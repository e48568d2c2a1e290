// The expert's layers as five launches each, one behind the other: sizes, what a launch is given, how memory between them lies.
//
// A launch starts while the one before it still runs, and brings its share of the weights into shared memory meanwhile. Then it
// waits, and only reads what the one before made. CTAs that have cuts of one sum are a cluster and add up in shared memory.
#pragma once

#include <cstdint>

namespace chain {

constexpr int WIDTH = 1024, HEADS = 8, HEAD = 256, MLP = 4096, MAX_LAYERS = 32;
constexpr int HALF = HEAD / 2, QKV = (HEADS + 2) * HEAD, INNER = HEADS * HEAD;
// Tokens, and behind the last of them, for a norm, its shift.
constexpr int ROWS = 56, TOKEN_TILES = ROWS / 8, MAX_TOKENS = ROWS - 1;
constexpr int TILE = 64, TILES = WIDTH / TILE, GROUP = 128;

using bf16 = uint16_t;

// Rows of tokens lie in chunks of 64 columns, ready for the matrix unit: in a row of 128 bytes, 16-byte pieces are swapped.
constexpr int CHUNK_BYTES = ROWS * 128;
ON_DEVICE int in_chunk(int row, int column) { return row * 128 + ((column / 8 ^ row % 8) * 8 + column % 8) * 2; }
ON_DEVICE bf16* in_chunks(char* base, int row, int column) {
    return reinterpret_cast<bf16*>(base + column / 64 * CHUNK_BYTES + in_chunk(row, column % 64));
}

// What is to come soon is asked for by a launch before: so many bytes, `each` of them by one lane of a CTA.
struct Ahead {
    const char* from;
    int bytes, each;
};

struct Common {
    int tokens, square_parts;
    float eps;
    const float* squares;  // [tokens, parts]
    Ahead ahead;
    long long* stamps;
};

struct Qkv {
    device::Map weight;  // by columns, rows of eight, halves of a head, eights, heads
    Common all;
    const bf16* given;  // rows as they are, for the first layer
    const char* x;
    char* q;
    bf16* kv[2];
    const int32_t* start;
    float log2_theta;
};

struct Attention {
    device::Map k, v;  // by columns, keys, slots
    Common all;
    const char* q;
    const bf16 *k_fresh, *v_fresh, *k_next, *v_next;  // next: the next layer's, of which null asks nothing
    int64_t slot_step, token_step;
    const int64_t* slot;
    const uint8_t* mask;
    const int32_t* length;
    int prefix;
    char* out;
};

// A product that is gated and added to the stream; its norm is what comes next.
struct Add {
    device::Map weight;  // by columns, rows
    Common all;
    const char* x;
    const float* table;  // of the gate's norm: scale, shift, gate
    int64_t line_step, norm_step;
    const int64_t* line;  // null: the first
    const float* given;   // the residual by rows, for the first layer
    float* residual;      // by tile, token tile, thread
    char* scaled;
    float* squares_out;
    float *residual_last, *scaled_last;  // by rows, for the last layer
};

struct GateUp {
    device::Map weight;  // by columns, rows of eight, gate and up, eights
    Common all;
    const char* x;
    char* hidden;
};

constexpr int EVENTS = 10;
// Clock cycles; the first and the last event also nanoseconds that all multiprocessors count alike.
ON_DEVICE void stamp(const Common& a, int event) {
#ifdef STRETTO_STAMPS
    if (a.stamps == nullptr || device::thread_id() != 0) return;
    long long* at = a.stamps + device::block_id() * EVENTS;
    at[event] = device::ticks();
    if (event == 0 || event == 7) at[event == 0 ? 8 : 9] = device::nanoseconds();
#endif
}

ON_DEVICE void ask_ahead(const Ahead& a) {
    const int lane = device::thread_id() - 32;
    if (lane < 0 || lane >= 32) return;
    const int at = (device::block_id() * 32 + lane) * a.each;
    if (at < a.bytes) device::ask_for(a.from + at, uint32_t(min(a.each, a.bytes - at)));
}

}  // namespace chain
