// Tiles of D-wide rows of 16-bit elements in shared memory, swizzled so that neither the copies in nor ldmatrix meet a bank conflict, and
// what the attention kernels share: their arguments and the plan's layout.
//
// Compile-time options: D (64, 96, 128, 256), BF16 (0, 1), BM (packed rows of a tile), BN (keys of a tile), WARPS, SOFTCAP (0, 1).
#pragma once
#include "ptx.cuh"

#define THREADS (WARPS * 32)
constexpr int CHUNKS = D / 8;                 // 16-byte chunks of a row
constexpr int SLABS = BM / (WARPS * 16);      // 16-row slabs of a warp
constexpr u32 ROW_BYTES = D * 2;
constexpr u32 Q_BYTES = BM * ROW_BYTES;
constexpr u32 KV_BYTES = BN * ROW_BYTES;
constexpr int COPIES = D <= 128 ? 16 : 1;     // unrolled copies a thread: their addresses are registers that wide heads lack
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// One by-value argument of every attention kernel; runtime.py packs it in this order. Strides in elements.
struct Attention {
    const u16 *q, *k, *v;
    u16* out;
    float* lse;
    const int *hi, *lo;      // lo may be null
    const float* sinks;      // may be null
    int* plan;
    float *part_out, *part_lse;
    float* mass;             // the probe's result
    i64 q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, hi_batch, lo_batch;
    int batch, rows, keys, heads, kv_heads, prefix;
    int tiles;               // row tiles of one batch entry
    int max_items;           // work items that the plan has room for
    int target;              // work items to aim at, per key head
    float scale, softcap;
};

// The plan: 8 header ints (number of items, keys tiles per item, …), 8 ints per row tile, 4 ints per work item.
enum { HEADER = 8, TILE_INTS = 8, ITEM_INTS = 4 };
enum { TILE_PREFIX, TILE_FIRST, TILE_COUNT, TILE_BOUND, TILE_SLOT, TILE_SPLITS, TILE_ITEM, TILE_RANK };
enum { ITEM_TILE, ITEM_FIRST, ITEM_COUNT, ITEM_SLOT };

DEV int* tile_of(const Attention& p, int tile) { return p.plan + HEADER + tile * TILE_INTS; }
DEV int* item_of(const Attention& p, int item) { return p.plan + HEADER + p.batch * p.tiles * TILE_INTS + item * ITEM_INTS; }

// Column `chunk` of row `row`: the chunk moves with the row so that eight rows of one column lie in eight different bank groups.
DEV u32 swizzle(int row) { return D == 96 ? (row >> 1) & 3 : row & 7; }
DEV u32 at(int row, int chunk) { return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16; }

// Copy rows `first ..` of a matrix of keys or values; rows from `bound` on are zeros, whatever the memory holds.
template <int ROWS> DEV void copy_rows(u32 to, const u16* from, i64 stride, int first, int bound) {
    static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll(COPIES)
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        const int c = i * THREADS + thread_id(), row = c / CHUNKS, chunk = c % CHUNKS;
        const bool valid = first + row < bound;
        copy16(to + at(row, chunk), from + (valid ? (first + row) * stride + chunk * 8 : 0), valid);
    }
}

// Packed row r of a key head is query r / G, head r % G of the group: neighbours share their limit, or nearly.
struct Packed {
    int query, head;
    bool valid;
};
DEV Packed unpack(const Attention& p, int row, int kv_head) {
    const int groups = p.heads / p.kv_heads, query = row / groups;
    return {query, kv_head * groups + row - query * groups, query < p.rows};
}

// Copy the queries of a row tile. Rows beyond the last are zeros.
DEV void copy_queries(const Attention& p, u32 to, int batch, int kv_head, int first_row) {
    static_assert(BM * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
    const u16* base = p.q + batch * p.q_batch;
#pragma unroll(COPIES)
    for (int i = 0; i < BM * CHUNKS / THREADS; i++) {
        const int c = i * THREADS + thread_id(), row = c / CHUNKS, chunk = c % CHUNKS;
        const Packed r = unpack(p, first_row + row, kv_head);
        copy16(to + at(row, chunk), base + (r.valid ? r.query * p.q_row + r.head * p.q_head + chunk * 8 : 0), r.valid);
    }
}

// The key tiles of a row tile: those of the prefix, then those between lo and hi. Keys from `bound` on are none of its business.
struct KeyTiles {
    int in_prefix, first, bound;
};
DEV KeyTiles key_tiles(const int* tile) { return {load(tile + TILE_PREFIX), load(tile + TILE_FIRST), load(tile + TILE_BOUND)}; }
DEV int first_key(const KeyTiles& t, int n) { return (n < t.in_prefix ? n : n - t.in_prefix + t.first) * BN; }

// The limits of one row, and of the rows of a warp.
struct Limit {
    int lo, hi;
};
DEV Limit limit_of(const Attention& p, int batch, const Packed& r) {
    if (!r.valid) return {0, -1};
    const int hi = load(p.hi + batch * p.hi_batch + r.query);
    return {p.lo ? load(p.lo + batch * p.lo_batch + r.query) : 0, min_of(hi, p.keys - 1)};
}
// Without short circuits, which become branches: as many as a tile has scores.
DEV bool sees(const Limit& x, int prefix, int key) { return (key < prefix) | ((key >= x.lo) & (key <= x.hi)); }

// A score times this is an exponent of 2.
DEV float exponent_scale(const Attention& p) { return SOFTCAP ? LOG2E : p.scale * LOG2E; }
DEV float capped(const Attention& p, float s) {
    // tanh.approx is off by 2^-11 of the cap; this is off by 2^-22.
    const float e = exp2_fast(s * (2.0f * LOG2E * p.scale / p.softcap));
    return p.softcap - 2.0f * p.softcap * reciprocal(e + 1.0f);
}

// Where results go, in elements.
DEV i64 out_offset(const Attention& p, int batch, const Packed& r) {
    return ((static_cast<i64>(batch) * p.rows + r.query) * p.heads + r.head) * D;
}
DEV i64 lse_offset(const Attention& p, int batch, const Packed& r) {
    return (static_cast<i64>(batch) * p.heads + r.head) * p.rows + r.query;
}
DEV i64 part_offset(const Attention& p, int slot, int kv_head, int row) {
    return (static_cast<i64>(slot) * p.kv_heads + kv_head) * BM + row;
}
