#include "common/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/check.h"

namespace manus_fast {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

thread_local bool inside_pool = false;
thread_local bool inline_only = false;

// Waking a sleeping thread costs tens of microseconds, as much as a small loop: both sides look around for
// about that long before they sleep, so that loops that follow each other closely find the threads awake.
template <typename Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// One share of a phase's range: a thread's own, of which others take when theirs is done.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

// All chunks of one phase.
struct Phase {
  const Body* body = nullptr;
  std::vector<Share> shares;
  alignas(64) std::atomic<std::int64_t> left{0};  // iterations that have not ended

  void prepare(const Body& work, std::int64_t n, std::int64_t chunk, int threads) {
    body = &work;
    left.store(n);
    shares = std::vector<Share>(threads);
    const std::int64_t chunks = (n + chunk - 1) / chunk;
    for (int i = 0; i < threads; ++i) {
      shares[i].next = std::min(n, chunks * i / threads * chunk);
      shares[i].end = std::min(n, chunks * (i + 1) / threads * chunk);
    }
  }
};

struct Job {
  Phase phases[2];
  int count = 1;  // phases in use
  std::int64_t chunk = 1;
  std::atomic<bool> failed{false};
  std::mutex error_mutex;
  std::exception_ptr error;

  void run_chunk(Phase& phase, std::int64_t begin, std::int64_t end) {
    try {
      (*phase.body)(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
      failed.store(true);
    }
    phase.left.fetch_sub(end - begin);
  }

  // Takes chunks, of its own share first, until none is left.
  void drain(Phase& phase, int thread) {
    const int threads = static_cast<int>(phase.shares.size());
    for (int i = 0; i < threads; ++i) {
      Share& share = phase.shares[(thread + i) % threads];
      for (;;) {
        const std::int64_t begin = share.next.load() < share.end ? share.next.fetch_add(chunk) : share.end;
        if (begin >= share.end) break;
        run_chunk(phase, begin, std::min(begin + chunk, share.end));
      }
    }
  }

  void run(int thread) {
    drain(phases[0], thread);
    if (count == 1) return;
    // Every chunk has been taken by a thread that runs it: none waits for one that has not woken up.
    const auto ended = [this] { return phases[0].left.load() == 0; };
    if (!spin_until(ended)) {
      while (!ended()) std::this_thread::yield();
    }
    if (!failed.load()) drain(phases[1], thread);
  }
};

class Pool {
 public:
  explicit Pool(int workers) : pid_(getpid()) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this, i] { loop(i + 1); });
  }

  ~Pool() {
    stopping_.store(true);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  int workers() const { return static_cast<int>(threads_.size()); }
  bool same_process() const { return pid_ == getpid(); }

  // The mutex is for threads that sleep. Threads that are awake meet over atomics, all sequentially consistent: of two
  // that each announce something and then look for what the other announced, at least one sees it.
  void run(Job& job) {
    job_.store(&job);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    inside_pool = true;
    job.run(0);
    inside_pool = false;
    // Every chunk is taken. Wait for the threads that took one, not for those that have not woken up: on a busy
    // machine they may not get a core for long.
    job_.store(nullptr);
    const auto idle = [this] { return active_.load() == 0; };
    if (spin_until(idle)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.store(true);
    done_.wait(lock, idle);
    waiting_.store(false);
  }

 private:
  void loop(int thread) {
    inside_pool = true;
    std::uint64_t seen = 0;
    const auto called = [&] { return stopping_.load() || generation_.load() != seen; };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, called);
        sleepers_.fetch_sub(1);
      }
      if (stopping_.load()) return;
      seen = generation_.load();
      active_.fetch_add(1);  // before the look at job_: the caller clears it, then waits for active_ to be 0
      if (Job* job = job_.load()) job->run(thread);
      if (active_.fetch_sub(1) == 1 && waiting_.load()) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  alignas(64) std::atomic<std::uint64_t> generation_{0};
  std::atomic<Job*> job_{nullptr};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> active_{0};
  std::atomic<bool> waiting_{false};
  std::vector<std::thread> threads_;
};

std::mutex pool_mutex;  // held while a job runs: one parallel loop at a time

// After fork the parent's threads do not exist in the child: to join them, or to destroy a condition variable that one
// of them sleeps on, would wait for ever. The child leaves the pool as it is.
struct EndPool {
  void operator()(Pool* ended) const {
    static Pool* abandoned;  // still reachable, for whoever looks for leaks
    if (ended->same_process()) {
      delete ended;
    } else {
      abandoned = ended;
    }
  }
};

// Those that this process may run on: in a container or under taskset fewer than the machine has. A quota of CPU time
// counts too: threads beyond it would be stopped for most of every period.
int available_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  const int quota = quota_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  if (quota > 0) cores = std::min(cores, quota);
#endif
  return std::clamp(cores, 1, kMaxThreads);
}

// A file's first `most` bytes; empty where it cannot be read. By C's own calls: a process that has loaded libraries with
// a C++ runtime of their own inside them may resolve the file streams of <fstream> to those, and crash.
std::string contents(const std::string& path, std::size_t most) {
  std::string text;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  if (!file) return text;
  text.resize(most);
  text.resize(std::fread(text.data(), 1, most, file.get()));
  return text;
}

// Of one control group: quota / period, infinite where it has none.
double quota_of(const std::string& folder, bool second) {
  double quota = -1.0, period = 0.0;
  if (second) {
    // "max 100000" without a quota
    const std::string text = contents(folder + "/cpu.max", 64);
    if (std::sscanf(text.c_str(), "%lf %lf", &quota, &period) != 2) quota = -1.0;
  } else {
    quota = std::strtod(contents(folder + "/cpu.cfs_quota_us", 32).c_str(), nullptr);  // -1 without one
    period = std::strtod(contents(folder + "/cpu.cfs_period_us", 32).c_str(), nullptr);
  }
  return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

std::unique_ptr<Pool, EndPool> pool;
std::atomic<int> wanted_threads{0};

// A fork waits for a loop that another thread runs: the child would find the mutex held by nobody.
[[maybe_unused]] const int fork_handlers = pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                                                          [] { pool_mutex.unlock(); });

}  // namespace

int quota_cores(const std::string& cgroups, const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  const std::string text = contents(cgroups, 1 << 16);
  // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1.
  for (std::size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const std::size_t first = line.find(':'), last = line.find(':', first + 1);
    if (first == std::string::npos || last == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, last - first - 1) + ",";
    const bool second = controllers == ",,";
    if (!second && controllers.find(",cpu,") == std::string::npos) continue;
    std::string path = line.substr(last + 1);
    // Every group above counts as well. In a container the path may be the host's, of which nothing is mounted but the
    // container's own group, at the root.
    for (;;) {
      if (path == "/") path.clear();
      least = std::min(least, quota_of(root + (second ? "" : "/cpu") + path, second));
      if (path.empty()) break;
      const std::size_t slash = path.rfind('/');
      path.resize(slash == std::string::npos ? 0 : slash);
    }
  }
  return std::isfinite(least) ? static_cast<int>(std::min(std::ceil(least), 1e6)) : 0;
}

int num_threads() {
  const int wanted = wanted_threads.load();
  if (wanted > 0) return wanted;
  static const int cores = available_cores();
  return cores;
}

void set_num_threads(int n) {
  MF_CHECK(n >= 1 && n <= kMaxThreads, "num_threads: expected an integer from 1 to ", kMaxThreads, ", got ", n);
  wanted_threads.store(n);
}

void run_inline(bool on) { inline_only = on; }

namespace {

// Runs the phases (the second may be null) on the pool, or inline where one chunk is enough.
void run_parallel(std::int64_t n, std::int64_t grain, const Body& first, const Body* second) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(1, grain);
  const int threads = num_threads();
  if (threads == 1 || n <= grain || inside_pool || inline_only) {
    first(0, n);
    if (second) (*second)(0, n);
    return;
  }
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (!pool || !pool->same_process() || pool->workers() != threads - 1) pool.reset(new Pool(threads - 1));
  Job job;
  // Eight chunks a thread: evens out uneven iterations without contention on the counters.
  job.chunk = std::max(grain, (n + threads * 8 - 1) / (threads * 8));
  job.count = second ? 2 : 1;
  job.phases[0].prepare(first, n, job.chunk, threads);
  if (second) job.phases[1].prepare(*second, n, job.chunk, threads);
  pool->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace

void parallel_for(std::int64_t n, std::int64_t grain, const Body& body) { run_parallel(n, grain, body, nullptr); }

void parallel_phases(std::int64_t n, std::int64_t grain, const Body& first, const Body& second) {
  run_parallel(n, grain, first, &second);
}

}  // namespace manus_fast
