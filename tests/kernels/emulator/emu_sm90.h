// The instructions of ptx_sm90.cuh on the machine of emu.h.
//
// TMA copies land as late as they can: when no thread can go on without one (or, by the seed, as soon as they can). Their words are poison
// until then, and racing for whoever has not waited at their barrier. Products read shared memory from their issue to their wait, all that
// they read has to be visible to the async proxy, and their registers may not be touched in between: results are poison until the wait.
#pragma once

// What the tests encode in place of the driver's opaque map: 4-D, innermost first.
struct EmuMap { u64 address; i64 dims[4], strides[3]; u32 box_rows; };
static_assert(sizeof(EmuMap) <= sizeof(TensorMap));

namespace emu {

struct Barrier {
    int count = 0, pending = 0, initialiser = -1, index = 0;
    u32 initialised = 0, landings = 0;
    i64 bytes = 0;
    u64 phase = 0;
    std::vector<u32> gathered, published;
};
struct Box { u32 to, bar; EmuMap map; i64 at[4]; };
struct Result { float* c; int count; u64 batch; std::vector<float> value; };
struct Left { const u32* a; u64 batch; u32 value[4]; };
struct Span { u32 begin, end; };
struct Reading { u64 batch; std::vector<Span> spans; };
// A thread's products in flight; batches are counted as they are committed.
struct Products {
    u64 batch = 0;
    bool has_begun = false;
    std::vector<Result> results;
    std::vector<Left> lefts;
    std::vector<Reading> readings;  // of the warp, with its first lane
    std::vector<u64> issued;        // operands, to compare with the other warps'
};
// A named barrier: who is there, and whether some only arrive. Those may be anywhere by then, so that nobody learns of anybody's writes.
struct Named { int id; u64 generation; bool has_passers; std::vector<int> there; };
struct Hopper {
    std::vector<std::pair<u32, Barrier>> barriers;
    std::vector<Box> boxes;
    std::vector<Products> products;
    std::vector<int> registers;                  // per warp
    std::vector<Named> named;
    int pool = 0, ended = 0;
};
inline Hopper& h() {
    static Hopper hopper;
    return hopper;
}

inline Barrier& barrier(u32 a) {
    check_bounds(a, 8);
    for (auto& [address, b] : h().barriers)
        if (address == a) {
            if (!ordered(*m().now, b.initialiser, b.initialised)) fail("a barrier is used before its initialisation is known");
            return b;
        }
    fail("a barrier is used that was never initialised");
}
inline void complete(Barrier& b) {
    if (b.pending || b.bytes) return;
    b.phase++;
    b.pending = b.count;
    b.published = b.gathered;
    m().steps++;
}
inline void arrive(u32 a, i64 bytes) {
    Barrier& b = barrier(a);
    Thread& t = *m().now;
    if (b.pending == 0) fail("more threads arrive than the barrier expects");
    join(b.gathered, t.clock);
    tick(t);
    b.bytes += bytes;
    b.pending--;
    m().steps++;
    complete(b);
}

inline u32 swizzled(u32 a) { return a ^ (a >> 7 & 7) << 4; }
inline bool is_published(const Word& w) {
    return w.writer < 0 || w.writer >= static_cast<int>(m().warps.size()) * 32 || w.written <= m().threads[w.writer].fenced;
}

// A barrier's copies write in its name: its place in the clocks comes after the threads'.
inline int name_of(const Barrier& b) { return static_cast<int>(m().warps.size()) * 32 + b.index; }

inline void land(const Box& x) {
    Machine& machine = m();
    Barrier* b = nullptr;
    for (auto& [address, each] : h().barriers)
        if (address == x.bar) b = &each;
    for (u32 row = 0; row < x.map.box_rows; row++)
        for (u32 chunk = 0; chunk < 8; chunk++) {
            const i64 at[4] = {x.at[0] + chunk * 8, x.at[1] + row, x.at[2], x.at[3]};
            bool is_inside = true;
            for (int i = 0; i < 4; i++) is_inside &= at[i] >= 0 && at[i] < x.map.dims[i];
            const u32 to = swizzled(x.to + row * 128 + chunk * 16);
            if (is_inside) {
                const u64 from = x.map.address + at[0] * 2 + at[1] * x.map.strides[0] + at[2] * x.map.strides[1] + at[3] * x.map.strides[2];
                check_global(reinterpret_cast<const void*>(from), 16, false);
                memcpy(&machine.shared[to], reinterpret_cast<const void*>(from), 16);
            } else {
                memset(&machine.shared[to], 0, 16);
            }
        }
    b->landings++;
    for (u32 i = x.to / 4; i < (x.to + x.map.box_rows * 128) / 4; i++) {
        Word& w = machine.words[i];
        w.flight = -1;
        w.writer = name_of(*b);
        w.written = b->landings;
        w.reads.clear();
    }
    b->gathered[name_of(*b)] = b->landings;
    b->bytes -= x.map.box_rows * 128;
    machine.steps++;
    complete(*b);
}

// 32 bytes of a row, by every row of an operand.
inline std::vector<Span> spans_of(u64 descriptor, int rows, bool is_transposed) {
    std::vector<Span> spans;
    const u32 start = (descriptor & 0x3fff) << 4, panel = (descriptor >> 16 & 0x3fff) << 4, atom = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail("a descriptor names another swizzle than that of 128 bytes");
    if (start % 16 || (is_transposed && start % 1024)) fail("an operand starts off its swizzle's atom");
    if (!is_transposed)
        for (int r = 0; r < rows; r++)
            for (u32 c = 0; c < 32; c += 16) {
                const u32 a = swizzled(start + r / 8 * atom + r % 8 * 128 + c);
                spans.push_back({a, a + 16});
            }
    else
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < rows; n += 8) {
                const u32 a = swizzled(start + n / 64 * panel + n % 64 * 2 + k / 8 * atom + k % 8 * 128);
                spans.push_back({a, a + 16});
            }
    return spans;
}
inline void read_in_flight(const std::vector<Span>& spans) {
    Thread& reader = m().threads[m().now->warp * 32];
    for (const Span& s : spans) {
        check_bounds(s.begin, 16);
        for (u32 i = s.begin / 4; i < s.end / 4; i++) {
            Word& w = m().words[i];
            if (w.flight >= 0) fail("a product reads shared memory before a copy to it has landed");
            if (!ordered(reader, w.writer, w.written)) fail("a product races with a write");
            if (!is_published(w)) fail("a product reads what was not published to the async proxy");
            read_of(w, reader.index).in_flight++;
        }
    }
}
inline float element(u32 a) {
    u16 v;
    memcpy(&v, &m().shared[a], 2);
    return widen(v);
}

constexpr u32 POISON = 0x7fc0dead;
inline bool is_poison(float f) {
    u32 bits;
    memcpy(&bits, &f, 4);
    return bits == POISON;
}

struct Product {
    float* c;
    const u32* a_registers;
    u64 a, b;
    bool adds, is_transposed;
};

// One warp's part of a product: its 16 rows, all N columns. Values are those of the issue, and come into the registers at the wait.
template <int N> void multiply(unsigned char (*in)[64]) {
    const int warp = m().now->warp;
    const Product& one = slot<Product>(in, 0);
    std::vector<float> A(16 * 16), B(16 * N);
    Reading reading{h().products[warp * 32].batch, spans_of(one.b, N, one.is_transposed)};
    for (size_t i = 0; i < reading.spans.size(); i++)
        for (int e = 0; e < 8; e++) {
            const int k = one.is_transposed ? i / (N / 8) : i % 2 * 8 + e, n = one.is_transposed ? i % (N / 8) * 8 + e : i / 2;
            B[k * N + n] = element(reading.spans[i].begin + e * 2);
        }
    if (!one.a_registers) {
        const auto all = spans_of(one.a, 64, false);
        const std::vector<Span> own(all.begin() + warp % 4 * 32, all.begin() + warp % 4 * 32 + 32);
        for (int i = 0; i < 32; i++)
            for (int e = 0; e < 8; e++) A[i / 2 * 16 + i % 2 * 8 + e] = element(own[i].begin + e * 2);
        reading.spans.insert(reading.spans.end(), own.begin(), own.end());
    }
    read_in_flight(reading.spans);
    h().products[warp * 32].readings.push_back(reading);
    auto& issued = h().products[warp * 32].issued;
    issued.push_back(one.b);
    for (int other = warp / 4 * 4; other < warp / 4 * 4 + 4; other++) {
        const auto& theirs = h().products[other * 32].issued;
        if (theirs.size() >= issued.size() && theirs[issued.size() - 1] != one.b) fail("the warps of a warpgroup issue different products");
    }
    for (int lane = 0; lane < 32; lane++) {
        const Product& own = slot<Product>(in, lane);
        if (own.a != one.a || own.b != one.b || own.adds != one.adds) fail("the lanes of a warp name different operands");
        if (own.a_registers)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++) A[(lane / 4 + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8 + e] = widen(static_cast<u16>(own.a_registers[i] >> 16 * e));
    }
    for (int lane = 0; lane < 32; lane++) {
        const Product& own = slot<Product>(in, lane);
        Products& p = h().products[warp * 32 + lane];
        if (!p.has_begun) fail("a product is issued without its fence");
        if (own.a_registers) {
            p.lefts.push_back({own.a_registers, p.batch, {}});
            memcpy(p.lefts.back().value, own.a_registers, 16);
        }
        Result* r = nullptr;
        for (Result& each : p.results)
            if (each.c == own.c) r = &each;
        if (!r) {
            p.results.push_back({own.c, N / 2, 0, std::vector<float>(own.c, own.c + N / 2)});
            r = &p.results.back();
        }
        r->batch = p.batch;
        for (int i = 0; i < N / 2; i++) {
            const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = own.adds ? r->value[i] : 0.0f;
            for (int k = 0; k < 16; k++) sum += A[row * 16 + k] * B[k * N + column];
            r->value[i] = sum;
        }
        for (int i = 0; i < N / 2; i++) memcpy(own.c + i, &POISON, 4);
    }
}

template <class T> void forget(std::vector<T>& all, u64 last) {
    all.erase(std::remove_if(all.begin(), all.end(), [last](const T& x) { return x.batch <= last; }), all.end());
}
// Let batches up to and with `last` be over, for the thread that runs.
inline void finish_products(u64 last) {
    Thread& t = *m().now;
    Products& p = h().products[t.index];
    for (const Left& x : p.lefts)
        if (x.batch <= last && memcmp(x.a, x.value, 16)) fail("the left operand of a product in flight was changed");
    forget(p.lefts, last);
    for (Result& r : p.results) {
        if (r.batch > last) continue;
        for (int i = 0; i < r.count; i++)
            if (!is_poison(r.c[i])) fail("the result of a product in flight was touched");
        memcpy(r.c, r.value.data(), r.count * 4);
    }
    forget(p.results, last);
    for (const Reading& x : p.readings) {
        if (x.batch > last) continue;
        for (const Span& s : x.spans)
            for (u32 i = s.begin / 4; i < s.end / 4; i++) {
                Read& r = read_of(m().words[i], t.index);
                r.in_flight--;
                r.clock = t.clock[t.index];
            }
    }
    forget(p.readings, last);
}

inline void reset_hopper() {
    Hopper& x = h();
    const int threads = static_cast<int>(m().warps.size()) * 32, each = std::min(255, 65536 / threads) / 8 * 8;
    x.barriers.clear(), x.boxes.clear(), x.named.clear();
    x.products.assign(threads, Products());
    x.registers.assign(threads / 32, each);
    x.pool = 65536 - threads * each;
    x.ended = 0;
}
inline bool land_one(bool is_stuck) {
    auto& boxes = h().boxes;
    if (boxes.empty() || (!is_stuck && !m().is_eager)) return false;
    const auto at = m().is_eager ? boxes.end() - 1 : boxes.begin();
    const Box box = *at;
    boxes.erase(at);
    land(box);
    return true;
}
inline void check_ended() {
    if (!h().products[m().now->index].results.empty()) fail("the kernel ended before its products were over");
    if (++h().ended < static_cast<int>(m().warps.size()) * 32) return;
    for (const Named& x : h().named)
        if (!x.there.empty()) fail("threads wait for nobody at a named barrier when the kernel ends");
}
inline const bool installed = [] {
    m().reset = reset_hopper;
    m().land_one = land_one;
    m().at_exit = check_ended;
    return true;
}();

}  // namespace emu

DEV void barrier_init(u32 bar, int count) {
    emu::touch(bar, 8, true);
    emu::Barrier b;
    const emu::Thread& t = *emu::m().now;
    b.count = b.pending = count;
    b.initialiser = t.index, b.initialised = t.clock[t.index];
    b.index = static_cast<int>(emu::h().barriers.size());
    b.gathered.assign(t.clock.size(), 0);
    if (b.index >= emu::BARRIERS) emu::fail("more barriers than the emulator has room for");
    emu::h().barriers.push_back({bar, b});
}
DEV void barrier_arrive(u32 bar) { emu::arrive(bar, 0); }
DEV void barrier_arrive_expecting(u32 bar, u32 bytes) { emu::arrive(bar, bytes); }
DEV void barrier_wait(u32 bar, u32 parity) {
    while ((emu::barrier(bar).phase & 1) == parity) emu::yield();
    const emu::Barrier& b = emu::barrier(bar);
    if (!b.published.empty()) emu::join(emu::m().now->clock, b.published);
}
DEV bool barrier_polled(u32 bar, u32 parity, int polls) {
    for (int i = 0; i < polls && (emu::barrier(bar).phase & 1) == parity; i++) {
        emu::m().steps++;
        emu::yield();
    }
    const bool is_over = (emu::barrier(bar).phase & 1) != parity;
    if (is_over) barrier_wait(bar, parity);
    return is_over;
}
inline size_t emu_meet(int id, int threads, bool passes) {
    auto& named = emu::h().named;
    const int self = emu::m().now->index;
    size_t i = 0;
    while (i < named.size() && named[i].id != id) i++;
    if (i == named.size()) named.push_back({id, 0, false, {}});
    emu::Named& x = named[i];
    if (std::find(x.there.begin(), x.there.end(), self) != x.there.end()) emu::fail("a thread comes to a named barrier twice");
    emu::m().steps++;
    x.has_passers |= passes;
    x.there.push_back(self);
    if (static_cast<int>(x.there.size()) == threads) {
        if (!x.has_passers) emu::synchronise(self / threads * threads, threads);
        x.generation++, x.has_passers = false;
        x.there.clear();
    }
    return i;
}
DEV void group_arrive(int id, int threads) { emu_meet(id, threads, true); }
DEV void group_sync(int id, int threads) {
    u64 generation = 0;
    for (const auto& x : emu::h().named)
        if (x.id == id) generation = x.generation;
    const size_t i = emu_meet(id, threads, false);
    while (emu::h().named[i].generation == generation) emu::yield();
}
DEV void publish_to_async() {
    emu::Thread& t = *emu::m().now;
    t.fenced = t.clock[t.index];
    emu::tick(t);
}

DEV void copy_box(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch) {
    EmuMap m;
    memcpy(&m, &map, sizeof m);
    const u32 bytes = m.box_rows * 128;
    const emu::Thread& t = *emu::m().now;
    if (to % 1024) emu::fail("a box lands off its swizzle's atom");
    emu::check_bounds(to, 16), emu::check_bounds(to + bytes - 16, 16);
    const emu::Barrier& b = emu::barrier(bar);
    if (b.initialiser >= 0 && b.initialised > emu::m().threads[b.initialiser].fenced) emu::fail("a barrier was not published to the async proxy");
    for (u32 i = to / 4; i < (to + bytes) / 4; i++) {
        emu::Word& w = emu::m().words[i];
        if (w.flight >= 0) emu::fail("two copies to one place are in flight");
        if (!emu::ordered(t, w.writer, w.written)) emu::fail("a copy races with a write");
        if (!emu::is_published(w)) emu::fail("a copy overwrites what was not published to the async proxy");
        emu::check_reads_over(t, w);
        w.flight = t.index;
    }
    memset(&emu::m().shared[to], 0xff, bytes);
    emu::h().boxes.push_back({to, bar, m, {column, row, head, batch}});
}

template <int N> DEV void registers_give() {
    emu::meet_warp<int>(20, 0, [](auto, auto) {
        int& own = emu::h().registers[emu::m().now->warp];
        if (N > own || N % 8) emu::fail("a warp gives registers that it does not have");
        emu::h().pool += (own - N) * 32;
        own = N;
        emu::m().steps++;
    });
}
template <int N> DEV void registers_take() {
    emu::meet_warp<int>(21, 0, [](auto, auto) {});
    emu::Thread& t = *emu::m().now;
    int& own = emu::h().registers[t.warp];
    while (t.lane == 0 && own != N && emu::h().pool < (N - own) * 32) emu::yield();
    if (t.lane == 0) {
        emu::h().pool -= (N - own) * 32;
        own = N;
        emu::m().steps++;
    }
    while (own != N) emu::yield();
}

DEV void product_begin() { emu::h().products[emu::m().now->index].has_begun = true; }
DEV void product_commit() { emu::h().products[emu::m().now->index].batch++; }
template <int PENDING> DEV void product_wait() {
    emu::meet_warp<int>(22 + PENDING, 0, [](auto, auto) {});
    for (int i = 0; i < 2; i++) {  // products take their time: others go on meanwhile
        emu::m().steps++;
        emu::yield();
    }
    emu::Products& p = emu::h().products[emu::m().now->index];
    if (p.batch > PENDING) emu::finish_products(p.batch - PENDING - 1);
    p.has_begun = false;
}
template <int N> DEV void settle(float (&c)[N][4]) {
    for (auto& four : c)
        for (float f : four)
            if (emu::is_poison(f)) emu::fail("the result of a product is used before the wait for it");
}
template <int N> DEV void settle(u32 (&)[N][4]) {}
DEV void compute_first(float) {}

template <int N> DEV void product_shared(float (&c)[N][4], u64 a, u64 b, bool adds) {
    emu::meet_warp<int>(40 + N, emu::Product{&c[0][0], nullptr, a, b, adds, false}, [](auto in, auto) { emu::multiply<N * 8>(in); });
}
template <int N> DEV void product_registers(float (&c)[N][4], const u32 (&a)[4], u64 b) {
    emu::meet_warp<int>(400 + N, emu::Product{&c[0][0], a, 0, b, true, true}, [](auto in, auto) { emu::multiply<N * 8>(in); });
}
