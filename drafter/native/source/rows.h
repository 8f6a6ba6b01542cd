// A matrix with a pointer to each of its rows.
#pragma once

#include <cstdint>
#include <vector>

namespace drafter {

struct Rows {
    std::vector<float> numbers;
    std::vector<float*> rows;

    void reserve(int64_t count, int64_t width) {
        if (static_cast<int64_t>(numbers.size()) < count * width) numbers.resize(count * width);
        rows.resize(count);
        for (int64_t row = 0; row < count; ++row) rows[row] = numbers.data() + row * width;
    }
};

}  // namespace drafter
