// Attention with an exact limit per row, for Hopper (sm_90a): the contract of ragged_mma.cu. One warpgroup brings keys and values by TMA, two
// warpgroups multiply by wgmma, 64 packed rows each; a tile's scores are multiplied while the tile before it is added to the outputs.
//
// Tiles in shared memory are panels of 64 columns: rows of 128 bytes in the hardware's 128-byte swizzle, eight rows to an atom of 1 KiB.
#include "plan.cuh"
#include "ptx_sm90.cuh"
#include "rows.cuh"
#include "tiles.cuh"

static_assert(SLABS == 1 && WARPS == 8, "two warpgroups multiply 64 rows each, 16 of each warp");
constexpr int ALL_THREADS = THREADS + 128;  // the multiplying warpgroups, then the one that copies
constexpr int PANELS = (D + 63) / 64;
constexpr u32 PANEL_ROW = 128;
constexpr u32 Q_TILE = PANELS * BM * PANEL_ROW, KV_TILE = PANELS * BN * PANEL_ROW;
constexpr u32 ATOM = 8 * PANEL_ROW;
enum { FULL_K, FULL_V, EMPTY_K, EMPTY_V };  // barriers, two each: one per stage
constexpr int ROWS_BARRIER = 1;             // named barrier of the multiplying warpgroups; 0 is block_sync's
constexpr int TURN_BARRIER = 2;             // two: whose turn it is to multiply

struct TmaAttention {
    TensorMap k_map, v_map;
    Attention a;
};

// Where the block's tiles and barriers lie.
struct Places {
    u32 q, k, v, barriers;
};
DEV Places places() {
    const u32 q = shared_base(), k = q + Q_TILE, v = k + 2 * KV_TILE;
    return {q, k, v, v + 2 * KV_TILE};
}
DEV u32 barrier_of(const Places& x, int kind, int n) { return x.barriers + (kind * 2 + (n & 1)) * 8; }
// Tile n is the (n / 2)-th of its stage. A stage is full at the end of that phase, and free for it at the end of the phase before.
DEV u32 full_parity(int n) { return n >> 1 & 1; }
DEV u32 free_parity(int n) { return full_parity(n) ^ 1; }

// Wait until tile n is there, or until its stage is free for it. With BOUNDED_WAITS, so many polls at most: a hang becomes a line in the
// place of the mass (tests/kernels/diagnose_sm90.py), for each warp the first time that it gave up: block + 1, thread, kind of barrier, tile.
DEV void wait_for(const Attention& p, const Places& x, int kind, int n) {
    const u32 bar = barrier_of(x, kind, n), parity = kind < EMPTY_K ? full_parity(n) : free_parity(n);
#ifdef BOUNDED_WAITS
    int* line = reinterpret_cast<int*>(p.mass) + thread_id() / 32 * 4;
    if (load_again(line) || barrier_polled(bar, parity, BOUNDED_WAITS)) return;
    const int found[4] = {block_x() + 1, thread_id(), kind, n};
    UNROLL for (int i = 0; i < 4; i++) store(line + i, found[i]);
#else
    barrier_wait(bar, parity);
#endif
}

template <int ROWS> DEV u32 panel_at(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * PANEL_ROW + ((chunk % 8) ^ (row & 7)) * 16;
}

// Strides of the operands in bytes: leading, from panel to panel where columns are contiguous, and from atom to atom. Options, so that a first
// run on a device can try others.
#ifndef K_LEADING
#define K_LEADING 16
#endif
#ifndef K_STRIDE
#define K_STRIDE ATOM
#endif
#ifndef V_LEADING
#define V_LEADING (BN * PANEL_ROW)
#endif
#ifndef V_STRIDE
#define V_STRIDE ATOM
#endif

// Descriptor of an operand in shared memory.
DEV u64 operand(u32 start, u32 leading, u32 stride) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(leading >> 4 & 0x3fff) << 16 | (start >> 4 & 0x3fff);
}
DEV u64 keys_operand(u32 start) { return operand(start, K_LEADING, K_STRIDE); }  // queries too
DEV u64 values_operand(u32 start) { return operand(start, V_LEADING, V_STRIDE); }

// --- The warpgroup that copies.

// Values of a tile that the row tile sees only in part, without TMA: rows from the bound on are zeros whatever the memory holds, for a
// probability of zero times a NaN would be a NaN.
DEV void copy_values(const Attention& p, u32 to, const u16* v, int first, int bound) {
    const int thread = thread_id() - THREADS;
#pragma unroll 1
    for (int c = thread; c < BN * PANELS * 8; c += 128) {
        const int row = c / (PANELS * 8), chunk = c % (PANELS * 8);
        const bool valid = first + row < bound && chunk < CHUNKS;
        copy16(to + panel_at<BN>(row, chunk), v + (valid ? (first + row) * p.v_row + chunk * 8 : 0), valid);
    }
    copy_commit();
    copy_wait<0>();
    publish_to_async();
}

DEV void copy_panels(u32 to, const TensorMap& map, u32 bar, int row, int head, int batch) {
    UNROLL for (int i = 0; i < PANELS; i++) copy_box(to + i * BN * PANEL_ROW, map, bar, i * 64, row, head, batch);
}

// Keys of a tile before the values of the tile before it: in the order of use, and those values wait longer for their stage.
DEV void bring(const TmaAttention& p, const Places& x, const KeyTiles& t, int first, int count, int kv_head, int batch) {
    const bool leads = thread_id() == THREADS;
    const u16* v = p.a.v + batch * p.a.v_batch + kv_head * p.a.v_head;
    for (int next = 0; next <= count; next++) {
        if (leads && next < count) {
            const u32 full_k = barrier_of(x, FULL_K, next);
            wait_for(p.a, x, EMPTY_K, next);
            barrier_arrive_expecting(full_k, KV_TILE);
            copy_panels(x.k + (next & 1) * KV_TILE, p.k_map, full_k, first_key(t, first + next), kv_head, batch);
        }
        const int n = next - 1;
        if (n < 0) continue;
        const int key = first_key(t, first + n);
        const u32 stage = x.v + (n & 1) * KV_TILE, full_v = barrier_of(x, FULL_V, n);
        wait_for(p.a, x, EMPTY_V, n);
        const bool is_whole = key + BN <= t.bound || t.bound == p.a.keys;  // TMA gives zeros beyond the last key
        if (!is_whole) copy_values(p.a, stage, v, key, t.bound);
        if (is_whole && leads) {
            barrier_arrive_expecting(full_v, KV_TILE);
            copy_panels(stage, p.v_map, full_v, key, kv_head, batch);
        } else {
            barrier_arrive(full_v);
        }
    }
}

// --- The warpgroups that multiply.

DEV void take_queries(const Attention& p, const Places& x, int batch, int kv_head, int first_row) {
    const u16* base = p.q + batch * p.q_batch;
#pragma unroll 4
    for (int c = thread_id(); c < BM * CHUNKS; c += THREADS) {
        const int row = c / CHUNKS, chunk = c % CHUNKS;
        const Packed r = unpack(p, first_row + row, kv_head);
        copy16(x.q + panel_at<BM>(row, chunk), base + (r.valid ? r.query * p.q_row + r.head * p.q_head + chunk * 8 : 0), r.valid);
    }
    copy_commit();
    copy_wait<0>();
    publish_to_async();
    group_sync(ROWS_BARRIER, THREADS);
}

// Start multiplying the warpgroup's queries with a tile of keys.
DEV void start_scores(float (&s)[BN / 8][4], const Places& x, u32 k_tile) {
    const u32 q = x.q + thread_id() / 128 * 64 * PANEL_ROW;
    UNROLL for (int k = 0; k < D / 16; k++) {
        const u32 step = k % 4 * 32;  // 16 columns of a panel
        product_shared(s, keys_operand(q + k / 4 * BM * PANEL_ROW + step), keys_operand(k_tile + k / 4 * BN * PANEL_ROW + step), k > 0);
    }
    product_commit();
}

// Start adding probabilities times a tile of values to the outputs.
DEV void start_outputs(float (&out)[D / 8][4], const u32 (&a)[BN / 16][4], u32 v_tile) {
    UNROLL for (int k = 0; k < BN / 16; k++) {
        const u32 v = v_tile + k * 2 * ATOM;
#if D == 96
        product_registers(reinterpret_cast<float(&)[8][4]>(out[0]), a[k], values_operand(v));
        product_registers(reinterpret_cast<float(&)[4][4]>(out[8]), a[k], values_operand(v + BN * PANEL_ROW));
#else
        product_registers(out, a[k], values_operand(v));
#endif
    }
    product_commit();
}

// Scores become probabilities relative to the rows' tops, and those the left operand of the next product.
DEV void weigh(const Attention& p, Rows& w, float (&s)[1][BN / 8][4], float (&fades)[1][2], int key) {
    const int last = key + BN - 1;
    if (SOFTCAP) UNROLL for (int i = 0; i < BN / 8 * 4; i++) s[0][i / 4][i % 4] = capped(p, s[0][i / 4][i % 4]);
    if (!(last < p.prefix || (key >= w.max_lo && last <= w.min_hi))) hide(p, w, s, key);
    soften<true>(p, w, s, fades);
}
DEV void pack_weights(u32 (&a)[BN / 16][4], const float (&s)[1][BN / 8][4]) {
    UNROLL for (int k = 0; k < BN / 16; k++) UNROLL for (int i = 0; i < 4; i++)
        a[k][i] = pack(s[0][2 * k + (i >> 1)][(i & 1) * 2], s[0][2 * k + (i >> 1)][(i & 1) * 2 + 1]);
}

DEV void release(const Places& x, int kind, int n) {
    if ((thread_id() & 31) == 0) barrier_arrive(barrier_of(x, kind, n));
}

// The two warpgroups take turns at the multiplier, the first one first: while one's products run, the other softens, and neither keeps both
// waiting. Wide heads multiply for longer than they soften and need no turns.
constexpr bool TAKES_TURNS = D <= 128;
DEV int turn_of(int warpgroup) { return TURN_BARRIER + warpgroup; }
DEV void take_turn() {
    if (TAKES_TURNS) group_sync(turn_of(thread_id() / 128), THREADS);
}
DEV void give_turn() {
    if (TAKES_TURNS) group_arrive(turn_of(1 - thread_id() / 128), THREADS);
}

DEV void multiply(const Attention& p, const Places& x, Rows& w, const KeyTiles& t, int first, int count) {
    float s[1][BN / 8][4], fades[1][2];
    u32 a[BN / 16][4];
    const bool is_first = thread_id() < 128;
    if (!is_first && count > 1) give_turn();
    wait_for(p, x, FULL_K, 0);
    product_begin();
    start_scores(s[0], x, x.k);
    product_wait<0>();
    settle(s[0]);
    release(x, EMPTY_K, 0);
    weigh(p, w, s, fades, first_key(t, first));  // nothing to fade yet
    pack_weights(a, s);
#pragma unroll 1
    for (int n = 1; n < count; n++) {
        wait_for(p, x, FULL_K, n);
        take_turn();
        settle(s[0]);
        product_begin();
        start_scores(s[0], x, x.k + (n & 1) * KV_TILE);
        wait_for(p, x, FULL_V, n - 1);
        settle(w.out[0]);
        settle(a);
        product_begin();
        start_outputs(w.out[0], a, x.v + (n - 1 & 1) * KV_TILE);
        if (is_first || n + 1 < count) give_turn();  // after the last turn, nobody waits for one
        product_wait<1>();
        settle(s[0]);
        release(x, EMPTY_K, n);
        weigh(p, w, s, fades, first_key(t, first + n));
        if (D <= 128 || !SOFTCAP) compute_first(w.sum[0][0] + w.sum[0][1]);  // wider heads lack the registers
        product_wait<0>();
        settle(w.out[0]);
        release(x, EMPTY_V, n - 1);
        UNROLL for (int h = 0; h < 2; h++) fade_out(w, 0, h, fades[0][h]);
        pack_weights(a, s);
    }
    wait_for(p, x, FULL_V, count - 1);
    settle(w.out[0]);
    settle(a);
    product_begin();
    start_outputs(w.out[0], a, x.v + (count - 1 & 1) * KV_TILE);
    product_wait<0>();
    settle(w.out[0]);
}

KERNEL(ragged_sm90, TmaAttention, ALL_THREADS, 1) {
    const int kv_head = block_x() % p.a.kv_heads, *item = item_of(p.a, block_x() / p.a.kv_heads);
    if (block_x() / p.a.kv_heads >= load(p.a.plan)) return;
    const int tile = load(item + ITEM_TILE), first = load(item + ITEM_FIRST), count = load(item + ITEM_COUNT), slot = load(item + ITEM_SLOT);
    const int batch = tile / p.a.tiles, tile_row = tile % p.a.tiles * BM;
    const KeyTiles t = key_tiles(tile_of(p.a, tile));
    const Places x = places();
    if (thread_id() == THREADS) {
        UNROLL for (int i = 0; i < 2; i++) {
            barrier_init(barrier_of(x, FULL_K, i), 1);     // who starts the copies
            barrier_init(barrier_of(x, FULL_V, i), 128);   // every thread that copies: some values go without TMA
            barrier_init(barrier_of(x, EMPTY_K, i), WARPS);
            barrier_init(barrier_of(x, EMPTY_V, i), WARPS);
        }
        publish_to_async();
    }
    block_sync();
    if (thread_id() >= THREADS) {
        registers_give<40>();
        bring(p, x, t, first, count, kv_head, batch);
    } else {
        registers_take<232>();
        take_queries(p.a, x, batch, kv_head, tile_row);
        Rows w;
        start_rows(p.a, w, batch, kv_head, tile_row + thread_id() / 32 * 16);
        if (count > 0) multiply(p.a, x, w, t, first, count);
        group_sync(ROWS_BARRIER, THREADS);  // no queries are multiplied any more, before results are staged over them
        finish(p.a, w, x.q, batch, kv_head, tile_row, slot);
    }
}
