// The ring of stages, and the warp that fills it: what each phase will read, in the order in which it will.
#pragma once

#include "expert_plan.cuh"

namespace expert {

// A position in the ring; those who fill and those who read move through it alike.
struct Ring {
    char* shared;
    int stage = 0;
    uint32_t turn = 0;

    ON_DEVICE explicit Ring(char* base) : shared(base) {}
    ON_DEVICE char* data() const { return shared + stage * STAGE_BYTES; }
    ON_DEVICE device::Barrier* full() const { return reinterpret_cast<device::Barrier*>(shared + BARRIERS_AT) + stage; }
    ON_DEVICE device::Barrier* empty() const { return full() + STAGES; }
    ON_DEVICE void next() {
        if (++stage == STAGES) stage = 0, turn ^= 1;
    }
    ON_DEVICE Ring ahead(int stages) const {
        Ring other(shared);
        const int at = stage + stages, wraps = at >= STAGES;
        other.stage = at - wraps * STAGES, other.turn = turn ^ uint32_t(wraps);
        return other;
    }
    ON_DEVICE const char* await() const {
        device::barrier_wait(full(), turn);
        return data();
    }
    ON_DEVICE void release(int lane) {
        device::sync_warp();
        if (lane == 0) device::barrier_arrive(empty());
        next();
    }
    // Fill a stage: lane i copies row i.
    ON_DEVICE void fill(int lane, int rows, const bf16* row, int bytes, int step) {
        device::barrier_wait(empty(), turn ^ 1);
        if (lane == 0) device::barrier_arrive_expecting(full(), uint32_t(rows * bytes));
        device::sync_warp();
        if (lane < rows) device::copy_row(data() + lane * step, row, uint32_t(bytes), full());
        next();
    }
};

// Which key cut of which query block this CTA attends to; CTAs beyond the last block have none.
struct Span {
    int block, cut, first, keys;
    bool any, suffix;

    ON_DEVICE Span(const Arguments& a) {
        block = device::block_id() / SPANS, cut = device::block_id() % SPANS;
        any = block * QUERIES < a.tokens * HEADS;
        suffix = cut == KEY_CUTS;
        const int each = (a.prefix + KEY_CUTS * 8 - 1) / (KEY_CUTS * 8) * 8;
        const int bound = min(max(*a.length, 0), a.prefix);
        first = suffix ? 0 : cut * each;
        keys = suffix ? a.tokens : max(min(first + each, bound) - first, 0);
    }
    // Each CTA of a block joins the spans of some of its rows, two warps a row.
    ON_DEVICE bool shares(int warp) const { return cut + warp / 2 * SPANS < QUERIES; }
    ON_DEVICE int shared_query(int warp) const { return block * QUERIES + cut + warp / 2 * SPANS; }
    ON_DEVICE uint32_t* sums(const Arguments& a, int of, int query) const {
        return a.board + SPAN_SUMS + (of * ALL_QUERIES + query) * HEAD;
    }
    ON_DEVICE uint32_t* tops(const Arguments& a, int half, int of, int query) const {
        return a.board + SPAN_TOPS + ((half * SPANS + of) * ALL_QUERIES + query) * 2;
    }
};

// The first of the two columns of a pair; the second is HALF further.
ON_DEVICE int column_of_pair(int pair) { return pair / HALF * HEAD + pair % HALF; }

// The suffix's keys are put into their stages by those who read them.
ON_DEVICE void feed_keys(const Arguments& a, Ring& ring, const Span& span, int layer, int lane) {
    if (!span.any) return;
    const int64_t at = *a.slot * a.slot_step + layer * a.layer_step, step = a.token_step;
    const bf16 *k = a.k + at, *v = a.v + at;
    const int keys = span.suffix ? 0 : span.keys;
#pragma unroll 1
    for (int first = 0; first < SPAN_KEYS; first += 32)
        ring.fill(lane, min(max(keys - first, 0), 32), k + (span.first + first + lane) * step, HEAD * 2, ROW_512);
#pragma unroll 1
    for (int first = 0; first < SPAN_KEYS; first += 32)
        ring.fill(lane, min(max(keys - first, 0), 32), v + (span.first + first + lane) * step, HEAD * 2, ROW_TRANSPOSED);
}

ON_DEVICE void feed(const Arguments& a, char* shared, int lane) {
    const int cta = device::block_id(), tile = cta / CUTS, cut = cta % CUTS;
    const Span span(a);
    Ring ring(shared);
#pragma unroll 1
    for (int phase = 0; phase < a.phases; ++phase) {
        const Layer& w = a.layers[phase / PHASES];
        switch (phase % PHASES) {
            case 0:
#pragma unroll 1
                for (int first = 0; first < 2 * PAIRS; first += 8) {
                    const int i = min(first + lane, 2 * PAIRS - 1), high = i >= PAIRS;
                    const int column = column_of_pair(cta * PAIRS + i - high * PAIRS) + high * HALF;
                    ring.fill(lane, min(2 * PAIRS - first, 8), w.qkv + int64_t(column) * WIDTH, WIDTH * 2, ROW_2048);
                }
                break;
            case 1:
                feed_keys(a, ring, span, phase / PHASES, lane);
                break;
            case 2:
#pragma unroll 1
                for (int first = 0; first < TILE; first += 32) {
                    const bf16* row = w.out + int64_t(tile * TILE + first + lane) * INNER + cut * (INNER / CUTS);
                    ring.fill(lane, 32, row, INNER / CUTS * 2, ROW_512);
                }
                break;
            case 3:
#pragma unroll 1
                for (int first = 0; first < 2 * GATES; first += 8) {
                    const int up = first >= GATES, i = min(lane, 7) + first - up * GATES;
                    ring.fill(lane, 8, w.gate_up + int64_t(cta * GATES + i + up * MLP) * WIDTH, WIDTH * 2, ROW_2048);
                }
                break;
            case 4:
#pragma unroll 1
                for (int first = 0; first < TILE; first += 16) {
                    const bf16* row = w.down + int64_t(tile * TILE + first + min(lane, 15)) * MLP + cut * (MLP / CUTS);
                    ring.fill(lane, 16, row, MLP / CUTS * 2, ROW_1024);
                }
                break;
        }
    }
}

}  // namespace expert
