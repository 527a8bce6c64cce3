"""Bugs to plant in ``ragged_sm90.cu``: the case that has to notice, what stands there, and what the bug puts in its place."""

from __future__ import annotations

BUGS = {
    "the first keys are not waited for": ("long", "    barrier_wait(barrier_of(x, FULL_K, 0), full_parity(0));\n", ""),
    "keys are not waited for": ("long", "        barrier_wait(barrier_of(x, FULL_K, n), full_parity(n));\n", ""),
    "values are not waited for": (
        "long",
        "        barrier_wait(barrier_of(x, FULL_V, n - 1), full_parity(n - 1));\n",
        "",
    ),
    "the last values are not waited for": (
        "long",
        "    barrier_wait(barrier_of(x, FULL_V, count - 1), full_parity(count - 1));\n",
        "",
    ),
    "the phase never changes": ("long", "return n >> 1 & 1;", "return 0;"),
    "the phase changes with every tile": ("long", "return n >> 1 & 1;", "return n & 1;"),
    "phases start at the other parity": ("long", "return n >> 1 & 1;", "return (n >> 1 & 1) ^ 1;"),
    "a free stage is waited for by the wrong phase": ("long", "return full_parity(n) ^ 1;", "return full_parity(n);"),
    "keys overwrite a stage that is in use": (
        "long",
        "            barrier_wait(barrier_of(x, EMPTY_K, n), free_parity(n));\n",
        "",
    ),
    "values overwrite a stage that is in use": (
        "long",
        "        barrier_wait(barrier_of(x, EMPTY_V, n), free_parity(n));\n",
        "",
    ),
    "keys are given back while they are multiplied": (
        "long",  # the first ones: later on, the values' barriers would hold the copies back
        "    product_wait<0>();\n    settle(s[0]);\n    release(x, EMPTY_K, 0);\n",
        "    release(x, EMPTY_K, 0);\n    product_wait<0>();\n    settle(s[0]);\n",
    ),
    "values are given back while they are multiplied": (
        "long",
        "        product_wait<0>();\n        settle(w.out[0]);\n        release(x, EMPTY_V, n - 1);\n",
        "        release(x, EMPTY_V, n - 1);\n        product_wait<0>();\n        settle(w.out[0]);\n",
    ),
    "keys are given back by one warp alone": (
        "long",
        "if ((thread_id() & 31) == 0) barrier_arrive",
        "if ((thread_id() & 127) < 4) barrier_arrive",
    ),
    "scores are used before they are there": ("long", "product_wait<1>();", "product_wait<2>();"),
    "outputs fade while they are added to": (
        "long",
        "        product_wait<0>();\n        settle(w.out[0]);\n        release(x, EMPTY_V, n - 1);\n",
        "        release(x, EMPTY_V, n - 1);\n",
    ),
    "weights change while they are multiplied": (
        "long",
        "        weigh(p, w, s, fades, first_key(t, first + n));\n",
        "        weigh(p, w, s, fades, first_key(t, first + n));\n        pack_weights(a, s);\n",
    ),
    "the kernel ends before its products": (
        "dim64",
        "    product_wait<0>();\n    settle(w.out[0]);\n}",
        "}",
    ),
    "the first product has no fence": (
        "dim64",
        "    product_begin();\n    start_scores(s[0], x, x.k);",
        "    start_scores(s[0], x, x.k);",
    ),
    "products have no fence": ("long", "        product_begin();\n        start_scores", "        start_scores"),
    "queries are not published": (
        "dim64",
        "    publish_to_async();\n    group_sync(ROWS_BARRIER, THREADS);",
        "    group_sync(ROWS_BARRIER, THREADS);",
    ),
    "queries are multiplied before they are all there": (
        "dim64",
        "    publish_to_async();\n    group_sync(ROWS_BARRIER, THREADS);",
        "    publish_to_async();",
    ),
    "barriers are not published": (
        "dim64",
        "        }\n        publish_to_async();\n    }\n    block_sync();",
        "        }\n    }\n    block_sync();",
    ),
    "barriers are used before they are there": (
        "dim64",
        "    }\n    block_sync();\n    if (thread_id() >= THREADS) {",
        "    }\n    if (thread_id() >= THREADS) {",
    ),
    "values that went without TMA are not published": (
        "unseen",
        "    copy_wait<0>();\n    publish_to_async();\n}",
        "    copy_wait<0>();\n}",
    ),
    "values that went without TMA have not landed": (
        "unseen",
        "    copy_commit();\n    copy_wait<0>();\n    publish_to_async();\n}",
        "    copy_commit();\n    publish_to_async();\n}",
    ),
    "values that no row sees are multiplied": ("unseen", "key + BN <= t.bound || t.bound == p.a.keys;", "true;"),
    "values that no row sees are copied": (
        "unseen",
        "const bool valid = first + row < bound && chunk",
        "const bool valid = chunk",
    ),
    "fewer bytes are announced than come": (
        "dim64",
        "barrier_arrive_expecting(full_k, KV_TILE);",
        "barrier_arrive_expecting(full_k, KV_TILE / 2);",
    ),
    "more bytes are announced than come": (
        "dim64",
        "barrier_arrive_expecting(full_v, KV_TILE);",
        "barrier_arrive_expecting(full_v, 2 * KV_TILE);",
    ),
    "a barrier expects too few": (
        "long",
        "barrier_init(barrier_of(x, EMPTY_K, i), WARPS);",
        "barrier_init(barrier_of(x, EMPTY_K, i), WARPS - 1);",
    ),
    "a barrier expects too many": (
        "long",
        "barrier_init(barrier_of(x, EMPTY_V, i), WARPS);",
        "barrier_init(barrier_of(x, EMPTY_V, i), WARPS + 1);",
    ),
    "values are full when TMA's thread has arrived": (
        "unseen",
        "barrier_init(barrier_of(x, FULL_V, i), 128);",
        "barrier_init(barrier_of(x, FULL_V, i), 1);",
    ),
    "two barriers are one": ("dim64", "(kind * 2 + (n & 1)) * 8", "(kind + (n & 1)) * 8"),
    "more registers are taken than were given": ("dim64", "registers_take<232>", "registers_take<240>"),
    "queries lie in another swizzle": ("dim64", "((chunk % 8) ^ (row & 7)) * 16", "((chunk % 8) ^ (row & 3)) * 16"),
    "the descriptor names another swizzle": ("dim64", "swizzle_128 = 1ull << 62", "swizzle_128 = 2ull << 62"),
    "atoms are too close": ("dim64", "static_cast<u64>(ATOM >> 4)", "static_cast<u64>(ATOM >> 5)"),
    "panels of values are too close": (
        "dim128",
        "product_registers(out, a[k], operand(v, BN * PANEL_ROW));",
        "product_registers(out, a[k], operand(v, ATOM));",
    ),
    "the second panel of values is the first": (
        "dim96",
        "operand(v + BN * PANEL_ROW, BN * PANEL_ROW)",
        "operand(v, BN * PANEL_ROW)",
    ),
    "a warpgroup multiplies the other's queries": (
        "dim64",
        "thread_id() / 128 * 64 * PANEL_ROW",
        "(1 - thread_id() / 128) * 64 * PANEL_ROW",
    ),
    "columns are multiplied twice": ("dim64", "const u32 step = k % 4 * 32;", "const u32 step = k % 2 * 32;"),
    "every panel is the first": ("dim128", "map, bar, i * 64, row", "map, bar, 0, row"),
    "scores add to those of the tile before": ("long", "+ step, 16), k > 0);", "+ step, 16), true);"),
    "heads get their neighbour's keys": (
        "dim64",
        "p.k_map, full_k, key, kv_head, batch",
        "p.k_map, full_k, key, 0, batch",
    ),
    "every batch entry gets the first one's values": (
        "batch",
        "p.v_map, full_v, key, kv_head, batch",
        "p.v_map, full_v, key, kv_head, 0",
    ),
    "values come from the other stage": ("long", "x.v + (n - 1 & 1) * KV_TILE", "x.v + (n & 1) * KV_TILE"),
    "outputs do not follow the top": (
        "long",
        "        UNROLL for (int h = 0; h < 2; h++) fade_out(w, 0, h, fades[0][h]);\n",
        "",
    ),
    "a factor stays from the tile before": ("long", "            fades[m][h] = 1.0f;\n", ""),
    "limits are those of the tile before": (
        "long",
        "weigh(p, w, s, fades, first_key(t, first + n));",
        "weigh(p, w, s, fades, first_key(t, first + n - 1));",
    ),
    "a tile that a limit cuts is taken as whole": (
        "long",
        "key >= w.max_lo && last <= w.min_hi",
        "key >= w.max_lo && key <= w.min_hi",
    ),
    "a tile that a window cuts is taken as whole": (
        "dense-window",
        "(key >= w.max_lo && last",
        "(last >= w.max_lo && last",
    ),
    "hi is exclusive": ("dim64", "key <= x.hi)", "key < x.hi)"),
    "lo is exclusive": ("window", "(key >= x.lo &&", "(key > x.lo &&"),
    "the prefix is one longer": ("window-sinks", "return key < prefix ||", "return key <= prefix ||"),
    "results are staged over queries in use": (
        "dim128",
        "        group_sync(ROWS_BARRIER, THREADS);  // no queries",
        "        // no queries",
    ),
    "a turn is not waited for": ("long", "        take_turn();\n", ""),
    "a turn is never given": ("long", "        if (is_first || n + 1 < count) give_turn();", "       "),
    "nobody has the first turn": ("long", "    if (!is_first && count > 1) give_turn();\n", ""),
    "both have the first turn": (
        "long",
        "    if (!is_first && count > 1) give_turn();",
        "    if (count > 1) give_turn();",
    ),
    "a turn is given that nobody takes": ("long", "if (is_first || n + 1 < count) give_turn", "give_turn"),
    "a turn is given to oneself": ("long", "turn_of(1 - thread_id() / 128)", "turn_of(thread_id() / 128)"),
    "the two turns are one": ("long", "return TURN_BARRIER + warpgroup;", "return TURN_BARRIER;"),
    "a turn is given where no tiles follow": (
        "dim64",
        "    if (!is_first && count > 1) give",
        "    if (!is_first) give",
    ),
}
