// What a frame of a CTC head emits after each of several paths: the joint network, the LM head and the softmax.
//
// Called from Python by way of ctypes; `library.py` declares the same structures.

#include <algorithm>
#include <vector>

#include "norms.h"
#include "products.h"
#include "rows.h"
#include "team.h"

namespace drafter {

struct JointLayer {
    const float *norm_weight, *norm_bias;  // `[d]`
    Matrix inner, out;
};

struct Joint {
    Matrix out;  // from terms to states
    const JointLayer* layers;
    const float *norm_weight, *norm_bias;  // `[d]`
    const float *blank_weight, *blank_bias;  // `[d]`, `[1]`
    Matrix head;
    int64_t layer_count, terms, hidden;
};

// M paths, all at the same frame.
struct Score {
    const float* frame_states;  // of row r: `frame_states + r * state_stride`, `[d]`
    const float* frame_terms;   // likewise, `[terms]`
    int64_t state_stride, term_stride;
    const int64_t* rows;       // `[M]`
    const float* label_terms;  // `[M, terms]`
    int64_t count;          // M
    float* shares;          // `[M, outputs of the head]` softmax of the logits
    float* blanks;          // `[M]` probability of the blank
    int64_t threads;
};

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Softmax in place.
void soften_row(float* row, int64_t size) {
    float top = row[0];
    for (int64_t i = 1; i < size; ++i) top = std::max(top, row[i]);
    Vec sums{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vec weights = exp(load(row + i) - top);
        store(row + i, weights);
        sums += weights;
    }
    float sum = sum_lanes(sums);
    for (; i < size; ++i) sum += row[i] = std::exp(row[i] - top);
    const float norm = 1.0f / sum;
    for (i = 0; i < size; ++i) row[i] *= norm;
}

void score(const Joint& joint, const Score& asked, Team& team) {
    const int count = static_cast<int>(asked.count);
    const int64_t d = joint.hidden;
    Rows terms, states, normed, inner;
    terms.reserve(count, joint.terms);
    states.reserve(count, d);
    normed.reserve(count, d);
    team.loop(count, [&](int path) {
        const float* frame = asked.frame_terms + asked.rows[path] * asked.term_stride;
        const float* label = asked.label_terms + path * joint.terms;
        float* sum = terms.rows[path];
        int64_t i = 0;
        for (; i + kLanes <= joint.terms; i += kLanes) store(sum + i, silu(load(frame + i) + load(label + i)));
        for (; i < joint.terms; ++i) sum[i] = (frame[i] + label[i]) * sigmoid(frame[i] + label[i]);
        const float* state = asked.frame_states + asked.rows[path] * asked.state_stride;
        std::copy(state, state + d, states.rows[path]);
    });
    multiply_all<End::kAdd>(team, {&joint.out, terms.numbers.data(), states.rows.data(), count});
    for (int64_t layer = 0; layer < joint.layer_count; ++layer) {
        const JointLayer& one = joint.layers[layer];
        inner.reserve(count, one.inner.outputs);
        team.loop(count, [&](int path) {
            normalise_layer(states.rows[path], one.norm_weight, one.norm_bias, normed.rows[path], d);
        });
        multiply_all<End::kSilu>(team, {&one.inner, normed.numbers.data(), inner.rows.data(), count});
        multiply_all<End::kAdd>(team, {&one.out, inner.numbers.data(), states.rows.data(), count});
    }
    std::vector<float*> shares(count);
    team.loop(count, [&](int path) {
        float* state = normed.rows[path];
        normalise_layer(states.rows[path], joint.norm_weight, joint.norm_bias, state, d);
        float sum = joint.blank_bias[0];
        for (int64_t i = 0; i < d; ++i) sum += state[i] * joint.blank_weight[i];
        asked.blanks[path] = sigmoid(sum);
        shares[path] = asked.shares + path * joint.head.outputs;
    });
    multiply_all<End::kStore>(team, {&joint.head, normed.numbers.data(), shares.data(), count});
    team.loop(count, [&](int path) { soften_row(shares[path], joint.head.outputs); });
}

}  // namespace
}  // namespace drafter

extern "C" void drafter_score(const drafter::Joint* joint, const drafter::Score* asked) {
    drafter::Team::run(static_cast<int>(asked->threads), [&](drafter::Team& team) {
        drafter::score(*joint, *asked, team);
    });
}
