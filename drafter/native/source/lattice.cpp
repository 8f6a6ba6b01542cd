// The lattice search of a CTC head as one call: the best draft trees under frames that know the last labels.
//
// The algorithm is that of drafter/ctc/lattice.py, which says what it computes. This code leaves out what cannot be
// in a tree. Called from Python by way of ctypes; `build.py` declares the same structures.

#include <algorithm>
#include <vector>

#include "search.h"

namespace drafter {

namespace {

// The paths of one level that are extended. Of each, in flat lists: the mass that arrives at each frame of its band with
// its last token, and its last labels.
struct Paths {
    std::vector<int> row, node;
    std::vector<float> prob, arrival;
    std::vector<int64_t> labels;  // a drafted token's id, or -1 - (which of the texts' last tokens)

    void clear() {
        row.clear(), node.clear(), prob.clear(), arrival.clear(), labels.clear();
    }
    int count() const { return static_cast<int>(row.size()); }
};

// A question: a path, and a frame of its band.
struct Asked {
    int path, place;
};

class LatticeSearch {
  public:
    void run(const Joint& joint, const Search& search, Team& team) {
        joint_ = &joint, search_ = &search, team_ = &team;
        begin();
        const int levels = static_cast<int>(std::min(search.depth, search.frames));
        for (int level = 0; level < levels && paths_.count(); ++level) {
            const int keep = static_cast<int>(std::min(search.size - 1 - level, search.beam));
            if (keep < 1) break;
            const int first = level, stop = static_cast<int>(std::min<int64_t>(level + search.band, search.frames));
            ask(first, stop);
            find_best(std::min<int>(keep, static_cast<int>(joint.head.outputs)));
            for (int row = 0; row < search.rows; ++row) take_best(row, keep, level + 1);
            extend();
        }
        team.loop(static_cast<int>(search.rows),
                  [&](int row) { tries_[row].write(search.trees, row, search.size, search.pending[row]); });
    }

  private:
    // All rows at their roots; the frames' terms.
    void begin() {
        const Search& search = *search_;
        const int64_t rows = search.rows, places = search.labels.places;
        const int states = static_cast<int>(rows * search.frames);
        frame_terms_.reserve(states, joint_->terms);
        multiply_all<End::kStore>(*team_, {&joint_->frames, search.states, frame_terms_.rows.data(), states});
        tries_.resize(rows);
        found_.resize(rows);
        paths_.clear();
        for (int row = 0; row < rows; ++row) {
            tries_[row].clear();
            paths_.row.push_back(row);
            paths_.node.push_back(-1);
            paths_.prob.push_back(1.0f);
            for (int64_t place = 0; place < search.band; ++place) paths_.arrival.push_back(place == 0);
            for (int64_t place = 0; place < places; ++place) paths_.labels.push_back(-1 - (row * places + place));
        }
    }

    void add_label_terms(int path, float* sum) const {
        const LabelTable& table = search_->labels;
        const int64_t terms = joint_->terms;
        for (int64_t place = 0; place < table.places; ++place) {
            const int64_t label = paths_.labels[path * table.places + place];
            const float* from = label < 0 ? table.recent + (place * table.texts - 1 - label) * terms
                                          : table.drafted + (place * table.tokens + label) * terms;
            int64_t i = 0;
            for (; i + kLanes <= terms; i += kLanes) store(sum + i, load(sum + i) + load(from + i));
            for (; i < terms; ++i) sum[i] += from[i];
        }
    }

    // Run the recursion over a band: a blank leaves mass to the next frame, a token takes it away. What frames after the
    // first would say of paths that reach them with little mass is left out.
    void ask(int first, int stop) {
        const Search& search = *search_;
        const int64_t band = search.band;
        const int count = paths_.count(), frames = stop - first;
        shares_.reserve(count * band, joint_->head.outputs);
        mass_.assign(count * band, 0.0f);
        blanks_.resize(count * band);
        reached_.resize(count);
        for (int path = 0; path < count; ++path) reached_[path] = paths_.arrival[path * band];
        auto counts = [&](int path, int place) { return place == 0 || reached_[path] > search.least; };
        // To ask is to read the LM head: for few questions that takes as long as for one.
        const bool at_once = count * frames <= kRows;
        if (at_once) {
            asked_.clear();
            for (int place = 0; place < frames; ++place)
                for (int path = 0; path < count; ++path) asked_.push_back({path, place});
            answer(first);
        }
        for (int place = 0; place < frames; ++place) {
            if (!at_once) {
                asked_.clear();
                for (int path = 0; path < count; ++path)
                    if (counts(path, place)) asked_.push_back({path, place});
                answer(first);
            }
            for (int path = 0; path < count; ++path) {
                float left = 0.0f;
                if (counts(path, place)) {
                    const float blank = blanks_[path * band + place];
                    mass_[path * band + place] = reached_[path] * (1.0f - blank);
                    left = reached_[path] * blank;
                }
                reached_[path] = left + (place + 1 < band ? paths_.arrival[path * band + place + 1] : 0.0f);
            }
        }
    }

    // Shares and blanks of what is asked, for the band that begins at frame `first`.
    void answer(int first) {
        const int64_t band = search_->band, d = joint_->hidden;
        if (asked_.empty()) return;
        questions_.clear();
        for (const Asked& one : asked_) {
            const int64_t at = paths_.row[one.path] * search_->frames + first + one.place;
            float* shares = shares_.rows[one.path * band + one.place];
            questions_.push_back({search_->states + at * d, frame_terms_.rows[at], shares, 0});
        }
        network_.answer(*joint_, questions_, [&](int q, float* sum) { add_label_terms(asked_[q].path, sum); }, *team_);
        for (size_t q = 0; q < asked_.size(); ++q)
            blanks_[asked_[q].path * band + asked_[q].place] = questions_[q].blank;
    }

    // The likeliest continuations of each path, best first.
    void find_best(int keep) {
        const int count = paths_.count();
        best_.resize(static_cast<size_t>(count) * keep);
        best_of_ = keep;
        team_->loop(count, [&](int path) { find_best_of(path, keep); });
    }

    void find_best_of(int path, int keep) {
        const int64_t band = search_->band, tokens = joint_->head.outputs;
        const float* mass = mass_.data() + path * band;
        float* const* shares = shares_.rows.data() + path * band;
        Candidate* best = best_.data() + static_cast<size_t>(path) * keep;
        int found = 0;
        auto offer = [&](int64_t token, float prob) {
            prob = prob > 0 ? prob : 0.0f;  // NaN has no order, and what is drafted from it is worth nothing
            if (found == keep && !(prob > best[keep - 1].prob)) return;
            int place = found < keep ? found++ : keep - 1;
            for (; place > 0 && best[place - 1].prob < prob; --place) best[place] = best[place - 1];
            best[place] = {prob, static_cast<int>(token), 0, 0, path};
        };
        int64_t token = 0;
        for (; token + kLanes <= tokens; token += kLanes) {
            Vec probs = mass[0] * load(shares[0] + token);
            for (int64_t place = 1; place < band; ++place)
                if (mass[place] > 0) probs += mass[place] * load(shares[place] + token);
            if (found == keep && !(largest_lane(probs) > best[keep - 1].prob)) continue;
            for (int lane = 0; lane < kLanes; ++lane) offer(token + lane, probs[lane]);
        }
        for (; token < tokens; ++token) {
            float prob = mass[0] * shares[0][token];
            for (int64_t place = 1; place < band; ++place)
                if (mass[place] > 0) prob += mass[place] * shares[place][token];
            offer(token, prob);
        }
    }

    // The best continuations of all paths of a row become its candidates of this depth.
    void take_best(int row, int keep, int depth) {
        std::vector<Candidate>& found = found_[row];
        found.clear();
        for (int path = 0; path < paths_.count(); ++path)
            if (paths_.row[path] == row)
                found.insert(found.end(), best_.begin() + path * best_of_, best_.begin() + (path + 1) * best_of_);
        const size_t kept = std::min<size_t>(keep, found.size());
        std::stable_sort(found.begin(), found.end(), is_likelier);
        found.resize(kept);
        for (Candidate& one : found) {
            one.parent = paths_.node[one.path];
            one.depth = depth;
            one.prob = std::min(one.prob, paths_.prob[one.path]);  // rounding must not lift it above its parent
            tries_[row].add(one);
        }
    }

    // Go on from those of the newest candidates that are in the best tree so far: no other one can have a child in it.
    void extend() {
        const Search& search = *search_;
        const int64_t band = search.band, places = search.labels.places;
        later_.clear();
        for (int row = 0; row < search.rows; ++row) {
            Trie& all = tries_[row];
            const int last = static_cast<int>(found_[row].size());
            const float limit = last > 0 ? all.limit(search.size - 1, search.least) : search.least;
            for (int node = all.count() - last; node < all.count(); ++node) {
                const Candidate& one = all[node];
                if (!(one.prob > limit)) continue;
                later_.row.push_back(row);
                later_.node.push_back(node);
                later_.prob.push_back(one.prob);
                for (int64_t place = 0; place < band; ++place) {
                    const int64_t at = one.path * band + place;
                    later_.arrival.push_back(mass_[at] > 0 ? mass_[at] * shares_.rows[at][one.token] : 0.0f);
                }
                for (int64_t place = 1; place < places; ++place)
                    later_.labels.push_back(paths_.labels[one.path * places + place]);
                later_.labels.push_back(one.token);
            }
            found_[row].clear();
        }
        std::swap(paths_, later_);
    }

    const Joint* joint_ = nullptr;
    const Search* search_ = nullptr;
    Team* team_ = nullptr;
    JointNetwork network_;
    Rows frame_terms_, shares_;  // shares of each path and place in the band
    Paths paths_, later_;
    std::vector<float> mass_, reached_, blanks_;
    std::vector<Asked> asked_;
    std::vector<Question> questions_;
    std::vector<Candidate> best_;
    int best_of_ = 0;
    std::vector<Trie> tries_;
    std::vector<std::vector<Candidate>> found_;
};

}  // namespace

void search_lattice(const Joint& joint, const Search& search, Team& team) {
    // Kept, because large buffers that are new have to be cleared by the system first.
    static thread_local LatticeSearch lattice;
    lattice.run(joint, search, team);
}

}  // namespace drafter

extern "C" void drafter_search(const drafter::Joint* joint, const drafter::Search* search) {
    const auto& find = search->labels.places == 0 ? drafter::search_prefixes : drafter::search_lattice;
    drafter::Team::run(static_cast<int>(search->threads), [&](drafter::Team& team) { find(*joint, *search, team); });
}
