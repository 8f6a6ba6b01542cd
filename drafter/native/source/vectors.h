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

}  // namespace drafter
