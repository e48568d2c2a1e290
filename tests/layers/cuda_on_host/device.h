// A host stand-in for device.cuh: threads are fibers on one CPU thread, warps work in lockstep where the device's do.
//
// Copies complete late and in a shuffled order, so that a reader that does not wait reads old data. A grid that cannot go on
// is reported instead of hanging.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <vector>

#define ON_DEVICE inline
using std::max;
using std::min;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

namespace host {

extern "C" void stretto_switch(void** save, void* load);
asm(R"(
.text
.globl stretto_switch
stretto_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

struct Warp {
    int arrived = 0, alive = 32;
    uint64_t round = 0;
    const char* what = nullptr;
    uint32_t in[32][6], out[32][1];
};

struct Meeting {
    int arrived = 0;
    uint64_t round = 0;
};

struct Copy {
    std::function<void()> work;
    uint32_t bytes;
    uint64_t* barrier;
    uint64_t due;
};

struct Fetch {
    char* to;
    const char* from;
    bool there;
};

struct Fiber {
    void* stack_pointer;
    int cta, thread;
    bool done = false;
    const char* waits = nullptr;
    uint64_t cluster_round = 0;
    std::vector<std::vector<Fetch>> fetches;
    std::vector<Fetch> fetched;
};

constexpr size_t STACK = 32 * 1024;

struct Grid {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Meeting> all, groups, clusters;
    std::vector<std::vector<char>> shared;
    std::vector<Copy> copies;
    std::vector<uint64_t> asleep;
    std::function<void(char*)> kernel;
    std::string fault;
    void* scheduler;
    Fiber* now;
    int threads, cluster;
    uint64_t passes = 0, progress = 0, moves = 0, random = 88172645463325252ull;

    uint64_t next_random() {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        return random;
    }
    Warp& warp() { return warps[now->cta * (threads / 32) + now->thread / 32]; }
    char* base(int cta) { return shared[cta].data() + (-(uintptr_t)shared[cta].data() & 1023); }
};
inline Grid* grid = nullptr;

inline void yield() { stretto_switch(&grid->now->stack_pointer, grid->scheduler); }
inline void moved() { grid->progress = grid->passes, ++grid->moves; }

inline void enter() {
    grid->kernel(grid->base(grid->now->cta));
    grid->now->done = true;
    moved();
    yield();
}

inline void fail(const std::string& text) {
    if (grid->fault.empty()) grid->fault = text;
    for (;;) yield();
}

// All lanes give `in`; the last one computes everyone's `out`.
template <class Work>
void together(const char* what, const uint32_t* in, int words, uint32_t* out, int results, Work work) {
    Warp& w = grid->warp();
    const int lane = grid->now->thread % 32;
    if (w.arrived == 0) w.what = what;
    if (std::strcmp(w.what, what) != 0) fail(std::string("lanes of a warp part: ") + w.what + " and " + what);
    std::memcpy(w.in[lane], in, words * 4);
    const uint64_t round = w.round;
    if (++w.arrived == 32) {
        work(w);
        w.arrived = 0, ++w.round;
        moved();
    } else {
        while (w.round == round) yield();
    }
    std::memcpy(out, w.out[lane], results * 4);
}

inline void meet(Meeting& m, int threads) {
    const uint64_t round = m.round;
    if (++m.arrived == threads) {
        m.arrived = 0, ++m.round;
        moved();
    } else {
        while (m.round == round) yield();
    }
}

// mbarrier: pending arrivals, expected arrivals, bytes to come, phase; kept outside the 8 bytes in shared memory.
struct State {
    int expected, pending;
    int64_t bytes;
    uint32_t phase;
};
inline std::vector<State>& states() {
    static std::vector<State> all;
    return all;
}
inline State& state_of(uint64_t* b) { return states().at(*b); }
inline void settle(State& s) {
    if (s.pending == 0 && s.bytes == 0) s.pending = s.expected, s.phase ^= 1;
    moved();
}

inline void deliver(bool everything) {
    for (size_t i = 0; i < grid->copies.size();) {
        Copy& c = grid->copies[i];
        if (everything || c.due <= grid->passes) {
            c.work();
            State& s = state_of(c.barrier);
            s.bytes -= c.bytes;
            settle(s);
            c = std::move(grid->copies.back());
            grid->copies.pop_back();
        } else {
            ++i;
        }
    }
}

// What the first waiting threads wait for.
inline std::string whereabouts() {
    std::string text;
    int said = 0;
    for (Fiber& f : grid->fibers)
        if (!f.done && f.thread % 32 == 0 && said++ < 12)
            text += "; CTA " + std::to_string(f.cta) + " thread " + std::to_string(f.thread) + " for " + (f.waits == nullptr ? "others" : f.waits);
    return text;
}

template <class Kernel>
const char* launch(int ctas, int threads, int shared_bytes, Kernel kernel, int cluster = 1) {
    static std::string fault;
    auto made = std::make_unique<Grid>();
    grid = made.get();
    states().clear();
    grid->threads = threads, grid->kernel = kernel, grid->cluster = cluster;
    grid->fibers.resize(ctas * threads), grid->warps.resize(ctas * threads / 32);
    grid->all.resize(ctas), grid->groups.resize(ctas * threads / 128), grid->asleep.resize(ctas), grid->clusters.resize(ctas / cluster);
    // Bits that are no number: nobody may depend on what shared memory holds at first.
    grid->shared.assign(ctas, std::vector<char>(shared_bytes + 1024, char(0xff)));
    const size_t bytes = grid->fibers.size() * STACK;
    char* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) return "no memory for stacks";
    for (size_t i = 0; i < grid->fibers.size(); ++i) {
        Fiber& f = grid->fibers[i];
        f.cta = int(i) / threads, f.thread = int(i) % threads;
        // At the entry of a function the stack is 8 off a multiple of 16.
        void** top = reinterpret_cast<void**>(stacks + (i + 1) * STACK - 64);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&enter);
        for (int r = 0; r < 6; ++r) *--top = nullptr;
        f.stack_pointer = top;
    }
    for (bool any = true; any && grid->fault.empty(); ++grid->passes) {
        any = false;
        deliver(false);
        for (size_t warp = 0; warp < grid->fibers.size(); warp += 32) {
            // Some CTAs are slow for a while.
            if (warp % grid->threads == 0) {
                uint64_t& until = grid->asleep[warp / grid->threads];
                if (until <= grid->passes && grid->next_random() % 64 == 0) until = grid->passes + grid->next_random() % 64;
            }
            if (grid->asleep[warp / grid->threads] > grid->passes) {
                for (size_t i = warp; i < warp + 32; ++i) any = any || !grid->fibers[i].done;
                continue;
            }
            // A warp goes on while any of its threads can: what it uses stays in the CPU's caches.
            for (uint64_t before = grid->moves - 1; before != grid->moves;) {
                before = grid->moves;
                for (size_t i = warp; i < warp + 32; ++i) {
                    if (grid->fibers[i].done) continue;
                    any = true;
                    grid->now = &grid->fibers[i];
                    stretto_switch(&grid->scheduler, grid->now->stack_pointer);
                }
            }
        }
        if (any && grid->copies.empty() && grid->passes - grid->progress > 400) grid->fault = "every thread waits" + whereabouts();
    }
    munmap(stacks, bytes);
    fault = grid->fault;
    grid = nullptr;
    return fault.empty() ? nullptr : fault.c_str();
}

inline float of_bf16(uint32_t bits) {
    bits <<= 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint32_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return std::isnan(f) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

}  // namespace host

namespace device {

inline int thread_id() { return host::grid->now->thread; }
inline int block_id() { return host::grid->now->cta; }
inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline uint32_t pack(float low, float high) { return host::to_bf16(low) | host::to_bf16(high) << 16; }
inline uint32_t pack_fine(float low, float high) {
    const _Float16 both[2] = {_Float16(low), _Float16(high)};
    uint32_t bits;
    std::memcpy(&bits, both, 4);
    return bits;
}
inline float2 unpack_fine(uint32_t bits) {
    _Float16 both[2];
    std::memcpy(both, &bits, 4);
    return {float(both[0]), float(both[1])};
}
// e4m3: four bits of exponent, three behind the point, no infinities; halves go to the even neighbour.
inline uint8_t to_coded(float x) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return sign | 0x7f;
    const float size = std::min(std::fabs(x), 448.0f);
    const int exponent = size < 0.015625f ? -6 : std::ilogb(size);
    const int eighths = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
    // What is rounded up to a power of two carries into the exponent, and so does what leaves the subnormals.
    return sign | uint8_t((exponent + 6) * 8 + eighths);
}
inline float of_coded(uint8_t code) {
    static const std::vector<float> all = [] {
        std::vector<float> numbers(256);
        for (int i = 0; i < 256; ++i) {
            const int exponent = i >> 3 & 15, eighths = i & 7;
            const float size = exponent == 0 ? std::ldexp(float(eighths), -9) : std::ldexp(float(8 + eighths), exponent - 10);
            numbers[i] = (i & 0x7f) == 0x7f ? NAN : i & 0x80 ? -size : size;
        }
        return numbers;
    }();
    return all[code];
}
inline uint16_t pack_coded(float low, float high) { return uint16_t(to_coded(low) | to_coded(high) << 8); }
inline float power_of_two(float x) { return std::exp2(x); }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
inline float quotient(float a, float b) { return a / b; }

inline float from_lane_xor(float x, int mask) {
    uint32_t in[2], out;
    std::memcpy(in, &x, 4);
    in[1] = uint32_t(mask);
    host::together("shuffle", in, 2, &out, 1, [](host::Warp& w) {
        for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[l ^ int(w.in[l][1])][0];
    });
    std::memcpy(&x, &out, 4);
    return x;
}
inline void sync_group(int group) { host::meet(host::grid->groups[block_id() * (host::grid->threads / 128) + group], 128); }
inline void sync_all() { host::meet(host::grid->all[block_id()], host::grid->threads); }
using Barrier = uint64_t;
inline void barrier_init(Barrier* b, uint32_t arrivals) {
    *b = host::states().size();
    host::states().push_back({int(arrivals), int(arrivals), 0, 0});
}
inline void barriers_ready() {}
inline void barrier_arrive(Barrier* b) {
    host::State& s = host::state_of(b);
    if (--s.pending < 0) host::fail("a barrier has more arrivals than it expects");
    host::settle(s);
}
inline void barrier_arrive_expecting(Barrier* b, uint32_t bytes) {
    host::state_of(b).bytes += bytes;
    barrier_arrive(b);
}
inline void barrier_wait(Barrier* b, uint32_t parity) {
    // Passed once the phase of this parity is complete.
    host::grid->now->waits = "a stage";
    while (host::state_of(b).phase == parity) host::yield();
    host::grid->now->waits = nullptr;
}
inline void copy_later(uint32_t bytes, Barrier* b, std::function<void()> work) {
    host::grid->copies.push_back({std::move(work), bytes, b, host::grid->passes + host::grid->next_random() % 12});
}
inline void copy_row(void* to, const void* from, uint32_t bytes, Barrier* b) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) host::fail("a copied row is not aligned");
    copy_later(bytes, b, [=] { std::memcpy(to, from, bytes); });
}

struct Map {
    const char* from;
    int each;  // bytes of a number
    uint64_t sizes[5], steps[5];
    uint32_t tile[5];
};
struct Place {
    int at[5];
};
inline Map map_of(const void* from, int each, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    Map m{static_cast<const char*>(from), each};
    for (int i = 0; i < 5; ++i) m.sizes[i] = sizes[i], m.steps[i] = i == 0 ? each : steps[i - 1], m.tile[i] = tile[i];
    return m;
}
// Of bf16.
inline Map map_of(const void* from, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    return map_of(from, 2, sizes, steps, tile);
}
inline void ask_for_tile(const Map&, const Place&) {}
// In rows of 128 bytes; 16-byte pieces change places by the row's number in a group of eight.
inline void copy_tile(void* to, const Map& m, const Place& place, Barrier* b) {
    if (reinterpret_cast<uintptr_t>(to) % 1024) host::fail("a tile is not aligned");
    uint32_t rows = 1;
    for (int i = 1; i < 5; ++i) rows *= m.tile[i];
    copy_later(rows * 128, b, [=] {
        for (uint32_t row = 0; row < rows; ++row) {
            const char* from = m.from + place.at[0] * m.each;
            bool inside = true;
            uint32_t rest = row;
            for (int i = 1; i < 5; ++i) {
                const uint64_t at = place.at[i] + rest % m.tile[i];
                rest /= m.tile[i];
                inside = inside && at < m.sizes[i];
                from += at * m.steps[i];
            }
            for (int piece = 0; piece < 8; ++piece) {
                char* out = static_cast<char*>(to) + row * 128 + (piece ^ row % 8) * 16;
                if (inside && (place.at[0] * m.each + piece * 16) < int64_t(m.sizes[0]) * m.each) std::memcpy(out, from + piece * 16, 16);
                else std::memset(out, 0, 16);
            }
        }
    });
}

// Launches of a chain run one after the other.
inline void let_next_start() {}
inline void await_previous() {}
inline void ask_for(const void* from, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) host::fail("what is asked for is not aligned");
}

// Nothing of a copy by threads is there before it is awaited.
inline void fetch16(void* to, const void* from, bool there) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) host::fail("a copied piece is not aligned");
    host::grid->now->fetched.push_back({static_cast<char*>(to), static_cast<const char*>(from), there});
}
inline void end_fetches() {
    host::grid->now->fetches.push_back(std::move(host::grid->now->fetched));
    host::grid->now->fetched.clear();
}
template <int LATER>
void await_fetches() {
    auto& groups = host::grid->now->fetches;
    while (groups.size() > LATER) {
        for (const host::Fetch& f : groups.front())
            if (f.there) std::memcpy(f.to, f.from, 16);
            else std::memset(f.to, 0, 16);
        groups.erase(groups.begin());
    }
}

using Remote = char*;
inline int rank_in_cluster() { return block_id() % host::grid->cluster; }
inline void cluster_arrive() {
    host::Meeting& m = host::grid->clusters[block_id() / host::grid->cluster];
    host::grid->now->cluster_round = m.round;
    if (++m.arrived == host::grid->threads * host::grid->cluster) {
        m.arrived = 0, ++m.round;
        host::moved();
    }
}
inline void cluster_wait() {
    host::grid->now->waits = "its cluster";
    while (host::grid->clusters[block_id() / host::grid->cluster].round == host::grid->now->cluster_round) host::yield();
    host::grid->now->waits = nullptr;
}
inline Remote at_rank(const void* p, int rank) {
    const int64_t at = static_cast<const char*>(p) - host::grid->base(block_id());
    return host::grid->base(block_id() / host::grid->cluster * host::grid->cluster + rank) + at;
}
inline void came(Remote barrier, int bytes) {
    host::State& s = host::state_of(reinterpret_cast<uint64_t*>(barrier));
    s.bytes -= bytes;
    host::settle(s);
}
inline void send4(Remote to, Remote barrier, float a, float b, float c, float d) {
    if (reinterpret_cast<uintptr_t>(to) % 16) host::fail("what is sent is not aligned");
    *reinterpret_cast<float4*>(to) = {a, b, c, d};
    came(barrier, 16);
}
inline void send4(Remote to, Remote barrier, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    send4(to, barrier, as_float(a), as_float(b), as_float(c), as_float(d));
}
inline void send2(Remote to, Remote barrier, float a, float b) {
    *reinterpret_cast<float2*>(to) = {a, b};
    came(barrier, 8);
}
inline float from_lane(float x, int lane) {
    uint32_t in[2], out;
    std::memcpy(in, &x, 4);
    in[1] = uint32_t(lane);
    host::together("shuffle", in, 2, &out, 1, [](host::Warp& w) {
        for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[w.in[l][1]][0];
    });
    std::memcpy(&x, &out, 4);
    return x;
}

// A number of a tile: `at` bytes into 128-byte rows, whose 16-byte pieces are swapped.
inline float in_tile(const void* tile, int row, int bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(tile) + row * 128 + bytes;
    return host::of_bf16(*reinterpret_cast<const uint16_t*>(at ^ (at >> 7 & 7) << 4));
}
inline void before_products() {}
inline void products_begin() {}
inline void products_end() {}
template <int LATER>
void await_products() {}
template <int N>
void multiply_tiles(float* c, const void* a, const void* b, bool add) {
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    float rows[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) rows[i][k] = in_tile(a, warp * 16 + lane / 4 + i * 8, k * 2);
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 16; ++k) sum += rows[i / 2][k] * in_tile(b, n * 8 + lane % 4 * 2 + i % 2, k * 2);
            c[4 * n + i] = sum;
        }
}
inline float coded_in_tile(const void* tile, int row, int bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(tile) + row * 128 + bytes;
    return of_coded(*reinterpret_cast<const uint8_t*>(at ^ (at >> 7 & 7) << 4));
}
inline void multiply_56_coded(float (&c)[28], const void* a, const void* b, bool add) {
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    float rows[2][32];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 32; ++k) rows[i][k] = coded_in_tile(a, warp * 16 + lane / 4 + i * 8, k);
    for (int n = 0; n < 7; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 32; ++k) sum += rows[i / 2][k] * coded_in_tile(b, n * 8 + lane % 4 * 2 + i % 2, k);
            c[4 * n + i] = sum;
        }
}
inline void multiply_56(float (&c)[28], const void* a, const void* b, bool add) { multiply_tiles<56>(c, a, b, add); }
inline void multiply_64(float (&c)[32], const void* a, const void* b, bool add) { multiply_tiles<64>(c, a, b, add); }
inline void multiply_by_rows(float (&c)[32], const void* a, const void* b, bool add) {
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            const int row = warp * 16 + lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; ++k) sum += in_tile(a, row, k * 2) * in_tile(b, k, column * 2);
            c[4 * n + i] = sum;
        }
}

}  // namespace device
