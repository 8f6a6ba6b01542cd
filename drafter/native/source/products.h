// Products of a few rows with a matrix of weights, which is laid out once in the order in which it is read.
//
// Each output is a sum over the inputs in an order that does not depend on the number of rows. So a row's numbers do not
// depend, to the last bit, on what else is computed with it. Weights in bf16 are multiplied by the processor's matrix unit
// (tiles.h), if it has one.
#pragma once

#include <algorithm>
#include <vector>

#include "codes.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace drafter {

constexpr int kRows = kLanes == 16 ? 12 : 6;  // rows whose sums fit into the registers

// Weights of a linear layer: blocks of `kBlock` outputs; the last block is filled up with zeros.
struct Matrix {
    const void* weights;  // float `[inputs, kBlock]`; uint32 `[inputs / 2, kBlock]`, of two inputs in bf16; or CodedBlocks
    const float* bias;    // `[blocks * kBlock]` or null
    int64_t inputs, outputs;
    int32_t half;   // whether the weights are bf16
    int32_t coded;  // whether they are codes

    int blocks() const { return static_cast<int>((outputs + kBlock - 1) / kBlock); }
};

// What becomes of the sums.
enum class End {
    kStore,  // out = factor * sum
    kAdd,    // out += factor * sum
    kSilu,   // out = silu(sum)
    kGated,  // out = gate(first half of the block) * second half
};

enum class Gate : int32_t { kSilu, kGelu };

struct Product {
    const Matrix* matrix;
    const float* in;  // `[rows, inputs]`
    float* const* out;  // of each row
    int rows;
    float factor = 1.0f;
    Gate gate = Gate::kSilu;
};

struct HalfWeights {
    typedef uint32_t Stored;
    static constexpr int kInputs = 2;  // whose weights lie together
    static Vec read(const Stored* from, int input) {
        const Words both = load_words(from), bits = input ? both & 0xffff0000u : both << 16;
        Vec value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

struct FloatWeights {
    typedef float Stored;
    static constexpr int kInputs = 1;
    static Vec read(const Stored* from, int) { return load(from); }
};

template <End end>
inline void finish(Vec first, Vec second, const Product& product, int row, int block) {
    const float* bias = product.matrix->bias;
    float* out = product.out[row];
    const int64_t column = static_cast<int64_t>(block) * kBlock, outputs = product.matrix->outputs;
    if (bias != nullptr) {
        first += load(bias + column);
        second += load(bias + column + kLanes);
    }
    if (end == End::kGated) {
        store(out + column / 2, (product.gate == Gate::kGelu ? gelu(first) : silu(first)) * second);
        return;
    }
    if (end == End::kSilu) {
        first = silu(first);
        second = silu(second);
    } else {
        first *= product.factor;
        second *= product.factor;
    }
    if (column + kBlock <= outputs) {
        float* to = out + column;
        store(to, end == End::kAdd ? load(to) + first : first);
        store(to + kLanes, end == End::kAdd ? load(to + kLanes) + second : second);
        return;
    }
    for (int lane = 0; lane < kBlock && column + lane < outputs; ++lane) {
        float value = lane < kLanes ? first[lane] : second[lane - kLanes];
        out[column + lane] = end == End::kAdd ? out[column + lane] + value : value;
    }
}

// Fetch what is read of a block at once.
template <class Stored>
inline void fetch_line(const Stored* from) {
    __builtin_prefetch(from);
    __builtin_prefetch(from + kLanes);
}

// Rows that are multiplied with the same weights, one part after another.
struct Part {
    int row, rows;     // the first one, and how many
    int index, count;  // which part this is, and of how many
};

// `rows` rows times `blocks` blocks of weights. Both are constants, so that all sums are in registers.
//
// Meanwhile memory is to give what is multiplied next. Several blocks are too much to be fetched long before: these are
// fetched just ahead. Of one block it is the block that this thread will probably take next, `ahead` blocks further on. Each
// part of the rows fetches a part of it, so memory works as long as arithmetic does.
template <class Weights, End end, int rows, int blocks>
void multiply(const Product& product, const Part& part, int block, int ahead) {
    const Matrix& matrix = *product.matrix;
    const int64_t inputs = matrix.inputs, size = inputs / Weights::kInputs * kBlock;
    const auto* weights = static_cast<const typename Weights::Stored*>(matrix.weights) + block * size;
    const auto* next = weights + ahead * size + size * part.index / part.count / kBlock * kBlock;
    const float* in = product.in + part.row * inputs;
    Vec sums[rows][blocks][2] = {};
    for (int64_t k = 0; k < inputs; k += Weights::kInputs) {
        const int64_t at = k / Weights::kInputs;
        const auto* line = weights + at * kBlock;
        if (blocks == 1) {
            fetch_line(next + at / part.count * kBlock);
        } else {
#pragma GCC unroll 4
            for (int b = 0; b < blocks; ++b) fetch_line(line + b * size + 1024 / sizeof(typename Weights::Stored));
        }
#pragma GCC unroll 2
        for (int input = 0; input < Weights::kInputs; ++input) {
            Vec first[blocks], second[blocks];
#pragma GCC unroll 4
            for (int b = 0; b < blocks; ++b) {
                first[b] = Weights::read(line + b * size, input);
                second[b] = Weights::read(line + b * size + kLanes, input);
            }
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                const Vec x = all(in[r * inputs + k + input]);
#pragma GCC unroll 4
                for (int b = 0; b < blocks; ++b) {
                    sums[r][b][0] += x * first[b];
                    sums[r][b][1] += x * second[b];
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; ++b)
            finish<end>(sums[r][b][0], sums[r][b][1], product, part.row + r, block + b);
}

// Few rows have few sums. Then several blocks are read at a time, or each product would wait for the one before it.
template <class Weights, End end>
void multiply_block(const Product& product, const Part& part, int block, int blocks, int ahead) {
    switch (part.rows) {
#define DRAFTER_ROWS(count)                                                              \
    case count:                                                                          \
        for (int b = 0; b < blocks; ++b) multiply<Weights, end, count, 1>(product, part, block + b, ahead); \
        return;
#define DRAFTER_FEW_ROWS(count, together)                                                \
    case count:                                                                          \
        while (blocks >= together) {                                                     \
            multiply<Weights, end, count, together>(product, part, block, ahead);        \
            block += together;                                                           \
            blocks -= together;                                                          \
        }                                                                                \
        for (int b = 0; b < blocks; ++b) multiply<Weights, end, count, 1>(product, part, block + b, ahead); \
        return;
        DRAFTER_FEW_ROWS(1, 4)
        DRAFTER_FEW_ROWS(2, 2)
        DRAFTER_FEW_ROWS(3, 2)
        DRAFTER_ROWS(4)
        DRAFTER_ROWS(5)
        DRAFTER_ROWS(6)
#if defined(__AVX512F__)
        DRAFTER_ROWS(7)
        DRAFTER_ROWS(8)
        DRAFTER_ROWS(9)
        DRAFTER_ROWS(10)
        DRAFTER_ROWS(11)
        DRAFTER_ROWS(12)
#endif
#undef DRAFTER_ROWS
#undef DRAFTER_FEW_ROWS
    }
}

// out = in * weights^T by vectors, shared among the team.
template <End end>
void multiply_by_vectors(Team& team, const Product& product) {
    const Matrix& matrix = *product.matrix;
    const int blocks = matrix.blocks(), parts = (product.rows + kRows - 1) / kRows;
    const int together = product.rows <= 3 ? 4 : 1;
    team.loop((blocks + together - 1) / together, [&](int chunk) {
        const int block = chunk * together, count = std::min(together, blocks - block);
        for (Part part{0, 0, 0, parts}; part.index < parts; ++part.index, part.row += part.rows) {
            const int left = parts - part.index;
            part.rows = (product.rows - part.row + left - 1) / left;
            if (matrix.half)
                multiply_block<HalfWeights, end>(product, part, block, count, team.size());
            else
                multiply_block<FloatWeights, end>(product, part, block, count, team.size());
        }
    });
}

// Weights of some outputs of a coded matrix, `[count, inputs]`. A block is expanded once for outputs that follow one another.
inline void copy_outputs(const Matrix& matrix, const int64_t* outputs, int64_t count, float* to) {
    static thread_local std::vector<float> weights;
    weights.resize(std::max<size_t>(weights.size(), matrix.inputs * kBlock));
    const auto* coded = static_cast<const CodedBlock*>(matrix.weights);
    int64_t expanded = -1;
    for (const int64_t* output = outputs; output < outputs + count; ++output) {
        if (*output / kBlock != expanded) expand(coded[expanded = *output / kBlock], matrix.inputs, weights.data());
        for (int64_t k = 0; k < matrix.inputs; ++k) *to++ = weights[k * kBlock + *output % kBlock];
    }
}

// out = in * weights^T with weights in codes, which are expanded again for each part of the rows.
template <End end>
void multiply_coded(Team& team, const Product& product) {
    const Matrix& matrix = *product.matrix;
    const auto* coded = static_cast<const CodedBlock*>(matrix.weights);
    const int blocks = matrix.blocks(), parts = (product.rows + kCodedRows - 1) / kCodedRows;
    const int together = product.rows <= 3 ? 4 : 1;
    team.loop((blocks + together - 1) / together, [&](int chunk) {
        const int last = std::min(blocks, (chunk + 1) * together);
        for (int block = chunk * together, count; block < last; block += count) {
            const bool both = block + 1 < last && coded[block].format == coded[block + 1].format;
            count = both && product.rows <= kCodedFew ? kCodedBlocks : 1;
            for (int part = 0, row = 0, rows; part < parts; ++part, row += rows) {
                rows = (product.rows - row + parts - part - 1) / (parts - part);
                Vec sums[2 * kCodedRows * kCodedBlocks];
                add_up_coded(coded + block, count, product.in + row * matrix.inputs, rows, matrix.inputs, sums);
                for (int sum = 0; sum < rows * count; ++sum)
                    finish<end>(sums[2 * sum], sums[2 * sum + 1], product, row + sum / count, block + sum % count);
            }
        }
    });
}

#if defined(DRAFTER_TILES)
inline bool takes_tiles(const Matrix& matrix) {
    return matrix.half && matrix.inputs % kTileInputs == 0 && may_use_tiles();
}

// The same by the matrix unit.
template <End end>
void multiply_by_tiles(Team& team, const Product& product) {
    static thread_local std::vector<Tile> split;
    const Matrix& matrix = *product.matrix;
    const int64_t inputs = matrix.inputs, steps = inputs / kTileInputs;
    const auto* weights = static_cast<const uint32_t*>(matrix.weights);
    constexpr int kMost = 4 * kGroupRows;  // rows that are taken at a time: their parts stay in the cache
    for (int begin = 0; begin < product.rows; begin += kMost) {
        const int rows = std::min(kMost, product.rows - begin), groups = groups_of(rows);
        split.resize(std::max(split.size(), static_cast<size_t>(kParts * groups * steps)));
        Tile* tiles = split.data();  // of this thread, while others work on them, too
        team.loop(groups, [&](int group) {
            const int first = group * kGroupRows, count = std::min(kGroupRows, rows - first);
            for (int row = 0; row < count; ++row)
                split_row(product.in + (begin + first + row) * inputs, inputs, row, count, tiles + kParts * group * steps);
        });
        const int blocks = matrix.blocks();
        const int together = groups == 1 ? kTogether * std::clamp(blocks / 48, 1, 4) : 1;
        team.loop((blocks + together - 1) / together, [&](int chunk) {
            const int block = chunk * together, count = std::min(together, blocks - block);
            multiply_tiles(tiles, rows, inputs, weights, block, count, [&](int row, int at, Vec first, Vec second) {
                finish<end>(first, second, product, begin + row, at);
            });
        });
    }
}
#endif

// out = in * weights^T, shared among the team.
template <End end>
void multiply_all(Team& team, const Product& product) {
    if (product.matrix->coded) return multiply_coded<end>(team, product);
#if defined(DRAFTER_TILES)
    if (takes_tiles(*product.matrix)) return multiply_by_tiles<end>(team, product);
#endif
    multiply_by_vectors<end>(team, product);
}

}  // namespace drafter
