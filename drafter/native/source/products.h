// Products of a few rows with a matrix of weights, which is laid out once in the order in which it is read.
//
// Each output is one sum over the inputs, in their order, whatever the number of rows. So a row's numbers do not depend,
// to the last bit, on what else is computed with it.
#pragma once

#include <algorithm>

#include "team.h"
#include "vectors.h"

namespace drafter {

constexpr int kBlock = 2 * kLanes;  // outputs of a block of weights
constexpr int kRows = kLanes == 16 ? 12 : 6;  // rows whose sums fit into the registers

// Weights of a linear layer: blocks of `kBlock` outputs, each `[inputs, kBlock]`; the last block is filled up with zeros.
struct Matrix {
    const void* weights;  // uint32: two bf16, of outputs j and j + kLanes; or float
    const float* bias;    // `[blocks * kBlock]` or null
    int64_t inputs, outputs;
    int32_t half;  // whether the weights are bf16
    int32_t unused;

    int blocks() const { return static_cast<int>((outputs + kBlock - 1) / kBlock); }
};

// What becomes of the sums.
enum class End {
    kStore,  // out = sum
    kAdd,    // out += sum
    kSilu,   // out = silu(sum)
    kGated,  // out = silu(first half of the block) * second half
};

struct Product {
    const Matrix* matrix;
    const float* in;  // `[rows, inputs]`
    float* const* out;  // of each row
    int rows;
};

struct HalfWeights {
    typedef uint32_t Stored;
    static constexpr int kStride = kLanes;  // stored numbers for one input
    static void read(const Stored* from, Vec& first, Vec& second) {
        Words both = load_words(from), low = both << 16, high = both & 0xffff0000u;
        std::memcpy(&first, &low, sizeof first);
        std::memcpy(&second, &high, sizeof second);
    }
};

struct FloatWeights {
    typedef float Stored;
    static constexpr int kStride = kBlock;
    static void read(const Stored* from, Vec& first, Vec& second) {
        first = load(from);
        second = load(from + kLanes);
    }
};

template <End end>
inline void finish(Vec first, Vec second, const float* bias, float* out, int64_t column, int64_t outputs) {
    if (bias != nullptr) {
        first += load(bias + column);
        second += load(bias + column + kLanes);
    }
    if (end == End::kGated) {
        store(out + column / 2, silu(first) * second);
        return;
    }
    if (end == End::kSilu) {
        first = silu(first);
        second = silu(second);
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

// `rows` rows times `blocks` blocks of weights. Both are constants, so that all sums are in registers.
template <class Weights, End end, int rows, int blocks>
void multiply(const Product& product, int row, int block) {
    const Matrix& matrix = *product.matrix;
    const int64_t inputs = matrix.inputs, size = inputs * Weights::kStride;
    const auto* weights = static_cast<const typename Weights::Stored*>(matrix.weights) + block * size;
    const float* in = product.in + row * inputs;
    Vec sums[rows][blocks][2] = {};
    for (int64_t k = 0; k < inputs; ++k) {
        Vec first[blocks], second[blocks];
#pragma GCC unroll 4
        for (int b = 0; b < blocks; ++b) {
            const auto* at = weights + b * size + k * Weights::kStride;
            __builtin_prefetch(at + 1024 / sizeof(typename Weights::Stored));
            Weights::read(at, first[b], second[b]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; ++r) {
            const Vec x = all(in[r * inputs + k]);
#pragma GCC unroll 4
            for (int b = 0; b < blocks; ++b) {
                sums[r][b][0] += x * first[b];
                sums[r][b][1] += x * second[b];
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; ++b)
            finish<end>(sums[r][b][0], sums[r][b][1], matrix.bias, product.out[row + r],
                        static_cast<int64_t>(block + b) * kBlock, matrix.outputs);
}

// Few rows have few sums. Then several blocks are read at a time, or each product would wait for the one before it.
template <class Weights, End end>
void multiply_block(const Product& product, int row, int rows, int block, int blocks) {
    switch (rows) {
#define DRAFTER_ROWS(count)                                                              \
    case count:                                                                          \
        for (int b = 0; b < blocks; ++b) multiply<Weights, end, count, 1>(product, row, block + b); \
        return;
#define DRAFTER_FEW_ROWS(count, together)                                                \
    case count:                                                                          \
        while (blocks >= together) {                                                     \
            multiply<Weights, end, count, together>(product, row, block);                \
            block += together;                                                           \
            blocks -= together;                                                          \
        }                                                                                \
        for (int b = 0; b < blocks; ++b) multiply<Weights, end, count, 1>(product, row, block + b); \
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

// out = in * weights^T, shared among the team.
template <End end>
void multiply_all(Team& team, const Product& product) {
    const Matrix& matrix = *product.matrix;
    const int blocks = matrix.blocks(), parts = (product.rows + kRows - 1) / kRows;
    const int together = product.rows <= 3 ? 4 : 1;
    team.loop((blocks + together - 1) / together, [&](int chunk) {
        const int block = chunk * together, count = std::min(together, blocks - block);
        for (int part = 0, row = 0; part < parts; ++part) {
            const int rows = (product.rows - row + parts - part - 1) / (parts - part);
            if (matrix.half)
                multiply_block<HalfWeights, end>(product, row, rows, block, count);
            else
                multiply_block<FloatWeights, end>(product, row, rows, block, count);
            row += rows;
        }
    });
}

}  // namespace drafter
