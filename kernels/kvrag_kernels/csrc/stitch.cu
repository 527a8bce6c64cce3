// Stitch: stored KV of some layers of all chunks to its rows of the buffer, in one launch. A block takes some rows of one head of the keys or
// the values of a layer of a chunk. A unit of work is two 8-element pieces of a row, which halves that rotate together are too: read,
// dequantise, rotate in float32, round once. Neighbouring threads take neighbouring pieces, so that each access fills whole sectors.
// A code times a float16 scale is exact in float32, so what is read has the same bits whether or not the compiler fuses the addition of a zero.
//
// Compile-time options: D, BF16 (of the buffer), CODEC (0: 16 bits, 1: int8, 2: int4, 3: fp8 e4m3), SOURCE_BF16 (where CODEC is 0),
// K_GROUP and V_GROUP (channels that share a scale), ROTARY (channels that are rotated, a multiple of 16), INTERLEAVED (0, 1).
#include "ptx.cuh"

#define STITCH_THREADS 256
constexpr int UNITS = D / 16;  // of a row
constexpr int TILE_ROWS = 64;
constexpr bool SAME = CODEC == 0 && SOURCE_BF16 == BF16;  // stored bits are the buffer's

// Keys or values of a chunk in all layers. Strides of data in bytes, of the rest in elements; a stride of 0 repeats.
struct Side {
    const unsigned char* data;
    const u16 *scales, *zeros;  // zeros may be null
    i64 layer, head, row, scale_layer, scale_head, scale_row, zero_layer, zero_head, zero_row;
    i64 tokens;  // log2 of how many rows share scales and zeros
};
struct Part {
    Side sides[2];     // keys, values
    i64 start, rows;   // first row of the buffer, number of rows
};
// Where the keys or the values of a layer go, and their rotation table or -1.
struct Place {
    u16* out;
    i64 head, row, table;
};
// One by-value argument; stitch_launch.py packs it, and the table of parts and places, in this order.
struct Stitch {
    const Part* parts;
    const Place* places;        // keys, values; layer by layer
    const float *cos, *sin;     // (tables, rows, ROTARY / 2)
    const unsigned char* skip;  // per row of the buffer, or null
    i64 table_stride;
    int count, heads, tiles;    // parts; key heads; tiles of the longest part
};

struct Piece {
    float x[8];
    Quad raw;
};

// The stored bits of a piece: 16, 8 or 4 bytes.
DEV Quad fetch(const unsigned char* row, int piece) {
    if (CODEC == 0) return load16(row + piece * 16);
    if (CODEC == 2) return Quad{{load(reinterpret_cast<const u32*>(row + piece * 4)), 0, 0, 0}};
    const u64 bits = load(reinterpret_cast<const u64*>(row + piece * 8));
    return Quad{{static_cast<u32>(bits), static_cast<u32>(bits >> 32), 0, 0}};
}

// Element i of eight of 16 bits.
DEV float nth(const Quad& q, int i, bool is_bfloat16) { return widen(static_cast<u16>(q.x[i / 2] >> (i % 2 * 16)), is_bfloat16); }

template <int GROUP> DEV Piece read(const Quad& raw, const u16* scales, const u16* zeros, int piece) {
    Piece c;
    c.raw = raw;
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 byte = raw.x[i / 4] >> (i % 4 * 8) & 255;
        if (CODEC == 0) c.x[i] = nth(raw, i, SOURCE_BF16);
        else if (CODEC == 1) c.x[i] = static_cast<float>(static_cast<signed char>(byte));
        else if (CODEC == 2) c.x[i] = static_cast<float>(static_cast<int>(raw.x[0] >> (4 * i) & 15) - 8);
        else c.x[i] = from_e4m3(byte);
    }
    if (CODEC != 0 && GROUP == 1) {
        const Quad scale = load16(scales + piece * 8);
        UNROLL for (int i = 0; i < 8; i++) c.x[i] *= nth(scale, i, false);
    } else if (CODEC != 0 && GROUP % 8 == 0) {
        const float scale = widen(load(scales + piece / (GROUP / 8)), false);
        UNROLL for (int i = 0; i < 8; i++) c.x[i] *= scale;
    } else if (CODEC != 0) {
        UNROLL for (int i = 0; i < 8; i++) c.x[i] *= widen(load(scales + (piece * 8 + i) / GROUP), false);
    }
    if (CODEC != 0 && zeros) {
        const Quad zero = load16(zeros + piece * 8);
        UNROLL for (int i = 0; i < 8; i++) c.x[i] += nth(zero, i, false);
    }
    return c;
}

DEV void write(u16* row, int piece, const Piece& c, bool untouched) {
    Quad q;
    UNROLL for (int i = 0; i < 4; i++) q.x[i] = pack(c.x[2 * i], c.x[2 * i + 1]);
    store16(row + piece * 8, SAME && untouched ? c.raw : q);
}

// Turn (a, b) by one angle; returns whether the angle is zero, which leaves both as they are to the bit.
DEV bool turn(float& a, float& b, float c, float s) {
    if (c == 1.0f && s == 0.0f) return true;
    const float x = a;
    a = x * c - b * s;
    b = b * c + x * s;
    return false;
}

// Turn four pairs, by the angles from the place in the tables on.
DEV bool turn4(float (&a)[8], float (&b)[8], int first_a, int first_b, int step, const Stitch& p, i64 at) {
    const Quad c = load16(p.cos + at), s = load16(p.sin + at);
    bool still = true;
    UNROLL for (int i = 0; i < 4; i++)
        still &= turn(a[first_a + step * i], b[first_b + step * i], float_of_bits(c.x[i]), float_of_bits(s.x[i]));
    return still;
}

// The first 16 · TURNED channels rotate.
template <int GROUP, int TURNED> DEV void stitch_side(const Stitch& p, const Part& part, const Side& side, const Place& place, int layer, int head, int tile) {
    const i64 row_bytes = side.row, out_row = place.row;
    const int start = static_cast<int>(part.start), rows = static_cast<int>(part.rows), tokens = static_cast<int>(side.tokens);
    const unsigned char* data = side.data + layer * side.layer + head * side.head;
    u16* out = place.out + head * place.head + start * out_row;
    const i64 table = place.table, angles = table * p.table_stride + static_cast<i64>(start) * (ROTARY / 2);
    for (int i = thread_id(); i < TILE_ROWS * UNITS; i += STITCH_THREADS) {
        const int row = tile * TILE_ROWS + i / UNITS, unit = i % UNITS, shared = row >> tokens;
        if (row >= rows || (p.skip && load(p.skip + (start + row)))) continue;
        const bool rotated = unit < TURNED;
        const int first = rotated ? unit : unit + TURNED, second = first + (rotated ? TURNED : UNITS - TURNED);
        const unsigned char* from = data + row * row_bytes;
        const Quad raw0 = fetch(from, first), raw1 = fetch(from, second);
        // Found anew for each row: kept from row to row, they would be more registers than there are.
        const u16* scale = side.scales + layer * side.scale_layer + head * side.scale_head + shared * side.scale_row;
        const u16* zero = side.zeros ? side.zeros + layer * side.zero_layer + head * side.zero_head + shared * side.zero_row : nullptr;
        Piece a = read<GROUP>(raw0, scale, zero, first), b = read<GROUP>(raw1, scale, zero, second);
        bool a_still = true, b_still = true;
        if (rotated && table >= 0) {
            const i64 at = angles + row * (ROTARY / 2);
            if (INTERLEAVED) {
                a_still = turn4(a.x, a.x, 0, 1, 2, p, at + first * 4);
                b_still = turn4(b.x, b.x, 0, 1, 2, p, at + second * 4);
            } else {
                a_still = turn4(a.x, b.x, 0, 0, 1, p, at + unit * 8);
                a_still &= turn4(a.x, b.x, 4, 4, 1, p, at + unit * 8 + 4);
                b_still = a_still;
            }
        }
        write(out + row * out_row, first, a, a_still);
        write(out + row * out_row, second, b, b_still);
    }
}

KERNEL(stitch, Stitch, STITCH_THREADS, 3) {
    const int tile = block_x() % p.tiles, head = block_x() / p.tiles % p.heads, at = block_x() / p.tiles / p.heads;
    const int side = at % 2, layer = at / 2 / p.count;
    const Part& part = p.parts[at / 2 % p.count];
    const Place& place = p.places[2 * layer + side];
    if (side == 0) stitch_side<K_GROUP, ROTARY / 16>(p, part, part.sides[0], place, layer, head, tile);
    else stitch_side<V_GROUP, 0>(p, part, part.sides[1], place, layer, head, tile);
}
