// What frames of a CTC head emit after paths: the joint network, the LM head and the softmax.
#pragma once

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
    Matrix frames;  // from frame states to terms
    Matrix out;     // from terms to states
    const JointLayer* layers;
    const float *norm_weight, *norm_bias;    // `[d]`
    const float *blank_weight, *blank_bias;  // `[d]`, `[1]`
    Matrix head;
    int64_t layer_count, terms, hidden;  // 0 layers and terms: frames know no labels
};

// A frame after a path: where its state is, what it adds to the network's first layer, and where its shares go.
struct Question {
    const float *state, *terms;  // `[d]`, `[terms]`
    float* shares;               // `[outputs of the head]`
    float blank;                 // the answer: the blank's probability
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Softmax in place.
inline void soften_row(float* row, int64_t size) {
    float top = row[0];
    int64_t i = 0;
    if (size >= kLanes) {
        Vec largest = load(row);
        for (i = kLanes; i + kLanes <= size; i += kLanes) {
            const Vec some = load(row + i);
            largest = some > largest ? some : largest;
        }
        top = largest_lane(largest);
    }
    for (; i < size; ++i) top = std::max(top, row[i]);
    Vec sums{};
    for (i = 0; i + kLanes <= size; i += kLanes) {
        const Vec weights = exp(load(row + i) - top);
        store(row + i, weights);
        sums += weights;
    }
    float sum = sum_lanes(sums);
    for (; i < size; ++i) sum += row[i] = std::exp(row[i] - top);
    const float norm = 1.0f / sum;
    for (i = 0; i + kLanes <= size; i += kLanes) store(row + i, load(row + i) * norm);
    for (; i < size; ++i) row[i] *= norm;
}

// Answers many questions at a time, so that the weights are read once for all of them.
class JointNetwork {
  public:
    // `label_terms(question, sum)` adds to `sum` `[terms]` what the path's labels add to the first layer.
    template <class LabelTerms>
    void answer(const Joint& joint, std::vector<Question>& questions, const LabelTerms& label_terms, Team& team) {
        const int count = static_cast<int>(questions.size());
        const int64_t d = joint.hidden;
        terms_.reserve(count, joint.terms);
        states_.reserve(count, d);
        normed_.reserve(count, d);
        team.loop(count, [&](int q) {
            float* sum = terms_.rows[q];
            std::copy(questions[q].terms, questions[q].terms + joint.terms, sum);
            label_terms(q, sum);
            int64_t i = 0;
            for (; i + kLanes <= joint.terms; i += kLanes) store(sum + i, silu(load(sum + i)));
            for (; i < joint.terms; ++i) sum[i] *= sigmoid(sum[i]);
            std::copy(questions[q].state, questions[q].state + d, states_.rows[q]);
        });
        if (joint.terms > 0)
            multiply_all<End::kAdd>(team, {&joint.out, terms_.numbers.data(), states_.rows.data(), count});
        for (int64_t layer = 0; layer < joint.layer_count; ++layer) {
            const JointLayer& one = joint.layers[layer];
            inner_.reserve(count, one.inner.outputs);
            team.loop(count, [&](int q) {
                normalise_layer(states_.rows[q], one.norm_weight, one.norm_bias, normed_.rows[q], d);
            });
            multiply_all<End::kSilu>(team, {&one.inner, normed_.numbers.data(), inner_.rows.data(), count});
            multiply_all<End::kAdd>(team, {&one.out, inner_.numbers.data(), states_.rows.data(), count});
        }
        shares_.resize(count);
        team.loop(count, [&](int q) {
            float* state = normed_.rows[q];
            normalise_layer(states_.rows[q], joint.norm_weight, joint.norm_bias, state, d);
            float sum = joint.blank_bias[0];
            for (int64_t i = 0; i < d; ++i) sum += state[i] * joint.blank_weight[i];
            questions[q].blank = sigmoid(sum);
            shares_[q] = questions[q].shares;
        });
        multiply_all<End::kStore>(team, {&joint.head, normed_.numbers.data(), shares_.data(), count});
        team.loop(count, [&](int q) { soften_row(shares_[q], joint.head.outputs); });
    }

  private:
    Rows terms_, states_, normed_, inner_;
    std::vector<float*> shares_;
};

}  // namespace drafter
