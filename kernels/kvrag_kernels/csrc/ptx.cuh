// The machine: every instruction that C++ has no word for, and every access to shared or global memory. The only file with asm, so that
// an emulator (KV_EMU) can stand in for it and run the kernels' own source on a CPU. No CUDA header is included: NVRTC needs no path.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef KV_EMU
#include "emu.h"
#else

#define DEV static __device__ __forceinline__
#define KERNEL(name, Params, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)
#define UNROLL _Pragma("unroll")

DEV int thread_id() { return threadIdx.x; }
DEV int block_x() { return blockIdx.x; }
DEV int block_y() { return blockIdx.y; }
DEV int block_z() { return blockIdx.z; }

extern __shared__ __align__(1024) unsigned char kv_shared[];
DEV u32 shared_base() { return static_cast<u32>(__cvta_generic_to_shared(kv_shared)); }

// Barriers and votes.
DEV void block_sync() { __syncthreads(); }
DEV void warp_sync() { __syncwarp(); }
DEV bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }
template <class T> DEV T shuffle_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Global memory, 1 to 16 bytes.
template <class T> DEV T load(const T* p) { return __ldg(p); }
template <class T> DEV T load_again(const T* p) { return *p; }  // memory that this kernel writes too
template <class T> DEV void store(T* p, T x) { *p = x; }
struct __align__(16) Quad { u32 x[4]; };
struct __align__(8) Pair { float x[2]; };
DEV Quad load16(const void* p) {
    Quad r;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3]) : "l"(p));
    return r;
}
DEV void store16(void* p, Quad r) { *reinterpret_cast<Quad*>(p) = r; }
DEV void store_pair(float* p, float a, float b) { *reinterpret_cast<Pair*>(p) = Pair{{a, b}}; }

// Shared memory, by 32-bit address.
DEV void put32(u32 a, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DEV u32 get32(u32 a) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
    return x;
}
DEV void put128(u32 a, Quad r) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r.x[0]), "r"(r.x[1]), "r"(r.x[2]), "r"(r.x[3]) : "memory");
}
DEV Quad get128(u32 a) {
    Quad r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
                 : "r"(a)
                 : "memory");
    return r;
}

// 16 bytes from global to shared memory, landing at the wait; zeros where `valid` is false. sm_75 has no such unit.
DEV void copy16(u32 to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
    put128(to, valid ? load16(from) : Quad{{0, 0, 0, 0}});
#endif
}
DEV void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> DEV void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Four 8×8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEV void matrix4(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
}
DEV void matrix4_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
}

// c (16×8, float32) += a (16×16) · b (16×8), 16-bit operands: bfloat16 where BF16 is 1, else float16.
DEV void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#elif BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Two floats as 16-bit elements, `low` at the lower address.
DEV u32 pack(float low, float high) {
    u32 r;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#elif __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("{.reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}" : "=r"(r) : "f"(low), "f"(high));
#endif
    return r;
}

// A 16-bit float, and an 8-bit one (e4m3fn, any architecture: the exponent is moved by a product, which is exact, subnormals too).
DEV float widen(u16 x, bool is_bfloat16) {
    if (is_bfloat16) return __uint_as_float(static_cast<u32>(x) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEV float float_of_bits(u32 x) { return __uint_as_float(x); }

DEV float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }  // a · b + c
DEV float float_max(float a, float b) { return fmaxf(a, b); }
DEV float infinity() { return __int_as_float(0x7f800000); }

#endif

DEV float from_e4m3(u32 x) {
    const float size = (x & 0x7f) == 0x7f ? float_of_bits(0x7fc00000) : float_of_bits((x & 0x7f) << 20) * 0x1p120f;
    return x & 0x80 ? -size : size;
}
DEV int min_of(int a, int b) { return a < b ? a : b; }
DEV int max_of(int a, int b) { return a > b ? a : b; }
DEV int ceil_div(int a, int b) { return (a + b - 1) / b; }
