// The instructions of ptx.cuh, on the machine of emu.h; and what the tests call from outside.
#pragma once

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
        emu::synchronise(0, static_cast<int>(x.warps.size()) * 32);
    } else {
        while (x.block.generation == generation) emu::yield();
    }
}
DEV void warp_sync() {
    emu::meet_warp<int>(1, 0, [](auto, auto) { emu::synchronise(emu::m().now->warp * 32, 32); });
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
