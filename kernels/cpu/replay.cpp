// Makes recorded calls again, in their order: what a decode step costs without an interpreter between its ops.

#include "calls.h"

namespace {

struct Replay {
    const disagg::Call* calls;
    int64_t num_calls;
    int64_t* invalid;
};

}  // namespace

// Returns -1, or the index of the call that found something invalid, whose result is in `invalid` then; the calls behind it
// were not made.
extern "C" int64_t disagg_replay(const void* p) {
    const auto& args = disagg::args_as<Replay>(p);
    for (int64_t i = 0; i < args.num_calls; ++i) {
        const int64_t result = args.calls[i].function(args.calls[i].args);
        if (result != disagg::DONE) {
            *args.invalid = result;
            return i;
        }
    }
    return disagg::DONE;
}
