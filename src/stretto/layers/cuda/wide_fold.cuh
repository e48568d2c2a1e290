// What is left of a norm behind a wide product: a factor of each token, and a line of a table that is added, looked up while products
// run. Also where each token's results go.
#pragma once

#include "wide_product.cuh"

namespace wide {

// A token's factor is given, or it is the inverse root of its mean square. In e4m3 it is the share of that in what the codes were
// divided by, `before`, and `by` of it.
struct Left {
    const float *factor, *table;  // null: squares are given; no line
    const int64_t* lines;
    int64_t line_step;
    int row_tokens;  // so many tokens share a line's number
    const float *squares, *before, *by;  // sums of squares in so many parts a token; the last two may be null
    int parts, before_parts;
    float width, eps;

    ON_DEVICE float mean(const float* all, int count, int token) const {
        const float* its = all + int64_t(token) * count;
        float sum = 0.0f;
        if (count % 4 == 0) {
#pragma unroll 4
            for (int part = 0; part < count; part += 4) {
                const float4 four = *reinterpret_cast<const float4*>(its + part);
                sum += (four.x + four.y) + (four.z + four.w);
            }
        } else {
#pragma unroll 1
            for (int part = 0; part < count; ++part) sum += its[part];
        }
        return sum / width + eps;
    }
    ON_DEVICE float factor_of(int token) const {
        if (factor != nullptr) return factor[token];
        const float its = mean(squares, parts, token);
        const float share = before == nullptr ? device::inverse_root(its) : device::inverse_root(its / mean(before, before_parts, token));
        return by == nullptr ? share : share * *by;
    }
};

// The same in 64-bit words.
struct LeftWords {
    int64_t given;  // 0: nothing is left of a norm
    const float *factor, *table;
    const int64_t* lines;
    int64_t line_step, row_tokens;
    const float *squares, *before, *by;
    int64_t parts, before_parts, width;
    double eps;

    Left read() const {
        return {factor, table, lines, line_step, int(row_tokens), squares, before, by, int(parts), int(before_parts), float(width), float(eps)};
    }
};
constexpr int LEFT_WORDS = 13;
static_assert(sizeof(LeftWords) == LEFT_WORDS * 8);

// Rows of a tile alternate by eights: eight of a first part (gates, lower halves of heads), eight of a second one.
ON_DEVICE int within_part(int row) { return row / 16 * 8 + row % 8; }
ON_DEVICE int part_of(int row) { return row / 8 % 2; }

template <class C>
struct Known {
    static constexpr int LINES = 8;
    static constexpr int FACTORS_AT = C::TOKENS * 8, SHIFTS_AT = (FACTORS_AT + C::TOKENS * 8 + 15) / 16 * 16;
    static constexpr int BYTES = SHIFTS_AT + LINES * C::ROWS * 4;
    char* base;

    // Where a token's results go, in numbers; -1: there is no such token.
    ON_DEVICE int64_t* place() const { return reinterpret_cast<int64_t*>(base); }
    // A token's factor, and how far its line is from the first.
    ON_DEVICE float2* factor() const { return reinterpret_cast<float2*>(base + FACTORS_AT); }
    ON_DEVICE float* shift() const { return reinterpret_cast<float*>(base + SHIFTS_AT); }
    // Whether all lines of a tile are here; else they are read where they are.
    static ON_DEVICE bool holds(const Left& left, const Tile& tile) {
        return left.table == nullptr || (tile.token + C::TOKENS - 1) / left.row_tokens - tile.token / left.row_tokens < LINES;
    }

    // Lines, by one warp: their numbers at once, then all that is read from them. `column_of` a row of the tile in the table.
    template <class Column>
    ON_DEVICE void fill(const Left& left, int tokens, const Tile& tile, int lane, Column column_of) const {
        const int first = tile.token / left.row_tokens, last = (min(tile.token + C::TOKENS, tokens) - 1) / left.row_tokens;
        const int lines = left.table == nullptr ? 1 : holds(left, tile) ? last - first + 1 : 0;
        constexpr int EACH = C::ROWS / 32, ONCE = 4;
        uint32_t away = 0;
        if (left.table != nullptr && lane < lines) away = uint32_t(left.lines[first + lane] * left.line_step);
#pragma unroll 1
        for (int begin = 0; begin < lines; begin += ONCE) {
            float shifts[ONCE][EACH];
#pragma unroll
            for (int l = 0; l < ONCE; ++l) {
                const uint32_t its = device::bits_from_lane(away, begin + l);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const bool there = left.table != nullptr && begin + l < lines;
                    shifts[l][i] = there ? device::at(left.table + its + column_of(lane + i * 32)) : 0.0f;
                }
            }
#pragma unroll
            for (int l = 0; l < ONCE; ++l)
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (begin + l < LINES) shift()[(begin + l) * C::ROWS + lane + i * 32] = shifts[l][i];
        }
    }
    // What is each token's, by all threads of the groups, while the first chunks are on their way.
    template <class Place>
    ON_DEVICE void note(const Left& left, int tokens, const Tile& tile, int thread, Place place_of) const {
#pragma unroll
        for (int t = thread; t < C::TOKENS; t += C::GROUPS * GROUP) {
            const int token = min(tile.token + t, tokens - 1);
            const int run = token / left.row_tokens;
            uint32_t away = 0;
            if (left.table != nullptr)
                away = holds(left, tile) ? (run - tile.token / left.row_tokens) * C::ROWS : uint32_t(left.lines[run] * left.line_step);
            factor()[t] = {left.factor_of(token), device::as_float(away)};
            place()[t] = tile.token + t < tokens ? place_of(token) : -1;
        }
    }
};

// Both parts of a token and of the next one, as the folded norm makes them: c[0], c[1] of the first part, c[2], c[3] of the second.
template <class C>
struct Unfolded {
    const float4* factors;         // of two tokens
    const float *first, *second;   // shifts of this thread's rows of both parts, in the first line

    Unfolded() = default;
    ON_DEVICE Unfolded(const Known<C>& known, const Left& left, const Tile& tile, int row, int column, int further)
        : factors(reinterpret_cast<const float4*>(known.factor())), first(left.table + column), second(left.table + column + further) {
        if (Known<C>::holds(left, tile)) first = known.shift() + row, second = first + 8;
    }
    ON_DEVICE void operator()(int token, float* c) const {
        const float4 by = factors[token / 2];
        const uint32_t away[2] = {device::bits_of(by.y), device::bits_of(by.w)};
        c[0] = c[0] * by.x + first[away[0]];
        c[2] = c[2] * by.x + second[away[0]];
        c[1] = c[1] * by.z + first[away[1]];
        c[3] = c[3] * by.z + second[away[1]];
    }
};

// Results of a group on their way out: rows of a token each, whose 16-byte pieces change places so that neither writing nor reading
// meets itself.
template <int ROW_BYTES>
struct Tray {
    static constexpr int PIECES = ROW_BYTES / 16, SWAPPED = PIECES < 8 ? PIECES : 8;
    char* base;

    // Which change places does not depend on the run of 8 tokens, so that runs are a constant apart.
    ON_DEVICE char* at(int run, int token, int piece) const {
        return base + run * (8 * ROW_BYTES) + (token * ROW_BYTES + (piece / SWAPPED * SWAPPED + (piece ^ token * SWAPPED / 8) % SWAPPED) * 16);
    }
    // Pieces of 8 bf16 numbers of the tokens 8 n to 8 (n + 4), but no more than there are runs of 8; packed[i] is this lane's of 8 (n + i).
    template <int RUNS>
    ON_DEVICE void put(int n, const uint32_t (&packed)[4], int piece, int lane) const {
        if (n + 4 <= RUNS) {
            device::store_turned(at(n, lane % 8, piece) + lane / 8 * (8 * ROW_BYTES), packed[0], packed[1], packed[2], packed[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (n + i < RUNS) device::store_turned(at(n + i, lane % 8, piece), packed[i]);
        }
    }
    // By a group: `to(token, piece)` is where 16 bytes go, or null.
    template <class To>
    ON_DEVICE void send(int tokens, int index, To to) const {
#pragma unroll 2
        for (int i = index; i < tokens * PIECES; i += GROUP) {
            char* there = to(i / PIECES, i % PIECES);
            if (there != nullptr) *reinterpret_cast<float4*>(there) = *reinterpret_cast<const float4*>(at(i / PIECES / 8, i / PIECES % 8, i % PIECES));
        }
    }
};

}  // namespace wide
