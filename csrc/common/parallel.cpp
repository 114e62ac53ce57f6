#include "common/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/check.h"

namespace manus_fast {
namespace {

struct Job {
  const std::function<void(std::int64_t, std::int64_t)>* body;
  std::int64_t n;
  std::int64_t chunk;
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void run() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(chunk);
      if (begin >= n) return;
      try {
        (*body)(begin, std::min(begin + chunk, n));
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }
};

thread_local bool inside_pool = false;

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

class Pool {
 public:
  explicit Pool(int workers) : pid_(getpid()) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { loop(); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int workers() const { return static_cast<int>(threads_.size()); }
  bool same_process() const { return pid_ == getpid(); }

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      ++generation_;
    }
    wake_.notify_all();
    inside_pool = true;
    job.run();
    inside_pool = false;
    // Every chunk is taken. Wait for the threads that took one, not for those that have not woken up: on a busy
    // machine they may not get a core for long.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    spin_until([this] { return active_ == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  void loop() {
    inside_pool = true;
    std::uint64_t seen = 0;
    for (;;) {
      Job* job = nullptr;
      spin_until([&] { return stopping_ || generation_ != seen; });
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        job = job_;
        if (!job) continue;
        ++active_;
      }
      job->run();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--active_ == 0) done_.notify_one();
      }
    }
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  // Written under the mutex; atomic because spin_until reads them without it.
  std::atomic<int> active_{0};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

std::mutex pool_mutex;  // held while a job runs: one parallel loop at a time
std::unique_ptr<Pool> pool;
std::atomic<int> wanted_threads{0};

}  // namespace

int num_threads() {
  const int wanted = wanted_threads.load();
  if (wanted > 0) return wanted;
  return std::max(1u, std::thread::hardware_concurrency());
}

void set_num_threads(int n) {
  MF_CHECK(n >= 1, "num_threads: expected an integer >= 1, got ", n);
  wanted_threads.store(n);
}

void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(1, grain);
  const int threads = num_threads();
  if (threads == 1 || n <= grain || inside_pool) {
    body(0, n);
    return;
  }
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && !pool->same_process()) pool.release();  // after fork the parent's threads do not exist here
  if (!pool || pool->workers() != threads - 1) pool = std::make_unique<Pool>(threads - 1);
  Job job;
  job.body = &body;
  job.n = n;
  // Four chunks a thread: evens out uneven iterations without contention on the counter.
  job.chunk = std::max(grain, (n + threads * 4 - 1) / (threads * 4));
  pool->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace manus_fast
