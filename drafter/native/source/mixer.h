// Mixers of recurrent layers: a short convolution, and heads whose state is a matrix S from keys to values.
//
//     S <- decay * S + k * w^T,   o = S^T q
//
// A step decays by exp(decay * softplus(step + bias)). By the gated delta rule (arXiv 2412.06464) what is written is
// w = rate * (v - what k reads); by Mamba 2 (arXiv 2405.21060) it is the value, times the step. Whether a node is a token
// of a prompt, a plain step or in a draft tree, it is one token that follows its parent's state. So its numbers do not
// depend, to the last bit, on what is run beside it; nor on the kind, but where the model limits the steps of prompts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "norms.h"
#include "products.h"
#include "rows.h"
#include "team.h"
#include "texts.h"
#include "vectors.h"

namespace drafter {

enum class Rule : int32_t { kDelta, kMamba };

struct Mixer {
    Matrix in;   // from `[d]` to `[C + H * V + H]`: channels, gates and steps; by the delta rule `[H]` rates, too
    Matrix out;  // from `[H * V]` to `[d]`
    const float *taps, *taps_bias;  // `[k, C]` weights of the convolution, its newest input the last; `[C]` or null
    const float *decays, *step_bias, *skip;  // `[H]`; `skip` is how much of a value is output as it is, or null
    const float* norm;                       // `[H * V]` of the output
    int64_t key_heads, heads, key_size, value_size, reach;  // G, H, K, V, k
    int64_t channels, query_at, key_at, value_at;           // C = 2 * G * K + H * V, and where each kind begins
    int64_t normed;      // numbers of the output that are normed together; 0 for none
    int64_t gate_first;  // whether the output is gated before it is normed
    float epsilon;       // of the norm
    float rate;          // by the delta rule: a rate is this, times a sigmoid
    float least, most;   // of steps in prompts
    Rule rule;
};

// A layer's states, by entry.
struct States {
    float* inputs;    // `[entries, C, k]` last inputs of the convolution
    float* memories;  // `[entries, H, K, V]`
};

// What is kept of a node until its step is committed: `[C]` inputs, `[G, K]` keys, `[H, V]` what it writes, `[H]` decays.
struct Kept {
    int64_t keys, written, decays, width;

    explicit Kept(const Mixer& mixer)
        : keys(mixer.channels), written(keys + mixer.key_heads * mixer.key_size),
          decays(written + mixer.heads * mixer.value_size), width(decays + mixer.heads) {}
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

template <class Work>
inline void with_vectors(int vectors, const Work& work) {
    switch (vectors) {
        case 1: return work(std::integral_constant<int, 1>());
        case 2: return work(std::integral_constant<int, 2>());
        case 3: return work(std::integral_constant<int, 3>());
        default: return work(std::integral_constant<int, 4>());
    }
}

// Last inputs of the convolution, `[C, k]`, from k rows of channels.
inline void store_inputs(const std::vector<const float*>& rows, int64_t channels, float* to) {
    const int64_t reach = static_cast<int64_t>(rows.size());
    for (int64_t j = 0; j < reach; ++j)
        for (int64_t c = 0; c < channels; ++c) to[c * reach + j] = rows[j][c];
}

// Runs mixers over the nodes of a forward. Its memory is used again by the next layer.
class Mixing {
  public:
    Mixing(const Texts& given, Team& team) : given_(given), order_(given), team_(team) {}

    // Returns `[M, H * V]`, which `mixer.out` takes. `kept` `[B * N, Kept::width]` is null where all states are written here.
    const Rows& run(const Mixer& mixer, const States& states, const float* in, float* kept) {
        const int count = static_cast<int>(given_.count);
        projected_.reserve(count, mixer.in.outputs);
        mixed_.reserve(count, mixer.channels);
        rates_.reserve(count, 2 * mixer.heads + mixer.key_heads);
        output_.reserve(count, mixer.heads * mixer.value_size);
        multiply_all<End::kStore>(team_, {&mixer.in, in, projected_.rows.data(), count});
        const int64_t entry = mixer.channels * mixer.reach;
        const int texts = static_cast<int>(order_.texts.size());
        pasts_.reserve(texts, entry);
        team_.loop(texts, [&](int t) {  // each input of the past by itself
            const float* from = states.inputs + order_.texts[t].from * entry;
            for (int64_t j = 0; j < mixer.reach; ++j)
                for (int64_t c = 0; c < mixer.channels; ++c) pasts_.rows[t][j * mixer.channels + c] = from[c * mixer.reach + j];
        });
        each_node([&](int t, int m) { prepare(mixer, t, m, kept); });
        const int parts = static_cast<int>(mixer.heads) * Columns::parts(mixer);
        team_.loop(texts * parts, [&](int chunk) {
            const Columns columns(mixer, chunk % parts);
            with_vectors(columns.vectors, [&](auto vectors) {
                follow<vectors()>(mixer, states, order_.texts[chunk / parts], columns, kept);
            });
        });
        each_node([&](int, int m) { finish(mixer, m); });
        team_.loop(texts, [&](int t) {
            const Order::Text& text = order_.texts[t];
            for (int w = text.first_write; w < text.last_write; ++w) {
                const int64_t* write = given_.writes + 3 * w;
                store_inputs(window(mixer, t, text.begin + static_cast<int>(write[1]) - 1), mixer.channels,
                             states.inputs + write[2] * entry);
            }
        });
        return output_;
    }

  private:
    template <class Work>
    void each_node(const Work& work) {
        constexpr int kChunk = 4;  // nodes that are worth sharing
        int texts = static_cast<int>(order_.texts.size());
        starts_.assign(1, 0);
        for (int t = 0; t < texts; ++t)
            starts_.push_back(starts_.back() + (order_.texts[t].end - order_.texts[t].begin + kChunk - 1) / kChunk);
        team_.loop(starts_.back(), [&](int chunk) {
            const int t = static_cast<int>(std::upper_bound(starts_.begin(), starts_.end(), chunk) - starts_.begin()) - 1;
            const int first = order_.texts[t].begin + (chunk - starts_[t]) * kChunk;
            for (int m = first; m < std::min(first + kChunk, order_.texts[t].end); ++m) work(t, m);
        });
    }

    // The last k inputs up to a node of a text; up to the text itself if it comes before the first node.
    std::vector<const float*> window(const Mixer& mixer, int t, int m) const {
        std::vector<const float*> rows(mixer.reach);
        int64_t past = mixer.reach;
        if (m < order_.texts[t].begin) m = -1;
        for (int64_t j = mixer.reach - 1; j >= 0; --j) {
            if (m >= 0) {
                rows[j] = projected_.rows[m];
                m = order_.parent[m];
            } else {
                rows[j] = pasts_.rows[t] + --past * mixer.channels;
            }
        }
        return rows;
    }

    // Convolve a node's inputs, and find its decays and rates.
    void prepare(const Mixer& mixer, int t, int m, float* kept) {
        const std::vector<const float*> rows = window(mixer, t, m);
        float *const out = mixed_.rows[m], *const rates = rates_.rows[m];
        const int64_t channels = mixer.channels, size = mixer.key_size;
        const auto sum_at = [&](int64_t c) {
            Vec sum = mixer.taps_bias == nullptr ? Vec{} : load(mixer.taps_bias + c);
            for (int64_t j = 0; j < mixer.reach; ++j) sum += load(rows[j] + c) * load(mixer.taps + j * channels + c);
            return silu(sum);
        };
        int64_t c = 0;
        for (; c + kLanes <= channels; c += kLanes) store(out + c, sum_at(c));
        for (; c < channels; ++c) {
            float sum = mixer.taps_bias == nullptr ? 0.0f : mixer.taps_bias[c];
            for (int64_t j = 0; j < mixer.reach; ++j) sum += rows[j][c] * mixer.taps[j * channels + c];
            out[c] = sum / (1.0f + std::exp(-sum));
        }
        const bool delta = mixer.rule == Rule::kDelta;
        const float scale = 1.0f / std::sqrt(static_cast<float>(size));
        for (int64_t g = 0; g < mixer.key_heads; ++g) {
            float *const query = out + mixer.query_at + g * size, *const key = out + mixer.key_at + g * size;
            if (delta) {
                shorten(query, size, scale);
                shorten(key, size, 1.0f);
            }
            rates[2 * mixer.heads + g] = dot(query, key, size);
        }
        const float* const steps = projected_.rows[m] + channels + mixer.heads * mixer.value_size;
        for (int64_t h = 0; h < mixer.heads; ++h) {
            float step = steps[h] + mixer.step_bias[h];
            step = step > 20.0f ? step : std::log1p(std::exp(step));
            if (given_.parents == nullptr) step = std::min(std::max(step, mixer.least), mixer.most);
            rates[h] = std::exp(mixer.decays[h] * step);
            rates[mixer.heads + h] = delta ? mixer.rate / (1.0f + std::exp(-steps[mixer.heads + h])) : step;
        }
        if (kept == nullptr) return;
        const Kept at(mixer);
        float* const to = kept + given_.which[m] * at.width;
        std::copy(projected_.rows[m], projected_.rows[m] + channels, to);
        std::copy(out + mixer.key_at, out + mixer.key_at + mixer.key_heads * size, to + at.keys);
        std::copy(rates, rates + mixer.heads, to + at.decays);
    }

    // Make a vector `scale` long.
    static void shorten(float* vector, int64_t size, float scale) {
        const float factor = scale / std::sqrt(dot(vector, vector, size) + 1e-6f);
        for (int64_t i = 0; i < size; ++i) vector[i] *= factor;
    }

    static float dot(const float* one, const float* other, int64_t size) {
        Vec sums{};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) sums += load(one + i) * load(other + i);
        float sum = sum_lanes(sums);
        for (; i < size; ++i) sum += one[i] * other[i];
        return sum;
    }

    // Follow all nodes of a text with some columns of a head's state.
    template <int vectors>
    void follow(const Mixer& mixer, const States& states, const Order::Text& text, const Columns& columns, float* kept) {
        static thread_local std::vector<float> places;
        const int64_t size = mixer.key_size, width = vectors * kLanes;
        const int64_t group = columns.head / (mixer.heads / mixer.key_heads);
        const int64_t of_head = columns.head * mixer.value_size + columns.first;  // where the columns lie among all heads'
        const int64_t entry = mixer.heads * size * mixer.value_size;
        const auto memory = [&](int64_t of) {
            return states.memories + of * entry + columns.head * size * mixer.value_size + columns.first;
        };
        const Kept at(mixer);
        if (static_cast<int64_t>(places.size()) < text.places * size * width) places.resize(text.places * size * width);
        int write = text.first_write;
        const auto keep = [&](int64_t after, const float* state, int64_t stride) {
            for (; write < text.last_write && given_.writes[3 * write + 1] == after; ++write) {
                float* const to = memory(given_.writes[3 * write + 2]);
                if (to == state) continue;
                for (int64_t k = 0; k < size; ++k)
                    std::copy(state + k * stride, state + k * stride + width, to + k * mixer.value_size);
            }
        };
        keep(0, memory(text.from), mixer.value_size);
        for (int m = text.begin; m < text.end; ++m) {
            const int source = order_.source[m], target = order_.target[m];
            const float* state = source < 0 ? memory(text.from) : places.data() + source * size * width;
            const int64_t stride = source < 0 ? mixer.value_size : width;
            const float* const query = mixed_.rows[m] + mixer.query_at + group * size;
            const float* const key = mixed_.rows[m] + mixer.key_at + group * size;
            const float* const rates = rates_.rows[m];
            const float decay = rates[columns.head], rate = rates[mixer.heads + columns.head];
            const float both = rates[2 * mixer.heads + group];
            Vec known[vectors], found[vectors];
            read_state<vectors>(state, stride, key, query, size, known, found);
            float written[kWide * kLanes];
            for (int v = 0; v < vectors; ++v) {
                const Vec value = load(mixed_.rows[m] + mixer.value_at + of_head + v * kLanes);
                const Vec some = rate * (mixer.rule == Rule::kDelta ? value - decay * known[v] : value);
                store(written + v * kLanes, some);
                Vec out = decay * found[v] + both * some;
                if (mixer.skip != nullptr) out += mixer.skip[columns.head] * value;
                store(output_.rows[m] + of_head + v * kLanes, out);
            }
            if (kept != nullptr)
                std::copy(written, written + width, kept + given_.which[m] * at.width + at.written + of_head);
            if (target < 0) continue;
            float* const next = places.data() + target * size * width;
            advance_state<vectors>(state, stride, next, width, key, written, decay, size);
            keep(m - text.begin + 1, next, width);
        }
    }

    // Norm and gate a node's output.
    void finish(const Mixer& mixer, int m) {
        float* const out = output_.rows[m];
        const float* const gates = projected_.rows[m] + mixer.channels;
        const int64_t size = mixer.heads * mixer.value_size;
        const auto gate = [&] {
            for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(out + i) * silu(load(gates + i)));
        };
        if (mixer.gate_first) gate();
        for (int64_t i = 0; i < size && mixer.normed > 0; i += mixer.normed)
            normalise(out + i, mixer.norm + i, out + i, mixer.normed, mixer.epsilon);
        if (!mixer.gate_first) gate();
    }

    const Texts given_;
    const Order order_;
    Team& team_;
    Rows projected_, mixed_, rates_, pasts_, output_;
    std::vector<int> starts_;
};

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
                const float* const of = node(place);
                advance_state<vectors()>(state, mixer.value_size, after, mixer.value_size, of + at.keys + group * size,
                                         of + at.written + columns.head * mixer.value_size + columns.first,
                                         of[at.decays + columns.head], size);
            }
        });
    });
}

}  // namespace drafter
