// Products by the matrix unit of a processor (Intel's AMX), as exact as those in fp32.
//
// The unit multiplies numbers in bf16 and adds them up in fp32, many times as fast as vectors do. Weights that are exact in
// bf16 go in as they are. An input is split into three numbers in bf16, which are eight bits of it each:
//
//     x = high + middle + low,   x * w = high * w + middle * w + low * w
//
// Each product on the right is exact, so what is rounded are the sums, as in fp32. The parts are rows of their own, so each
// output is the sum of three sums, each over the inputs in an order that does not depend on the other rows.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define DRAFTER_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace drafter {

constexpr int kTileRows = 16, kTileInputs = 32;  // of a tile: 16 rows of 64 bytes
constexpr int kParts = 3;                        // of an input
constexpr int kGroupRows = kTileRows;            // rows whose parts are multiplied together, in up to three tiles

inline int groups_of(int rows) { return (rows + kGroupRows - 1) / kGroupRows; }

// Parts of inputs: 16 rows of 32.
struct alignas(64) Tile {
    uint16_t numbers[kTileRows][kTileInputs];
};

// Whether the system lets this process use the unit: it has to be asked, because the registers are large.
inline bool may_use_tiles() {
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
    return may;
}

// Take the upper halves of numbers, which are bf16, away from them, and store them.
inline void take_part(Vec& first, Vec& second, uint16_t* to) {
    typedef uint16_t Halves __attribute__((vector_size(kTileInputs * sizeof(uint16_t))));
    Words bits[2];
    Halves low, high;
    std::memcpy(&bits[0], &first, sizeof first);
    std::memcpy(&bits[1], &second, sizeof second);
    std::memcpy(&low, &bits[0], sizeof low);
    std::memcpy(&high, &bits[1], sizeof high);
    const Halves upper = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35,
                                                 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
    std::memcpy(to, &upper, sizeof upper);
    for (Words& word : bits) word &= 0xffff0000u;
    Vec taken[2];
    std::memcpy(taken, bits, sizeof taken);
    first -= taken[0];
    second -= taken[1];
}

// Split the inputs of one row of a group of `rows`. Part p of row r is row `p * rows + r` of the group's tiles,
// `[3, inputs / 32]`.
inline void split_row(const float* in, int64_t inputs, int row, int rows, Tile* tiles) {
    const int64_t steps = inputs / kTileInputs;
    Tile* of_part[kParts];
    int at[kParts];
    for (int part = 0; part < kParts; ++part) {
        of_part[part] = tiles + (part * rows + row) / kTileRows * steps;
        at[part] = (part * rows + row) % kTileRows;
    }
    for (int64_t step = 0; step < steps; ++step, in += kTileInputs) {
        Vec first = load(in), second = load(in + kLanes);
        for (int part = 0; part < kParts; ++part) take_part(first, second, of_part[part][step].numbers[at[part]]);
    }
}

constexpr int kTogether = 3;  // blocks that are read together by rows whose parts are in one tile
constexpr int kLine = kBlock * sizeof(float), kRow = sizeof(Tile::numbers[0]);  // bytes

typedef float Sums[kParts * kTileRows][kBlock];  // of a group's parts with a block

// Registers 0 to 5 hold sums, 6 parts of rows, 7 weights. Only one tile of rows alone may have fewer than all its rows:
// there are no registers for more shapes. What is summed up of rows that are not there is nobody's.
inline void shape_tiles(int rows) {
    struct alignas(64) {
        uint8_t palette = 1, first_row = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
        shapes.rows[i] = static_cast<uint8_t>(i < 7 ? std::min(rows, kTileRows) : kTileRows);
        shapes.bytes[i] = kRow;
    }
    _tile_loadconfig(&shapes);
}

inline void fetch(const void* from, int lines) {
    for (int line = 0; line < lines; ++line) _mm_prefetch(static_cast<const char*>(from) + line * 64, _MM_HINT_T0);
}

// Sums of one tile of rows with three blocks of weights, `[inputs / 2, 32]` pairs of inputs each. Few rows take as long as
// memory takes to give the weights, and it gives three streams faster than one.
inline void add_up_blocks(const Tile* rows, int64_t steps, const uint32_t* first, int64_t size, Sums* sums) {
    const uint32_t *second = first + size, *third = second + size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t step = 0; step < steps; ++step) {
        const int64_t at = step * kTileRows * kBlock, soon = at + 2 * kTileRows * kBlock;
        fetch(first + soon, kBlock);
        fetch(second + soon, kBlock);
        fetch(third + soon, kBlock);
        _tile_loadd(6, rows + step, kRow);
        _tile_loadd(7, first + at, kLine);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, first + at + kLanes, kLine);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, second + at, kLine);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, second + at + kLanes, kLine);
        _tile_dpbf16ps(3, 6, 7);
        _tile_loadd(7, third + at, kLine);
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(7, third + at + kLanes, kLine);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(0, sums[0][0], kLine);
    _tile_stored(1, sums[0][0] + kLanes, kLine);
    _tile_stored(2, sums[1][0], kLine);
    _tile_stored(3, sums[1][0] + kLanes, kLine);
    _tile_stored(4, sums[2][0], kLine);
    _tile_stored(5, sums[2][0] + kLanes, kLine);
}

// Sums of one to three tiles of rows with a block of weights. `soon` is read soon: `lines` cache lines are fetched at each
// step.
template <int tiles>
void add_up_tiles(const Tile* rows, int64_t steps, const uint32_t* weights, const char* soon, int lines, Sums& sums) {
    const Tile *second = rows + steps, *third = second + steps;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (tiles > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if constexpr (tiles > 2) {
        _tile_zero(4);
        _tile_zero(5);
    }
    for (int64_t step = 0; step < steps; ++step, weights += kTileRows * kBlock, soon += lines * 64) {
        fetch(soon, lines);
        _tile_loadd(7, weights, kLine);
        _tile_loadd(6, rows + step, kRow);
        _tile_dpbf16ps(0, 6, 7);
        if constexpr (tiles > 1) {
            _tile_loadd(6, second + step, kRow);
            _tile_dpbf16ps(2, 6, 7);
        }
        if constexpr (tiles > 2) {
            _tile_loadd(6, third + step, kRow);
            _tile_dpbf16ps(4, 6, 7);
        }
        _tile_loadd(7, weights + kLanes, kLine);
        if constexpr (tiles > 2) {
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(6, second + step, kRow);
        }
        if constexpr (tiles > 1) {
            _tile_dpbf16ps(3, 6, 7);
            _tile_loadd(6, rows + step, kRow);
        }
        _tile_dpbf16ps(1, 6, 7);
    }
    _tile_stored(0, sums[0], kLine);
    _tile_stored(1, sums[0] + kLanes, kLine);
    if constexpr (tiles > 1) {
        _tile_stored(2, sums[kTileRows], kLine);
        _tile_stored(3, sums[kTileRows] + kLanes, kLine);
    }
    if constexpr (tiles > 2) {
        _tile_stored(4, sums[2 * kTileRows], kLine);
        _tile_stored(5, sums[2 * kTileRows] + kLanes, kLine);
    }
}

// The products of split rows, group by group, with some blocks of weights: `finish(row, block, first, second)` for each row
// and block.
template <class Finish>
void multiply_tiles(const Tile* split, int rows, int64_t inputs, const uint32_t* weights, int first, int blocks,
                    const Finish& finish) {
    alignas(64) Sums sums[kTogether];
    const int64_t steps = inputs / kTileInputs, size = inputs * kLanes;
    const int groups = groups_of(rows), last = first + blocks;
    const auto finish_group = [&](int begin, int count, int block, const Sums& of) {
        for (int row = 0; row < count; ++row) {
            const float *high = of[row], *middle = of[count + row], *low = of[2 * count + row];
            finish(begin + row, block, load(high) + (load(middle) + load(low)),
                   load(high + kLanes) + (load(middle + kLanes) + load(low + kLanes)));
        }
    };
    asm volatile("" ::: "memory");  // what the tiles read has been written
    shape_tiles(kParts * rows);
    int block = first;
    if (kParts * rows <= kTileRows)
        for (; block + kTogether <= last; block += kTogether) {
            add_up_blocks(split, steps, weights + block * size, size, sums);
            for (int other = 0; other < kTogether; ++other) finish_group(0, rows, block + other, sums[other]);
        }
    for (; block < last; ++block) {
        const uint32_t* of_block = weights + block * size;
        // One group fetches what it needs soon; several share in fetching the next block.
        const char* soon = reinterpret_cast<const char*>(of_block + (groups == 1 ? 2 * kTileRows * kBlock : size));
        const int lines = (kBlock + groups - 1) / groups;
        for (int group = 0; group < groups; ++group, soon += steps * lines * 64) {
            const int begin = group * kGroupRows, count = std::min(kGroupRows, rows - begin);
            const Tile* of_group = split + kParts * group * steps;
            switch ((kParts * count + kTileRows - 1) / kTileRows) {
                case 1: add_up_tiles<1>(of_group, steps, of_block, soon, lines, sums[0]); break;
                case 2: add_up_tiles<2>(of_group, steps, of_block, soon, lines, sums[0]); break;
                default: add_up_tiles<3>(of_group, steps, of_block, soon, lines, sums[0]);
            }
            finish_group(begin, count, block, sums[0]);
        }
    }
    _tile_release();
}

}  // namespace drafter

#endif
