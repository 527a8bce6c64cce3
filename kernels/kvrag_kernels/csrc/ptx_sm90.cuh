// What only Hopper (sm_90a) has: barriers that count arrivals and bytes, tile copies (TMA), products of a warpgroup (wgmma), registers that
// move between warpgroups. Like ptx.cuh, nothing but asm, and the emulator (KV_EMU) stands in for it.
#pragma once
#include "ptx.cuh"

struct __attribute__((aligned(128))) TensorMap { u64 opaque[16]; };  // of cuTensorMapEncodeTiled; CUDA 12 asks for 64, CUDA 13 for 128

#ifdef KV_EMU
#include "emu_sm90.h"
#else

// A barrier in shared memory: 8 bytes. A phase is over when `count` threads have arrived and all announced bytes have landed.
DEV void barrier_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEV void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void barrier_arrive_expecting(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Wait for the end of the phase of this parity: 0 for the first, 1 for the second, and so on. Before the first, parity 1 passes at once.
DEV void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred over;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@over bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// The same for so many polls at most; whether the phase is over.
DEV bool barrier_polled(u32 bar, u32 parity, int polls) {
    int over = 0;
    for (int i = 0; i < polls && !over; i++)
        asm volatile("{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.b32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(bar), "r"(parity)
                     : "memory");
    return over;
}
// Named barriers: `threads` threads meet, of which some arrive and go on.
DEV void group_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void group_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Own writes to shared memory so far, barriers included, become visible to copies and products, which run in a proxy of their own.
DEV void publish_to_async() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A box of 64 columns, 16-bit, and as many rows as the map says, to shared memory in the swizzle of 128 bytes; zeros beyond the tensor.
DEV void copy_box(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Registers of this warpgroup's threads, fewer or more than at launch.
template <int N> DEV void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Around products: begin before the first one that reads registers that other instructions wrote; commit after a batch; wait until all but the
// last PENDING batches are over. `settle` keeps the compiler from moving what reads or writes registers across: results to before their wait,
// operands to behind their fence.
DEV void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void product_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
template <int N> DEV void settle(float (&c)[N][4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[i][e])::"memory");
}
template <int N> DEV void settle(u32 (&a)[N][4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[i][e])::"memory");
}
// Have x, which is not negative, computed before what follows. The compiler may move a wait for products up, above arithmetic that was meant to
// overlap with them, but not above an instruction that might sleep and reads what the arithmetic gave. It never sleeps.
DEV void compute_first(float x) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never nanosleep.u32 0;\n}" ::"f"(x) : "memory");
}

#ifndef V_TRANSPOSED
#define V_TRANSPOSED 1  // values lie row by row, columns contiguous
#endif
#define KV_TEXT_OF(x) #x
#define KV_TEXT(x) KV_TEXT_OF(x)
#if BF16
#define KV_TYPES "f32.bf16.bf16"
#else
#define KV_TYPES "f32.f16.f16"
#endif
#define KV_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KV_R32 KV_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KV_R64 KV_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KV_R128                                                                                                                            \
    KV_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94," \
           "%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120," \
           "%121,%122,%123,%124,%125,%126,%127"
#define KV_C1(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define KV_C4(i) KV_C1(i), KV_C1(i + 1), KV_C1(i + 2), KV_C1(i + 3)
#define KV_C8(i) KV_C4(i), KV_C4(i + 4)
#define KV_C16(i) KV_C8(i), KV_C8(i + 8)
#define KV_C32(i) KV_C16(i), KV_C16(i + 16)

// c (64 × N, float32; the fragment of mma, eight columns after another) += or = a · b, for 16 of the summed dimension. `a` of shared memory by
// descriptor, `b` too, both with that dimension contiguous.
#define KV_SHARED(N, REGS, OUT, A, B, P)                                                                                                \
    DEV void product_shared(float (&c)[N / 8][4], u64 a, u64 b, bool adds) {                                                            \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16." KV_TYPES " {" REGS \
                     "}, %" A ", %" B ", adds, 1, 1, 0, 0;\n}"                                                                          \
                     : OUT                                                                                                              \
                     : "l"(a), "l"(b), "r"(static_cast<int>(adds))                                                                      \
                     : "memory");                                                                                                       \
    }
KV_SHARED(64, KV_R32, KV_C8(0), "32", "33", "34")
KV_SHARED(128, KV_R64, KV_C16(0), "64", "65", "66")

// The same with `a` in registers, the fragment of mma, and `b` by descriptor with its N columns contiguous; always adds.
#define KV_REGISTERS(N, REGS, OUT, A0, A1, A2, A3, B)                                                                               \
    DEV void product_registers(float (&c)[N / 8][4], const u32 (&a)[4], u64 b) {                                                    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16." KV_TYPES " {" REGS "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B \
                     ", 1, 1, 1, " KV_TEXT(V_TRANSPOSED) ";"                                                                          \
                     : OUT                                                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                           \
                     : "memory");                                                                                                   \
    }
KV_REGISTERS(32, KV_R16, KV_C4(0), "16", "17", "18", "19", "20")
KV_REGISTERS(64, KV_R32, KV_C8(0), "32", "33", "34", "35", "36")
KV_REGISTERS(128, KV_R64, KV_C16(0), "64", "65", "66", "67", "68")
KV_REGISTERS(256, KV_R128, KV_C32(0), "128", "129", "130", "131", "132")

#endif
