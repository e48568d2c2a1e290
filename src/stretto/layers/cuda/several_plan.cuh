// The expert's layers as five launches each, one behind the other: sizes, what a launch is given, how memory between them lies.
//
// A launch starts while the one before it still runs, and brings its share of the weights into shared memory meanwhile. Then it
// waits, and only reads what the one before made. CTAs that have cuts of one sum are a cluster and add up in shared memory.
#pragma once

#include <cstdint>

namespace chain {

constexpr int WIDTH = 1024, HEADS = 8, HEAD = 256, MLP = 4096, MAX_LAYERS = 32;
constexpr int HALF = HEAD / 2, QKV = (HEADS + 2) * HEAD, INNER = HEADS * HEAD;
// Of a robot: tokens, and behind the last of them, for a norm, its shift. A CTA multiplies the rows of up to MAX_ROBOTS.
constexpr int ROWS = 56, TOKEN_TILES = ROWS / 8, MAX_TOKENS = ROWS - 1, MAX_ROBOTS = 4;
constexpr int TILE = 64, TILES = WIDTH / TILE, GROUP = 128;

using bf16 = uint16_t;

// What the factors of a product are made of. Rows of both lie in chunks of 128 bytes, COLUMNS numbers.
struct Plain {
    using Number = bf16;
    using Pair = uint32_t;
    static constexpr bool CODED = false;
    static constexpr int COLUMNS = 64;
    ON_DEVICE static Pair pair(float low, float high) { return device::pack(low, high); }
    ON_DEVICE static void multiply(float (&c)[28], const void* a, const void* b, bool add) { device::multiply_56(c, a, b, add); }
};
// e4m3. Rows of a stream are divided by what their root mean square was one norm ago, others multiplied by a fixed number.
struct Coded {
    using Number = uint8_t;
    using Pair = uint16_t;
    static constexpr bool CODED = true;
    static constexpr int COLUMNS = 128;
    ON_DEVICE static Pair pair(float low, float high) { return device::pack_coded(low, high); }
    ON_DEVICE static void multiply(float (&c)[28], const void* a, const void* b, bool add) { device::multiply_56_coded(c, a, b, add); }
};
template <class E>
ON_DEVICE typename E::Number rounded(float x) { return typename E::Number(E::pair(x, 0.0f)); }

// Rows of tokens lie in chunks ready for the matrix unit: in a row of 128 bytes, 16-byte pieces are swapped.
constexpr int CHUNK_BYTES = ROWS * 128;
template <class E = Plain>
ON_DEVICE int in_chunk(int row, int column) {
    constexpr int EACH = E::COLUMNS / 8;
    return row * 128 + ((column / EACH ^ row % 8) * EACH + column % EACH) * int(sizeof(typename E::Number));
}

// Robots of a batch whose rows are multiplied together are a group of `each`; the last group may lack some.
struct Robots {
    int batch, each;
};
// Rows of a group lie together, chunk by chunk. WIDE: columns of a row.
template <class E, int WIDE>
ON_DEVICE typename E::Number* in_chunks(char* base, int each, int group, int robot, int row, int column) {
    const int64_t chunk = group * (WIDE / E::COLUMNS) + column / E::COLUMNS;
    return reinterpret_cast<typename E::Number*>(base + (chunk * each + robot) * CHUNK_BYTES + in_chunk<E>(row, column % E::COLUMNS));
}
// What each robot has for itself.
constexpr int QUERY_BYTES = TOKEN_TILES * HEADS * 8 * HEAD * 2, KEPT_SQUARES = 64;

// What is to come soon is asked for by a launch before: so many bytes, `each` of them by one lane of a CTA.
struct Ahead {
    const char* from;
    int bytes, each;
};

// Sums of squares of the tokens' rows, [robots, step, parts].
struct Squares {
    const float* at;
    int parts, step;
};

struct Common {
    Robots robots;
    int tokens;
    float eps;
    Squares squares, before;  // of the stream; in e4m3 also what it was one norm ago
    const float *by, *to;     // in e4m3: a product is multiplied by this, and what is written by that, if not null
    Ahead ahead;
    long long* stamps;
};

// What a norm's shift adds to the product behind it, where it is no row of the product.
struct Shift {
    const float* table;
    int64_t step;
    const int64_t* line;
};

struct Qkv {
    device::Map weight;  // by columns, rows of eight, halves of a head, eights, heads
    Common all;
    Shift shift;
    const bf16* given;  // [robots, tokens + 1, columns] as they are, for the first layer
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
    int64_t mask_step;
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
    const int64_t* line;  // null: the robot's own number
    const float* given;   // the residual by rows, for the first layer
    float* residual;      // by tile, token tile, thread
    char* scaled;
    int squares_step;
    float* squares_out;
    float *residual_last, *scaled_last;  // by rows, for the last layer
};

struct GateUp {
    device::Map weight;  // by columns, rows of eight, gate and up, eights
    Common all;
    Shift shift;
    const char* x;
    char* hidden;
};

constexpr int EVENTS = 10, MOST_CTAS = 512;
// Clock cycles; the first and the last event also nanoseconds that all multiprocessors count alike.
ON_DEVICE void stamp(const Common& a, int event) {
#ifdef STRETTO_STAMPS
    if (a.stamps == nullptr || device::thread_id() != 0 || device::block_id() >= MOST_CTAS) return;
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
