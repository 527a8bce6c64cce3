// The plan of a request, made on the device once for all layers: which key tiles each row tile needs, and their split into work items of
// near-equal length, so that few heads or few rows fill the chip too. The longest items come first: the short ones fill the gaps at the end.
// One block.
#pragma once
#include "tiles.cuh"

#define PLAN_THREADS 256
#ifndef MIN_ITEM
#define MIN_ITEM 4  // key tiles: shorter items cost more in partial results than they balance
#endif

// Span of a row tile's limits, by one warp.
struct Span {
    int lo, hi;
};
DEV Span span_of(const Attention& p, int batch, int tile) {
    const int groups = p.heads / p.kv_heads;
    const int first = tile * BM / groups, last = min_of(p.rows - 1, (tile * BM + BM - 1) / groups);
    Span s{p.keys, -1};
    for (int query = first + (thread_id() & 31); query <= last; query += 32) {
        const Limit x = limit_of(p, batch, {query, 0, true});
        if (x.lo > x.hi) continue;
        s.lo = min_of(s.lo, max_of(x.lo, 0));
        s.hi = max_of(s.hi, x.hi);
    }
    UNROLL for (int mask = 16; mask; mask >>= 1) {
        s.lo = min_of(s.lo, shuffle_xor(s.lo, mask));
        s.hi = max_of(s.hi, shuffle_xor(s.hi, mask));
    }
    return s;
}

// Sum of x over the block up to and with this thread; `scratch` has room for one int per thread.
DEV int scan(u32 scratch, int x) {
    const u32 own = scratch + thread_id() * 4;
    block_sync();
    put32(own, x);
    block_sync();
    for (int step = 1; step < PLAN_THREADS; step <<= 1) {
        const int before = thread_id() >= step ? static_cast<int>(get32(own - step * 4)) : 0;
        block_sync();
        x += before;
        put32(own, x);
        block_sync();
    }
    return x;
}

// Write the tile's row of the table; returns its number of key tiles.
DEV int describe(const Attention& p, int tile) {
    const int in_prefix = ceil_div(p.prefix, BN);
    const Span s = span_of(p, tile / p.tiles, tile % p.tiles);
    const int first = max_of(in_prefix, s.lo / BN), count = in_prefix + max_of(0, s.hi / BN + 1 - first) * (s.hi >= 0);
    if ((thread_id() & 31) == 0) {
        int* t = tile_of(p, tile);
        store(t + TILE_PREFIX, in_prefix);
        store(t + TILE_FIRST, first);
        store(t + TILE_COUNT, count);
        store(t + TILE_BOUND, max_of(p.prefix, s.hi + 1));
    }
    return count;
}

// Which of PLAN_THREADS lengths the items of a tile have, the longest first.
DEV int rank_of(const Attention& p, int count, int splits, int per_item) {
    const int longest = min_of(per_item, ceil_div(p.keys, BN));
    return (longest - ceil_div(count, splits)) * PLAN_THREADS / (longest + 1);
}
DEV int parts_of(int splits) { return splits > 1 ? splits : 0; }

KERNEL(ragged_plan, Attention, PLAN_THREADS, 1) {
    const u32 scratch = shared_base(), last = scratch + (PLAN_THREADS - 1) * 4;
    const int all = p.batch * p.tiles, lane = thread_id() & 31;
    int mine = 0;
    for (int tile = thread_id() / 32; tile < all; tile += PLAN_THREADS / 32) mine += describe(p, tile) * (lane == 0);
    scan(scratch, mine);
    block_sync();
    const int total = get32(last), per_item = max_of(MIN_ITEM, ceil_div(total, p.target));
    for (int tile = thread_id(); tile < all; tile += PLAN_THREADS) {
        int* t = tile_of(p, tile);
        const int count = load_again(t + TILE_COUNT), splits = max_of(1, ceil_div(count, per_item));
        store(t + TILE_SPLITS, splits);
        store(t + TILE_RANK, rank_of(p, count, splits, per_item));
    }
    block_sync();
    int item = 0, slot = 0;  // a thread per rank: its items and partial results, then where the next of them go
    for (int tile = 0; tile < all; tile++) {
        if (load_again(tile_of(p, tile) + TILE_RANK) != thread_id()) continue;
        const int splits = load_again(tile_of(p, tile) + TILE_SPLITS);
        item += splits;
        slot += parts_of(splits);
    }
    item = scan(scratch, item) - item;
    const int items = get32(last);
    slot = scan(scratch, slot) - slot;
    const int slots = get32(last);
    for (int tile = 0; tile < all; tile++) {
        int* t = tile_of(p, tile);
        if (load_again(t + TILE_RANK) != thread_id()) continue;
        const int splits = load_again(t + TILE_SPLITS);
        store(t + TILE_ITEM, item);
        store(t + TILE_SLOT, slot);
        item += splits;
        slot += parts_of(splits);
    }
    block_sync();
    for (int tile = thread_id(); tile < all; tile += PLAN_THREADS) {
        const int* t = tile_of(p, tile);
        const int count = load_again(t + TILE_COUNT), splits = load_again(t + TILE_SPLITS);
        for (int i = 0; i < splits; i++) {
            int* x = item_of(p, load_again(t + TILE_ITEM) + i);
            const int first = static_cast<int>(static_cast<i64>(count) * i / splits);
            store(x + ITEM_TILE, tile);
            store(x + ITEM_FIRST, first);
            store(x + ITEM_COUNT, static_cast<int>(static_cast<i64>(count) * (i + 1) / splits) - first);
            store(x + ITEM_SLOT, splits > 1 ? load_again(t + TILE_SLOT) + i : -1);
        }
    }
    if (thread_id() == 0) {
        store(p.plan, items);
        store(p.plan + 1, slots);
    }
}
