// Mixers by themselves, for models whose other parts run by their own code, and the commit of their states.
//
// Called from Python by way of ctypes; `mixing.py` declares the same structures.

#include "mixing.h"

extern "C" {

int64_t drafter_kept_width(const drafter::Mixer* mixer) { return drafter::Kept(*mixer).width; }

// Run a mixer over hidden states `in` `[M, d]`, which gives `out` `[M, d]`.
void drafter_mix(const drafter::Mixer* mixer, const drafter::Texts* texts, const drafter::States* states, const float* in,
                 float* kept, float* out, int64_t threads) {
    drafter::Team::run(static_cast<int>(threads), [&](drafter::Team& team) {
        drafter::Mixing mixing(*texts, team);
        const drafter::Rows& mixed = mixing.run(*mixer, *states, in, kept);
        std::vector<float*> rows(texts->count);
        for (int64_t m = 0; m < texts->count; ++m) rows[m] = out + m * mixer->out.outputs;
        drafter::multiply_all<drafter::End::kStore>(
            team, {&mixer->out, mixed.numbers.data(), rows.data(), static_cast<int>(texts->count)});
    });
}

void drafter_keep_paths(const drafter::KeptLayer* layers, int64_t count, const drafter::Accepted* accepted, int64_t threads) {
    drafter::Team::run(static_cast<int>(threads), [&](drafter::Team& team) {
        for (int64_t layer = 0; layer < count; ++layer) drafter::keep_paths(layers[layer], *accepted, team);
    });
}
}
