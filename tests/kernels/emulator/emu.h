// A GPU thread block on one CPU thread: stands in for the instructions of ptx.cuh, so that g++ runs the kernels' own source.
//
// A thread is a fiber. Barriers, votes, shuffles, ldmatrix and mma meet as they do on the device. cp.async lands at the wait and is poison
// until then. Every access to shared memory is checked for bounds and for races: two threads, one of them writing, with no barrier between.
// Global memory may only be touched inside the ranges that the caller registered. Bank conflicts of ldmatrix are counted. What it does not
// model: the memory model's finer points, timing, occupancy, several blocks at once.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define DEV static inline
#define UNROLL
#ifndef EMU_ARCH
#define EMU_ARCH 900
#endif

struct Quad { u32 x[4]; };

namespace emu {

constexpr int STACK_BYTES = 128 * 1024;

struct Copy { u32 to; unsigned char data_from_zero; const void* from; };

struct Thread {
    ucontext_t context;
    jmp_buf state;
    bool started = false, done = false;
    int lane = 0, warp = 0, index = 0;
    std::vector<unsigned char> stack;
    std::vector<Copy> open;                  // issued, not committed
    std::vector<std::vector<Copy>> groups;   // committed, not landed
};

// Meeting point of a warp (32 lanes) or of the block.
struct Meeting {
    int arrived = 0, kind = -1;
    u64 generation = 0;
    unsigned char in[32][64], out[32][64];
};

// Who touched four bytes of shared memory last, and in which stretch between barriers.
struct Word {
    int writer = -1, reader = -1, flight = -1;
    u64 write_block = 0, write_warp = 0, read_block = 0, read_warp = 0;
    bool many_lanes = false, many_warps = false;
};

struct Range { const unsigned char *begin, *end; bool writable; };

struct Machine {
    std::vector<Thread> threads;
    std::vector<Meeting> warps;
    std::vector<u64> warp_epoch;
    std::vector<unsigned char> shared;
    std::vector<Word> words;
    std::vector<Range> ranges;
    Meeting block;
    Thread* now = nullptr;
    jmp_buf scheduler;
    u64 epoch = 1, bank_conflicts = 0;
    int bx = 0, by = 0, bz = 0;
    std::string error;
    std::function<void()> body;
};
inline Machine& m() {
    static Machine machine;
    return machine;
}

[[noreturn]] inline void leave() { longjmp(m().scheduler, 1); }
inline void yield() {
    if (_setjmp(m().now->state) == 0) leave();
}
[[noreturn]] inline void fail(const std::string& what) {
    Machine& x = m();
    if (x.error.empty())
        x.error = what + " (block " + std::to_string(x.bx) + "," + std::to_string(x.by) + ", thread " + std::to_string(x.now ? x.now->index : -1) + ")";
    x.now->done = true;
    leave();
}

inline void entry() {
    m().body();
    Thread& t = *m().now;
    if (!t.open.empty()) fail("copies were issued and never committed");
    for (auto& g : t.groups)
        if (!g.empty()) fail("the kernel ended before its copies landed");
    t.done = true;
    leave();
}

// Deposit `arg`, wait for the whole warp, return this lane's result; `all` computes every lane's from every lane's.
template <class R, class A, class F> R meet_warp(int kind, const A& arg, F all) {
    static_assert(sizeof(A) <= 64 && sizeof(R) <= 64, "arguments fit their slot");
    Machine& x = m();
    Meeting& w = x.warps[x.now->warp];
    if (w.arrived == 0) w.kind = kind;
    if (w.kind != kind) fail("lanes of one warp meet in different instructions");
    memcpy(w.in[x.now->lane], &arg, sizeof(A));
    const u64 generation = w.generation;
    if (++w.arrived == 32) {
        all(reinterpret_cast<unsigned char(*)[64]>(w.in), reinterpret_cast<unsigned char(*)[64]>(w.out));
        w.arrived = 0;
        w.generation++;
    } else {
        while (w.generation == generation) yield();
    }
    R r;
    memcpy(&r, w.out[x.now->lane], sizeof(R));
    return r;
}
template <class T> T& slot(unsigned char (*s)[64], int lane) { return *reinterpret_cast<T*>(s[lane]); }

inline void check_bounds(u32 a, u32 bytes) {
    if (a % std::min(bytes, 16u) || a + bytes > m().shared.size())
        fail("shared address " + std::to_string(a) + " is misaligned or outside " + std::to_string(m().shared.size()) + " bytes");
}
inline bool ordered(int other, u64 block, u64 warp) {
    const Thread& t = *m().now;
    if (other < 0 || other == t.index || block < m().epoch) return true;
    return other / 32 == t.warp && warp < m().warp_epoch[t.warp];
}
inline void touch(u32 a, u32 bytes, bool writes) {
    check_bounds(a, bytes);
    const Thread& t = *m().now;
    for (u32 i = a / 4; i < (a + bytes + 3) / 4; i++) {
        Word& w = m().words[i];
        if (w.flight >= 0) fail("shared memory is touched before a copy to it has landed");
        if (!ordered(w.writer, w.write_block, w.write_warp)) fail(writes ? "two threads write without a barrier" : "a read races with a write");
        if (writes) {
            const bool same_block = w.reader >= 0 && w.read_block == m().epoch;
            if (same_block && w.many_warps) fail("a write races with reads of several warps");
            if (same_block && w.many_lanes && w.read_warp == m().warp_epoch[t.warp]) fail("a write races with reads of several lanes");
            if (!ordered(w.reader, w.read_block, w.read_warp)) fail("a write races with a read");
            w.writer = t.index;
            w.write_block = m().epoch;
            w.write_warp = m().warp_epoch[t.warp];
            w.reader = -1;
            w.many_lanes = w.many_warps = false;
        } else {
            if (w.reader >= 0 && w.read_block == m().epoch) {
                if (w.reader / 32 != t.warp) w.many_warps = true;
                else if (w.reader != t.index && w.read_warp == m().warp_epoch[t.warp]) w.many_lanes = true;
                else if (w.read_warp != m().warp_epoch[t.warp]) w.many_lanes = false;
            } else {
                w.many_lanes = w.many_warps = false;
            }
            w.reader = t.index;
            w.read_block = m().epoch;
            w.read_warp = m().warp_epoch[t.warp];
        }
    }
}
inline void check_global(const void* p, u32 bytes, bool writes) {
    const auto* a = static_cast<const unsigned char*>(p);
    if (reinterpret_cast<uintptr_t>(a) % bytes) fail("a global access is misaligned");
    for (const Range& r : m().ranges)
        if (a >= r.begin && a + bytes <= r.end) {
            if (writes && !r.writable) fail("an input is written");
            return;
        }
    fail(writes ? "a global write is outside every tensor" : "a global read is outside every tensor");
}

inline float float_of(u32 bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline float widen(u16 x, bool is_bfloat16 = BF16) {
    if (is_bfloat16) return float_of(static_cast<u32>(x) << 16);
    _Float16 h;
    memcpy(&h, &x, 2);
    return static_cast<float>(h);
}
inline u16 narrow(float f) {
    u16 r;
#if BF16
    u32 bits;
    memcpy(&bits, &f, 4);
    if (f != f) return 0x7fff;
    r = static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    const _Float16 h = static_cast<_Float16>(f);
    memcpy(&r, &h, 2);
#endif
    return r;
}

inline void land(Thread& t, std::vector<Copy>& group) {
    for (const Copy& c : group) {
        for (u32 i = c.to / 4; i < c.to / 4 + 4; i++) m().words[i].flight = -1;
        touch(c.to, 16, true);
        if (c.data_from_zero) memset(&m().shared[c.to], 0, 16);
        else memcpy(&m().shared[c.to], c.from, 16);
    }
    group.clear();
}

// One block: run the fibers, each until it has to wait, in an order that the seed picks, until all are done.
inline void run_block(int num_threads, u32 shared_bytes, u32 seed) {
    Machine& x = m();
    x.shared.assign(shared_bytes, 0xff);  // NaN in every format
    x.words.assign(shared_bytes / 4 + 1, Word());
    x.warps.assign(num_threads / 32, Meeting());
    x.warp_epoch.assign(num_threads / 32, 1);
    x.block = Meeting();
    std::vector<int> order(num_threads);
    for (int i = 0; i < num_threads; i++) {
        const int warp = seed == 0 ? i / 32 : seed == 1 ? num_threads / 32 - 1 - i / 32 : static_cast<int>((i / 32 * (2 * seed + 1) + seed) % (num_threads / 32));
        order[i] = warp * 32 + (seed == 1 ? 31 - i % 32 : i % 32);
        Thread& t = x.threads[i];
        t.started = t.done = false;
        t.index = i, t.lane = i % 32, t.warp = i / 32;
        t.open.clear(), t.groups.clear();
    }
    for (int left = num_threads; left > 0 && x.error.empty();) {
        left = 0;
        u64 progress = x.block.generation + x.block.arrived;
        for (auto& w : x.warps) progress += w.generation * 32 + w.arrived;
        for (int i : order) {
            Thread& t = x.threads[i];
            if (t.done) continue;
            x.now = &t;
            if (_setjmp(x.scheduler) == 0) {
                if (t.started) _longjmp(t.state, 1);
                t.started = true;
                if (t.stack.empty()) t.stack.resize(STACK_BYTES);
                getcontext(&t.context);
                t.context.uc_stack.ss_sp = t.stack.data();
                t.context.uc_stack.ss_size = t.stack.size();
                t.context.uc_link = nullptr;
                makecontext(&t.context, entry, 0);
                setcontext(&t.context);
            }
            left += !x.threads[i].done;
            if (!x.error.empty()) return;
        }
        u64 after = x.block.generation + x.block.arrived;
        for (auto& w : x.warps) after += w.generation * 32 + w.arrived;
        if (left && after == progress) { x.error = "deadlock: every thread that is left waits at a barrier"; return; }
    }
}

inline int launch(const std::function<void()>& body, const unsigned* grid, unsigned threads, unsigned shared_bytes, unsigned seed) {
    Machine& x = m();
    x.error.clear();
    x.bank_conflicts = 0;
    x.body = body;
    if (x.threads.size() < threads) x.threads.resize(threads);
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned b = 0; b < grid[0]; b++) {
                x.bx = b, x.by = y, x.bz = z;
                run_block(threads, shared_bytes, seed);
                if (!x.error.empty()) return 1;
            }
    return 0;
}

}  // namespace emu

extern "C" inline __attribute__((used)) const char* emu_error() { return emu::m().error.c_str(); }
extern "C" inline __attribute__((used)) u64 emu_bank_conflicts() { return emu::m().bank_conflicts; }
extern "C" inline __attribute__((used)) void emu_forget() { emu::m().ranges.clear(); }
extern "C" inline __attribute__((used)) void emu_register(const void* p, u64 bytes, int writable) {
    const auto* a = static_cast<const unsigned char*>(p);
    emu::m().ranges.push_back({a, a + bytes, writable != 0});
}

#define KERNEL(name, Params, num_threads, blocks)                                                                             \
    static void name##_body(const Params& p);                                                                                 \
    extern "C" int name(const void* params, const unsigned* grid, unsigned shared_bytes, unsigned seed) {                     \
        Params p;                                                                                                             \
        memcpy(&p, params, sizeof p);                                                                                         \
        return emu::launch([&] { name##_body(p); }, grid, num_threads, shared_bytes, seed);                                   \
    }                                                                                                                         \
    extern "C" unsigned name##_params() { return sizeof(Params); }                                                            \
    static void name##_body(const Params& p)

DEV int thread_id() { return emu::m().now->index; }
DEV int block_x() { return emu::m().bx; }
DEV int block_y() { return emu::m().by; }
DEV int block_z() { return emu::m().bz; }
DEV u32 shared_base() { return 0; }

DEV void block_sync() {
    emu::Machine& x = emu::m();
    const u64 generation = x.block.generation;
    if (++x.block.arrived == static_cast<int>(x.warps.size()) * 32) {
        x.block.arrived = 0;
        x.block.generation++;
        x.epoch++;
    } else {
        while (x.block.generation == generation) emu::yield();
    }
}
DEV void warp_sync() {
    emu::meet_warp<int>(1, 0, [](auto, auto) { emu::m().warp_epoch[emu::m().now->warp]++; });
}
DEV bool warp_any(bool v) {
    return emu::meet_warp<bool>(2, v, [](auto in, auto out) {
        bool any = false;
        for (int i = 0; i < 32; i++) any |= emu::slot<bool>(in, i);
        for (int i = 0; i < 32; i++) emu::slot<bool>(out, i) = any;
    });
}
template <class T> DEV T shuffle_xor(T v, int mask) {
    return emu::meet_warp<T>(100 + mask, v, [mask](auto in, auto out) {
        for (int i = 0; i < 32; i++) emu::slot<T>(out, i) = emu::slot<T>(in, i ^ mask);
    });
}

template <class T> DEV T load_again(const T* p) {
    emu::check_global(p, sizeof(T), false);
    return *p;
}
template <class T> DEV T load(const T* p) { return load_again(p); }
template <class T> DEV void store(T* p, T v) {
    emu::check_global(p, sizeof(T), true);
    *p = v;
}
DEV Quad load16(const void* p) {
    emu::check_global(p, 16, false);
    Quad r;
    memcpy(&r, p, 16);
    return r;
}
DEV void store16(void* p, Quad r) {
    emu::check_global(p, 16, true);
    memcpy(p, &r, 16);
}
DEV void store_pair(float* p, float a, float b) {
    emu::check_global(p, 8, true);
    p[0] = a, p[1] = b;
}

template <class T> DEV void emu_put(u32 a, const T& v) {
    emu::touch(a, sizeof(T), true);
    memcpy(&emu::m().shared[a], &v, sizeof(T));
}
template <class T> DEV T emu_get(u32 a) {
    emu::touch(a, sizeof(T), false);
    T v;
    memcpy(&v, &emu::m().shared[a], sizeof(T));
    return v;
}
DEV void put32(u32 a, u32 v) { emu_put(a, v); }
DEV u32 get32(u32 a) { return emu_get<u32>(a); }
DEV void put128(u32 a, Quad r) { emu_put(a, r); }
DEV Quad get128(u32 a) { return emu_get<Quad>(a); }

DEV void copy16(u32 to, const void* from, bool valid) {
#if EMU_ARCH < 800
    put128(to, valid ? load16(from) : Quad{{0, 0, 0, 0}});
#else
    emu::touch(to, 16, true);
    if (valid) emu::check_global(from, 16, false);
    memset(&emu::m().shared[to], 0xff, 16);
    for (u32 i = to / 4; i < to / 4 + 4; i++) emu::m().words[i].flight = emu::m().now->index;
    emu::m().now->open.push_back({to, !valid, from});
#endif
}
DEV void copy_commit() {
    emu::Thread& t = *emu::m().now;
    t.groups.push_back(t.open);
    t.open.clear();
}
template <int PENDING> DEV void copy_wait() {
    emu::Thread& t = *emu::m().now;
    while (t.groups.size() > PENDING) {
        emu::land(t, t.groups.front());
        t.groups.erase(t.groups.begin());
    }
}

struct EmuMatrices { u32 r[4]; };
template <bool TRANSPOSED> DEV void emu_matrix4(u32 (&r)[4], u32 a) {
    emu::touch(a, 16, false);
    const auto got = emu::meet_warp<EmuMatrices>(3 + TRANSPOSED, a, [](auto in, auto out) {
        for (int i = 0; i < 4; i++) {
            u32 banks = 0;
            for (int row = 0; row < 8; row++) {
                const u32 bit = 1u << (emu::slot<u32>(in, i * 8 + row) / 16 % 8);
                emu::m().bank_conflicts += (banks & bit) != 0;
                banks |= bit;
            }
            for (int lane = 0; lane < 32; lane++)
                for (int e = 0; e < 2; e++) {
                    const int row = TRANSPOSED ? lane % 4 * 2 + e : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + e;
                    u16 v;
                    memcpy(&v, &emu::m().shared[emu::slot<u32>(in, i * 8 + row) + column * 2], 2);
                    u32& to = emu::slot<EmuMatrices>(out, lane).r[i];
                    to = e ? (to & 0xffff) | static_cast<u32>(v) << 16 : v;
                }
        }
    });
    memcpy(r, got.r, 16);
}
DEV void matrix4(u32 (&r)[4], u32 a) { emu_matrix4<false>(r, a); }
DEV void matrix4_transposed(u32 (&r)[4], u32 a) { emu_matrix4<true>(r, a); }

struct EmuOperands { float c[4]; u32 a[4], b[2]; };
struct EmuResult { float c[4]; };
DEV void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    EmuOperands own;
    memcpy(own.c, c, 16), memcpy(own.a, a, 16);
    own.b[0] = b0, own.b[1] = b1;
    const auto got = emu::meet_warp<EmuResult>(5, own, [](auto in, auto out) {
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const EmuOperands& o = emu::slot<EmuOperands>(in, lane);
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++) A[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + e] = emu::widen(static_cast<u16>(o.a[i] >> 16 * e));
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < 2; e++) B[lane % 4 * 2 + i * 8 + e][lane / 4] = emu::widen(static_cast<u16>(o.b[i] >> 16 * e));
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = emu::slot<EmuOperands>(in, lane).c[i];
                for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][column];
                emu::slot<EmuResult>(out, lane).c[i] = sum;
            }
    });
    memcpy(c, got.c, 16);
}

DEV u32 pack(float low, float high) { return emu::narrow(low) | static_cast<u32>(emu::narrow(high)) << 16; }
DEV float widen(u16 x, bool is_bfloat16) { return emu::widen(x, is_bfloat16); }
DEV float float_of_bits(u32 x) { return emu::float_of(x); }
DEV float exp2_fast(float x) { return exp2f(x); }
DEV float log2_fast(float x) { return log2f(x); }
DEV float reciprocal(float x) { return 1.0f / x; }
DEV float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEV float float_max(float a, float b) { return fmaxf(a, b); }
DEV float infinity() { return INFINITY; }
