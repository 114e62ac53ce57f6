// Runs every CUDA kernel of the ops once on small odd shapes, to be watched by NVIDIA's compute-sanitizer (`make
// sanitize`): neither Python nor torch is loaded, so that a tool needs seconds. Results are compared with the CPU
// kernels and, for the product, with a loop in double, so that a run under a tool also says that the kernels worked.
//
//     mf_gpu_check [gae] [ppo_loss] [linear_logprob] [gae_large] [ppo_loss_large]
//
// Shapes are the smallest that reach every branch: more than one tile and block, ends inside a tile, rows that begin
// inside one, lengths that do not allow 16-byte loads. The large ones give a block a second and third tile. Each array is an allocation of its own, which is what memcheck
// can watch. Exit code 1 and a line that says what is wrong where a result is.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/parallel.h"
#include "ops/linear_logprob.h"
#include "ops/ops.h"

namespace {

using namespace manus_fast;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// An array on the device. Without values it stays unwritten: a kernel that reads it before writing is initcheck's find.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t n) : n_(n) { check(cudaMalloc(&data_, std::max<std::size_t>(1, n) * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    check(cudaMemcpy(data_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> values(n_);
    check(cudaMemcpy(values.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t n_;
  T* data_ = nullptr;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  double uniform() { return std::uniform_real_distribution<double>(0, 1)(engine_); }
  std::vector<float> normal(std::size_t n, double scale = 1) {
    std::normal_distribution<double> draw(0, scale);
    std::vector<float> out(n);
    for (float& x : out) x = static_cast<float>(draw(engine_));
    return out;
  }

 private:
  std::mt19937 engine_;
};

// Throws unless `got` is within `tolerance` of `want`, relative to its norm.
template <typename A, typename B>
void close(const std::string& name, const std::vector<A>& got, const std::vector<B>& want, double tolerance) {
  double off = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got.at(i)) - static_cast<double>(want[i]);
    off += d * d, norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  const double error = std::sqrt(off / std::max(norm, 1e-30));
  if (!(error <= tolerance)) throw std::runtime_error(concat(name, ": off by ", error, ", more than ", tolerance));
}

// Of `got`, 0 where `want` is not finite: what a row of gae with such a number in it holds is not compared.
std::vector<float> where_finite(const std::vector<float>& got, const std::vector<float>& want) {
  std::vector<float> out(got.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::isfinite(want.at(i)) ? got[i] : 0.0f;
  return out;
}

// One case of gae, padded [rows, length] or packed by `boundaries`, at token and at turn level. `broken`: the tokens of
// some rows are not finite, and those of the others are what they are without.
void gae_case(std::int64_t rows, std::int64_t length, const std::vector<std::int32_t>& boundaries,
              bool broken = false) {
  Random random(static_cast<unsigned>(rows + length));
  const bool packed = !boundaries.empty();
  const std::int64_t n = packed ? boundaries.back() : rows * length;
  if (packed) rows = static_cast<std::int64_t>(boundaries.size()) - 1;
  std::vector<float> rewards = random.normal(n), values = random.normal(n), bootstrap = random.normal(rows);
  std::vector<std::uint8_t> mask(n);
  std::vector<std::int32_t> turn(n);
  for (std::int64_t i = 0, id = 0; i < n; ++i) {
    mask[i] = random.uniform() < 0.7;
    if (!mask[i]) rewards[i] = 0;
    turn[i] = static_cast<std::int32_t>(id += random.uniform() < 0.1);
  }
  if (broken) {
    for (const std::int64_t i : {n / 3, n / 2}) mask[i] = 1, rewards[i] = NAN, values[i] = INFINITY;
    bootstrap[rows - 1] = NAN;
  }
  const Array<float> r(rewards), v(values), b(bootstrap);
  const Array<std::uint8_t> m(mask);
  const Array<std::int32_t> t(turn), c(boundaries);
  for (const bool turns : {false, true}) {
    GaeArgs args{};
    args.rewards = rewards.data(), args.values = values.data(), args.mask = mask.data();
    args.turn_id = turns ? turn.data() : nullptr;
    args.bootstrap = bootstrap.data(), args.cu_seqlens = packed ? boundaries.data() : nullptr;
    args.rows = rows, args.row_length = packed ? 0 : length, args.tokens = n;
    args.gamma = 0.97, args.lam = 0.9, args.token_gamma = 1, args.token_lam = 1;
    std::vector<float> advantages(n), returns(n);
    std::vector<double> stats(3);
    args.advantages = advantages.data(), args.returns = returns.data(), args.stats = stats.data();
    cpu::gae(args);

    const Array<float> got_advantages(n), got_returns(n);
    const Array<double> got_stats(3);
    const Array<char> workspace(cuda::gae_workspace(n, turns));
    args.rewards = r.get(), args.values = v.get(), args.mask = m.get(), args.turn_id = turns ? t.get() : nullptr;
    args.bootstrap = b.get(), args.cu_seqlens = packed ? c.get() : nullptr;
    args.advantages = got_advantages.get(), args.returns = got_returns.get(), args.stats = got_stats.get();
    cuda::gae(args, workspace.get(), Stream{nullptr});
    const std::string name = concat("gae of ", rows, " rows, turns ", turns);
    close(name, where_finite(got_advantages.host(), advantages), where_finite(advantages, advantages), 1e-5);
    close(name, where_finite(got_returns.host(), returns), where_finite(returns, returns), 1e-5);
    if (!broken) close(name, got_stats.host(), stats, 1e-5);
    if (broken && !std::isnan(got_stats.host()[2])) throw std::runtime_error(name + ": a deviation of NaN is a number");
  }
}

void gae_cases() {
  gae_case(3, 4099, {});
  gae_case(5, 7, {});
  gae_case(9, 1000, {});  // whole rows a block, the last tile not full
  gae_case(6, 2, {});
  gae_case(0, 0, {0, 1, 1, 4096, 4100, 8999, 9001});
  gae_case(9, 1000, {}, true);
  gae_case(0, 0, {0, 1, 1, 4096, 4100, 8999, 9001}, true);
}

void gae_large_cases() {
  gae_case(450, 4096, {});
  gae_case(3, 700001, {});
  std::vector<std::int32_t> boundaries = {0};
  for (int row = 0; row < 2500; ++row) boundaries.push_back(boundaries.back() + row * 7919 % 1500);
  gae_case(0, 0, boundaries);
}

// One case of ppo_loss: `terms` gives it values, a reference, an entropy and weights; `by_row` a ratio of the sequence.
void ppo_loss_case(std::int64_t n, bool terms, bool by_row) {
  Random random(static_cast<unsigned>(n));
  const std::vector<float> advantages = random.normal(n), noise = random.normal(n, 0.1), values = random.normal(n);
  std::vector<float> log_prob(n), old(n), old_values(n), returns(n), ref(n), entropy(n), weights(n), sequence(n);
  std::vector<std::uint8_t> mask(n, 1);
  for (std::int64_t i = 0; i < n; ++i) {
    log_prob[i] = static_cast<float>(-random.uniform()), old[i] = log_prob[i] + noise[i];
    old_values[i] = values[i] + 0.2f, returns[i] = values[i] + 0.5f, ref[i] = log_prob[i] - 0.05f;
    entropy[i] = static_cast<float>(random.uniform()), weights[i] = static_cast<float>(random.uniform());
    sequence[i] = 0.01f * static_cast<float>(i % 7);
    if (i > 0 && i < 5) mask[i] = 0;
  }
  const auto present = [&](bool there, const std::vector<float>& x) { return there ? x.data() : nullptr; };
  PpoLossArgs args{};
  args.log_prob = log_prob.data(), args.old_log_prob = old.data(), args.advantages = advantages.data();
  args.mask = mask.data(), args.weights = present(terms, weights), args.scale = present(by_row, weights);
  args.sequence_log_ratio = present(by_row, sequence), args.values = present(terms, values);
  args.old_values = present(terms, old_values), args.returns = present(terms, returns);
  args.ref_log_prob = present(terms, ref), args.entropy = present(terms, entropy);
  args.n = n, args.mean = {nullptr, 0.1}, args.rstd = {nullptr, 0.9}, args.denominator = {nullptr, double(n)};
  args.clip_low = 0.8f, args.clip_high = 1.2f, args.dual_clip = terms ? 3.0f : 0.0f, args.value_clip = 0.5f;
  args.vf_coef = 0.5f, args.kl_coef = 0.1f, args.ent_coef = 0.01f;
  args.clip = terms ? Clip::ppo : Clip::cispo, args.kl = by_row ? Kl::k3_plus : Kl::k3;
  std::vector<float> gradient(n), gradient_values(n), gradient_entropy(n), loss(1);
  std::vector<double> stats(kLossStats);
  args.grad_log_prob = gradient.data(), args.grad_values = terms ? gradient_values.data() : nullptr;
  args.grad_entropy = terms ? gradient_entropy.data() : nullptr, args.loss = loss.data(), args.stats = stats.data();
  cpu::ppo_loss(args);

  const Array<float> l(log_prob), o(old), a(advantages), w(weights), s(sequence), v(values), ov(old_values);
  const Array<float> ret(returns), rf(ref), e(entropy), got(n), got_values(n), got_entropy(n), got_loss(1);
  const Array<std::uint8_t> m(mask);
  const Array<double> got_stats(kLossStats), scalars({0.1, 0.9, double(n)});
  const Array<char> workspace(cuda::ppo_loss_workspace());
  const auto on_device = [](bool there, const Array<float>& x) { return there ? x.get() : nullptr; };
  args.log_prob = l.get(), args.old_log_prob = o.get(), args.advantages = a.get(), args.mask = m.get();
  args.weights = on_device(terms, w), args.scale = on_device(by_row, w);
  args.sequence_log_ratio = on_device(by_row, s), args.values = on_device(terms, v);
  args.old_values = on_device(terms, ov), args.returns = on_device(terms, ret);
  args.ref_log_prob = on_device(terms, rf), args.entropy = on_device(terms, e);
  args.mean.pointer = scalars.get(), args.rstd.pointer = scalars.get() + 1;
  args.denominator.pointer = scalars.get() + 2;
  args.grad_log_prob = got.get(), args.grad_values = on_device(terms, got_values);
  args.grad_entropy = on_device(terms, got_entropy), args.loss = got_loss.get(), args.stats = got_stats.get();
  cuda::ppo_loss(args, workspace.get(), Stream{nullptr});
  const std::string name = concat("ppo_loss of ", n);
  close(name, got_loss.host(), loss, 1e-4);
  close(name, got_stats.host(), stats, 1e-4);
  close(name, got.host(), gradient, 1e-4);
  if (terms) close(name, got_values.host(), gradient_values, 1e-4);
  if (terms) close(name, got_entropy.host(), gradient_entropy, 1e-4);

  // 1 leaves the gradients as they are, 0.5 halves them.
  float* const arrays[3] = {args.grad_log_prob, args.grad_values, args.grad_entropy};
  const Array<float> factors({1.0f, 0.5f});
  cuda::scale_gradients(arrays, n, factors.get(), Stream{nullptr});
  cuda::scale_gradients(arrays, n, factors.get() + 1, Stream{nullptr});
  for (float& x : gradient) x *= 0.5f;
  close(concat(name, ", scaled"), got.host(), gradient, 1e-4);
}

void ppo_loss_cases() {
  ppo_loss_case(3206, true, false);
  ppo_loss_case(1, true, false);
  ppo_loss_case(387, true, true);
  ppo_loss_case(1027, false, false);
}

void ppo_loss_large_cases() { ppo_loss_case(1000003, true, false); }

std::vector<__nv_bfloat16> rounded(std::vector<float>& values) {
  std::vector<__nv_bfloat16> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    out[i] = __float2bfloat16(values[i]);
    values[i] = __bfloat162float(out[i]);
  }
  return out;
}

std::vector<float> widened(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = __bfloat162float(values[i]);
  return out;
}

// Three tiles of tokens, four of the vocabulary, eight steps of H; one temperature or one a row; an ignored token.
void linear_logprob_case(bool per_row) {
  const std::int64_t rows = 261, width = 456, words = 787, stride = 792, tiles = (words + 255) / 256;
  Random random(2);
  std::vector<float> hidden = random.normal(rows * width), weight = random.normal(words * width, 1 / std::sqrt(456.0));
  const Array<__nv_bfloat16> x(rounded(hidden)), w(rounded(weight));
  std::vector<std::int64_t> target(rows);
  std::vector<float> temperature(rows, 0.8f), up = random.normal(rows), up_entropy = random.normal(rows);
  for (std::int64_t i = 0; i < rows; ++i) {
    target[i] = i == 5 ? -1 : static_cast<std::int64_t>(random.uniform() * words);
    if (per_row) temperature[i] = static_cast<float>(random.uniform()) + 0.5f;
  }

  std::vector<double> logits(rows * words), log_prob(rows), entropy(rows), gradient(rows * words);
  for (std::int64_t i = 0; i < rows; ++i) {
    double* const z = &logits[i * words];
    double top = -1e300, total = 0, mean = 0;
    for (std::int64_t j = 0; j < words; ++j) {
      for (std::int64_t k = 0; k < width; ++k) z[j] += double(hidden[i * width + k]) * double(weight[j * width + k]);
      top = std::max(top, z[j] / temperature[i]);
    }
    for (std::int64_t j = 0; j < words; ++j) {
      const double y = z[j] / temperature[i] - top;
      total += std::exp(y), mean += std::exp(y) * y;
    }
    if (target[i] < 0) continue;
    log_prob[i] = z[target[i]] / temperature[i] - top - std::log(total);
    entropy[i] = std::log(total) - mean / total;
    for (std::int64_t j = 0; j < words; ++j) {
      const double log_p = z[j] / temperature[i] - top - std::log(total), p = std::exp(log_p);
      const double chosen = j == target[i] ? up[i] : 0.0;
      gradient[i * words + j] = (chosen - p * (up[i] + up_entropy[i] * (log_p + entropy[i]))) / temperature[i];
    }
  }

  const Array<std::int64_t> t(target);
  const Array<float> scale(temperature), g(up), h(up_entropy);
  const Array<float> partials(tiles * 3 * rows), got_log_prob(rows), got_entropy(rows), log_total(rows);
  const Array<float> target_logit(std::vector<float>(rows, NAN));
  const Array<__nv_bfloat16> out(std::vector<__nv_bfloat16>(rows * stride));
  cuda::LogitTileArgs args{};
  args.hidden = x.get(), args.weight = w.get(), args.target = t.get();
  args.temperature = per_row ? scale.get() : nullptr;
  args.inverse_temperature = 1 / 0.8f, args.tokens = rows, args.width = width, args.vocabulary = words;
  args.hidden_stride = args.weight_stride = width, args.first = 0, args.stream = nullptr;
  args.partials = partials.get(), args.target_logit = target_logit.get(), args.out_stride = stride;
  cuda::MergeArgs merge{};
  merge.target = t.get(), merge.temperature = args.temperature, merge.inverse_temperature = args.inverse_temperature;
  merge.tokens = rows, merge.vocabulary = words, merge.partials = partials.get();
  merge.target_logit = target_logit.get(), merge.log_prob = got_log_prob.get(), merge.entropy = got_entropy.get();
  merge.log_total = log_total.get(), merge.stream = nullptr;
  const std::string name = concat("linear_logprob, temperature by row ", per_row);
  const auto inside = [&](const std::vector<float>& padded) {
    std::vector<float> cut;
    for (std::int64_t i = 0; i < rows; ++i) {
      cut.insert(cut.end(), padded.begin() + i * stride, padded.begin() + i * stride + words);
    }
    return cut;
  };
  for (const bool keep : {false, true}) {
    args.out = keep ? out.get() : nullptr;
    cuda::logit_statistics(args);
    cuda::merge_statistics(merge);
    close(concat(name, ", log-prob"), got_log_prob.host(), log_prob, 1e-4);
    close(concat(name, ", entropy"), got_entropy.host(), entropy, 1e-4);
    if (keep) close(concat(name, ", logits"), inside(widened(out.host())), logits, 1e-2);
  }
  args.log_total = log_total.get(), args.grad_log_prob = g.get(), args.grad_entropy = h.get();
  args.entropy = got_entropy.get(), args.out = out.get();
  cuda::logit_gradient(args);
  close(concat(name, ", gradient"), inside(widened(out.host())), gradient, 1e-2);
}

void linear_logprob_cases() {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9 || device.minor != 0) {
    std::printf("-- linear_logprob: not run, its kernels are for compute capability 9.0\n");
    return;
  }
  linear_logprob_case(false);
  linear_logprob_case(true);
}

}  // namespace

int main(int count, char** names) {
  const struct {
    const char* name;
    void (*run)();
  } ops[] = {{"gae", gae_cases}, {"ppo_loss", ppo_loss_cases}, {"linear_logprob", linear_logprob_cases},
               {"gae_large", gae_large_cases}, {"ppo_loss_large", ppo_loss_large_cases}};
  set_num_threads(1);
  try {
    for (const auto& op : ops) {
      const auto named = [&](const char* given) { return std::strcmp(given, op.name) == 0; };
      if (count > 1 && std::none_of(names + 1, names + count, named)) continue;
      op.run();
      check(cudaDeviceSynchronize());
      std::printf("-- %s: every kernel ran, results right\n", op.name);
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::printf("-- wrong: %s\n", error.what());
    return 1;
  }
  return 0;
}
