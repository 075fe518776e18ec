// Reads memory from end to end and adds it up, with as many independent sums as keep the loads going.
#include <cstdint>
#include <cstring>

namespace {
constexpr int64_t kLanes = 16, kSums = 16;
typedef int32_t Vector __attribute__((vector_size(4 * kLanes)));
}  // namespace

extern "C" int64_t disagg_read(const int32_t* data, int64_t count) {
    Vector sums[kSums] = {};
    const int64_t whole = count / (kLanes * kSums) * (kLanes * kSums);
    for (int64_t i = 0; i < whole; i += kLanes * kSums) {
        for (int64_t s = 0; s < kSums; ++s) {
            Vector loaded;
            std::memcpy(&loaded, data + i + s * kLanes, sizeof(loaded));
            sums[s] += loaded;
        }
    }
    int64_t total = 0;
    for (const Vector& sum : sums)
        for (int64_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
    for (int64_t i = whole; i < count; ++i) total += data[i];
    return total;
}
