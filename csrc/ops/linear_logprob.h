// The product of hidden states and the output matrix on Hopper, with what is done to a tile of logits fused behind it.
// Raw device pointers and a stream; nothing here waits for the device.
#pragma once

#include <cstdint>

namespace manus_fast::cuda {

// Vocabulary columns of one tile: the forward's partial statistics are one entry a row and tile.
constexpr int kTileVocabulary = 256;

struct LogitTileArgs {
  const void* hidden;          // bf16 [N, H], rows hidden_stride elements apart (a multiple of 8; 16-byte aligned)
  const void* weight;          // bf16 [V, H], rows weight_stride elements apart (likewise): a slice of the vocabulary
  const std::int64_t* target;  // [N], in the whole vocabulary
  const float* temperature;    // [N], or null: inverse_temperature for all
  float inverse_temperature;
  std::int64_t tokens, width, vocabulary;  // N, H, V of the slice
  std::int64_t hidden_stride, weight_stride;
  std::int64_t first;  // the slice's first word in the whole vocabulary
  // Forward: partial statistics float [tiles, 3, N] from the slice's first tile on (first is a multiple of
  // kTileVocabulary); the target's logit [N], written by whoever holds its column; and the logits, bf16 [N, V], or null.
  float* partials;
  float* target_logit;
  // Gradient: per row, base-2 log-sum-exp, upstream gradients (grad_entropy may be null) and entropy.
  const float* log_total;
  const float* grad_log_prob;
  const float* grad_entropy;
  const float* entropy;
  void* out;                // bf16 [N, V]: logits (forward) or their gradient (gradient)
  std::int64_t out_stride;  // a multiple of 8
  void* stream;
};

// Running maximum, sum and weighted sum of each row over each tile of logits, without writing the logits unless asked.
void logit_statistics(const LogitTileArgs& args);

// The gradient with respect to the logits of the slice.
void logit_gradient(const LogitTileArgs& args);

struct MergeArgs {
  const std::int64_t* target;
  const float* temperature;
  float inverse_temperature;
  std::int64_t tokens, vocabulary;
  const float* partials;  // [tiles, 3, N]
  const float* target_logit;
  float* log_prob;   // [N]
  float* entropy;    // [N]
  float* log_total;  // [N], base 2
  void* stream;
};

// Merges the partial statistics of every tile of the vocabulary.
void merge_statistics(const MergeArgs& args);

}  // namespace manus_fast::cuda
