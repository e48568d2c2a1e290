// residual + gate * (x W^T) for many tokens, in bf16 or e4m3, with what the next norm is made of: rows scaled for the product behind
// it, and the sums of squares of each row's runs of 64 columns. Sums stay in fp32 until the scaled rows are rounded.
//
// Where the input is cut over the CTAs of a cluster, each sends the others their token tiles, and ends with its own of all cuts,
// added in the order of the cuts: so a row's bits do not depend on where it lies.
#pragma once

#include "wide_product.cuh"

namespace added {

using wide::GROUP;

// A table's line of each token: `lines` of runs of `row_tokens` tokens, or, if null, the runs' own numbers.
struct Lines {
    const float* table;
    const int64_t* lines;
    int64_t step;
    int row_tokens;

    ON_DEVICE const float* of(int token) const {
        const int64_t run = token / row_tokens;
        return table + (lines == nullptr ? run : device::at(lines + run)) * step;
    }
};

struct Given : wide::Factors {
    const float* residual;
    float* total;
    char* scaled;
    float* squares;  // [tokens, rows / 64]
    Lines gate, scale;
    // Of coded factors; and mean squares of the rows one norm ago, by which codes are divided.
    const float *x_scale, *weight_scale, *before;
    int before_parts;
    float eps;
};

template <class C>
struct Finish {
    static constexpr int SPLITS = C::SPLITS, RUNS = C::COLUMNS / 8, BLOCKS = C::BLOCKS;
    // Which runs of 8 tokens a cut ends with.
    static ON_DEVICE int first_run(int split) { return RUNS * split / SPLITS; }
    static ON_DEVICE int owner_of(int run) { return ((run + 1) * SPLITS - 1) / RUNS; }
    // A unit is 64 columns of 8 tokens: a group's sums of a cut, 16 bytes a thread.
    static constexpr int EACH = (RUNS + SPLITS - 1) / SPLITS, UNITS = EACH * BLOCKS, UNIT_BYTES = GROUP * 16;
    static constexpr bool SENDS = SPLITS > 1;
    // What the other cuts send; and, where stages were, units turned, by tokens.
    static constexpr int GROUP_BYTES = SENDS ? (SPLITS - 1) * UNITS * UNIT_BYTES : 0, BYTES = C::GROUPS * GROUP_BYTES;
    static constexpr int TURNED = 68, TRAY_BYTES = UNITS * 8 * TURNED * 4;
    // Lines of so many units are looked up at a time, those of the first ones while products run.
    static constexpr int AT_ONCE = UNITS <= 4 ? UNITS : UNITS <= 8 ? 4 : 2;
    static constexpr int KNOWERS = 32;
    // The constructor waits for the launch before: tables are there already.
    static constexpr bool WAITS = true;
    static_assert(!C::LASTING && C::GROUPS * TRAY_BYTES <= C::STAGES_BYTES);
    using Room = wide::Room<C, Finish>;

    struct Line {
        float4 gate, scale;
    };

    const Given& a;
    char *kept, *turned;
    device::Barrier* known;
    int rank, split, group, index;
    int row, token;  // of this thread in its first unit: four columns from `row` on
    float4 residual[UNITS];
    float before[C::CODED ? UNITS : 1];  // a part of a row's squares one norm ago: sixteen lanes have them all
    Line line[AT_ONCE];
    float by = 1.0f;

    ON_DEVICE Finish(const Given& a, const Room& room, int rank, int group, int index)
        : a(a), kept(room.kept() + group * GROUP_BYTES), turned(room.base + group * TRAY_BYTES), known(room.known()), rank(rank), split(rank / C::CROWD), group(group), index(index) {
        const wide::Tile tile = wide::Order<C>(a).at(device::cluster_id(C::CLUSTER), rank);
        row = tile.row + group % C::BY_ROWS * BLOCKS * 64 + index % 16 * 4;
        token = tile.token + group / C::BY_ROWS * C::COLUMNS + first_run(split) * 8 + index / 16;
        if constexpr (C::CODED) by = device::at(a.x_scale) * device::at(a.weight_scale);
        look_at_lines(0);
        device::await_previous();
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            if (wanted(i)) residual[i] = *reinterpret_cast<const float4*>(a.residual + int64_t(token_of(i)) * a.rows + row_of(i));
            if constexpr (C::CODED) {
                before[i] = 0.0f;
                if (wanted(i))
                    for (int part = index % 16; part < a.before_parts; part += 16) before[i] += a.before[int64_t(token_of(i)) * a.before_parts + part];
            }
        }
    }

    ON_DEVICE int runs() const { return first_run(split + 1) - first_run(split); }
    ON_DEVICE int token_of(int unit) const { return token + unit / BLOCKS * 8; }
    ON_DEVICE int row_of(int unit) const { return row + unit % BLOCKS * 64; }
    ON_DEVICE bool wanted(int unit) const { return unit / BLOCKS < runs() && token_of(unit) < a.tokens; }

    static ON_DEVICE device::Place weight_at(const Given&, int column, int row) { return {{column, row, 0, 0, 0}}; }
    static ON_DEVICE int more(const Given&, const wide::Tile&) { return 0; }
    static ON_DEVICE void bring_more(const Given&, const wide::Tile&, int, char*, device::Barrier*) {}
    // The barrier of what is looked up also counts what the other cuts send.
    static ON_DEVICE void look_up(const Given&, const Room& room, const wide::Tile&, int lane) {
        const int split = device::rank_in_cluster() / C::CROWD, its = first_run(split + 1) - first_run(split);
        if (SENDS && lane == 0) device::barrier_expect(room.known(), uint32_t((SPLITS - 1) * its * BLOCKS * C::GROUPS * UNIT_BYTES));
    }

    // What the `from`th of the other cuts sent for a unit.
    ON_DEVICE float4* in(int from, int unit) const {
        return reinterpret_cast<float4*>(kept + (from * UNITS + unit) * UNIT_BYTES);
    }
    ON_DEVICE float* tray(int unit) const { return reinterpret_cast<float*>(turned) + unit * 8 * TURNED; }

    ON_DEVICE void look_at_lines(int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from + i < UNITS && wanted(from + i)) line[i] = look_at(from + i);
    }

    ON_DEVICE Line look_at(int unit) const {
        Line its;
        const int at = token_of(unit), column = row_of(unit);
        its.gate = a.gate.table == nullptr ? float4{1.0f, 1.0f, 1.0f, 1.0f} : device::at4(a.gate.of(at) + column);
        its.scale = device::at4(a.scale.of(at) + column);
        return its;
    }

    template <class Sums>
    ON_DEVICE void exchange(const Sums& sums, float4 (&own)[UNITS]) const {
#pragma unroll
        for (int n = 0; n < RUNS; ++n) {
            const int to = owner_of(n), slot = n - first_run(to);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const float* c = sums[block] + 4 * n;
                if (to == split) {
                    own[slot * BLOCKS + block] = {c[0], c[1], c[2], c[3]};
                } else {
                    const int other = to * C::CROWD + rank % C::CROWD;
                    const device::Remote there = device::at_rank(in(split - (split > to), slot * BLOCKS + block) + index, other);
                    device::send4(there, device::at_rank(known, other), c[0], c[1], c[2], c[3]);
                }
            }
        }
    }

    ON_DEVICE void operator()(const wide::Tile&, int, float (&sums)[BLOCKS][C::COLUMNS / 2]) {
        float4 own[UNITS];
        if constexpr (SENDS && C::CROWD == 1) device::cluster_wait();  // all are there
        if constexpr (SENDS) exchange(sums, own);
        device::barrier_wait(known, 0);
        const int warp = index / 32, g = index % 32 / 4, t = index % 4;
        // Nobody reads the stages any more.
        device::sync_some<C::GROUPS * GROUP>();
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            if (i / BLOCKS >= runs()) continue;
            float4 sum;
            if constexpr (SENDS) {
                sum = split == 0 ? own[i] : in(0, i)[index];
#pragma unroll
                for (int s = 1; s < SPLITS; ++s) {
                    const float4 part = s == split ? own[i] : in(s - (s > split), i)[index];
                    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
                }
            } else {
                const float* c = sums[i % BLOCKS] + 4 * (i / BLOCKS);
                sum = {c[0], c[1], c[2], c[3]};
            }
            float* at = tray(i) + 2 * t * TURNED + warp * 16 + g;
            at[0] = sum.x, at[TURNED] = sum.y, at[8] = sum.z, at[TURNED + 8] = sum.w;
        }
        device::sync_group(group);
#pragma unroll
        for (int from = 0; from < UNITS; from += AT_ONCE) {
            if (from > 0) look_at_lines(from);
#pragma unroll
            for (int i = from; i < from + AT_ONCE && i < UNITS; ++i) store(i, line[i - from]);
        }
    }

    static ON_DEVICE float sum_of_sixteen(float x) {
#pragma unroll
        for (int step = 1; step < 16; step *= 2) x += device::from_lane_xor(x, step);
        return x;
    }

    // Four columns of a token; sixteen lanes have its 64.
    ON_DEVICE void store(int i, const Line& its) const {
        float square = 0.0f, over = 1.0f;
        if constexpr (C::CODED) over = device::inverse_root(sum_of_sixteen(before[i]) / float(a.rows) + a.eps);
        if (wanted(i)) {
            const float4 sum = *reinterpret_cast<const float4*>(tray(i) + index / 16 * TURNED + index % 16 * 4), r = residual[i];
            const float4 now = {r.x + its.gate.x * by * sum.x, r.y + its.gate.y * by * sum.y, r.z + its.gate.z * by * sum.z, r.w + its.gate.w * by * sum.w};
            square = now.x * now.x + now.y * now.y + now.z * now.z + now.w * now.w;
            const int64_t at = int64_t(token_of(i)) * a.rows + row_of(i);
            *reinterpret_cast<float4*>(a.total + at) = now;
            const float4 next = {now.x * (1.0f + its.scale.x), now.y * (1.0f + its.scale.y), now.z * (1.0f + its.scale.z), now.w * (1.0f + its.scale.w)};
            if constexpr (C::CODED)
                *reinterpret_cast<uint32_t*>(a.scaled + at) =
                    device::pack_coded(next.x * over, next.y * over) | uint32_t(device::pack_coded(next.z * over, next.w * over)) << 16;
            else
                *reinterpret_cast<float2*>(a.scaled + at * 2) = {device::as_float(device::pack(next.x, next.y)), device::as_float(device::pack(next.z, next.w))};
        }
        square = sum_of_sixteen(square);
        if (index % 16 == 0 && wanted(i)) a.squares[int64_t(token_of(i)) * (a.rows / 64) + row_of(i) / 64] = square;
    }
};

}  // namespace added
