// The probe: the most attention that each key gets from any row and query head, without probabilities in memory. The rows' log-sum-exps are known
// from the attention before it, so that a probability is one exponential. One block per tile of BM keys and key head, keys being the left
// operand; tiles of BN packed rows pass by.
#include "tiles.cuh"


// What a packed row of the tile is to all keys: its limits, and the base-2 log of its softmax's denominator (infinite beyond the last row: no probability).
struct RowFacts {
    Limit limit;
    float total;
};
DEV RowFacts facts_of(const Attention& p, int batch, int kv_head, int row) {
    const Packed r = unpack(p, row, kv_head);
    if (!r.valid) return {{0, -1}, infinity()};
    const float lse = load(p.lse + lse_offset(p, batch, r));  // -inf for a row that sees no key, which is never asked
    const float total = lse * LOG2E, sink = p.sinks ? load(p.sinks + r.head) * LOG2E : -infinity();
    const float top = float_max(total, sink);
    return {limit_of(p, batch, r), p.sinks ? top + log2_fast(exp2_fast(total - top) + exp2_fast(sink - top)) : total};
}

// Copy BN packed rows of queries.
DEV void copy_row_tile(const Attention& p, u32 to, int batch, int kv_head, int first_row) {
#pragma unroll(COPIES)
    for (int i = 0; i < BN * CHUNKS / THREADS; i++) {
        const int c = i * THREADS + thread_id(), row = c / CHUNKS, chunk = c % CHUNKS;
        const Packed r = unpack(p, first_row + row, kv_head);
        copy16(to + at(row, chunk), p.q + batch * p.q_batch + (r.valid ? r.query * p.q_row + r.head * p.q_head + chunk * 8 : 0), r.valid);
    }
}

// Scores of 16·SLABS keys against BN rows, transposed: lanes hold keys lane/4 (+ 8) and rows 2 (lane % 4) (+ 1).
DEV void score_keys(float (&s)[SLABS][BN / 8][4], u32 k_tile, u32 q_tile) {
    const int lane = thread_id() & 31, warp = thread_id() / 32;
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int n = 0; n < BN / 8; n++) UNROLL for (int e = 0; e < 4; e++) s[m][n][e] = 0.0f;
    UNROLL for (int k = 0; k < D / 16; k++) {
        u32 a[SLABS][4];
        UNROLL for (int m = 0; m < SLABS; m++) matrix4(a[m], k_tile + at((warp * SLABS + m) * 16 + (lane & 15), k * 2 + (lane >> 4)));
        UNROLL for (int n = 0; n < BN / 16; n++) {
            u32 b[4];
            matrix4(b, q_tile + at(n * 16 + (lane >> 4) * 8 + (lane & 7), k * 2 + (lane >> 3 & 1)));
            UNROLL for (int m = 0; m < SLABS; m++) {
                multiply_add(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Whether any row sees a key of the tile. Keys may be a pool that many requests share, of which these rows see a small part. Each warp looks by
// itself, so that all agree without a barrier.
DEV bool is_seen(const Attention& p, int batch, int first_key) {
    bool found = first_key < p.prefix;
    for (int row = thread_id() & 31; row < p.rows; row += 32) {
        const int hi = load(p.hi + batch * p.hi_batch + row), lo = p.lo ? load(p.lo + batch * p.lo_batch + row) : 0;
        found |= (hi >= first_key) & (lo < first_key + BM);
    }
    return warp_any(found);
}

KERNEL(probe, Attention, THREADS, 1) {
    const int key_tiles = ceil_div(p.keys, BM), tile = block_x() % key_tiles, kv_head = block_x() / key_tiles % p.kv_heads;
    const int batch = block_x() / key_tiles / p.kv_heads, packed = p.rows * (p.heads / p.kv_heads), lane = thread_id() & 31;
    float* const mass_of_tile = p.mass + (static_cast<i64>(batch) * p.kv_heads + kv_head) * p.keys + tile * BM;
    if (!is_seen(p, batch, tile * BM)) {
        for (int key = thread_id(); key < min_of(BM, p.keys - tile * BM); key += THREADS) store(mass_of_tile + key, 0.0f);
        return;
    }
    const u32 k_tile = shared_base(), q_tiles = k_tile + Q_BYTES;
    copy_rows<BM>(k_tile, p.k + batch * p.k_batch + kv_head * p.k_head, p.k_row, tile * BM, p.keys);
    copy_row_tile(p, q_tiles, batch, kv_head, 0);
    copy_commit();
    float mass[SLABS][2] = {};
    for (int first = 0; first < packed; first += BN) {
        const u32 stage = (first / BN & 1) * KV_BYTES;
        copy_wait<0>();
        block_sync();  // these rows have landed for all, and all are done with the stage that the next ones go to
        if (first + BN < packed) copy_row_tile(p, q_tiles + KV_BYTES - stage, batch, kv_head, first + BN);
        copy_commit();
        float s[SLABS][BN / 8][4];
        score_keys(s, k_tile, q_tiles + stage);
        UNROLL for (int n = 0; n < BN / 8; n++) UNROLL for (int e = 0; e < 2; e++) {
            const RowFacts row = facts_of(p, batch, kv_head, first + n * 8 + (lane & 3) * 2 + e);
            UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int h = 0; h < 2; h++) {
                const int key = tile * BM + (thread_id() / 32 * SLABS + m) * 16 + h * 8 + lane / 4;
                const float x = SOFTCAP ? capped(p, s[m][n][2 * h + e]) : s[m][n][2 * h + e];
                if (sees(row.limit, p.prefix, key)) mass[m][h] = float_max(mass[m][h], exp2_fast(fused(x, exponent_scale(p), -row.total)));
            }
        }
    }
    copy_wait<0>();
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int h = 0; h < 2; h++) {
        float most = float_max(mass[m][h], shuffle_xor(mass[m][h], 1));
        most = float_max(most, shuffle_xor(most, 2));
        const int key = (thread_id() / 32 * SLABS + m) * 16 + h * 8 + lane / 4;
        if ((lane & 3) == 0 && tile * BM + key < p.keys) store(mass_of_tile + key, most);
    }
}
