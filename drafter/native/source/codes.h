// Weights as quantised files store them: codes of a few bits, which are expanded as they are read.
//
//     weight = code * scale + offset
//
// Some inputs, a run, share scale and offset. These are a number in fp16 of several runs, times a byte of the run where the
// format has one. Of code, byte and fp16 any product has at most 24 bits, so it is exact in fp32, and a weight is rounded
// as often as in the formats' definitions: once where there is an offset, and else never.
#pragma once

#include "vectors.h"

namespace drafter {

// GGUF's, by their numbers there; `coded.py` takes their blocks apart.
enum class Format : int64_t { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

// A block of outputs of a coded matrix. Blocks of one matrix may differ in format, as those of queries and values do.
struct CodedBlock {
    const uint8_t* codes;
    Format format;
};

// Write the weights of a block, `[inputs, kBlock]`.
void expand(const CodedBlock& block, int64_t inputs, float* to);

// Rows that are multiplied together, and blocks that few rows read together: their sums would wait for themselves.
constexpr int kCodedRows = 6, kCodedBlocks = 2, kCodedFew = 2;

// Sums of one to `kCodedRows` rows `[rows, inputs]` with a block, in the order of the inputs, or of one to `kCodedFew` rows
// with `kCodedBlocks` blocks of one format: `[rows, blocks, 2]`.
void add_up_coded(const CodedBlock* block, int blocks, const float* in, int rows, int64_t inputs, Vec* sums);

}  // namespace drafter
