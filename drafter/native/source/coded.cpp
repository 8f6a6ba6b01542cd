// Weights in codes: how they are laid out, expanded and multiplied.
//
// Called from Python by way of ctypes; `coded.py` takes the blocks of files apart.

#include "products.h"

namespace drafter {
namespace {

// The codes of a block lie beside one another. For each part of `kInputs` inputs there are
//
//     fp16 [kHalves, kBlock], and then for each run: bytes [kBytes, kBlock], words of codes [kWords + kTops, kBlock]
//
// low: bits of a code in the words; high: those above, in one more word for a whole run. zero: the code of the weight 0, of
// formats whose offset is not stored.
template <int low, int high, int run, int runs, int halves, bool bytes, int zero>
struct Coded {
    static constexpr int kLow = low, kHigh = high, kRun = run, kInputs = run * runs, kHalves = halves, kZero = zero;
    static constexpr int kBytes = bytes ? halves : 0, kWords = run * low / 32, kTops = high ? 1 : 0;
    static constexpr int64_t kHead = halves * kBlock * 2, kOfRun = (kBytes + 4 * (kWords + kTops)) * kBlock;
    static constexpr int64_t kSize = kHead + runs * kOfRun;  // bytes of a part
    static_assert(high * run == 32 || high == 0, "the upper bits of a run fill a word");
};

// Return `work(format)` for the format of a number; `otherwise` for that of another format.
template <class Result, class Work>
Result with_format(Format format, Result otherwise, const Work& work) {
    switch (format) {
        case Format::kQ4_0: return work(Coded<4, 0, 32, 1, 1, false, 8>());
        case Format::kQ4_1: return work(Coded<4, 0, 32, 1, 2, false, 0>());
        case Format::kQ5_0: return work(Coded<4, 1, 32, 1, 1, false, 16>());
        case Format::kQ5_1: return work(Coded<4, 1, 32, 1, 2, false, 0>());
        case Format::kQ8_0: return work(Coded<8, 0, 32, 1, 1, false, 128>());
        case Format::kQ4_K: return work(Coded<4, 0, 32, 8, 2, true, 0>());
        case Format::kQ5_K: return work(Coded<4, 1, 32, 8, 2, true, 0>());
        case Format::kQ6_K: return work(Coded<4, 2, 16, 16, 1, true, 32>());
    }
    return otherwise;
}

// fp16 by its bits. Inputs are finite: exponents are set right by a product, which makes subnormal numbers normal.
inline Vec load_half(const uint8_t* from) {
    typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
    Halves stored;
    std::memcpy(&stored, from, sizeof stored);
    const Words bits = __builtin_convertvector(stored, Words), sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    Vec value;
    std::memcpy(&value, &rest, sizeof value);
    value *= 0x1p112f;
    Words made;
    std::memcpy(&made, &value, sizeof made);
    made |= sign;
    std::memcpy(&value, &made, sizeof value);
    return value;
}

inline Vec load_bytes(const uint8_t* from) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes stored;
    std::memcpy(&stored, from, sizeof stored);
    return __builtin_convertvector(__builtin_convertvector(stored, Ints), Vec);
}

inline Words load_words(const uint8_t* from) {
    Words value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Call `visit(input, weights)` for each input of `blocks` blocks that lie `size` bytes apart, in order. `weights` has two
// vectors of each block.
//
// A code is not shifted to the lowest bits of its lane but stays within half a word, which multiplies it by a power of two;
// its scale is divided by that. Both are exact, and an instruction less for each vector.
template <class Of, int blocks, class Visit>
inline void walk(const uint8_t* codes, int64_t size, int64_t inputs, const Visit& visit) {
    constexpr int kVecs = 2 * blocks, kOfHalf = 16 / Of::kLow;
    // Of vector v, at a distance from the beginning of a part; numbers of so many bytes.
    const auto at = [&](int v, int64_t distance, int bytes) {
        return codes + v / 2 * size + distance + v % 2 * kLanes * bytes;
    };
    for (int64_t k = 0; k < inputs; codes += Of::kSize) {
        Vec halves[Of::kHalves][kVecs];
#pragma GCC unroll 2
        for (int half = 0; half < Of::kHalves; ++half)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) halves[half][v] = load_half(at(v, half * kBlock * 2, 2));
        for (int64_t run = Of::kHead; run < Of::kSize; run += Of::kOfRun) {
            Vec scales[kOfHalf][kVecs], offset[kVecs];
            Words top[kVecs];
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
                Vec scale = halves[0][v];
                if (Of::kBytes) scale *= load_bytes(at(v, run, 1));
                offset[v] = Of::kHalves > 1 ? halves[Of::kHalves - 1][v] : -Of::kZero * scale;
                if (Of::kBytes > 1) offset[v] *= load_bytes(at(v, run + kBlock, 1));
                if (Of::kHigh) top[v] = load_words(at(v, run + (Of::kBytes + 4 * Of::kWords) * kBlock, 4));
#pragma GCC unroll 4
                for (int place = 0; place < kOfHalf; ++place, scale *= 1.0f / (1 << Of::kLow)) scales[place][v] = scale;
            }
            for (int word = 0; word < Of::kWords; ++word) {
                Words low[kVecs];
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) low[v] = load_words(at(v, run + (Of::kBytes + 4 * word) * kBlock, 4));
#pragma GCC unroll 8
                for (int code = 0; code < 2 * kOfHalf; ++code, ++k) {
                    constexpr uint32_t kMask = (1u << Of::kLow) - 1, kTop = (1u << Of::kHigh) - 1;
                    const int place = code % kOfHalf, shift = place * Of::kLow;
                    Vec weights[kVecs];
#pragma GCC unroll 4
                    for (int v = 0; v < kVecs; ++v) {
                        if (code == kOfHalf) low[v] >>= 16;
                        Words bits = low[v] & (kMask << shift);
                        if (Of::kHigh) {
                            bits |= (top[v] & kTop) << (Of::kLow + shift);
                            top[v] >>= Of::kHigh;
                        }
                        // Less than 2^31, and the conversion of numbers with a sign is a single instruction.
                        weights[v] = __builtin_convertvector((Ints)bits, Vec) * scales[place][v] + offset[v];
                    }
                    visit(k, weights);
                }
            }
        }
    }
}

// Sums in the order of the inputs, as everywhere.
template <class Of, int rows, int blocks>
void add_up(const CodedBlock* block, const float* in, int64_t inputs, Vec* to) {
    const int64_t size = blocks > 1 ? block[1].codes - block[0].codes : 0;
    Vec sums[rows][2 * blocks] = {};
    walk<Of, blocks>(block->codes, size, inputs, [&](int64_t k, const Vec (&weights)[2 * blocks]) {
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
            const Vec x = in[r * inputs + k] - Vec{};  // read to all lanes; `all` would add
#pragma GCC unroll 4
            for (int v = 0; v < 2 * blocks; ++v) sums[r][v] += x * weights[v];
        }
    });
    std::memcpy(to, sums, sizeof sums);
}

// Lay out a block of codes. Its outputs are rows `order[0..kBlock]` of the rest; -1 is an output of zeros.
template <class Of>
void lay_out(const int64_t* order, int64_t inputs, const uint8_t* codes, const uint16_t* halves, const int8_t* bytes,
             uint8_t* to) {
    const int64_t parts = inputs / Of::kInputs, runs = inputs / Of::kRun;
    // Write a number of each output, `rows` of which have `width` numbers.
    const auto put = [&](const auto& number) {
        for (int column = 0; column < kBlock; ++column) {
            decltype(number(0)) value = 0;
            if (order[column] >= 0) value = number(order[column]);
            std::memcpy(to, &value, sizeof value);
            to += sizeof value;
        }
    };
    for (int64_t part = 0; part < parts; ++part) {
        for (int half = 0; half < Of::kHalves; ++half)
            put([&](int64_t row) -> uint16_t { return halves[(row * parts + part) * Of::kHalves + half]; });
        for (int64_t run = part * Of::kInputs / Of::kRun; run < (part + 1) * Of::kInputs / Of::kRun; ++run) {
            for (int byte = 0; byte < Of::kBytes; ++byte)
                put([&](int64_t row) -> int8_t { return bytes[(row * runs + run) * Of::kBytes + byte]; });
            // Some bits of `count` codes from `first` on, which fill a word.
            const auto word = [&](int first, int count, int bits, int shift) {
                put([&](int64_t row) -> uint32_t {
                    uint32_t made = 0;
                    for (int i = 0; i < count; ++i) {
                        const uint32_t code = codes[row * inputs + run * Of::kRun + first + i] >> shift;
                        made |= (code & ((1u << bits) - 1)) << (i * bits);
                    }
                    return made;
                });
            };
            for (int i = 0; i < Of::kWords; ++i) word(i * 32 / Of::kLow, 32 / Of::kLow, Of::kLow, 0);
            if (Of::kTops) word(0, Of::kRun, Of::kHigh, Of::kLow);
        }
    }
}

}  // namespace

void expand(const CodedBlock& block, int64_t inputs, float* to) {
    with_format(block.format, false, [&](auto format) {
        walk<decltype(format), 1>(block.codes, 0, inputs, [&](int64_t k, const Vec (&weights)[2]) {
            store(to + k * kBlock, weights[0]);
            store(to + k * kBlock + kLanes, weights[1]);
        });
        return true;
    });
}

void add_up_coded(const CodedBlock* block, int blocks, const float* in, int rows, int64_t inputs, Vec* sums) {
    with_format(block->format, false, [&](auto format) {
        typedef decltype(format) Of;
        switch (rows) {
            case 1: (blocks == 1 ? add_up<Of, 1, 1> : add_up<Of, 1, kCodedBlocks>)(block, in, inputs, sums); break;
            case 2: (blocks == 1 ? add_up<Of, 2, 1> : add_up<Of, 2, kCodedBlocks>)(block, in, inputs, sums); break;
            case 3: add_up<Of, 3, 1>(block, in, inputs, sums); break;
            case 4: add_up<Of, 4, 1>(block, in, inputs, sums); break;
            case 5: add_up<Of, 5, 1>(block, in, inputs, sums); break;
            case 6: add_up<Of, 6, 1>(block, in, inputs, sums); break;
        }
        return true;
    });
}
}  // namespace drafter

extern "C" {

// Bytes of a block of outputs; 0 if there is no such format, or it has no parts of so many inputs.
int64_t drafter_coded_bytes(int64_t format, int64_t inputs) {
    return drafter::with_format(static_cast<drafter::Format>(format), int64_t{0}, [&](auto of) {
        return inputs % of.kInputs ? 0 : inputs / of.kInputs * of.kSize;
    });
}

// Lay out codes `[rows, inputs]`, fp16 `[rows, parts, kHalves]` and bytes `[rows, runs, kBytes]` as `blocks` blocks.
// `order[j]` is the row that column j holds; -1 leaves the column zero.
void drafter_lay_out(int64_t format, int64_t inputs, const int64_t* order, int64_t blocks, const uint8_t* codes,
                     const uint16_t* halves, const int8_t* bytes, uint8_t* out) {
    const int64_t size = drafter_coded_bytes(format, inputs);
    drafter::with_format(static_cast<drafter::Format>(format), false, [&](auto of) {
#pragma omp parallel for
        for (int64_t block = 0; block < blocks; ++block)
            drafter::lay_out<decltype(of)>(order + block * drafter::kBlock, inputs, codes, halves, bytes, out + block * size);
        return true;
    });
}

// Write the weights of some outputs of a coded matrix, `[count, inputs]`.
void drafter_expand(const drafter::Matrix* matrix, const int64_t* outputs, int64_t count, float* out) {
    constexpr int64_t kTogether = 4 * drafter::kBlock;  // outputs, which mostly follow one another
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += kTogether)
        drafter::copy_outputs(*matrix, outputs + first, std::min(kTogether, count - first), out + first * matrix->inputs);
}

// out = in * weights^T, for rows `[rows, inputs]` and `[rows, outputs]`.
void drafter_multiply(const drafter::Matrix* matrix, const float* in, int64_t rows, float* out, int64_t threads) {
    std::vector<float*> to(rows);
    for (int64_t row = 0; row < rows; ++row) to[row] = out + row * matrix->outputs;
    drafter::Team::run(static_cast<int>(threads), [&](drafter::Team& team) {
        drafter::multiply_all<drafter::End::kStore>(team, {matrix, in, to.data(), static_cast<int>(rows)});
    });
}
}
