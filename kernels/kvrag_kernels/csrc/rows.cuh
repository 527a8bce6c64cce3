// The rows of a warp in registers, as the fragments of mma and wgmma hold them: limits, online softmax, and how results leave.
#pragma once
#include "tiles.cuh"

// A warp's rows: 16·SLABS of the tile. A lane holds, of each slab, parts of rows lane/4 (index 0) and lane/4 + 8 (index 1).
struct Rows {
    Limit limit[SLABS][2];
    float top[SLABS][2], sum[SLABS][2];
    float out[SLABS][D / 8][4];
    int min_hi, max_hi, min_lo, max_lo;  // over the warp
};

DEV void start_rows(const Attention& p, Rows& w, int batch, int kv_head, int first_row) {
    const int lane = thread_id() & 31;
    w.min_hi = w.min_lo = 0x7fffffff;
    w.max_hi = w.max_lo = -1;
    UNROLL for (int s = 0; s < SLABS; s++) UNROLL for (int h = 0; h < 2; h++) {
        const Packed r = unpack(p, first_row + s * 16 + h * 8 + lane / 4, kv_head);
        const Limit x = limit_of(p, batch, r);
        w.limit[s][h] = x;
        w.top[s][h] = -infinity();
        w.sum[s][h] = 0.0f;
        if (r.valid) {
            w.min_hi = min_of(w.min_hi, x.hi);
            w.max_lo = max_of(w.max_lo, x.lo);
        }
        if (r.valid && x.lo <= x.hi) {
            w.max_hi = max_of(w.max_hi, x.hi);
            w.min_lo = min_of(w.min_lo, x.lo);
        }
    }
    UNROLL for (int mask = 4; mask < 32; mask <<= 1) {
        w.min_hi = min_of(w.min_hi, shuffle_xor(w.min_hi, mask));
        w.max_lo = max_of(w.max_lo, shuffle_xor(w.max_lo, mask));
        w.max_hi = max_of(w.max_hi, shuffle_xor(w.max_hi, mask));
        w.min_lo = min_of(w.min_lo, shuffle_xor(w.min_lo, mask));
    }
    UNROLL for (int s = 0; s < SLABS; s++) UNROLL for (int d = 0; d < D / 8; d++) UNROLL for (int e = 0; e < 4; e++) w.out[s][d][e] = 0.0f;
}

DEV void hide(const Attention& p, const Rows& w, float (&s)[SLABS][BN / 8][4], int first) {
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int n = 0; n < BN / 8; n++) UNROLL for (int e = 0; e < 4; e++) {
        const int key = first + n * 8 + (thread_id() & 3) * 2 + (e & 1);
        if (!sees(w.limit[m][e >> 1], p.prefix, key)) s[m][n][e] = -infinity();
    }
}

// Outputs follow the tops of their rows, which moved.
DEV void fade_out(Rows& w, int m, int h, float fade) {
    UNROLL for (int d = 0; d < D / 8; d++) {
        w.out[m][d][2 * h] *= fade;
        w.out[m][d][2 * h + 1] *= fade;
    }
}

// Online softmax: scores become probabilities relative to the rows' tops so far; sums and outputs follow a top that moved. Where outputs are
// being added to meanwhile, LATER leaves them alone and gives their factors in `fades`.
template <bool LATER> DEV void soften(const Attention& p, Rows& w, float (&s)[SLABS][BN / 8][4], float (&fades)[SLABS][2]) {
    const float c = exponent_scale(p);
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int h = 0; h < 2; h++) {
        float top = w.top[m][h];
        UNROLL for (int n = 0; n < BN / 8; n++) top = float_max(top, float_max(s[m][n][2 * h], s[m][n][2 * h + 1]));
        top = float_max(top, shuffle_xor(top, 1));
        top = float_max(top, shuffle_xor(top, 2));
        const float base = top == -infinity() ? 0.0f : top * c;  // a row that has seen no key yet: 2^(-inf - 0), not 2^(inf - inf)
        if (warp_any(top > w.top[m][h])) {
            const float fade = exp2_fast(fused(w.top[m][h], c, -base));
            w.sum[m][h] *= fade;
            if (LATER) fades[m][h] = fade;
            else fade_out(w, m, h, fade);
            w.top[m][h] = top;
        } else if (LATER) {
            fades[m][h] = 1.0f;
        }
        UNROLL for (int n = 0; n < BN / 8; n++) UNROLL for (int e = 0; e < 2; e++) {
            const float x = exp2_fast(fused(s[m][n][2 * h + e], c, -base));
            s[m][n][2 * h + e] = x;
            w.sum[m][h] += x;
        }
    }
}

// What a sink leaves of a row's probability: 1 / (1 + 2^(sink − total)).
DEV float left_by_sink(const Attention& p, int head, float total) {
    return p.sinks ? reciprocal(1.0f + exp2_fast(load(p.sinks + head) * LOG2E - total)) : 1.0f;
}

// Normalise, and write either the partial result of a split (float32, base-2 log) or the final one through the warp's own rows of `q_tile`.
DEV void finish(const Attention& p, Rows& w, u32 q_tile, int batch, int kv_head, int tile_row, int slot) {
    const int lane = thread_id() & 31, warp_row = thread_id() / 32 * SLABS * 16;
    warp_sync();
    UNROLL for (int m = 0; m < SLABS; m++) UNROLL for (int h = 0; h < 2; h++) {
        float sum = w.sum[m][h] + shuffle_xor(w.sum[m][h], 1);
        sum += shuffle_xor(sum, 2);
        const int row = warp_row + m * 16 + h * 8 + lane / 4;
        const Packed r = unpack(p, tile_row + row, kv_head);
        const float total = sum > 0.0f ? fused(w.top[m][h], exponent_scale(p), log2_fast(sum)) : -infinity();
        float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (slot < 0 && r.valid && sum > 0.0f) factor *= left_by_sink(p, r.head, total);
        if (r.valid && (lane & 3) == 0) {
            if (slot < 0) store(p.lse + lse_offset(p, batch, r), total * LN2);
            else store(p.part_lse + part_offset(p, slot, kv_head, row), total);
        }
        UNROLL for (int d = 0; d < D / 8; d++) {
            const float a = w.out[m][d][2 * h] * factor, b = w.out[m][d][2 * h + 1] * factor;
            if (slot < 0) put32(q_tile + at(row, d) + (lane & 3) * 4, pack(a, b));
            else if (r.valid) store_pair(p.part_out + part_offset(p, slot, kv_head, row) * D + d * 8 + (lane & 3) * 2, a, b);
        }
    }
    if (slot >= 0) return;
    warp_sync();
    for (int c = lane; c < SLABS * 16 * CHUNKS; c += 32) {
        const int row = warp_row + c / CHUNKS, chunk = c % CHUNKS;
        const Packed r = unpack(p, tile_row + row, kv_head);
        if (r.valid) store16(p.out + out_offset(p, batch, r) + chunk * 8, get128(q_tile + at(row, chunk)));
    }
}

#define COMBINE_THREADS 128
#define COMBINE_ROWS 16  // of a block: a warp waits for memory with each of its rows, so few each

// Merge the partial results of row tiles whose keys were split, by their log-sum-exps (base 2), and apply the sinks.
KERNEL(ragged_combine, Attention, COMBINE_THREADS, 4) {
    const int unit = block_x() / (BM / COMBINE_ROWS), begin = block_x() % (BM / COMBINE_ROWS) * COMBINE_ROWS;
    const int tile = unit / p.kv_heads, kv_head = unit % p.kv_heads, lane = thread_id() & 31;
    const int* t = tile_of(p, tile);
    const int splits = load(t + TILE_SPLITS), slot = load(t + TILE_SLOT), batch = tile / p.tiles;
    if (splits <= 1) return;
    for (int row = begin + thread_id() / 32; row < begin + COMBINE_ROWS; row += COMBINE_THREADS / 32) {
        const Packed r = unpack(p, tile % p.tiles * BM + row, kv_head);
        if (!r.valid) continue;
        float top = -infinity(), sum = 0.0f, o[D / 32] = {};
        for (int i = 0; i < splits; i++) top = float_max(top, load(p.part_lse + part_offset(p, slot + i, kv_head, row)));
        const float base = top == -infinity() ? 0.0f : top;
        for (int i = 0; i < splits; i++) {
            const i64 part = part_offset(p, slot + i, kv_head, row);
            const float w = exp2_fast(load(p.part_lse + part) - base);
            sum += w;
            UNROLL for (int c = 0; c < D / 32; c++) o[c] = fused(w, load(p.part_out + part * D + c * 32 + lane), o[c]);
        }
        const float total = sum > 0.0f ? base + log2_fast(sum) : -infinity();
        const float factor = sum > 0.0f ? left_by_sink(p, r.head, total) / sum : 0.0f;
        UNROLL for (int c = 0; c < D / 32; c++)
            store(p.out + out_offset(p, batch, r) + c * 32 + lane, static_cast<u16>(pack(o[c] * factor, 0.0f) & 0xffff));
        if (lane == 0) store(p.lse + lse_offset(p, batch, r), total * LN2);
    }
}
