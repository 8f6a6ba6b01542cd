// Norms of single rows, and softmax.
#pragma once

#include "vectors.h"

namespace drafter {

// out = in / (root of the mean square) * weight (RMSNorm, arXiv 1910.07467). `out` may be `in`.
inline void normalise(const float* in, const float* weight, float* out, int64_t size, float epsilon) {
    Vec squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(in + i) * load(in + i);
    float sum = sum_lanes(squares);
    for (; i < size; ++i) sum += in[i] * in[i];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + epsilon);
    for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, load(in + i) * factor * load(weight + i));
    for (; i < size; ++i) out[i] = in[i] * factor * weight[i];
}

// out = (in - mean) / (standard deviation) * weight + bias (LayerNorm, arXiv 1607.06450). `out` may be `in`.
inline void normalise_layer(const float* in, const float* weight, const float* bias, float* out, int64_t size) {
    constexpr float kEpsilon = 1e-5f;  // PyTorch's default
    Vec sums{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sums += load(in + i);
    float sum = sum_lanes(sums);
    for (; i < size; ++i) sum += in[i];
    const float mean = sum / static_cast<float>(size);
    Vec squares{};
    for (i = 0; i + kLanes <= size; i += kLanes) squares += (load(in + i) - mean) * (load(in + i) - mean);
    float square = sum_lanes(squares);
    for (; i < size; ++i) square += (in[i] - mean) * (in[i] - mean);
    const float factor = 1.0f / std::sqrt(square / static_cast<float>(size) + kEpsilon);
    for (i = 0; i + kLanes <= size; i += kLanes)
        store(out + i, (load(in + i) - mean) * factor * load(weight + i) + load(bias + i));
    for (; i < size; ++i) out[i] = (in[i] - mean) * factor * weight[i] + bias[i];
}

}  // namespace drafter
