// Attention of draft nodes over a KV cache. A node sees its row's committed positions and its own ancestors.
//
// Scores are kept by logical position, and sums go over them in that order. So what a node gets does not depend, to the
// last bit, on whether the tokens before it are committed or are nodes of a draft tree.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vectors.h"

// Sizes of a head, in vectors, that attention is compiled for.
#define DRAFTER_HEAD_SIZES                                                                                        \
    DRAFTER_HEAD(1) DRAFTER_HEAD(2) DRAFTER_HEAD(3) DRAFTER_HEAD(4) DRAFTER_HEAD(5) DRAFTER_HEAD(6) DRAFTER_HEAD(8) \
    DRAFTER_HEAD(10) DRAFTER_HEAD(12) DRAFTER_HEAD(16)

namespace drafter {

// Rotate the halves of a head against each other (RoPE, arXiv 2104.09864, in the layout of Llama).
inline void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float low = head[i], high = head[half + i];
        head[i] = low * cosines[i] - high * sines[i];
        head[half + i] = high * cosines[i] + low * sines[i];
    }
}

// Keys or values of one slot and one head: so many numbers at each position. Positions lie in blocks.
struct Lane {
    float* first;           // of position 0 of block 0
    int64_t stride;         // from one position to the next, in numbers
    const int64_t* blocks;  // where the slot's blocks are
    int64_t block;          // positions of a block
    float* at(int64_t position) const {
        return first + (blocks[position / block] * block + position % block) * stride;
    }
    // Call `work(position, numbers)` for the first `count` positions, in order.
    template <class Work>
    void walk(int64_t count, const Work& work) const {
        for (int64_t from = 0; from < count; from += block) {
            const float* numbers = first + blocks[from / block] * block * stride;
            const int64_t to = std::min(from + block, count);
            for (int64_t position = from; position < to; ++position, numbers += stride) work(position, numbers);
        }
    }
};

template <int vectors>
inline float dot(const float* one, const float* other) {
    Vec sum = load(one) * load(other);
#pragma GCC unroll 16
    for (int v = 1; v < vectors; ++v) sum += load(one + v * kLanes) * load(other + v * kLanes);
    return sum_lanes(sum);
}

// Turn scores of `length` positions into weights; return 1 / (sum of the weights). There is room for a whole vector.
inline float soften(float* scores, int64_t length) {
    const float lowest = -std::numeric_limits<float>::infinity();
    for (int64_t t = length; t % kLanes; ++t) scores[t] = lowest;
    Vec largest = load(scores);
    for (int64_t t = kLanes; t < length; t += kLanes) {
        const Vec some = load(scores + t);
        largest = some > largest ? some : largest;
    }
    const Vec top = all(largest_lane(largest));
    Vec sum{};
    for (int64_t t = 0; t < length; t += kLanes) {
        const Vec weights = exp(load(scores + t) - top);
        store(scores + t, weights);
        sum += weights;
    }
    return 1.0f / sum_lanes(sum);
}

// Attention of some nodes of one row for the query heads that share one KV head.
//
// prefix: positions that all of the nodes see. nodes: of the nodes. ancestors: for each node, the cache positions behind
// the prefix that it sees, in order; the last one is its own. queries(node, head), out(node, head): where they are.
template <int vectors, class Ancestors, class Queries, class Out>
void attend(Lane keys, Lane values, int64_t prefix, int nodes, int heads, float scale, const Ancestors& ancestors,
            const Queries& queries, const Out& out, std::vector<float>& scores) {
    int64_t longest = 0;
    for (int node = 0; node < nodes; ++node) longest = std::max<int64_t>(longest, ancestors(node).count);
    const int64_t width = (prefix + longest + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(scores.size()) < width * nodes * heads) scores.resize(width * nodes * heads);
    auto row = [&](int node, int head) { return scores.data() + (node * heads + head) * width; };
    keys.walk(prefix, [&](int64_t t, const float* key) {
        for (int node = 0; node < nodes; ++node)
            for (int head = 0; head < heads; ++head)
                row(node, head)[t] = scale * dot<vectors>(queries(node, head), key);
    });
    for (int node = 0; node < nodes; ++node) {
        const auto seen = ancestors(node);
        const int64_t length = prefix + seen.count;
        for (int64_t a = 0; a < seen.count; ++a)
            for (int head = 0; head < heads; ++head)
                row(node, head)[prefix + a] = scale * dot<vectors>(queries(node, head), keys.at(seen.position(a)));
        for (int head = 0; head < heads; ++head) {
            float* weights = row(node, head);
            const float norm = soften(weights, length);
            Vec sums[vectors] = {};
            values.walk(prefix, [&](int64_t t, const float* value) {
#pragma GCC unroll 16
                for (int v = 0; v < vectors; ++v) sums[v] += weights[t] * load(value + v * kLanes);
            });
            for (int64_t a = 0; a < seen.count; ++a) {
                const float* value = values.at(seen.position(a));
#pragma GCC unroll 16
                for (int v = 0; v < vectors; ++v) sums[v] += weights[prefix + a] * load(value + v * kLanes);
            }
            float* to = out(node, head);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) store(to + v * kLanes, sums[v] * norm);
        }
    }
}

}  // namespace drafter
