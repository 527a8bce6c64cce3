// Stitch: stored KV of all layers and segments to its rows of the buffer, in one launch. A unit of work is two 8-element chunks of a row of
// keys (both halves of what is rotated together) and two of values: read, dequantise, add the chunk's residual, rotate in float32, round once.
// A code times a float16 scale is exact in float32, so what is read has the same bits whether or not the compiler fuses the addition of a zero.
//
// Compile-time options: D, BF16 (of the buffer), CODEC (0: 16 bits, 1: int8, 2: int4, 3: fp8 e4m3), SOURCE_BF16 (where CODEC is 0),
// K_GROUP and V_GROUP (channels that share a scale), ROTARY (channels that are rotated, a multiple of 16), INTERLEAVED (0, 1).
#include "ptx.cuh"

#define STITCH_THREADS 256
constexpr int UNITS = D / 16;  // of a row
constexpr int TILE_ROWS = 64;
constexpr bool SAME = CODEC == 0 && SOURCE_BF16 == BF16;  // stored bits are the buffer's

// Where keys or values come from and go to. Strides of data in bytes, of the rest in elements; a stride of 0 repeats.
struct Side {
    const unsigned char* data;
    const u16 *scales, *zeros;  // zeros and residual may be null
    const float* residual;
    u16* out;
    i64 head, row, scale_head, scale_row, zero_head, zero_row;
    i64 tokens;  // log2 of how many rows share scales and zeros
    i64 residual_head, out_head, out_row;
};
struct Job {
    Side k, v;
    i64 start, rows, table;  // first row of the buffer, number of rows, rotation table or -1
};
// One by-value argument; stitch_launch.py packs it in this order.
struct Stitch {
    const Job* jobs;
    const float *cos, *sin;     // (tables, rows, ROTARY / 2)
    const unsigned char* skip;  // per row of the buffer, or null
    i64 table_stride;
    int heads, tiles;           // key heads; tiles of the longest segment
};

struct Chunk {
    float x[8];
    Quad raw;
};

// The stored bits of a chunk: 16, 8 or 4 bytes.
DEV Quad fetch(const Side& s, int head, int row, int chunk) {
    const unsigned char* at = s.data + head * s.head + row * s.row;
    if (CODEC == 0) return load16(at + chunk * 16);
    if (CODEC == 2) return Quad{{load(reinterpret_cast<const u32*>(at + chunk * 4)), 0, 0, 0}};
    const u64 bits = load(reinterpret_cast<const u64*>(at + chunk * 8));
    return Quad{{static_cast<u32>(bits), static_cast<u32>(bits >> 32), 0, 0}};
}

template <int GROUP> DEV Chunk read(const Side& s, const Quad& raw, int head, int row, int chunk) {
    Chunk c;
    c.raw = raw;
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 byte = raw.x[i / 4] >> (i % 4 * 8) & 255;
        if (CODEC == 0) c.x[i] = widen(static_cast<u16>(raw.x[i / 2] >> (i % 2 * 16)), SOURCE_BF16);
        else if (CODEC == 1) c.x[i] = static_cast<float>(static_cast<signed char>(byte));
        else if (CODEC == 2) c.x[i] = static_cast<float>(static_cast<int>(raw.x[0] >> (4 * i) & 15) - 8);
        else c.x[i] = from_e4m3(byte);
    }
    if (CODEC != 0) {
        const int shared = row >> s.tokens;
        const u16* scale = s.scales + head * s.scale_head + shared * s.scale_row;
        UNROLL for (int i = 0; i < 8; i++) c.x[i] *= widen(load(scale + (chunk * 8 + i) / GROUP), false);
        if (s.zeros) {
            const u16* zero = s.zeros + head * s.zero_head + shared * s.zero_row + chunk * 8;
            UNROLL for (int i = 0; i < 8; i++) c.x[i] += widen(load(zero + i), false);
        }
    }
    if (s.residual) UNROLL for (int i = 0; i < 8; i++) c.x[i] += load(s.residual + head * s.residual_head + chunk * 8 + i);
    return c;
}

DEV void write(const Side& s, int head, i64 row, int chunk, const Chunk& c, bool untouched) {
    Quad q;
    UNROLL for (int i = 0; i < 4; i++) q.x[i] = pack(c.x[2 * i], c.x[2 * i + 1]);
    store16(s.out + head * s.out_head + row * s.out_row + chunk * 8, SAME && untouched && !s.residual ? c.raw : q);
}

// Turn (a, b) by one angle; returns whether the angle is zero, which leaves both as they are to the bit.
DEV bool turn(float& a, float& b, float c, float s) {
    if (c == 1.0f && s == 0.0f) return true;
    const float x = a;
    a = x * c - b * s;
    b = b * c + x * s;
    return false;
}

// Rotate two chunks of keys: chunk u of the first half with chunk u of the second, or neighbours within each where pairs are interleaved.
DEV bool rotate(Chunk& a, Chunk& b, const float* cos, const float* sin, int unit) {
    bool still = true;
    UNROLL for (int i = 0; i < 8; i++) {
        if (INTERLEAVED) {
            const int pair = unit * 8 + i;
            Chunk& c = i < 4 ? a : b;
            still &= turn(c.x[i % 4 * 2], c.x[i % 4 * 2 + 1], load(cos + pair), load(sin + pair));
        } else {
            still &= turn(a.x[i], b.x[i], load(cos + unit * 8 + i), load(sin + unit * 8 + i));
        }
    }
    return still;
}

KERNEL(stitch, Stitch, STITCH_THREADS, 3) {
    const int tile = block_x() % p.tiles, head = block_x() / p.tiles % p.heads;
    const Job& job = p.jobs[block_x() / p.tiles / p.heads];
    for (int i = thread_id(); i < TILE_ROWS * UNITS; i += STITCH_THREADS) {
        const int row = tile * TILE_ROWS + i / UNITS, unit = i % UNITS;
        if (row >= job.rows || (p.skip && load(p.skip + job.start + row))) continue;
        const bool rotated = unit < ROTARY / 16, split = rotated && !INTERLEAVED;
        const int first = split ? unit : 2 * unit, second = split ? unit + ROTARY / 16 : 2 * unit + 1;
        // Bits first, all at once; then keys and values one after the other, in registers that they share.
        const Quad k0 = fetch(job.k, head, row, first), k1 = fetch(job.k, head, row, second);
        const Quad v0 = fetch(job.v, head, row, 2 * unit), v1 = fetch(job.v, head, row, 2 * unit + 1);
        Chunk a = read<K_GROUP>(job.k, k0, head, row, first), b = read<K_GROUP>(job.k, k1, head, row, second);
        bool still = true;
        if (rotated && job.table >= 0) {
            const i64 angles = job.table * p.table_stride + (job.start + row) * (ROTARY / 2);
            still = rotate(a, b, p.cos + angles, p.sin + angles, unit);
        }
        write(job.k, head, job.start + row, first, a, still);
        write(job.k, head, job.start + row, second, b, still);
        write(job.v, head, job.start + row, 2 * unit, read<V_GROUP>(job.v, v0, head, row, 2 * unit), true);
        write(job.v, head, job.start + row, 2 * unit + 1, read<V_GROUP>(job.v, v1, head, row, 2 * unit + 1), true);
    }
}
