// Scratch memory that a thread reuses from call to call.

#pragma once

#include <cstdint>
#include <vector>

namespace disagg {

// Memory for at least `size` numbers; the first ones keep their values.
template <class Number>
Number* at_least(std::vector<Number>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

}  // namespace disagg
