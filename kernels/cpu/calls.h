// How Python calls the kernels: every function is `int64_t disagg_x(const void* args)`, where `args` points to one struct that
// the function's file declares. A result of -1 says that all is done; else it is the index of what was invalid, and nothing
// was computed. So a call is two words, and a list of calls can be made again later (`replay.cpp`).

#pragma once

#include <cstdint>

namespace disagg {

constexpr int64_t DONE = -1;

using Function = int64_t (*)(const void* args);

struct Call {
    Function function;
    const void* args;
};

template <class Args>
const Args& args_as(const void* args) {
    return *static_cast<const Args*>(args);
}

}  // namespace disagg
