// Forward of a decoder over the nodes of draft trees, on a CPU, in fp32: RMSNorm, rotary positions, gated MLPs or experts.
//
// Called from Python by way of ctypes; `build.py` declares the same structures, and `blocks.py` says what families have.

#include <numeric>
#include <optional>
#include <vector>

#include "attention.h"
#include "mixing.h"
#include "norms.h"
#include "products.h"
#include "rows.h"
#include "team.h"
#include "vectors.h"

namespace drafter {

// MLPs of which each node takes a few: those with the largest logits, weighted by the softmax of all.
struct Experts {
    Matrix router;                  // `[E, d]`
    const Matrix *gate_up, *down;   // of each expert
    int64_t taken;                  // by each node
    int64_t normed;                 // whether a node's weights are divided by their sum
};

struct Layer {
    const float *attention_norm, *mlp_norm;      // `[d]`: of what goes in; null if it goes in as it is
    const float *attention_after, *mlp_after;    // `[d]`: of what comes out, before it is added; or null
    const float *query_norm, *key_norm;          // `[D]`; `[H * D]` if `joint_heads`; or null
    const float *cosines, *sines;                // `[positions, rotated / 2]`
    int64_t window;                              // positions that a node sees, backwards from its own
    const Experts* experts;                      // instead of the MLP; or null
    const Mixer* mixer;                          // instead of attention; or null
    Matrix qkv, output, gate_up, down;
};

struct Decoder {
    const Layer* layers;
    const float* embedding;   // `[V, d]`
    const float* final_norm;  // `[d]`
    Matrix head;
    int64_t positions, hidden, heads, kv_heads, head_size, rotated, vocabulary;
    int64_t joint_heads;  // whether a node's heads are normed together
    int64_t gated;        // whether attention's output is gated: the gates follow the values
    float epsilon, scale, score_cap, embedding_scale, residual_scale, logit_scale, logit_cap;  // caps: 0 for none
    Gate gate;
};

// Nodes of B rows, and where the results go.
struct Forward {
    float* const* keys;    // of each layer: `[blocks, positions of a block, kv_heads, D]`; null of a mixer's
    float* const* values;
    const Texts* texts;    // as mixers see the nodes; null if there are none
    const States* states;  // of each layer
    float* const* kept;    // of each layer; see `Mixing::run`
    const int64_t* blocks;      // `[slots, blocks of a slot]`: where they are
    int64_t block, slot_blocks;  // positions of a block, blocks of a slot
    int64_t first_slot, rows, nodes;  // B rows of N nodes
    const int64_t* tokens;     // `[B, N]`
    const int64_t* lengths;    // `[B]`
    const int64_t* positions;  // `[B, N]`
    const uint8_t* ancestors;  // `[B, N, N]`; null where each row is a chain
    const int64_t* which;      // `[M]` nodes that are computed, rising, as places in `[B * N]`
    int64_t count;             // M
    const int64_t* taps;       // `[K]` layers whose outputs are wanted; -1 is the LM head's input
    int64_t tap_count;
    float* hidden;             // `[B * N, K * d]` or null
    float* logits;             // `[B * N - logits_from, V]` or null
    int64_t logits_from;       // logits are computed of the nodes `which[logits_from:]`
    int64_t layers;            // how many of the first layers are run
    int64_t threads;
};

namespace {

// The M nodes of a forward by row, in terms of the cache.
struct Plan {
    struct Row {
        int64_t slot, prefix;
        int begin, end;  // its nodes among the M
    };
    struct Seen {
        const int64_t* listed;
        int64_t first, count;
        int64_t position(int64_t index) const { return listed ? listed[index] : first + index; }
    };
    std::vector<Row> rows;
    std::vector<int64_t> place;     // of each node: its position in the slot
    std::vector<int64_t> position;  // of each node: its position in the text
    std::vector<int64_t> seen;      // ancestors of all nodes, as positions in the slot
    std::vector<int64_t> seen_at;   // where each node's begin
    bool fits = true;               // whether all nodes are in the cache, and their tokens in the vocabulary

    Plan(const Forward& forward, int64_t positions, int64_t vocabulary) {
        const int64_t count = forward.count, nodes = forward.nodes, capacity = forward.block * forward.slot_blocks;
        place.resize(count);
        position.resize(count);
        seen_at.assign(1, 0);
        for (int64_t m = 0; m < count; ++m) {
            const int64_t row = forward.which[m] / nodes, node = forward.which[m] % nodes;
            const int64_t length = forward.lengths[row];
            if (rows.empty() || rows.back().slot != forward.first_slot + row)
                rows.push_back({forward.first_slot + row, length, static_cast<int>(m), static_cast<int>(m)});
            rows.back().end = static_cast<int>(m) + 1;
            place[m] = length + node;
            const int64_t token = forward.tokens[forward.which[m]];
            fits &= length >= 0 && place[m] < capacity && token >= 0 && token < vocabulary;
            position[m] = std::min(forward.positions[forward.which[m]], positions - 1);
            if (forward.ancestors != nullptr) {
                const uint8_t* line = forward.ancestors + forward.which[m] * nodes;
                for (int64_t other = 0; other <= node; ++other)
                    if (line[other]) seen.push_back(length + other);
                seen_at.push_back(static_cast<int64_t>(seen.size()));
            }
        }
    }
};

// Nodes of one row whose attention one thread computes at a time.
constexpr int kGroup = 16;

struct Group {
    int row, begin, end;
};

class Run {
  public:
    Run(const Decoder& decoder, const Forward& forward, Team& team)
        : decoder_(decoder), forward_(forward), team_(team), plan_(forward, decoder.positions, decoder.vocabulary),
          rows_(static_cast<int>(forward.count)) {
        for (size_t row = 0; row < plan_.rows.size(); ++row)
            for (int begin = plan_.rows[row].begin; begin < plan_.rows[row].end; begin += kGroup)
                groups_.push_back({static_cast<int>(row), begin, std::min(begin + kGroup, plan_.rows[row].end)});
        const int64_t d = decoder.hidden, gates = decoder.gated ? decoder.heads : 0;
        const int64_t qkv = (decoder.heads + 2 * decoder.kv_heads + gates) * decoder.head_size;
        if (forward.texts != nullptr) mixing_.emplace(*forward.texts, team);
        stream_.reserve(rows_, d);
        normed_.reserve(rows_, d);
        added_.reserve(rows_, d);
        qkv_.reserve(rows_, qkv);
        mixed_.reserve(rows_, decoder.heads * decoder.head_size);
    }

    // Whether it could be done.
    bool all() {
        if (!plan_.fits) return false;
        share(rows_, [&](int m) {
            const int64_t token = forward_.tokens[forward_.which[m]];
            const float* from = decoder_.embedding + token * decoder_.hidden;
            for (int64_t i = 0; i < decoder_.hidden; ++i) stream_.rows[m][i] = decoder_.embedding_scale * from[i];
        });
        for (int64_t layer = 0; layer < forward_.layers; ++layer) {
            const Layer& one = decoder_.layers[layer];
            if (one.mixer != nullptr)
                add(one.mixer->out,
                    mixing_->run(*one.mixer, forward_.states[layer], normed(one.attention_norm).numbers.data(),
                                 forward_.kept[layer]),
                    one.attention_after);
            else
                attention(one, forward_.keys[layer], forward_.values[layer]);
            if (one.experts != nullptr)
                experts(*one.experts, normed(one.mlp_norm));
            else
                mlp(one);
            take(layer, stream_);
        }
        norm(stream_, decoder_.final_norm);
        take(-1, normed_);
        if (forward_.logits != nullptr) logits();
        return true;
    }

  private:
    // Work on `count` nodes, in chunks that are worth sharing.
    template <class Work>
    void share(int count, const Work& work) {
        const int size = 4;
        team_.loop((count + size - 1) / size, [&](int chunk) {
            for (int m = chunk * size; m < std::min(count, (chunk + 1) * size); ++m) work(m);
        });
    }

    void norm(const Rows& from, const float* weight) {
        share(rows_, [&](int m) {
            normalise(from.rows[m], weight, normed_.rows[m], decoder_.hidden, decoder_.epsilon);
        });
    }

    // The stream as a part of a layer takes it.
    const Rows& normed(const float* weight) {
        if (weight == nullptr) return stream_;
        norm(stream_, weight);
        return normed_;
    }

    template <End end>
    void product(const Matrix& matrix, const Rows& in, const Rows& out, float factor = 1.0f) {
        multiply_all<end>(team_, {&matrix, in.numbers.data(), out.rows.data(), rows_, factor, decoder_.gate});
    }

    // Add a product to the stream, or its norm.
    void add(const Matrix& matrix, const Rows& in, const float* after) {
        if (after == nullptr) return product<End::kAdd>(matrix, in, stream_, decoder_.residual_scale);
        product<End::kStore>(matrix, in, added_);
        share(rows_, [&](int m) {
            float *to = stream_.rows[m], *from = added_.rows[m];
            normalise(from, after, from, decoder_.hidden, decoder_.epsilon);
            for (int64_t i = 0; i < decoder_.hidden; ++i) to[i] += decoder_.residual_scale * from[i];
        });
    }

    void attention(const Layer& layer, float* keys, float* values) {
        product<End::kStore>(layer.qkv, normed(layer.attention_norm), qkv_);
        share(rows_, [&](int m) { place_keys(layer, m, keys, values); });
        // A row's positions hold all heads, so one thread had better take them together. Few rows are shared by heads.
        const int all_heads = static_cast<int>(decoder_.kv_heads);
        const int together = groups_.size() >= 4 * static_cast<size_t>(forward_.threads) ? all_heads : 1;
        const int parts = all_heads / together;
        team_.loop(static_cast<int>(groups_.size()) * parts, [&](int chunk) {
            mix(layer, groups_[chunk / parts], chunk % parts * together, together, keys, values);
        });
        const int64_t size = decoder_.heads * decoder_.head_size, gates = size + 2 * decoder_.kv_heads * decoder_.head_size;
        if (decoder_.gated)
            share(rows_, [&](int m) { gate_softly(qkv_.rows[m] + gates, mixed_.rows[m], size); });
        add(layer.output, mixed_, layer.attention_after);
    }

    void mlp(const Layer& layer) {
        gated_.reserve(rows_, layer.down.inputs);
        product<End::kGated>(layer.gate_up, normed(layer.mlp_norm), gated_);
        add(layer.down, gated_, layer.mlp_after);
    }

    // Each expert's weights are read once for all nodes that take it. A node's sums are in the order of its experts.
    void experts(const Experts& experts, const Rows& in) {
        const int64_t count = experts.router.outputs, d = decoder_.hidden;
        routed_.reserve(rows_, count);
        product<End::kStore>(experts.router, in, routed_);
        share(rows_, [&](int m) { route(routed_.rows[m], count, experts); });
        std::vector<int> nodes;
        std::vector<float*> out;
        for (int64_t expert = 0; expert < count; ++expert) {
            nodes.clear();
            for (int m = 0; m < rows_; ++m)
                if (routed_.rows[m][expert] > 0.0f) nodes.push_back(m);
            const int some = static_cast<int>(nodes.size());
            if (some == 0) continue;
            gathered_.reserve(some, d);
            gated_.reserve(some, experts.down[expert].inputs);
            out.clear();
            for (int i = 0; i < some; ++i) {
                std::copy(in.rows[nodes[i]], in.rows[nodes[i]] + d, gathered_.rows[i]);
                out.push_back(stream_.rows[nodes[i]]);
            }
            multiply_all<End::kGated>(team_, {&experts.gate_up[expert], gathered_.numbers.data(), gated_.rows.data(), some,
                                              1.0f, decoder_.gate});
            for (int i = 0; i < some; ++i) {
                const float weight = routed_.rows[nodes[i]][expert];
                float* row = gated_.rows[i];
                for (int64_t j = 0; j < experts.down[expert].inputs; ++j) row[j] *= weight;
            }
            multiply_all<End::kAdd>(
                team_, {&experts.down[expert], gated_.numbers.data(), out.data(), some, decoder_.residual_scale});
        }
    }

    // Turn a node's logits of experts into their weights, which are 0 for those that it does not take.
    static void route(float* logits, int64_t count, const Experts& experts) {
        std::vector<int64_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + experts.taken, order.end(), [&](int64_t one, int64_t other) {
            return logits[one] != logits[other] ? logits[one] > logits[other] : one < other;
        });
        const float top = logits[order[0]];
        float sum = 0.0f;
        for (int64_t i = 0; i < count; ++i) {
            logits[order[i]] = std::exp(logits[order[i]] - top);
            if (i < experts.taken || !experts.normed) sum += logits[order[i]];
        }
        for (int64_t i = 0; i < count; ++i)
            logits[order[i]] = i < experts.taken ? logits[order[i]] / sum : 0.0f;
    }

    // Rotate a node's queries and keys, and write its keys and values behind its row's committed positions.
    void place_keys(const Layer& layer, int m, float* keys, float* values) {
        const int64_t size = decoder_.head_size, half = decoder_.rotated / 2;
        const float* cosines = layer.cosines + plan_.position[m] * half;
        const float* sines = layer.sines + plan_.position[m] * half;
        float* head = qkv_.rows[m];
        if (decoder_.joint_heads) {
            float* const keys_of_node = head + decoder_.heads * size;
            normalise(head, layer.query_norm, head, decoder_.heads * size, decoder_.epsilon);
            normalise(keys_of_node, layer.key_norm, keys_of_node, decoder_.kv_heads * size, decoder_.epsilon);
        }
        for (int64_t h = 0; h < decoder_.heads + decoder_.kv_heads; ++h, head += size) {
            const float* weight = h < decoder_.heads ? layer.query_norm : layer.key_norm;
            if (weight != nullptr && !decoder_.joint_heads) normalise(head, weight, head, size, decoder_.epsilon);
            rotate(head, cosines, sines, half);
        }
        const int64_t width = decoder_.kv_heads * size;
        const int64_t slot = forward_.which[m] / forward_.nodes + forward_.first_slot;
        std::copy(head - width, head, lane(keys, slot, 0).at(plan_.place[m]));
        std::copy(head, head + width, lane(values, slot, 0).at(plan_.place[m]));
    }

    // A slot's keys or values, from a head on.
    Lane lane(float* numbers, int64_t slot, int kv_head) const {
        return {numbers + kv_head * decoder_.head_size, decoder_.kv_heads * decoder_.head_size,
                forward_.blocks + slot * forward_.slot_blocks, forward_.block};
    }

    void mix(const Layer& layer, const Group& group, int kv_head, int kv_heads, float* keys, float* values) {
        switch (decoder_.head_size / kLanes) {
#define DRAFTER_HEAD(vectors) \
    case vectors:             \
        return mix_heads<vectors>(layer, group, kv_head, kv_heads, keys, values);
            DRAFTER_HEAD_SIZES
#undef DRAFTER_HEAD
        }
    }

    template <int vectors>
    void mix_heads(const Layer& layer, const Group& group, int kv_head, int kv_heads, float* keys, float* values) {
        static thread_local std::vector<float> scores;
        const Plan::Row& row = plan_.rows[group.row];
        const int64_t size = decoder_.head_size;
        const int heads = static_cast<int>(decoder_.heads / decoder_.kv_heads), first_head = kv_head * heads;
        // In a chain, the nodes before the group are ancestors of all in it.
        const int64_t prefix = forward_.ancestors ? row.prefix : plan_.place[group.begin];
        attend<vectors>(
            lane(keys, row.slot, kv_head), lane(values, row.slot, kv_head), prefix,
            {group.end - group.begin, kv_heads, heads}, {decoder_.scale, decoder_.score_cap, layer.window},
            [&](int node) -> Plan::Seen {
                if (!forward_.ancestors) return {nullptr, prefix, node + 1};
                const int64_t from = plan_.seen_at[group.begin + node], to = plan_.seen_at[group.begin + node + 1];
                return {plan_.seen.data() + from, 0, to - from};
            },
            [&](int node, int head) { return qkv_.rows[group.begin + node] + (first_head + head) * size; },
            [&](int node, int head) { return mixed_.rows[group.begin + node] + (first_head + head) * size; }, scores);
    }

    // Hand out a layer's output, if it is wanted.
    void take(int64_t layer, const Rows& from) {
        const int64_t d = decoder_.hidden, width = forward_.tap_count * d;
        for (int64_t tap = 0; tap < forward_.tap_count; ++tap) {
            if (forward_.taps[tap] != layer) continue;
            for (int m = 0; m < rows_; ++m)
                std::copy(from.rows[m], from.rows[m] + d, forward_.hidden + forward_.which[m] * width + tap * d);
        }
    }

    void logits() {
        const int64_t from = forward_.logits_from, size = decoder_.vocabulary;
        const int count = rows_ - static_cast<int>(from);
        std::vector<float*> out(count);
        for (int m = 0; m < count; ++m) out[m] = forward_.logits + (forward_.which[from + m] - from) * size;
        multiply_all<End::kStore>(
            team_, {&decoder_.head, normed_.rows[from], out.data(), count, decoder_.logit_scale});
        const float cap = decoder_.logit_cap;
        if (cap <= 0.0f) return;
        constexpr int64_t kPart = 1024 * kLanes;  // a row is long enough to be shared
        const int64_t parts = (size + kPart - 1) / kPart;
        team_.loop(static_cast<int>(count * parts), [&](int chunk) {
            float* const row = out[chunk / parts];
            int64_t i = chunk % parts * kPart;
            const int64_t end = std::min(size, i + kPart);
            for (; i + kLanes <= end; i += kLanes) store(row + i, cap * tanh(load(row + i) / cap));
            for (; i < end; ++i) row[i] = cap * std::tanh(row[i] / cap);
        });
    }

    const Decoder& decoder_;
    const Forward& forward_;
    Team& team_;
    Plan plan_;
    int rows_;
    std::vector<Group> groups_;
    std::optional<Mixing> mixing_;
    Rows stream_, normed_, added_, qkv_, mixed_, gated_, routed_, gathered_;
};

// bf16 by its bits: the upper half of a float's.
uint32_t upper_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits >> 16;
}

}  // namespace
}  // namespace drafter

extern "C" {

int64_t drafter_lanes() { return drafter::kLanes; }

// Whether attention is compiled for heads of `size` numbers.
int32_t drafter_takes_heads_of(int64_t size) {
    if (size % drafter::kLanes) return 0;
    switch (size / drafter::kLanes) {
#define DRAFTER_HEAD(vectors) \
    case vectors:             \
        return 1;
        DRAFTER_HEAD_SIZES
#undef DRAFTER_HEAD
    }
    return 0;
}

// Size in bytes of a matrix laid out by `drafter_pack`.
int64_t drafter_packed_bytes(int64_t outputs, int64_t inputs, int32_t half) {
    const int64_t blocks = (outputs + drafter::kBlock - 1) / drafter::kBlock;
    return blocks * inputs * drafter::kBlock * (half ? 2 : 4);
}

// Lay out weights `[outputs, inputs]`; in bf16 only an even number of inputs. `order[j]` is the output that column j holds;
// -1 leaves the column zero.
void drafter_pack(const float* weights, int64_t inputs, const int64_t* order, int64_t columns, int32_t half, void* out) {
    using namespace drafter;
    const int64_t blocks = (columns + kBlock - 1) / kBlock;
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; ++block) {
        auto at = [&](int64_t column, int64_t k) {
            const int64_t j = block * kBlock + column;
            return j < columns && order[j] >= 0 ? weights[order[j] * inputs + k] : 0.0f;
        };
        if (half) {
            auto* to = static_cast<uint32_t*>(out) + block * inputs / 2 * kBlock;
            for (int64_t k = 0; k < inputs; k += 2)
                for (int64_t column = 0; column < kBlock; ++column)
                    *to++ = upper_half(at(column, k)) | upper_half(at(column, k + 1)) << 16;
        } else {
            auto* to = static_cast<float*>(out) + block * inputs * kBlock;
            for (int64_t k = 0; k < inputs; ++k)
                for (int64_t column = 0; column < kBlock; ++column) *to++ = at(column, k);
        }
    }
}

// Returns 0 if a node is outside the cache or a token outside the vocabulary. Nothing has been done then.
int32_t drafter_forward(const drafter::Decoder* decoder, const drafter::Forward* forward) {
    bool done = false;
    drafter::Team::run(static_cast<int>(forward->threads), [&](drafter::Team& team) {
        done = drafter::Run(*decoder, *forward, team).all();
    });
    return done;
}
}
