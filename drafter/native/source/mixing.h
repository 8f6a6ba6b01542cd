// Mixers over the nodes of a forward: prompts, plain steps and draft trees.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "mixer.h"
#include "norms.h"
#include "products.h"
#include "rows.h"
#include "team.h"
#include "texts.h"
#include "vectors.h"

namespace drafter {

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
        output_.reserve(count, mixer.out.inputs);
        multiply_all<End::kStore>(team_, {&mixer.in, in, projected_.rows.data(), count});
        if (mixer.rule == Rule::kPlain)
            each_node([&](int, int m) { gate(projected_.rows[m] + 2 * mixer.channels, projected_.rows[m], mixer.channels); });
        const int64_t entry = mixer.channels * mixer.reach;
        const int texts = static_cast<int>(order_.texts.size());
        pasts_.reserve(texts, entry);
        team_.loop(texts, [&](int t) {  // each input of the past by itself
            const float* from = states.inputs + order_.texts[t].from * entry;
            for (int64_t j = 0; j < mixer.reach; ++j)
                for (int64_t c = 0; c < mixer.channels; ++c) pasts_.rows[t][j * mixer.channels + c] = from[c * mixer.reach + j];
        });
        each_node([&](int t, int m) { prepare(mixer, t, m, kept); });
        if (mixer.rule == Rule::kSelective) select(mixer, kept);
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
        float* const out = mixed_.rows[m];
        const int64_t channels = mixer.channels;
        const bool plain = mixer.rule == Rule::kPlain;
        const auto sum_at = [&](int64_t c) {
            Vec sum = mixer.taps_bias == nullptr ? Vec{} : load(mixer.taps_bias + c);
            for (int64_t j = 0; j < mixer.reach; ++j) sum += load(rows[j] + c) * load(mixer.taps + j * channels + c);
            return plain ? sum : silu(sum);
        };
        int64_t c = 0;
        for (; c + kLanes <= channels; c += kLanes) store(out + c, sum_at(c));
        for (; c < channels; ++c) {
            float sum = mixer.taps_bias == nullptr ? 0.0f : mixer.taps_bias[c];
            for (int64_t j = 0; j < mixer.reach; ++j) sum += rows[j][c] * mixer.taps[j * channels + c];
            out[c] = plain ? sum : sum / (1.0f + std::exp(-sum));
        }
        if (kept != nullptr) {
            float* const to = kept + given_.which[m] * Kept(mixer).width;
            std::copy(projected_.rows[m], projected_.rows[m] + channels, to);
        }
        if (mixer.rule == Rule::kDelta || mixer.rule == Rule::kMamba) prepare_heads(mixer, m, kept);
    }

    void prepare_heads(const Mixer& mixer, int m, float* kept) {
        float *const mixed = mixed_.rows[m], *const rates = rates_.rows[m];
        const bool delta = mixer.rule == Rule::kDelta;
        const int64_t size = mixer.key_size;
        const float scale = 1.0f / std::sqrt(static_cast<float>(size));
        for (int64_t g = 0; g < mixer.key_heads; ++g) {
            float *const query = mixed + mixer.query_at + g * size, *const key = mixed + mixer.key_at + g * size;
            if (delta) {
                shorten(query, size, scale);
                shorten(key, size, 1.0f);
            }
            rates[2 * mixer.heads + g] = dot(query, key, size);
        }
        const float* const steps = projected_.rows[m] + mixer.channels + mixer.heads * mixer.value_size;
        for (int64_t h = 0; h < mixer.heads; ++h) {
            float step = soft(steps[h] + mixer.step_bias[h]);
            if (given_.parents == nullptr) step = std::min(std::max(step, mixer.least), mixer.most);
            rates[h] = std::exp(mixer.decays[h] * step);
            rates[mixer.heads + h] = delta ? mixer.rate / (1.0f + std::exp(-steps[mixer.heads + h])) : step;
        }
        if (kept == nullptr) return;
        const Kept at(mixer);
        float* const to = kept + given_.which[m] * at.width;
        std::copy(mixed + mixer.key_at, mixed + mixer.key_at + mixer.key_heads * size, to + at.keys);
        std::copy(rates, rates + mixer.heads, to + at.decays);
    }

    // Find the steps, keys and queries of Mamba 1.
    void select(const Mixer& mixer, float* kept) {
        const int count = static_cast<int>(given_.count);
        const int64_t rank = mixer.step.inputs, size = mixer.key_size;
        selected_.reserve(count, mixer.select.outputs);
        ranks_.reserve(count, rank);
        steps_.reserve(count, mixer.value_size);
        multiply_all<End::kStore>(team_, {&mixer.select, mixed_.numbers.data(), selected_.rows.data(), count});
        each_node([&](int, int m) {
            float* const row = selected_.rows[m];
            const float* const norms = mixer.select_norms;
            if (norms != nullptr) {
                normalise(row, norms, row, rank, mixer.epsilon);
                for (int64_t at = rank; at < rank + 2 * size; at += size)
                    normalise(row + at, norms + at, row + at, size, mixer.epsilon);
            }
            std::copy(row, row + rank, ranks_.rows[m]);
        });
        multiply_all<End::kStore>(team_, {&mixer.step, ranks_.numbers.data(), steps_.rows.data(), count});
        each_node([&](int, int m) {
            float* const steps = steps_.rows[m];
            for (int64_t v = 0; v < mixer.value_size; ++v) steps[v] = soft(steps[v]);
            if (kept == nullptr) return;
            const Kept at(mixer);
            float *const to = kept + given_.which[m] * at.width, *const keys = selected_.rows[m] + rank;
            std::copy(keys, keys + size, to + at.keys);
            std::copy(steps, steps + mixer.value_size, to + at.decays);
        });
    }

    // softplus, as PyTorch has it.
    static float soft(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

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
            float* const next = target < 0 ? nullptr : places.data() + target * size * width;
            const float* const values = mixed_.rows[m] + mixer.value_at + of_head;
            float *const out = output_.rows[m] + of_head, written[kWide * kLanes];
            if (mixer.rule == Rule::kSelective) {
                const float *const key = selected_.rows[m] + mixer.step.inputs, *const steps = steps_.rows[m] + of_head;
                for (int64_t i = 0; i < width; i += kLanes) store(written + i, load(steps + i) * load(values + i));
                select_state<vectors>(state, stride, next, width, key, key + size, written, steps, mixer.decays + of_head,
                                      mixer.value_size, size, out);
                for (int64_t i = 0; i < width; i += kLanes)
                    store(out + i, load(out + i) + load(mixer.skip + of_head + i) * load(values + i));
            } else {
                const float* const query = mixed_.rows[m] + mixer.query_at + group * size;
                const float* const key = mixed_.rows[m] + mixer.key_at + group * size;
                const float* const rates = rates_.rows[m];
                const float decay = rates[columns.head], rate = rates[mixer.heads + columns.head];
                const float both = rates[2 * mixer.heads + group];
                Vec known[vectors], found[vectors];
                read_state<vectors>(state, stride, key, query, size, known, found);
                for (int v = 0; v < vectors; ++v) {
                    const Vec value = load(values + v * kLanes);
                    const Vec some = rate * (mixer.rule == Rule::kDelta ? value - decay * known[v] : value);
                    store(written + v * kLanes, some);
                    const Vec read = decay * found[v] + both * some;
                    store(out + v * kLanes, mixer.skip == nullptr ? read : read + mixer.skip[columns.head] * value);
                }
                if (next != nullptr) advance_state<vectors>(state, stride, next, width, key, written, decay, size);
            }
            if (kept != nullptr)
                std::copy(written, written + width, kept + given_.which[m] * at.width + at.written + of_head);
            if (next != nullptr) keep(m - text.begin + 1, next, width);
        }
    }

    static void gate(const float* gates, float* values, int64_t size) {
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store(values + i, load(values + i) * load(gates + i));
        for (; i < size; ++i) values[i] *= gates[i];
    }

    // Norm and gate a node's output.
    void finish(const Mixer& mixer, int m) {
        float* const out = output_.rows[m];
        float* const gates = projected_.rows[m] + mixer.channels;
        if (mixer.rule == Rule::kPlain) {
            std::copy(mixed_.rows[m], mixed_.rows[m] + mixer.channels, out);
            return gate(gates, out, mixer.channels);
        }
        const int64_t size = mixer.heads * mixer.value_size;
        for (int64_t i = 0; i < size; i += kLanes) store(gates + i, silu(load(gates + i)));
        if (mixer.gate_first) gate(gates, out, size);
        for (int64_t i = 0; i < size && mixer.normed > 0; i += mixer.normed)
            normalise(out + i, mixer.norm + i, out + i, mixer.normed, mixer.epsilon);
        if (!mixer.gate_first) gate(gates, out, size);
    }

    const Texts given_;
    const Order order_;
    Team& team_;
    Rows projected_, mixed_, rates_, selected_, ranks_, steps_, pasts_, output_;
    std::vector<int> starts_;
};

}  // namespace drafter
