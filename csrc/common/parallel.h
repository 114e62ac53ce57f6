// One process-wide pool of std::threads. OpenMP is not used: its runtime confuses ThreadSanitizer and
// fights with torch's own pool. Work is split into contiguous chunks, so a loop whose iterations are
// independent gives the same result for every thread count. Each thread begins with its own share of the range, the
// same in every loop of that length, and takes of the others' when it is done: what it wrote last time is in its cache.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace manus_fast {

inline constexpr int kMaxThreads = 1024;

// Number of threads that parallel_for may use, from 1 to kMaxThreads, the caller's included: the cores that this process
// may run on, as they were at the first call, or what was set.
int num_threads();
void set_num_threads(int n);

// Whether loops of the calling thread run inline: one of several threads that keep the cores busy between them.
void run_inline(bool on);

// The cores that the CPU quotas of this process's control groups (version 2: cpu.max; version 1: cpu.cfs_quota_us) are
// worth, rounded up; 0 where there are none. `cgroups` stands for /proc/self/cgroup, `root` for /sys/fs/cgroup.
int quota_cores(const std::string& cgroups, const std::string& root);

// Calls body(begin, end) on disjoint chunks that cover [0, n), each at least `grain` long except the last.
// Runs inline when one chunk is enough or when called from inside a pool thread. The first exception
// thrown by a chunk is rethrown in the caller after every chunk has ended.
void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body);

// As parallel_for with `first` and then with `second`, for one wake-up of the threads: `second` begins when `first` has
// ended everywhere, and not at all where a chunk of it threw.
void parallel_phases(std::int64_t n, std::int64_t grain,
                     const std::function<void(std::int64_t, std::int64_t)>& first,
                     const std::function<void(std::int64_t, std::int64_t)>& second);

}  // namespace manus_fast
