// The attention draft module in decoding: frames of many texts that attend to the texts and to each other.
//
// The algorithm is that of drafter/heads/attention.py, which says what it computes. Called from Python by
// way of ctypes; `structures.py` declares the same structures.

#include <vector>

#include "attention.h"
#include "norms.h"
#include "products.h"
#include "rows.h"
#include "team.h"

namespace drafter {

struct LayerNorm {
    const float *weight, *bias;  // `[d]`
};

struct FrameLayer {
    LayerNorm attention_norm, mlp_norm;
    Matrix qkv, output, gate_up, down;
};

struct FrameLayers {
    const FrameLayer* layers;
    LayerNorm embedding_norm, hidden_norm;
    Matrix fusion;
    const float* slots;             // `[T, d]`
    const float *cosines, *sines;   // `[positions, D / 2]`
    int64_t layer_count, width, heads, head_size, intermediate;
    float scale, unused;
};

// New entries of texts, and the frames after some of them.
struct Frames {
    float* cache;  // `[layers, 2, slots, length, H, D]`
    int64_t slots, length;
    const float* embeddings;             // `[E, d]`
    const float* hidden;                 // of slot s at position p: `hidden + s * hidden_stride + p * d`
    int64_t hidden_stride;
    const int64_t *slot, *position;      // `[E]`
    int64_t entries;                     // E
    const int64_t* ends;                 // `[B]` entry of each row's pending token
    int64_t rows, frames;                // B, F
    float* states;                       // `[B, F, d]`
    int64_t threads;
};

namespace {

class FrameRun {
  public:
    void run(const FrameLayers& net, const Frames& asked, Team& team) {
        net_ = &net, asked_ = &asked, team_ = &team;
        const int64_t d = net.width;
        entries_ = static_cast<int>(asked.entries);
        frames_ = static_cast<int>(asked.rows * asked.frames);
        const int all = entries_ + frames_;
        stream_.reserve(all, d);
        normed_.reserve(all, d);
        qkv_.reserve(all, 3 * d);
        mixed_.reserve(frames_, d);
        gated_.reserve(frames_, net.intermediate);
        fuse();
        for (int64_t layer = 0; layer < net.layer_count; ++layer) {
            attention(net.layers[layer], layer);
            if (frames_) mlp(net.layers[layer]);
        }
        if (frames_) std::copy(stream_.rows[entries_], stream_.rows[entries_] + frames_ * d, asked.states);
    }

  private:
    template <class Work>
    void share(int from, int to, const Work& work) {
        const int size = 4;
        team_->loop((to - from + size - 1) / size, [&](int chunk) {
            for (int m = from + chunk * size; m < std::min(to, from + (chunk + 1) * size); ++m) work(m);
        });
    }

    void norm(LayerNorm by, int from) {
        share(from, entries_ + frames_, [&](int m) {
            normalise_layer(stream_.rows[m], by.weight, by.bias, normed_.rows[m], net_->width);
        });
    }

    // Entries of tokens and of the hidden states before them, which are zero before a text; frames begin from their
    // row's last entry.
    void fuse() {
        const int64_t d = net_->width;
        both_.reserve(entries_, 2 * d);
        nothing_.assign(d, 0.0f);
        share(0, entries_, [&](int e) {
            normalise_layer(asked_->embeddings + e * d, net_->embedding_norm.weight, net_->embedding_norm.bias,
                            both_.rows[e], d);
            const int64_t before = asked_->position[e] - 1;
            const float* hidden = asked_->hidden + asked_->slot[e] * asked_->hidden_stride + before * d;
            normalise_layer(before < 0 ? nothing_.data() : hidden, net_->hidden_norm.weight, net_->hidden_norm.bias,
                            both_.rows[e] + d, d);
        });
        multiply_all<End::kStore>(*team_, {&net_->fusion, both_.numbers.data(), stream_.rows.data(), entries_});
        for (int f = 0; f < frames_; ++f) {
            const float* entry = stream_.rows[asked_->ends[f / asked_->frames]];
            const float* slot = net_->slots + f % asked_->frames * d;
            float* to = stream_.rows[entries_ + f];
            for (int64_t i = 0; i < d; ++i) to[i] = entry[i] + slot[i];
        }
    }

    // Position of entry or frame m in its text, and its place in a layer's keys.
    int64_t position(int m) const {
        if (m < entries_) return asked_->position[m];
        const int frame = m - entries_;
        return asked_->position[asked_->ends[frame / asked_->frames]] + 1 + frame % asked_->frames;
    }
    int64_t slot(int m) const {
        return asked_->slot[m < entries_ ? m : asked_->ends[(m - entries_) / asked_->frames]];
    }

    void attention(const FrameLayer& layer, int64_t index) {
        const int64_t d = net_->width, size = net_->head_size, half = size / 2;
        const int all = entries_ + frames_;
        float* keys = asked_->cache + index * 2 * asked_->slots * asked_->length * d;
        float* values = keys + asked_->slots * asked_->length * d;
        norm(layer.attention_norm, 0);
        multiply_all<End::kStore>(*team_, {&layer.qkv, normed_.numbers.data(), qkv_.rows.data(), all});
        share(0, all, [&](int m) {
            const float* cosines = net_->cosines + position(m) * half;
            const float* sines = net_->sines + position(m) * half;
            float* head = qkv_.rows[m];
            for (int64_t h = 0; h < 2 * net_->heads; ++h, head += size) rotate(head, cosines, sines, half);
            const int64_t at = (slot(m) * asked_->length + position(m)) * d;
            std::copy(head - d, head, keys + at);
            std::copy(head, head + d, values + at);
        });
        if (!frames_) return;
        const int heads = static_cast<int>(net_->heads);
        team_->loop(static_cast<int>(asked_->rows) * heads, [&](int chunk) {
            mix(chunk / heads, chunk % heads, keys, values);
        });
        multiply_all<End::kAdd>(*team_, {&layer.output, mixed_.numbers.data(), stream_.rows.data() + entries_, frames_});
    }

    void mix(int row, int head, float* keys, float* values) {
        switch (net_->head_size / kLanes) {
#define DRAFTER_HEAD(vectors) \
    case vectors:             \
        return mix_head<vectors>(row, head, keys, values);
            DRAFTER_HEAD_SIZES
#undef DRAFTER_HEAD
        }
    }

    // The frames of a row see all of its entries and each other.
    template <int vectors>
    void mix_head(int row, int head, float* keys, float* values) {
        static thread_local std::vector<float> scores;
        struct None {
            int64_t count = 0;
            int64_t position(int64_t) const { return 0; }
        };
        const int64_t d = net_->width, offset = head * net_->head_size;
        const int frames = static_cast<int>(asked_->frames), end = static_cast<int>(asked_->ends[row]);
        auto lane = [&](float* numbers) { return Lane{numbers + offset, d, asked_->slot + end, asked_->length}; };
        attend<vectors>(
            lane(keys), lane(values), asked_->position[end] + 1 + frames, {frames, 1, 1}, {net_->scale},
            [](int) { return None(); },
            [&](int frame, int) { return qkv_.rows[entries_ + row * frames + frame] + offset; },
            [&](int frame, int) { return mixed_.rows[row * frames + frame] + offset; }, scores);
    }

    void mlp(const FrameLayer& layer) {
        norm(layer.mlp_norm, entries_);
        multiply_all<End::kGated>(*team_, {&layer.gate_up, normed_.rows[entries_], gated_.rows.data(), frames_});
        multiply_all<End::kAdd>(*team_, {&layer.down, gated_.numbers.data(), stream_.rows.data() + entries_, frames_});
    }

    const FrameLayers* net_ = nullptr;
    const Frames* asked_ = nullptr;
    Team* team_ = nullptr;
    int entries_ = 0, frames_ = 0;
    std::vector<float> nothing_;
    Rows both_, stream_, normed_, qkv_, mixed_, gated_;
};

}  // namespace
}  // namespace drafter

extern "C" void drafter_frames(const drafter::FrameLayers* net, const drafter::Frames* asked) {
    static thread_local drafter::FrameRun run;
    drafter::Team::run(static_cast<int>(asked->threads), [&](drafter::Team& team) { run.run(*net, *asked, team); });
}
