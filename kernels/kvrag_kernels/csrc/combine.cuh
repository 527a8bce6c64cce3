// Merge the partial results of row tiles whose keys were split, by their log-sum-exps (base 2), and apply the sinks.
#pragma once
#include "tiles.cuh"

#define COMBINE_THREADS 128

// What a sink leaves of a row's probability: 1 / (1 + 2^(sink − total)).
DEV float left_by_sink(const Attention& p, int head, float total) {
    return p.sinks ? reciprocal(1.0f + exp2_fast(load(p.sinks + head) * LOG2E - total)) : 1.0f;
}

KERNEL(ragged_combine, Attention, COMBINE_THREADS, 4) {
    const int tile = block_x() / p.kv_heads, kv_head = block_x() % p.kv_heads, lane = thread_id() & 31;
    const int* t = tile_of(p, tile);
    const int splits = load(t + TILE_SPLITS), slot = load(t + TILE_SLOT), batch = tile / p.tiles;
    if (splits <= 1) return;
    for (int row = thread_id() / 32; row < BM; row += COMBINE_THREADS / 32) {
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
