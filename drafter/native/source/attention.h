// Attention of draft nodes over a KV cache. A node sees its row's committed positions and its own ancestors.
//
// Scores are kept by logical position, and sums go over them in that order. So what a node gets does not depend, to the
// last bit, on whether the tokens before it are committed or are nodes of a draft tree.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

// Sizes of a head, in vectors, that attention is compiled for.
#define DRAFTER_HEAD_SIZES                                                                                        \
    DRAFTER_HEAD(1) DRAFTER_HEAD(2) DRAFTER_HEAD(3) DRAFTER_HEAD(4) DRAFTER_HEAD(5) DRAFTER_HEAD(6) DRAFTER_HEAD(8) \
    DRAFTER_HEAD(10) DRAFTER_HEAD(12) DRAFTER_HEAD(16) DRAFTER_HEAD(32)

namespace drafter {

// values *= sigmoid(gates), of whole vectors.
inline void gate_softly(const float* gates, float* values, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) store(values + i, load(values + i) / (1.0f + exp(-load(gates + i))));
}

// Rotate the halves of a head against each other (RoPE, arXiv 2104.09864, in the layout of Llama).
inline void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float low = head[i], high = head[half + i];
        head[i] = low * cosines[i] - high * sines[i];
        head[half + i] = high * cosines[i] + low * sines[i];
    }
}

// Positions whose keys and values, of all heads, stay in the nearest caches while several queries read them.
constexpr int64_t kTile = 2 * kLanes;

// Keys or values of one slot from one head on: so many numbers at each position. Positions lie in blocks.
struct Lane {
    float* first;           // of position 0 of block 0
    int64_t stride;         // from one position to the next, in numbers
    const int64_t* blocks;  // where the slot's blocks are
    int64_t block;          // positions of a block
    float* at(int64_t position) const {
        return first + (blocks[position / block] * block + position % block) * stride;
    }
    // Call `work(position, numbers, count)` for runs of up to `kTile` positions that lie one behind another.
    template <class Work>
    void walk(int64_t begin, int64_t end, const Work& work) const {
        for (int64_t from = begin, count; from < end; from += count) {
            count = std::min({kTile, block - from % block, end - from});
            work(from, at(from), count);
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

// Scores of one query with the keys of as many positions as a vector has lanes: `dot` of each, to the last bit.
template <int vectors>
inline Vec dots(const float* query, const float* keys, int64_t stride) {
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; ++t) {
        sums[t] = load(query) * load(keys + t * stride);
#pragma GCC unroll 16
        for (int v = 1; v < vectors; ++v) sums[t] += load(query + v * kLanes) * load(keys + t * stride + v * kLanes);
    }
    return sum_lanes_of(sums);
}

// Add `count` positions' values, weighted, to the sums of some queries: `[queries, vectors]`.
template <int vectors, int queries>
inline void add_values(float* sums, const float* const* weights, const float* values, int64_t stride, int64_t count) {
    constexpr int kSize = vectors * kLanes;
    Vec totals[queries][vectors];
    for (int q = 0; q < queries; ++q)
        for (int v = 0; v < vectors; ++v) totals[q][v] = load(sums + q * kSize + v * kLanes);
    for (int64_t t = 0; t < count; ++t, values += stride) {
        Vec numbers[vectors];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) numbers[v] = load(values + v * kLanes);
#pragma GCC unroll 4
        for (int q = 0; q < queries; ++q) {
            const Vec weight = all(weights[q][t]);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) totals[q][v] += weight * numbers[v];
        }
    }
    for (int q = 0; q < queries; ++q)
        for (int v = 0; v < vectors; ++v) store(sums + q * kSize + v * kLanes, totals[q][v]);
}

// Which of a row's nodes, and of the query heads that share each of some KV heads, attention is computed for.
struct Shape {
    int nodes, kv_heads, heads;  // heads: that share a KV head
    int count() const { return nodes * kv_heads * heads; }
};

// What scores are made of products of queries and keys, and for which positions.
struct Scoring {
    float scale;
    float cap = 0.0f;                                      // a score s becomes cap * tanh(s / cap); 0 for none
    int64_t window = std::numeric_limits<int64_t>::max();  // positions that a node sees, backwards from its own
};

// Attention of some nodes of one row. Memory is read in the order in which it lies, whatever the number of heads.
//
// prefix: positions that all of the nodes see. ancestors: for each node, the cache positions behind the prefix that it
// sees, in order; the last one is its own. queries(node, head), out(node, head): where they are.
//
// Positions before a node's window weigh exactly 0. Those before all windows are not read, and scores begin at a multiple
// of a vector, so that each stays in its lane.
template <int vectors, class Ancestors, class Queries, class Out>
void attend(Lane keys, Lane values, int64_t prefix, Shape shape, Scoring scoring, const Ancestors& ancestors,
            const Queries& queries, const Out& out, std::vector<float>& scratch) {
    constexpr int64_t kSize = vectors * kLanes;
    constexpr int kTogether = vectors <= 4 ? 4 : 1;  // queries whose sums fit into the registers
    const int count = shape.count(), each = shape.nodes * shape.heads;  // each: queries that share a KV head
    // The first position that a node sees, counted along its path.
    auto first = [&](int node) {
        return std::max<int64_t>(0, prefix + static_cast<int64_t>(ancestors(node).count) - scoring.window);
    };
    int64_t longest = 0, begin = first(0);
    for (int node = 0; node < shape.nodes; ++node) {
        longest = std::max<int64_t>(longest, ancestors(node).count);
        begin = std::min(begin, first(node));
    }
    const int64_t origin = begin / kLanes * kLanes;  // of the scores
    const int64_t width = (prefix + longest - origin + kLanes - 1) / kLanes * kLanes;
    const int64_t needed = count * (width + kSize + 1);
    if (static_cast<int64_t>(scratch.size()) < needed) scratch.resize(needed);
    float *const sums = scratch.data() + count * width, *const norms = sums + count * kSize;
    std::fill(sums, norms, 0.0f);
    // A query's scores, from a position on.
    auto row = [&](int query, int64_t position) { return scratch.data() + query * width + (position - origin); };
    auto node = [&](int query) { return query % each / shape.heads; };
    auto head = [&](int query) { return query / each * shape.heads + query % shape.heads; };
    auto offset = [&](int query) { return query / each * kSize; };  // of its KV head

    keys.walk(begin, prefix, [&](int64_t from, const float* key, int64_t run) {
        for (int query = 0; query < count; ++query) {
            const float* numbers = queries(node(query), head(query));
            const float* at = key + offset(query);
            float* scores = row(query, from);
            int64_t t = 0;
            for (; t + kLanes <= run; t += kLanes)
                store(scores + t, scoring.scale * dots<vectors>(numbers, at + t * keys.stride, keys.stride));
            for (; t < run; ++t) scores[t] = scoring.scale * dot<vectors>(numbers, at + t * keys.stride);
        }
    });
    for (int query = 0; query < count; ++query) {
        const auto seen = ancestors(node(query));
        const float* numbers = queries(node(query), head(query));
        float *const scores = row(query, origin), *const own = row(query, prefix);
        const int64_t from = first(node(query)), length = prefix + seen.count - origin;
        for (int64_t a = std::max<int64_t>(0, from - prefix); a < seen.count; ++a)
            own[a] = scoring.scale * dot<vectors>(numbers, keys.at(seen.position(a)) + offset(query));
        if (scoring.cap > 0.0f)
            for (int64_t t = 0; t < length; t += kLanes)
                store(scores + t, scoring.cap * tanh(load(scores + t) / scoring.cap));
        std::fill(scores, row(query, from), -std::numeric_limits<float>::infinity());
        norms[query] = soften(scores, length);
    }
    values.walk(begin, prefix, [&](int64_t from, const float* value, int64_t run) {
        for (int start = 0; start < count; start += each) {
            int query = start;
            auto add = [&](auto some) {
                const float* weights[some];
                for (int q = 0; q < some; ++q) weights[q] = row(query + q, from);
                add_values<vectors, some>(sums + query * kSize, weights, value + offset(query), values.stride, run);
                query += some;
            };
            while (query + kTogether <= start + each) add(std::integral_constant<int, kTogether>());
            while (query < start + each) add(std::integral_constant<int, 1>());
        }
    });
    for (int query = 0; query < count; ++query) {
        const auto seen = ancestors(node(query));
        float* const total = sums + query * kSize;
        for (int64_t a = std::max<int64_t>(0, first(node(query)) - prefix); a < seen.count; ++a) {
            const float* weights[] = {row(query, prefix) + a};
            add_values<vectors, 1>(total, weights, values.at(seen.position(a)) + offset(query), values.stride, 1);
        }
        float* to = out(node(query), head(query));
        for (int64_t v = 0; v < vectors; ++v) store(to + v * kLanes, load(total + v * kLanes) * norms[query]);
    }
}

}  // namespace drafter
