// The draft trees that searches find: nodes in the order in which they were found, and the best of them as a tree.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace drafter {

// Where trees of B texts are written to, `[B, size]` each; their draft nodes have the ids of the head's outputs.
struct Trees {
    int64_t *tokens, *parents, *depths;
    float* log_probs;
};

struct Candidate {
    float prob;
    int token, parent, depth, path;  // parent: index among the row's candidates, -1 for the root
};

inline bool is_likelier(const Candidate& one, const Candidate& other) { return one.prob > other.prob; }

// The candidates of one text's tree, those of a depth behind those of the depth before.
class Trie {
  public:
    void clear() { all_.clear(); }
    void add(const Candidate& one) { all_.push_back(one); }
    int count() const { return static_cast<int>(all_.size()); }
    const Candidate& operator[](int node) const { return all_[node]; }

    // A node that is not more probable than this can have no child in the tree of the `most` best nodes.
    float limit(int64_t most, float least) {
        if (static_cast<int64_t>(all_.size()) < most) return least;
        probs_.clear();
        for (const Candidate& one : all_) probs_.push_back(one.prob);
        std::nth_element(probs_.begin(), probs_.begin() + (most - 1), probs_.end(), std::greater<float>());
        return std::max(least, probs_[most - 1]);
    }

    // Write the most probable candidates as the tree of `row`, parents before children.
    void write(const Trees& trees, int64_t row, int64_t size, int64_t pending) const {
        std::vector<int> order(all_.size()), rank(all_.size());
        for (size_t node = 0; node < all_.size(); ++node) order[node] = static_cast<int>(node);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return is_likelier(all_[a], all_[b]); });
        for (size_t place = 0; place < order.size(); ++place) rank[order[place]] = static_cast<int>(place);
        const int64_t start = row * size;
        trees.tokens[start] = pending;
        trees.parents[start] = trees.depths[start] = 0;
        trees.log_probs[start] = 0.0f;
        for (int64_t place = 1; place < size; ++place) {
            const int64_t at = start + place;
            const bool exists = place <= static_cast<int64_t>(order.size()) && all_[order[place - 1]].prob > 0;
            const Candidate one = exists ? all_[order[place - 1]] : Candidate{0, -1, -1, 1, 0};
            trees.tokens[at] = one.token;
            trees.parents[at] = one.parent < 0 ? 0 : rank[one.parent] + 1;
            trees.depths[at] = one.depth;
            trees.log_probs[at] = exists ? std::log(one.prob) : -std::numeric_limits<float>::infinity();
        }
    }

  private:
    std::vector<Candidate> all_;
    std::vector<float> probs_;
};

}  // namespace drafter
