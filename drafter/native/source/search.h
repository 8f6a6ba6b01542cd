// What is asked of a search for draft trees under the frames of a CTC head.
#pragma once

#include "joint.h"
#include "team.h"
#include "trie.h"

namespace drafter {

// What a label adds to the joint network's first layer at each of the c places of a path's last labels.
struct LabelTable {
    const float* drafted;  // `[c, V, terms]` of the tokens that may be drafted
    const float* recent;   // `[c, B * c, terms]` of the texts' last tokens, the oldest of each text first
    int64_t places, tokens, texts;  // c, V, B * c
};

struct Search {
    LabelTable labels;
    const float* states;  // `[B, F, d]`
    int64_t rows, frames, band, depth, size, beam;
    float least, unused;
    const int64_t* pending;  // `[B]`
    Trees trees;
    int64_t threads;
};

// Best trees where frames know the last labels; and where they know none: `labels.places` is 0, and there is no joint network.
void search_lattice(const Joint& joint, const Search& search, Team& team);
void search_prefixes(const Joint& joint, const Search& search, Team& team);

}  // namespace drafter
