// A GPU thread block on one CPU thread: stands in for the instructions of ptx.cuh, so that g++ runs the kernels' own source.
//
// A thread is a fiber. Barriers, votes, shuffles, ldmatrix and mma meet as they do on the device. cp.async lands at the wait and is poison
// until then. Every access to shared memory is checked for bounds and for races: two threads, one of them writing, and no chain of barriers
// between them. Who has synchronised with whom is kept in vector clocks: a thread's clock holds, for each thread, up to when it is known.
// Global memory may only be touched inside the ranges that the caller registered. Bank conflicts of ldmatrix are counted. What it does not
// model: the memory model's finer points, timing, occupancy, several blocks at once. This file is the machine: fibers, meetings, checks; the
// instructions are in emu_ops.h.
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
    std::vector<u32> clock;                  // of every thread, and of every barrier that copies complete; its own is ahead of all others'
    u32 fenced = 0;                          // its writes up to this time are visible to the async proxy (sm_90)
};

// Meeting point of a warp (32 lanes) or of the block.
struct Meeting {
    int arrived = 0, kind = -1;
    u64 generation = 0;
    unsigned char in[32][64], out[32][64];
};

// Who touched four bytes of shared memory since the last write, and when; `in_flight`: asynchronous reads that are not known to be over.
struct Read { int thread; u32 clock; int in_flight; };
struct Word {
    int writer = -1, flight = -1;
    u32 written = 0;
    std::vector<Read> reads;
};

struct Range { const unsigned char *begin, *end; bool writable; };

struct Machine {
    std::vector<Thread> threads;
    std::vector<Meeting> warps;
    std::vector<unsigned char> shared;
    std::vector<Word> words;
    std::vector<Range> ranges;
    Meeting block;
    Thread* now = nullptr;
    jmp_buf scheduler;
    u64 bank_conflicts = 0, steps = 0;  // steps: whatever lets a waiting thread go on, but for the meetings, which count themselves
    int bx = 0, by = 0, bz = 0;
    bool is_eager = false;  // whether asynchronous copies land as soon as they can, the last one first
    std::string error;
    std::function<void()> body, reset, at_exit;
    std::function<bool(bool)> land_one;  // let one asynchronous copy land; told whether nothing else can go on
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
    if (m().at_exit) m().at_exit();
    t.done = true;
    leave();
}

// Clocks: a thread learns all that another knew, and starts a new stretch of its own.
constexpr int BARRIERS = 16;  // room in a clock for the barriers that copies complete
inline void join(std::vector<u32>& to, const std::vector<u32>& from) {
    for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}
inline void tick(Thread& t) { t.clock[t.index]++; }
inline void synchronise(int first, int count) {
    std::vector<u32> all = m().threads[first].clock;
    for (int i = first + 1; i < first + count; i++) join(all, m().threads[i].clock);
    for (int i = first; i < first + count; i++) {
        m().threads[i].clock = all;
        tick(m().threads[i]);
    }
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
inline bool ordered(const Thread& t, int other, u32 when) { return other < 0 || other == t.index || t.clock[other] >= when; }
inline void check_reads_over(const Thread& t, const Word& w) {
    for (const Read& r : w.reads) {
        if (r.in_flight) fail("shared memory is written that an instruction in flight reads");
        if (!ordered(t, r.thread, r.clock)) fail("a write races with a read");
    }
}
inline Read& read_of(Word& w, int thread) {
    for (Read& r : w.reads)
        if (r.thread == thread) return r;
    w.reads.push_back({thread, 0, 0});
    return w.reads.back();
}
inline void touch(u32 a, u32 bytes, bool writes) {
    check_bounds(a, bytes);
    const Thread& t = *m().now;
    for (u32 i = a / 4; i < (a + bytes + 3) / 4; i++) {
        Word& w = m().words[i];
        if (w.flight >= 0) fail("shared memory is touched before a copy to it has landed");
        if (!ordered(t, w.writer, w.written)) fail(writes ? "two threads write without a barrier" : "a read races with a write");
        if (writes) {
            check_reads_over(t, w);
            w.writer = t.index;
            w.written = t.clock[t.index];
            w.reads.clear();
        } else {
            read_of(w, t.index).clock = t.clock[t.index];
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
    x.is_eager = seed % 2;
    x.shared.assign(shared_bytes, 0xff);  // NaN in every format
    x.words.assign(shared_bytes / 4 + 1, Word());
    x.warps.assign(num_threads / 32, Meeting());
    x.block = Meeting();
    std::vector<int> order(num_threads);
    for (int i = 0; i < num_threads; i++) {
        const int warp = seed == 0 ? i / 32 : seed == 1 ? num_threads / 32 - 1 - i / 32 : static_cast<int>((i / 32 * (2 * seed + 1) + seed) % (num_threads / 32));
        order[i] = warp * 32 + (seed == 1 ? 31 - i % 32 : i % 32);
        Thread& t = x.threads[i];
        t.started = t.done = false;
        t.index = i, t.lane = i % 32, t.warp = i / 32;
        t.open.clear(), t.groups.clear();
        t.clock.assign(num_threads + BARRIERS, 0);
        t.clock[i] = 1;
        t.fenced = 0;
    }
    if (x.reset) x.reset();
    const auto progress_now = [&x] {
        u64 sum = x.steps + x.block.generation + x.block.arrived;
        for (auto& w : x.warps) sum += w.generation * 32 + w.arrived;
        return sum;
    };
    for (int left = num_threads; left > 0 && x.error.empty();) {
        left = 0;
        const u64 before = progress_now();
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
        const bool is_stuck = left && progress_now() == before;
        if (x.land_one && x.land_one(is_stuck)) continue;
        if (is_stuck) x.error = "deadlock: every thread that is left waits at a barrier";
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

#include "emu_ops.h"
