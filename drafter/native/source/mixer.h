// Mixers of recurrent layers: a short convolution, and heads, if any, whose state is a matrix S from keys to values.
//
//     S <- decay * S + k * w^T,   o = S^T q
//
// A step decays by exp(decay * softplus(step + bias)). By the gated delta rule (arXiv 2412.06464) what is written is
// w = rate * (v - what k reads); by Mamba 2 (arXiv 2405.21060) it is the value, times the step. Whether a node is a token
// of a prompt, a plain step or in a draft tree, it is one token that follows its parent's state. So its numbers do not
// depend, to the last bit, on what is run beside it; nor on the kind, but where the model limits the steps of prompts.
//
// By Mamba 1 (arXiv 2312.00752) there is one head, and each number of its state has a decay of its own: exp(decay * step) of
// the value's step. Keys, queries and steps are made of the values. Without heads (LFM2) the output is that of the
// convolution, gated, and so are its inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "products.h"
#include "team.h"
#include "vectors.h"

namespace drafter {

enum class Rule : int32_t { kDelta, kMamba, kSelective, kPlain };

struct Mixer {
    Matrix in;   // from `[d]` to channels `[C]` and gates `[H * V]`; by the delta rule and Mamba 2 steps `[H]`, and by the
                 // delta rule rates `[H]`; without heads the channels' gates `[C]`
    Matrix out;  // from `[H * V]` to `[d]`
    Matrix select, step;  // by Mamba 1: from values to `[R + 2 * K]`, steps, keys and queries; and from these steps to `[V]`
    const float *taps, *taps_bias;  // `[k, C]` weights of the convolution, its newest input the last; `[C]` or null
    const float *decays, *step_bias, *skip;  // `[H]`; `skip` is how much of a value is output as it is, or null. By Mamba 1
                                             // the decays are `[K, V]`, and `skip` `[V]`
    const float* norm;                       // `[H * V]` of the output
    const float* select_norms;               // `[R + 2 * K]` of steps, keys and queries, each by itself; or null
    int64_t key_heads, heads, key_size, value_size, reach;  // G, H, K, V, k
    int64_t channels, query_at, key_at, value_at;           // C, and where each kind begins among the channels
    int64_t normed;      // numbers of the output that are normed together; 0 for none
    int64_t gate_first;  // whether the output is gated before it is normed
    float epsilon;       // of the norms
    float rate;          // by the delta rule: a rate is this, times a sigmoid
    float least, most;   // of steps in prompts
    Rule rule;
};

// A layer's states, by entry.
struct States {
    float* inputs;    // `[entries, C, k]` last inputs of the convolution
    float* memories;  // `[entries, H, K, V]`
};

// What is kept of a node until its step is committed: `[C]` inputs, `[G, K]` keys, `[H, V]` what it writes, `[H]` decays; by
// Mamba 1 `[V]` steps instead of these.
struct Kept {
    int64_t keys, written, decays, width;

    explicit Kept(const Mixer& mixer)
        : keys(mixer.channels), written(keys + mixer.key_heads * mixer.key_size),
          decays(written + mixer.heads * mixer.value_size),
          width(decays + (mixer.rule == Rule::kSelective ? mixer.value_size : mixer.heads)) {}
};

constexpr int kWide = 4;  // vectors of values that are followed at a time: their sums fit into the registers

// Columns of one head's state, as many as a thread follows at a time.
struct Columns {
    int64_t head, first;
    int vectors;

    static int parts(const Mixer& mixer) { return static_cast<int>((mixer.value_size / kLanes + kWide - 1) / kWide); }

    Columns(const Mixer& mixer, int chunk) {
        const int each = parts(mixer), part = chunk % each;
        head = chunk / each;
        first = part * kWide * kLanes;
        vectors = std::min<int>(kWide, static_cast<int>(mixer.value_size / kLanes) - part * kWide);
    }
};

// What two vectors read from a state `[K, vectors]`.
template <int vectors>
inline void read_state(const float* state, int64_t stride, const float* one, const float* other, int64_t size,
                       Vec (&of_one)[vectors], Vec (&of_other)[vectors]) {
    for (int v = 0; v < vectors; ++v) of_one[v] = of_other[v] = Vec{};
    for (int64_t k = 0; k < size; ++k, state += stride) {
        const Vec first = all(one[k]), second = all(other[k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const Vec some = load(state + v * kLanes);
            of_one[v] += first * some;
            of_other[v] += second * some;
        }
    }
}

// The state after a node. Trees and commits both call this one function, so that they give the same bits: inlined, a compiler
// may round a sum of two products in two ways.
template <int vectors>
__attribute__((noinline)) void advance_state(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                                             const float* key, const float* written, float decay, int64_t size) {
    Vec add[vectors];
    for (int v = 0; v < vectors; ++v) add[v] = load(written + v * kLanes);
    const Vec factor = all(decay);
    for (int64_t k = 0; k < size; ++k, from += from_stride, to += to_stride) {
        const Vec some = all(key[k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) store(to + v * kLanes, load(from + v * kLanes) * factor + some * add[v]);
    }
}

// The same by Mamba 1, with a step for each value; and what a query reads from it. Either may be left out: `to`, if the state
// is not needed, and `query`.
template <int vectors>
__attribute__((noinline)) void select_state(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                                            const float* key, const float* query, const float* written, const float* steps,
                                            const float* decays, int64_t decay_stride, int64_t size, float* out) {
    Vec add[vectors], step[vectors], sums[vectors];
    for (int v = 0; v < vectors; ++v) {
        add[v] = load(written + v * kLanes);
        step[v] = load(steps + v * kLanes);
        sums[v] = Vec{};
    }
    for (int64_t k = 0; k < size; ++k, from += from_stride, decays += decay_stride) {
        const Vec some = all(key[k]), other = all(query == nullptr ? 0.0f : query[k]);
        for (int v = 0; v < vectors; ++v) {
            const Vec next = load(from + v * kLanes) * exp(load(decays + v * kLanes) * step[v]) + some * add[v];
            if (to != nullptr) store(to + v * kLanes, next);
            sums[v] += other * next;
        }
        if (to != nullptr) to += to_stride;
    }
    if (out == nullptr) return;
    for (int v = 0; v < vectors; ++v) store(out + v * kLanes, sums[v]);
}

template <class Work>
inline void with_vectors(int vectors, const Work& work) {
    switch (vectors) {
        case 1: return work(std::integral_constant<int, 1>());
        case 2: return work(std::integral_constant<int, 2>());
        case 3: return work(std::integral_constant<int, 3>());
        default: return work(std::integral_constant<int, 4>());
    }
}

// A layer, and what has been kept of its nodes.
struct KeptLayer {
    const Mixer* mixer;
    States states;
    const float* kept;  // `[B * N, Kept::width]`
};

// Accepted paths of B texts of N nodes.
struct Accepted {
    const int64_t* path;  // `[B, P]`: 0 and rising, then 0
    int64_t rows, nodes, length;
    const int64_t *from, *to;  // `[B]` entries of the states before the step, and of those after it
};

// Write the states after accepted paths.
inline void keep_paths(const KeptLayer& layer, const Accepted& accepted, Team& team) {
    const Mixer& mixer = *layer.mixer;
    const Kept at(mixer);
    const int64_t size = mixer.key_size, entry = mixer.heads * size * mixer.value_size, window = mixer.channels * mixer.reach;
    const int parts = static_cast<int>(mixer.heads) * Columns::parts(mixer) + 1;
    team.loop(static_cast<int>(accepted.rows) * parts, [&](int chunk) {
        const int64_t row = chunk / parts, from = accepted.from[row], to = accepted.to[row];
        const int64_t* const path = accepted.path + row * accepted.length;
        int64_t length = 1;
        while (length < accepted.length && path[length] > 0) ++length;
        const auto node = [&](int64_t place) { return layer.kept + (row * accepted.nodes + path[place]) * at.width; };
        if (chunk % parts == parts - 1) {
            const float* const before = layer.states.inputs + from * window;
            float* const after = layer.states.inputs + to * window;
            for (int64_t j = 0; j < mixer.reach; ++j) {
                const int64_t place = j - mixer.reach + length;  // on the path
                for (int64_t c = 0; c < mixer.channels; ++c)
                    after[c * mixer.reach + j] = place < 0 ? before[c * mixer.reach + j + length] : node(place)[c];
            }
            return;
        }
        const Columns columns(mixer, chunk % parts);
        const int64_t offset = columns.head * size * mixer.value_size + columns.first;
        const int64_t group = columns.head / (mixer.heads / mixer.key_heads);
        float* const after = layer.states.memories + to * entry + offset;
        const float* state = layer.states.memories + from * entry + offset;
        with_vectors(columns.vectors, [&](auto vectors) {
            for (int64_t place = 0; place < length; ++place, state = after) {
                const float *const of = node(place), *const key = of + at.keys + group * size;
                const float* const written = of + at.written + columns.head * mixer.value_size + columns.first;
                const int64_t stride = mixer.value_size;
                if (mixer.rule == Rule::kSelective)
                    select_state<vectors()>(state, stride, after, stride, key, nullptr, written,
                                            of + at.decays + columns.first, mixer.decays + columns.first, stride, size, nullptr);
                else
                    advance_state<vectors()>(state, stride, after, stride, key, written, of[at.decays + columns.head], size);
            }
        });
    });
}

}  // namespace drafter
