// One denoise step's layers of the expert in one launch: every CTA stays, and what it needs next is on its way to it.
//
// There is no barrier over the grid. A CTA goes on when the words that it reads are there (device.cuh), and clears those that
// all have read. That a word of the layer before may be cleared follows from what has been read since: the input of a layer
// is whole only when every CTA is through with the layer before, and the stream in the middle of a layer only when every
// CTA has read the input of that layer.
//
// Residuals live in registers: warp w of the CTA with cut s owns row 8 w + s, two columns of the CTA's tile a lane. As in
// the stream of the separate kernels, x (1 + scale) is rounded for the product behind a norm and 1 / rms multiplies its
// result; the row behind the last token carries shift. All sums have a fixed order.
#pragma once

#include "expert_attention.cuh"

namespace expert {

// Clear, of the layer before, what this thread wrote and all have read.
ON_DEVICE void clear_layer(const Who& who, const Arguments& a, const Span& span, const Owned& own, int layer) {
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int column = column_of_pair(who.cta * PAIRS + i % (PAIRS / 2) * 2);
        bf16* at = a.fresh(layer) + i / (PAIRS / 2) * QKV + column;
        device::post1(at, device::ABSENT), device::post1(at + HALF, device::ABSENT);
    }
    const int query = span.shared_query(who.warp);
    if (span.any && span.shares(who.warp) && query < a.tokens * HEADS)
        device::post2(a.attended(layer) + query * HEAD + who.warp % 2 * HALF + who.lane * 4, ABSENT_PAIR);
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (GATES / 2); i += CONSUMERS)
        device::post1(a.hidden(layer) + i / (GATES / 2) * MLP + who.cta * GATES + i % (GATES / 2) * 2, device::ABSENT);
    own.clear(who, a, a.middle(layer), a.middle_squares(layer));
}

// Turn queries and keys, and hand them and the values on.
ON_DEVICE void rotate(const Who& who, const Arguments& a, const Room& room, bf16* fresh) {
    const float* sums = room.sums();
#pragma unroll 1
    for (int i = who.thread; i < a.tokens * (PAIRS / 2); i += CONSUMERS) {
        const int row = i / (PAIRS / 2), p = i % (PAIRS / 2) * 2;
        const float factor = factor_of(a, room, row);
        const float2 low = normed(sums, row, p, factor, summed(sums, a.tokens, p));
        const float2 high = normed(sums, row, p + PAIRS, factor, summed(sums, a.tokens, p + PAIRS));
        const float2 one = room.angles()[row * PAIRS + p], other = room.angles()[row * PAIRS + p + 1];
        bf16* out = fresh + row * QKV + column_of_pair(who.cta * PAIRS + p);
        device::post1(out, device::pack(low.x * one.x - high.x * one.y, low.y * other.x - high.y * other.y));
        device::post1(out + HALF, device::pack(high.x * one.x + low.x * one.y, high.y * other.x + low.y * other.y));
    }
}

ON_DEVICE float gelu(float x) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), kept from overflow where it is zero anyway.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return device::quotient(x, 1.0f + device::exponential(fminf(-2.0f * u, 80.0f)));
}

ON_DEVICE void gate(const Who& who, const Arguments& a, const Room& room, bf16* hidden) {
    const float* sums = room.sums();
    // A thread has the same two columns in all its rows.
    const int column = who.thread % (GATES / 2) * 2;
    const float2 gate_shift = summed(sums, a.tokens, column), up_shift = summed(sums, a.tokens, GATES + column);
    bf16* out = hidden + who.cta * GATES + column;
#pragma unroll 2
    for (int row = who.thread / (GATES / 2); row < a.tokens; row += CONSUMERS / (GATES / 2)) {
        const float factor = factor_of(a, room, row);
        const float2 gate = normed(sums, row, column, factor, gate_shift);
        const float2 up = normed(sums, row, GATES + column, factor, up_shift);
        device::post1(out + row * MLP, device::pack(gelu(gate.x) * up.x, gelu(gate.y) * up.y));
    }
}

// What stays the same through all layers: the angles of this CTA's pairs, and which keys of its span are there.
ON_DEVICE void prepare(const Who& who, const Arguments& a, const Room& room, const Span& span) {
    for (int i = who.thread; i < a.tokens * PAIRS; i += CONSUMERS) {
        const int pair = who.cta * PAIRS + i % PAIRS;
        const float power = -a.log2_theta / HALF * float(pair % HALF);
        const float angle = float(*a.start + i / PAIRS) * exp2f(power);
        const bool turned = pair / HALF <= HEADS;  // queries and keys are, values are not
        room.angles()[i] = turned ? float2{cosf(angle), sinf(angle)} : float2{1.0f, 0.0f};
    }
    for (int i = who.thread; i < SPAN_KEYS; i += CONSUMERS)
        room.valid()[i] = i < span.keys && (span.suffix || a.mask[span.first + i]);
}

ON_DEVICE void compute(const Arguments& a, char* shared) {
    const Room room{shared};
    const Span span(a);
    Ring ring(shared);
    Owned own(Who(), a);
    const float* line = a.table + (a.line == nullptr ? 0 : *a.line) * a.line_step;
    prepare(Who(), a, room, span);
    sync();
#pragma unroll 1
    for (int phase = 0; phase < a.phases; ++phase) {
        const Who who;
        const int layer = phase / PHASES, kind = phase % PHASES, cut = who.cta % CUTS;
        stamp(a, phase, 0);
        if (kind == 1) {
            if (span.any) attend(who, a, ring, room, span, phase);
            // While others still attend. The suffix's span comes last, and joins first.
            if (layer > 0 && !span.suffix) clear_layer(who, a, span, own, layer - 1);
            stamp(a, phase, 5);
            if (span.any) join_spans(who, a, span, a.attended(layer));
            if (layer > 0 && span.suffix) clear_layer(who, a, span, own, layer - 1);
        } else {
            const bool first = kind == 0, adds = kind == 2 || kind == 4, down = kind == 4;
            Product p = {a.middle(layer), WIDTH, a.tokens + 1, WIDTH / GROUPS / 32, first ? 3 : TILE / 8, ROW_2048, 1};
            if (first) p.x = phase == 0 ? a.scaled : a.end(layer - 1);
            if (kind == 2) p = {a.attended(layer) + cut * (INNER / CUTS), INNER, a.tokens, INNER / CUTS / GROUPS / 32, TILE / 8, ROW_512, 4};
            if (down) p = {a.hidden(layer) + cut * (MLP / CUTS), MLP, a.tokens, MLP / CUTS / GROUPS / 32, TILE / 8, ROW_1024, 2};
            const Lines lines(a, line, layer * 2 + down, own.column);
            if (!adds) await_stream(who, a, room, first ? a.end_squares(max(layer - 1, 0)) : a.middle_squares(layer), phase == 0);
            stamp(a, phase, 1);
            multiply(who, a, ring, room.sums(), p, phase);
            stamp(a, phase, 3);
            if (first) {
                rotate(who, a, room, a.fresh(layer));
            } else if (adds) {
                uint32_t* parts = a.board + PRODUCTS + down * OF_PRODUCT;
                const Left left = {down ? a.end(layer) : a.middle(layer), down ? a.end_squares(layer) : a.middle_squares(layer)};
                add(who, a, room, own, lines, parts, left, phase);
            } else {
                gate(who, a, room, a.hidden(layer));
                if (layer > 0) own.clear(who, a, a.end(layer - 1), a.end_squares(layer - 1));
            }
        }
        stamp(a, phase, 6);
        // The next phase writes what this one still reads in shared memory.
        sync();
        stamp(a, phase, 7);
    }
}

ON_DEVICE void run(const Arguments& a, char* shared) {
    const int thread = device::thread_id();
    // Whatever lies in a stage is multiplied by zero where there is no key: it must be finite.
    for (int i = thread * 16; i < STAGES * STAGE_BYTES; i += THREADS * 16) *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    if (thread == 0) {
        Ring ring(shared);
        for (int s = 0; s < STAGES; ++s, ring.next()) {
            device::barrier_init(ring.full(), 1);
            device::barrier_init(ring.empty(), WARPS);
        }
        device::barriers_ready();
    }
    device::before_copies();
    device::sync_all();
    if (thread >= CONSUMERS) {
        device::give_registers();
        if (thread < CONSUMERS + 32) feed(a, shared, thread % 32);
    } else {
        device::take_registers();
        compute(a, shared);
    }
}

}  // namespace expert
