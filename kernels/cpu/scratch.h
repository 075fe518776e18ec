// Memory that a thread keeps from call to call.

#pragma once

#include <cstdint>
#include <vector>

namespace disagg {

// Where `size` numbers are, of which the first ones are those of before.
template <class Number>
Number* at_least(std::vector<Number>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

}  // namespace disagg
