// The reinforcement-learning ops as plain functions on raw pointers: sizes and, on the GPU, a stream go with
// them; shapes and types are checked by the Python layer. Arrays are contiguous; N counts tokens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace manus_fast {

// Rows are [rows, row_length] when cu_seqlens is null, else row r is [cu_seqlens[r], cu_seqlens[r + 1]).
struct GaeArgs {
  const float* rewards;              // [N], read only where mask is set
  const float* values;               // [N], read only where mask is set
  const std::uint8_t* mask;          // [N]
  const std::int32_t* turn_id;       // [N], or null: token level
  const float* bootstrap;            // [rows], or null: 0
  const std::int32_t* cu_seqlens;    // [rows + 1], or null
  std::int64_t rows;
  std::int64_t row_length;
  std::int64_t tokens;               // N
  double gamma, lam;                 // per turn, or per token at token level
  double token_gamma, token_lam;     // inside a turn
  float* advantages;                 // [N]
  float* returns;                    // [N]
  double* stats;                     // [3]: count, mean, sum of squared deviations over the mask
};

enum class Clip : std::int32_t { ppo = 0, cispo = 1, none = 2 };
enum class Kl : std::int32_t { k1 = 0, k2 = 1, k3 = 2, k3_plus = 3 };

// Sums over the counted tokens first, maxima last. manus_fast/ops/ppo_loss.py names the entries in this order.
constexpr int kRatioBounds = 7;
enum LossStat : int {
  kCount, kDropped, kPolicy, kValue, kKl, kEntropyLoss,  // losses: already divided by the denominator
  kClipLow, kClipHigh, kDualClip, kValueClip,            // counts
  kK1, kK3, kRefKl, kEntropy, kRatio, kWeight, kAdvantage,
  kReturn, kReturnSq, kError, kErrorSq,
  kRatioAbove,                                           // counts of ratio > kRatioBound[k]
  kLossSums = kRatioAbove + kRatioBounds,
  kRatioMax = kLossSums,
  kLogRatioMax,                                          // largest |log ratio|
  kLossStats
};
constexpr float kRatioBound[kRatioBounds] = {1.02f, 1.05f, 1.1f, 1.2f, 1.5f, 2.0f, 5.0f};

// A scalar that may live on the device: `pointer` when not null, else `value`.
struct Scalar {
  const double* pointer;
  double value;
};

struct PpoLossArgs {
  const float* log_prob;
  const float* old_log_prob;
  const float* advantages;
  const std::uint8_t* mask;
  const float* weights;        // importance-correction weight of the policy term, or null: 1
  const float* scale;          // aggregation weight of every term, or null: 1
  const float* sequence_log_ratio;  // replaces log_prob - old_log_prob in the ratio, or null
  const float* values;         // null: no value term
  const float* old_values;     // null: no value clip
  const float* returns;
  const float* ref_log_prob;   // null: no KL term
  const float* entropy;        // null: no entropy term
  std::int64_t n;
  Scalar mean, rstd, denominator;
  float clip_low, clip_high;   // ratio bounds themselves: 1 - low, 1 + high
  float dual_clip;             // 0: off
  float value_clip;            // 0: off
  float vf_coef, kl_coef, ent_coef;
  Clip clip;
  Kl kl;
  float* grad_log_prob;
  float* grad_values;          // null when values is null
  float* grad_entropy;         // null when entropy is null
  float* loss;                 // [1]
  double* stats;               // [kLossStats]
};

struct GroupArgs {
  const float* rewards;          // [E]; NaN: left out, advantage 0
  const std::int64_t* group;     // [E], any ids
  const std::uint8_t* counted;   // [E], or null: every entry enters its group's statistics
  const std::int64_t* order;     // [E]: indices sorted by group, ties by index
  std::int64_t n;
  int kind;                      // 0 (R - mean) / (std + eps), 1 R - mean, 2 n / (n - 1) (R - mean)
  bool raw_singleton;            // a group of one keeps its reward instead of 0
  double eps;
  float* advantages;             // [E]
};

struct BFloat16 {
  std::uint16_t bits;
};

// Rows of logits z under softmax(z / T). Number: float or double; Logit: the same, or BFloat16 with float. Rows with
// target < 0 are ignored.
template <typename Logit, typename Number = Logit>
struct LogitRows {
  const Logit* logits;             // [rows, vocabulary], rows `stride` apart
  const std::int64_t* target;      // [rows], below vocabulary
  const Number* temperature;       // [rows], or null: one_temperature
  Number one_temperature;
  std::int64_t rows, vocabulary, stride;
  // Of each row: the largest logit, and log sum e^((z - top) / T). Apart, for under a large common offset their sum would
  // lose the digits of the second. Written by logprob_statistics, read by logprob_gradient, as entropy is.
  Number* top;                     // [rows]
  Number* log_total;               // [rows]
  Number* entropy;                 // [rows], or null: not asked for
  Number* log_prob;                // [rows], written by logprob_statistics
  const Number* grad_log_prob;     // [rows]
  const Number* grad_entropy;      // [rows], or null: zero
  Logit* gradient;                 // [rows, vocabulary], rows `gradient_stride` apart; may be the logits
  std::int64_t gradient_stride;
};

// One new token per sequence against a cache with one slot per sequence; query head g of a group shares the key head.
constexpr std::int64_t kMaxHeadDim = 256;
struct SlotAttentionArgs {
  const float* query;            // [n, heads, group, dim]
  const float* keys;             // [slots, heads, length, dim]
  const float* values;           // the same
  const std::int64_t* slots;     // [n]: where the sequence lies in the cache
  const std::int64_t* lengths;   // [n]: how many of its tokens are seen, 1 to length
  std::int64_t n, heads, group, length;
  std::int64_t dim;              // a multiple of 16, at most kMaxHeadDim
  float scale;
  float* output;                 // [n, heads, group, dim]
};

// Rows laid end to end, each query over the first keys of its row; query head h * group + g shares key head h.
struct PackedAttentionArgs {
  const float* query;             // [queries, heads * group, dim], unit stride along dim
  const float* key;               // [keys, heads, dim], the same
  const float* value;             // [keys, heads, dim], the same
  std::int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
  const std::int32_t* cu_queries; // [rows + 1]
  const std::int32_t* cu_keys;    // [rows + 1]
  const std::int64_t* seen;       // [queries], from 1 to the row's number of keys
  std::int64_t rows, heads, group;
  std::int64_t dim;               // a multiple of 16, at most kMaxHeadDim
  float scale;
  float* output;                  // [queries, heads * group, dim]; the backward reads it, as log_sum
  float* log_sum;                 // [queries, heads * group]: log of the sum of e^score
  const float* grad_output;       // [queries, heads * group, dim]
  float* grad_query;              // [queries, heads * group, dim]
  float* grad_key;                // [keys, heads, dim]
  float* grad_value;              // [keys, heads, dim]
};

namespace cpu {
void gae(const GaeArgs& args);
void ppo_loss(const PpoLossArgs& args);
void group_advantages(const GroupArgs& args);
void slot_attention(const SlotAttentionArgs& args);
void packed_attention(const PackedAttentionArgs& args);
void packed_attention_gradient(const PackedAttentionArgs& args);
template <typename Logit, typename Number>
void logprob_statistics(const LogitRows<Logit, Number>& args);
template <typename Logit, typename Number>
void logprob_gradient(const LogitRows<Logit, Number>& args);
}  // namespace cpu

#if MF_BUILD_CUDA
// A cudaStream_t, without its header.
struct Stream {
  void* handle;
};

// Each launches on `stream` and returns; `workspace` is device memory of the size its function says, with any content.
namespace cuda {
std::size_t gae_workspace(std::int64_t tokens, bool turns);
void gae(const GaeArgs& args, void* workspace, Stream stream);
std::size_t ppo_loss_workspace();
void ppo_loss(const PpoLossArgs& args, void* workspace, Stream stream);
// Multiplies each gradient that is not null, [n], by *factor on the device; 1 touches nothing.
void scale_gradients(float* const (&gradients)[3], std::int64_t n, const float* factor, Stream stream);
}  // namespace cuda
#endif

}  // namespace manus_fast
