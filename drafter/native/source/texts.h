// Nodes of texts as mixers of recurrent layers follow them: each from the state of the one before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace drafter {

// What a forward runs of B texts, each behind a state that is an entry of the buffers of states.
struct Texts {
    int64_t rows, nodes;     // B texts of N nodes
    const int64_t* which;    // `[M]` nodes that are computed, rising, as places in `[B * N]`
    int64_t count;           // M
    const int64_t* parents;  // `[B, N]`: not below a node where it follows the state; null where each text is a chain
    const int64_t* from;     // `[B]` entries of the states
    const int64_t* writes;   // `[W, 3]`, rising: a text, after how many of its nodes its state is kept, and the entry
    int64_t write_count;     // W; of chains alone
};

// Nodes in their order, and which states they go on from.
//
// While a text is followed, states lie in places. A node takes its parent's if it is the last that goes on from there, so
// that a chain has one place; and a node from which nothing goes on has none.
struct Order {
    struct Text {
        int begin, end;  // its nodes among the M
        int64_t from;
        int first_write, last_write;
        int places = 0;
    };
    std::vector<Text> texts;
    std::vector<int> parent;          // of each node among the M; -1 where it follows the text's state
    std::vector<int> source, target;  // places of the states before and after each node; -1 for that of the text, or none

    explicit Order(const Texts& given) {
        const int count = static_cast<int>(given.count);
        std::vector<int> at(given.parents ? given.rows * given.nodes : 0, -1), text_of(given.rows, -1);
        parent.assign(count, -1);
        std::vector<int> below(count, 0), wanted(count, 0);
        for (int m = 0; m < count; ++m) {
            const int64_t row = given.which[m] / given.nodes, node = given.which[m] % given.nodes;
            if (text_of[row] < 0) {
                text_of[row] = static_cast<int>(texts.size());
                texts.push_back({m, m, given.from[row], 0, 0});
            }
            texts.back().end = m + 1;
            if (given.parents) {
                at[given.which[m]] = m;
                const int64_t above = given.parents[given.which[m]];
                if (above >= 0 && above < node) parent[m] = at[row * given.nodes + above];
            } else if (m > texts.back().begin) {
                parent[m] = m - 1;
            }
            if (parent[m] >= 0) ++below[parent[m]];
        }
        for (int64_t w = 0; w < given.write_count; ++w) {
            const int64_t* write = given.writes + 3 * w;
            if (text_of[write[0]] < 0) continue;  // nothing of it is run
            Text& text = texts[text_of[write[0]]];
            if (text.last_write == 0) text.first_write = static_cast<int>(w);
            text.last_write = static_cast<int>(w) + 1;
            if (write[1] > 0) wanted[text.begin + write[1] - 1] = 1;
        }
        place(below, wanted);
    }

  private:
    void place(std::vector<int>& below, const std::vector<int>& wanted) {
        source.assign(parent.size(), -1);
        target.assign(parent.size(), -1);
        std::vector<int> free;
        for (Text& text : texts) {
            free.clear();
            for (int m = text.begin; m < text.end; ++m) {
                const int above = parent[m];
                source[m] = above < 0 ? -1 : target[above];
                const bool last = above >= 0 && --below[above] == 0;
                if (below[m] == 0 && !wanted[m]) {
                    if (last) free.push_back(source[m]);
                } else if (last) {
                    target[m] = source[m];
                } else if (!free.empty()) {
                    target[m] = free.back();
                    free.pop_back();
                } else {
                    target[m] = text.places++;
                }
            }
        }
    }
};

}  // namespace drafter
