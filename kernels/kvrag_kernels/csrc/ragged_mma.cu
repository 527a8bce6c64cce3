// Attention with an exact limit per row: row i sees key j iff j < prefix or lo[i] <= j <= hi[i]. Flash attention forward with mma.sync and
// cp.async; sm_80 and newer, and float16 on sm_75. One work item of the plan and one key head per block: a tile of BM packed rows
// against a run of BN-key tiles. Keys and values of the next tile are on their way while this one is multiplied.
#include "plan.cuh"
#include "rows.cuh"
#include "tiles.cuh"

constexpr bool KEEPS_Q = D <= 128;  // in registers; wider heads read their queries from shared memory again for every tile
constexpr int STEPS = KEEPS_Q ? D / 16 : 4;  // unrolled steps over the head dim; all of them would spill where queries are read again

DEV void read_queries(u32 (&q)[SLABS][4], u32 q_tile, int k) {
    const int lane = thread_id() & 31, warp = thread_id() / 32;
    UNROLL for (int s = 0; s < SLABS; s++) matrix4(q[s], q_tile + at((warp * SLABS + s) * 16 + (lane & 15), k * 2 + (lane >> 4)));
}

// Scores of a warp's rows against a tile of keys, unscaled.
DEV void score(float (&s)[SLABS][BN / 8][4], const u32 (&q)[KEEPS_Q ? D / 16 : 1][SLABS][4], u32 q_tile, u32 k_tile) {
    const int lane = thread_id() & 31;
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int n = 0; n < BN / 8; n++) UNROLL for (int e = 0; e < 4; e++) s[m][n][e] = 0.0f;
#pragma unroll(STEPS)
    for (int k = 0; k < D / 16; k++) {
        u32 again[SLABS][4];
        if (!KEEPS_Q) read_queries(again, q_tile, k);
        const u32(*a)[4] = KEEPS_Q ? q[KEEPS_Q ? k : 0] : again;
        UNROLL for (int n = 0; n < BN / 16; n++) {
            u32 b[4];
            matrix4(b, k_tile + at(n * 16 + (lane >> 4) * 8 + (lane & 7), k * 2 + (lane >> 3 & 1)));
            UNROLL for (int m = 0; m < SLABS; m++) {
                multiply_add(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// out += probabilities · values.
DEV void gather(Rows& w, const float (&s)[SLABS][BN / 8][4], u32 v_tile) {
    const int lane = thread_id() & 31;
    UNROLL for (int k = 0; k < BN / 16; k++) {
        u32 a[SLABS][4];
        UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int i = 0; i < 4; i++)
            a[m][i] = pack(s[m][2 * k + (i >> 1)][(i & 1) * 2], s[m][2 * k + (i >> 1)][(i & 1) * 2 + 1]);
        UNROLL for (int d = 0; d < D / 16; d++) {
            u32 b[4];
            matrix4_transposed(b, v_tile + at(k * 16 + (lane & 15), d * 2 + (lane >> 4)));
            UNROLL for (int m = 0; m < SLABS; m++) {
                multiply_add(w.out[m][2 * d], a[m], b[0], b[1]);
                multiply_add(w.out[m][2 * d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

KERNEL(ragged_mma, Attention, THREADS, 1) {
    const int kv_head = block_x() % p.kv_heads, *item = item_of(p, block_x() / p.kv_heads);
    if (block_x() / p.kv_heads >= load(p.plan)) return;
    const int tile = load(item + ITEM_TILE), first = load(item + ITEM_FIRST), count = load(item + ITEM_COUNT), slot = load(item + ITEM_SLOT);
    const int batch = tile / p.tiles, tile_row = tile % p.tiles * BM;
    const KeyTiles t = key_tiles(tile_of(p, tile));
    const u16* k = p.k + batch * p.k_batch + kv_head * p.k_head;
    const u16* v = p.v + batch * p.v_batch + kv_head * p.v_head;
    const u32 q_tile = shared_base(), k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + 2 * KV_BYTES;

    copy_queries(p, q_tile, batch, kv_head, tile_row);
    if (count > 0) {
        copy_rows<BN>(k_tiles, k, p.k_row, first_key(t, first), t.bound);
        copy_rows<BN>(v_tiles, v, p.v_row, first_key(t, first), t.bound);
    }
    copy_commit();
    Rows w;
    start_rows(p, w, batch, kv_head, tile_row + thread_id() / 32 * SLABS * 16);
    u32 q[KEEPS_Q ? D / 16 : 1][SLABS][4];
    float unused[SLABS][2];
    for (int n = 0; n < count; n++) {
        const u32 stage = (n & 1) * KV_BYTES, next = KV_BYTES - stage;
        copy_wait<0>();
        block_sync();  // this tile has landed for all, and all are done with the stage that the next one goes to
        if (n + 1 < count) {
            copy_rows<BN>(k_tiles + next, k, p.k_row, first_key(t, first + n + 1), t.bound);
            copy_rows<BN>(v_tiles + next, v, p.v_row, first_key(t, first + n + 1), t.bound);
        }
        copy_commit();
        if (KEEPS_Q && n == 0) UNROLL for (int i = 0; i < (KEEPS_Q ? D / 16 : 0); i++) read_queries(q[i], q_tile, i);
        const int key = first_key(t, first + n), last = key + BN - 1;
        if (!(key < p.prefix || (key <= w.max_hi && last >= w.min_lo))) continue;  // none of the warp's rows sees any of the tile
        float s[SLABS][BN / 8][4];
        score(s, q, q_tile, k_tiles + stage);
        if (SOFTCAP) UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int i = 0; i < BN / 8 * 4; i++) s[m][i / 4][i % 4] = capped(p, s[m][i / 4][i % 4]);
        if (!(last < p.prefix || (key >= w.max_lo && last <= w.min_hi))) hide(p, w, s, key);
        soften<false>(p, w, s, unused);
        gather(w, s, v_tiles + stage);
    }
    copy_wait<0>();
    if (count == 0) block_sync();  // the queries have landed, before their rows are written over
    finish(p, w, q_tile, batch, kv_head, tile_row, slot);
}
