// Vectors of as many floats as a register of this processor holds, written once for all instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace drafter {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kBlock = 2 * kLanes;  // outputs of a block of weights

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Vec load(const float* from) {
    Vec value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Words load_words(const uint32_t* from) {
    Words value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

inline Vec all(float value) { return Vec{} + value; }

// Sum of the lanes, always in the same order.
inline float sum_lanes(Vec value) {
#if defined(__AVX512F__)
    typedef float Half __attribute__((vector_size(32)));
    Half low = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
    Half high = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
    Half half = low + high;
#else
    Vec half = value;
#endif
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter first = __builtin_shufflevector(half, half, 0, 1, 2, 3);
    Quarter second = __builtin_shufflevector(half, half, 4, 5, 6, 7);
    Quarter quarter = first + second;
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// Sum of the lanes of each of `kLanes` vectors: `sum_lanes` of each, to the last bit.
//
// Each step adds the same pairs of lanes as there, of two vectors at once, and leaves half as many vectors.
inline Vec sum_lanes_of(const Vec (&values)[kLanes]) {
#if defined(__AVX512F__)
    Vec pairs[8], quads[4], octets[2];  // of two, four and eight vectors
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const int first = i / 2 + 8 * (i % 2);
        const Vec &a = values[first], &b = values[first + 4];
        pairs[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Vec &a = pairs[2 * i], &b = pairs[2 * i + 1];
        quads[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                   __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const Vec &a = quads[2 * i], &b = quads[2 * i + 1];
        octets[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                    __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    return __builtin_shufflevector(octets[0], octets[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(octets[0], octets[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#else
    Vec sums;
    for (int i = 0; i < kLanes; ++i) sums[i] = sum_lanes(values[i]);
    return sums;
#endif
}

inline float largest_lane(Vec value) {
    float largest = value[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = value[lane] > largest ? value[lane] : largest;
    return largest;
}

// exp, to about one unit in the last place; 0 below -87. A number that is not finite stays one: NaN stays NaN.
//
// exp(x) = 2^n * exp(r), where n is the integer nearest to x / ln 2 and |r| <= ln 2 / 2; exp(r) by its Taylor series.
inline Vec exp(Vec x) {
    const Vec log2e = all(1.44269504088896341f), ln2_high = all(0.693359375f), ln2_low = all(-2.12194440e-4f);
    const Vec limit = all(88.0f), round = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec bounded = x > limit ? limit : x;
    bounded = bounded < -limit ? -limit : bounded;
    Vec shifted = bounded * log2e + round;
    Vec n = shifted - round;
    Vec r = bounded - n * ln2_high - n * ln2_low;
    Vec series = all(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    Vec result = series * scale;
    result = x < all(-87.0f) ? Vec{} : result;
    return x != x ? x : result;
}

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// GELU in its approximation by tanh (arXiv 1606.08415): x / 2 * (1 + tanh(u)), which is x * sigmoid(2 u).
inline Vec gelu(Vec x) {
    const Vec u = 0.79788456080286536f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
    return x / (1.0f + exp(-2.0f * u));
}

// tanh, to about two units in the last place: near 0 by Cephes' polynomial, as the difference from 1 loses digits there.
inline Vec tanh(Vec x) {
    const Vec square = x * x;
    Vec series = all(-5.70498872745e-3f);
    series = series * square + 2.06390887954e-2f;
    series = series * square - 5.37397155531e-2f;
    series = series * square + 1.33314422036e-1f;
    series = series * square - 3.33332819422e-1f;
    const Vec near = x + x * square * series, far = 1.0f - 2.0f / (1.0f + exp(2.0f * x));
    return square < all(0.625f * 0.625f) ? near : far;
}

}  // namespace drafter
