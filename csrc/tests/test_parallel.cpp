// The thread pool: every iteration once, phases in order, errors, threads that sleep and threads that are awake, fork.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/parallel.h"

using manus_fast::parallel_for;
using manus_fast::parallel_phases;
using manus_fast::set_num_threads;

namespace {

struct Threads {
  explicit Threads(int n) : before(manus_fast::num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before); }
  int before;
};

}  // namespace

TEST_CASE("every iteration runs once, in chunks of at least the grain") {
  for (const int threads : {1, 2, 3, 7}) {
    const Threads set(threads);
    for (const std::int64_t n : {1, 2, 31, 32, 33, 100, 1023, 4097}) {
      for (const std::int64_t grain : {1, 32, 5000}) {
        std::vector<std::atomic<int>> seen(n);
        std::atomic<int> small{0};
        parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          if (end - begin < grain && end != n) ++small;
          for (std::int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (std::int64_t i = 0; i < n; ++i) REQUIRE(seen[i] == 1);
        CHECK(small == 0);
      }
    }
  }
}

TEST_CASE("the second phase begins when the first has ended everywhere") {
  for (const int threads : {1, 2, 4}) {
    const Threads set(threads);
    for (int repeat = 0; repeat < 500; ++repeat) {
      // Plain ints: a thread sanitizer also sees that the phases are ordered.
      std::vector<int> first(257, 0), second(257, 0);
      parallel_phases(
          257, 8,
          [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) first[i] = static_cast<int>(i) + repeat;
          },
          [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) second[i] = first[256 - i];  // written by another chunk
          });
      for (int i = 0; i < 257; ++i) REQUIRE(second[i] == 256 - i + repeat);
    }
  }
}

TEST_CASE("an error of the first phase is thrown and keeps the second from running") {
  for (const int threads : {1, 3}) {
    const Threads set(threads);
    std::atomic<int> second{0};
    const auto fail = [](std::int64_t begin, std::int64_t end) {
      if (begin <= 70 && 70 < end) throw std::runtime_error("seventy");
    };
    CHECK_THROWS_WITH(parallel_phases(100, 4, fail, [&](std::int64_t, std::int64_t) { ++second; }), "seventy");
    CHECK(second == 0);
    CHECK_THROWS_WITH(parallel_phases(100, 4, [](std::int64_t, std::int64_t) {}, fail), "seventy");
    std::atomic<std::int64_t> after{0};  // the pool is as good as before
    parallel_for(100, 4, [&](std::int64_t begin, std::int64_t end) { after += end - begin; });
    CHECK(after == 100);
  }
}

TEST_CASE("loops inside loops run inline, and loops of several callers one after the other") {
  const Threads set(3);
  std::atomic<std::int64_t> total{0};
  const auto nested = [&] {
    for (int repeat = 0; repeat < 50; ++repeat) {
      parallel_for(16, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          parallel_for(10, 1, [&](std::int64_t b, std::int64_t e) { total += e - b; });
        }
      });
    }
  };
  std::thread other(nested);
  nested();
  other.join();
  CHECK(total == 2 * 50 * 16 * 10);
}

TEST_CASE("threads that have gone to sleep are woken, and the number of threads may change") {
  std::int64_t total = 0;
  for (int repeat = 0; repeat < 60; ++repeat) {
    const Threads set(1 + repeat % 4);
    std::atomic<std::int64_t> sum{0};
    parallel_for(64, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) sum += i;
    });
    total += sum;
    if (repeat % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  CHECK(total == 60 * (63 * 64 / 2));
}

TEST_CASE("a forked child, which has none of the threads, ends") {
  const Threads set(3);
  for (const bool asleep : {false, true}) {
    std::atomic<int> ran{0};
    parallel_for(64, 1, [&](std::int64_t begin, std::int64_t end) { ran += static_cast<int>(end - begin); });
    REQUIRE(ran == 64);
    if (asleep) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);      // a child that waits for its parent's threads is ended by the signal
      std::exit(0);  // runs the destructors of what is static, the pool's among them
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
}

#ifndef __SANITIZE_THREAD__  // which knows no threads in a forked child
TEST_CASE("a child that was forked while another thread ran a loop can run one") {
  const Threads set(2);
  std::atomic<bool> stop{false};
  std::atomic<int> sum{0};
  const auto loop = [&] {
    parallel_for(256, 8, [&](std::int64_t begin, std::int64_t end) { sum += static_cast<int>(end - begin); });
  };
  std::thread other([&] {
    while (!stop) loop();
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(10);  // ends a child that waits for ever
      sum = 0;
      loop();
      _exit(sum == 256 ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  stop = true;
  other.join();
}
#endif
