// The prefix search of a CTC head as one call: the best draft trees under frames that know no labels.
//
// The algorithm is that of drafter/ctc/prefix_search.py, which says what it computes. This code leaves out what cannot be in
// a tree: a prefix is at most as probable as each of its tokens is over all frames, so that after the first depth few tokens
// are left.

#include <algorithm>
#include <vector>

#include "search.h"

namespace drafter {

namespace {

constexpr int64_t kMost = 1 << 23;  // probabilities that are in memory at a time, if not one text has more

// Searches the tree of one text. Its memory is used again by the next one.
class TextSearch {
  public:
    // `shares` `[T][V]` of frames that emit a token, and their `blanks`.
    void run(const Search& search, int64_t row, float* const* shares, const Question* blanks, int64_t outputs) {
        frames_ = search.frames;
        emits_.resize(frames_);
        for (int64_t j = 0; j < frames_; ++j) emits_[j] = 1.0f - blanks[j].blank;
        const int64_t most = search.size - 1;
        trie_.clear();
        if (most < 1) return trie_.write(search.trees, row, search.size, search.pending[row]);
        take_first(shares, blanks, outputs, std::min(most, search.beam));
        float limit = trie_.limit(most, 0.0f);  // what is not more probable is in no tree
        gather(shares, outputs, limit);
        begin(blanks, std::max(limit, search.least));
        const int64_t depth = std::min(search.depth, search.frames);
        for (int64_t level = 1; level < depth && !prefixes_.empty(); ++level) {
            const int64_t keep = std::min(most - level, search.beam);
            if (keep < 1) break;
            const int before = trie_.count();
            take_best(limit, keep, static_cast<int>(level) + 1);
            limit = trie_.limit(most, 0.0f);
            extend(blanks, before, std::max(limit, search.least));
        }
        trie_.write(search.trees, row, search.size, search.pending[row]);
    }

  private:
    // A prefix that is extended: its node, and its last token's place among those that are left.
    struct Prefix {
        int node, last;
        float prob;
    };

    // The best tokens of the first depth; the sums of all tokens over the frames.
    void take_first(float* const* shares, const Question* blanks, int64_t outputs, int64_t keep) {
        sums_.resize(outputs);
        best_.clear();
        waits_.resize(frames_);
        float wait = 1.0f;  // until here all frames were blank
        for (int64_t j = 0; j < frames_; ++j) {
            waits_[j] = wait * emits_[j];
            wait *= blanks[j].blank;
        }
        int64_t token = 0;
        for (; token + kLanes <= outputs; token += kLanes) {
            Vec sum{}, first{};
            for (int64_t j = 0; j < frames_; ++j) {
                const Vec some = load(shares[j] + token);
                sum += emits_[j] * some;
                first += waits_[j] * some;
            }
            store(sums_.data() + token, sum > first ? sum : first);  // whatever rounding did
            if (static_cast<int64_t>(best_.size()) == keep && !(largest_lane(first) > best_.back().prob)) continue;
            for (int lane = 0; lane < kLanes; ++lane) offer({first[lane], static_cast<int>(token) + lane, -1, 1, 0}, keep);
        }
        for (; token < outputs; ++token) {
            float sum = 0.0f, first = 0.0f;
            for (int64_t j = 0; j < frames_; ++j) {
                sum += emits_[j] * shares[j][token];
                first += waits_[j] * shares[j][token];
            }
            sums_[token] = std::max(sum, first);
            offer({first, static_cast<int>(token), -1, 1, 0}, keep);
        }
        for (const Candidate& one : best_) trie_.add(one);
    }

    // Keep a candidate if it is among the `keep` best.
    void offer(Candidate one, int64_t keep) {
        if (!(one.prob > 0)) one.prob = 0.0f;  // NaN has no order, and what is drafted from it is worth nothing
        const bool full = static_cast<int64_t>(best_.size()) == keep;
        if (full && !(one.prob > best_.back().prob)) return;
        if (full) best_.pop_back();
        best_.insert(std::upper_bound(best_.begin(), best_.end(), one, is_likelier), one);
    }

    // Keep the probabilities `[T, C]` of the tokens that may be in the tree.
    void gather(float* const* shares, int64_t outputs, float limit) {
        tokens_.clear();
        for (int64_t token = 0; token < outputs; ++token)
            if (sums_[token] > limit) tokens_.push_back(static_cast<int>(token));
        width_ = (static_cast<int64_t>(tokens_.size()) + kLanes - 1) / kLanes * kLanes;
        probs_.assign(frames_ * width_, 0.0f);
        found_.resize(width_);
        for (int64_t j = 0; j < frames_; ++j)
            for (size_t c = 0; c < tokens_.size(); ++c) probs_[j * width_ + c] = emits_[j] * shares[j][tokens_[c]];
    }

    // The prefixes of one token, with the mass that ends with it, and that ends with blanks after it, at each frame.
    void begin(const Question* blanks, float limit) {
        prefixes_.clear();
        masses_.clear();
        float wait = 1.0f;
        arrivals_.assign(1, wait);
        for (int64_t j = 0; j + 1 < frames_; ++j) arrivals_.push_back(wait *= blanks[j].blank);
        for (int node = 0; node < trie_.count(); ++node) {
            if (!(trie_[node].prob > limit)) continue;
            const auto place = std::lower_bound(tokens_.begin(), tokens_.end(), trie_[node].token);
            prefixes_.push_back({node, static_cast<int>(place - tokens_.begin()), trie_[node].prob});
            follow(blanks, prefixes_.back().last, masses_);
        }
    }

    // Append the masses `[2, T]` of a prefix that ends with token `c`, from those that arrive before each frame.
    void follow(const Question* blanks, int c, std::vector<float>& masses) const {
        const size_t start = masses.size();
        masses.resize(start + 2 * frames_);
        float *const ends = masses.data() + start, *const waits = ends + frames_;
        float end = 0.0f, wait = 0.0f;
        for (int64_t j = 0; j < frames_; ++j) {
            waits[j] = blanks[j].blank * (wait + end);
            ends[j] = probs_[j * width_ + c] * (arrivals_[j] + end);
            end = ends[j], wait = waits[j];
        }
    }

    // What arrives before each frame from prefix `p`: with another token than its last, or with this once more.
    void arrive(size_t p, bool again) {
        const float *const ends = masses_.data() + 2 * p * frames_, *const waits = ends + frames_;
        arrivals_.assign(1, 0.0f);
        for (int64_t j = 0; j + 1 < frames_; ++j) arrivals_.push_back(waits[j] + (again ? 0.0f : ends[j]));
    }

    // The best continuations of all prefixes become candidates of this depth.
    void take_best(float limit, int64_t keep, int depth) {
        best_.clear();
        for (size_t p = 0; p < prefixes_.size(); ++p) {
            const Prefix& prefix = prefixes_[p];
            arrive(p, false);
            for (int64_t c = 0; c < width_; c += kLanes) {
                Vec sum{};
                for (int64_t j = 1; j < frames_; ++j) sum += arrivals_[j] * load(probs_.data() + j * width_ + c);
                store(found_.data() + c, sum);
            }
            arrive(p, true);
            float same = 0.0f;
            for (int64_t j = 1; j < frames_; ++j) same += arrivals_[j] * probs_[j * width_ + prefix.last];
            found_[prefix.last] = same;
            for (size_t c = 0; c < tokens_.size(); ++c)  // rounding must not lift it above its parent
                if (found_[c] > limit)
                    offer({std::min(found_[c], prefix.prob), static_cast<int>(c), prefix.node, depth, static_cast<int>(p)}, keep);
        }
        for (Candidate one : best_) {
            one.token = tokens_[one.token];
            trie_.add(one);
        }
    }

    // Go on from those that may have a child in the tree.
    void extend(const Question* blanks, int before, float limit) {
        next_.clear();
        next_masses_.clear();
        for (size_t i = 0; i < best_.size(); ++i) {
            const Candidate& one = best_[i];
            if (!(one.prob > limit)) continue;
            arrive(one.path, one.token == prefixes_[one.path].last);
            next_.push_back({before + static_cast<int>(i), one.token, one.prob});
            follow(blanks, one.token, next_masses_);
        }
        std::swap(prefixes_, next_);
        std::swap(masses_, next_masses_);
    }

    int64_t frames_ = 0, width_ = 0;
    Trie trie_;
    std::vector<float> emits_, waits_, sums_, probs_, found_, arrivals_, masses_, next_masses_;
    std::vector<int> tokens_;
    std::vector<Candidate> best_;
    std::vector<Prefix> prefixes_, next_;
};

class PrefixSearch {
  public:
    void run(const Joint& joint, const Search& search, Team& team) {
        const int64_t outputs = joint.head.outputs, frames = search.frames;
        const int64_t each = std::max<int64_t>(1, kMost / (frames * outputs));  // texts at a time
        for (int64_t first = 0; first < search.rows; first += each) {
            const int texts = static_cast<int>(std::min(each, search.rows - first));
            shares_.reserve(texts * frames, outputs);
            questions_.clear();
            for (int64_t at = 0; at < texts * frames; ++at)
                questions_.push_back({search.states + (first * frames + at) * joint.hidden, nullptr, shares_.rows[at], 0});
            network_.answer(joint, questions_, [](int, float*) {}, team);
            team.loop(texts, [&](int text) {
                static thread_local TextSearch one;
                one.run(search, first + text, shares_.rows.data() + text * frames, questions_.data() + text * frames, outputs);
            });
        }
    }

  private:
    JointNetwork network_;
    Rows shares_;
    std::vector<Question> questions_;
};

}  // namespace

void search_prefixes(const Joint& joint, const Search& search, Team& team) {
    static thread_local PrefixSearch prefixes;
    prefixes.run(joint, search, team);
}

}  // namespace drafter
