// Causal attention of rows laid end to end, on the CPU, forward and backward. A row's keys fit the cache, so each block
// of queries (all heads of a group together, which share keys) makes its whole rows of scores, and no running maximum is
// needed. All products are small dense ones of one routine, whose right side has unit stride: keys and values are
// transposed once a row. Nothing is computed for keys that no query of a block sees.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"
#include "ops/vectors.h"

namespace manus_fast::cpu {
namespace {

constexpr int kTile = 6;          // rows of a product at a time: with two vectors of columns, 12 of 16 registers
constexpr std::int64_t kBlock = 48;  // rows of scores at a time, about

std::int64_t padded(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// c[i, j] (+)= sum over k < n of a[i * a_row + k * a_step] * b[k * b_step + j], for R rows and C vectors of columns.
template <int R, int C>
MF_INLINE void tile(const float* a, std::int64_t a_row, std::int64_t a_step, const float* b, std::int64_t b_step,
                    std::int64_t n, float* c, std::int64_t c_row, bool add) {
  Floats sum[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) sum[i][j] = add ? load(c + i * c_row + j * kLanes, kLanes) : Floats{};
  for (std::int64_t k = 0; k < n; ++k) {
    Floats right[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) right[j] = load(b + k * b_step + j * kLanes, kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const float left = a[i * a_row + k * a_step];
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) sum[i][j] += right[j] * left;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) store(c + i * c_row + j * kLanes, sum[i][j], kLanes);
}

template <int C>
void columns(const float* a, std::int64_t a_row, std::int64_t a_step, std::int64_t rows, const float* b,
             std::int64_t b_step, std::int64_t n, float* c, std::int64_t c_row, bool add) {
  std::int64_t i = 0;
  for (; i + kTile <= rows; i += kTile)
    tile<kTile, C>(a + i * a_row, a_row, a_step, b, b_step, n, c + i * c_row, c_row, add);
  for (; i + 2 <= rows; i += 2) tile<2, C>(a + i * a_row, a_row, a_step, b, b_step, n, c + i * c_row, c_row, add);
  for (; i < rows; ++i) tile<1, C>(a + i * a_row, a_row, a_step, b, b_step, n, c + i * c_row, c_row, add);
}

// `tile` for any number of rows, and of columns that is a multiple of kLanes.
void product(const float* a, std::int64_t a_row, std::int64_t a_step, std::int64_t rows, const float* b,
             std::int64_t b_step, std::int64_t width, std::int64_t n, float* c, std::int64_t c_row, bool add) {
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes)
    columns<2>(a, a_row, a_step, rows, b + j, b_step, n, c + j, c_row, add);
  for (; j < width; j += kLanes) columns<1>(a, a_row, a_step, rows, b + j, b_step, n, c + j, c_row, add);
}

float total(Floats v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

float largest(Floats v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, v[i]);
  return most;
}

// What one thread needs for a row, of one key head at a time.
class Row {
 public:
  Row(const PackedAttentionArgs& args, std::int64_t number)
      : args_(args),
        head_(number % args.heads),
        first_query_(args.cu_queries[number / args.heads]),
        queries_(args.cu_queries[number / args.heads + 1] - first_query_),
        first_key_(args.cu_keys[number / args.heads]),
        keys_(args.cu_keys[number / args.heads + 1] - first_key_),
        width_(padded(keys_, kLanes)),
        at_a_time_(std::max<std::int64_t>(1, kBlock / args.group)) {}

  void forward() {
    if (!queries_) return;
    transposed(args_.key, key_at(), args_.key_token, keys_turned_);
    const float* value = args_.value + value_at();
    for (std::int64_t begin = 0; begin < queries_; begin += at_a_time_) {
      const std::int64_t rows = prepare(begin);
      out_.resize(rows * args_.dim);
      scores_from(query_, keys_turned_, rows, scores_);
      std::int64_t row = 0;
      for (std::int64_t q = begin; q < end_; ++q)
        for (std::int64_t g = 0; g < args_.group; ++g, ++row) {
          float* s = scores_.data() + row * width_;
          const std::int64_t seen = args_.seen[first_query_ + q], lanes = hide(s, seen);
          Floats most = load(s, kLanes), sum{};
          for (std::int64_t t = kLanes; t < lanes; t += kLanes) most = max(load(s + t, kLanes), most);
          const float top = largest(most);
          for (std::int64_t t = 0; t < lanes; t += kLanes) {
            const Floats e = exp_below_zero(load(s + t, kLanes) - top);
            store(s + t, e, kLanes);
            sum += e;
          }
          const float all = total(sum);
          args_.log_sum[at(q, g)] = top + std::log(all);
          std::fill(s + lanes, s + padded(most_seen_, kLanes), 0.0f);
          inverse_[row] = 1.0f / all;
        }
      product(scores_.data(), width_, 1, rows, value, args_.value_token, args_.dim, most_seen_, out_.data(), args_.dim,
              false);
      row = 0;
      for (std::int64_t q = begin; q < end_; ++q)
        for (std::int64_t g = 0; g < args_.group; ++g, ++row)
          for (std::int64_t d = 0; d < args_.dim; ++d)
            args_.output[at(q, g) * args_.dim + d] = out_[row * args_.dim + d] * inverse_[row];
    }
  }

  void backward() {
    const std::int64_t dim = args_.dim;
    grad_key_.assign(keys_ * dim, 0.0f);
    grad_value_.assign(keys_ * dim, 0.0f);
    if (queries_) {
      transposed(args_.key, key_at(), args_.key_token, keys_turned_);
      transposed(args_.value, value_at(), args_.value_token, values_turned_);
    }
    const float* key = args_.key + key_at();
    for (std::int64_t begin = 0; begin < queries_; begin += at_a_time_) {
      const std::int64_t rows = prepare(begin);
      upstream_.resize(rows * dim);
      out_.resize(rows * dim);
      scores_from(query_, keys_turned_, rows, scores_);
      std::int64_t row = 0;
      for (std::int64_t q = begin; q < end_; ++q)
        for (std::int64_t g = 0; g < args_.group; ++g, ++row)
          std::copy_n(args_.grad_output + at(q, g) * dim, dim, upstream_.data() + row * dim);
      scores_from(upstream_, values_turned_, rows, slopes_);
      row = 0;
      for (std::int64_t q = begin; q < end_; ++q)
        for (std::int64_t g = 0; g < args_.group; ++g, ++row) {
          float *p = scores_.data() + row * width_, *slope = slopes_.data() + row * width_;
          const float* output = args_.output + at(q, g) * dim;
          Floats dot{};
          for (std::int64_t d = 0; d < dim; d += kLanes)
            dot += load(output + d, kLanes) * load(upstream_.data() + row * dim + d, kLanes);
          const float shift = total(dot), log_sum = args_.log_sum[at(q, g)];
          const std::int64_t lanes = hide(p, args_.seen[first_query_ + q]);
          for (std::int64_t t = 0; t < lanes; t += kLanes) {
            const Floats weight = exp_below_zero(load(p + t, kLanes) - log_sum);
            store(p + t, weight, kLanes);
            store(slope + t, weight * (load(slope + t, kLanes) - shift), kLanes);
          }
          const std::int64_t end = padded(most_seen_, kLanes);
          std::fill(p + lanes, p + end, 0.0f);
          std::fill(slope + lanes, slope + end, 0.0f);
        }
      product(slopes_.data(), width_, 1, rows, key, args_.key_token, dim, most_seen_, out_.data(), dim, false);
      product(slopes_.data(), 1, width_, most_seen_, query_.data(), dim, dim, rows, grad_key_.data(), dim, true);
      product(scores_.data(), 1, width_, most_seen_, upstream_.data(), dim, dim, rows, grad_value_.data(), dim, true);
      row = 0;
      for (std::int64_t q = begin; q < end_; ++q)
        for (std::int64_t g = 0; g < args_.group; ++g, ++row)
          for (std::int64_t d = 0; d < dim; ++d)
            args_.grad_query[at(q, g) * dim + d] = out_[row * dim + d] * args_.scale;
    }
    for (std::int64_t t = 0; t < keys_; ++t) {
      const std::int64_t to = ((first_key_ + t) * args_.heads + head_) * dim;
      std::copy_n(grad_key_.data() + t * dim, dim, args_.grad_key + to);
      std::copy_n(grad_value_.data() + t * dim, dim, args_.grad_value + to);
    }
  }

 private:
  std::int64_t key_at() const { return first_key_ * args_.key_token + head_ * args_.key_head; }
  std::int64_t value_at() const { return first_key_ * args_.value_token + head_ * args_.value_head; }
  // Of output, log_sum and gradients, in heads.
  std::int64_t at(std::int64_t q, std::int64_t g) const {
    return ((first_query_ + q) * args_.heads + head_) * args_.group + g;
  }

  // [dim, width_] of keys or values; what lies beyond the last one is 0.
  void transposed(const float* x, std::int64_t begin, std::int64_t token, std::vector<float>& to) const {
    to.assign(args_.dim * width_, 0.0f);
    for (std::int64_t t = 0; t < keys_; ++t)
      for (std::int64_t d = 0; d < args_.dim; ++d) to[d * width_ + t] = x[begin + t * token + d];
  }

  // Gathers the scaled queries of the block that begins there; returns their number, all heads of the group counted.
  std::int64_t prepare(std::int64_t begin) {
    end_ = std::min(begin + at_a_time_, queries_);
    const std::int64_t rows = (end_ - begin) * args_.group;
    query_.resize(rows * args_.dim);
    inverse_.resize(rows);
    scores_.resize(rows * width_);
    most_seen_ = 0;
    float* to = query_.data();
    for (std::int64_t q = begin; q < end_; ++q) {
      most_seen_ = std::max(most_seen_, args_.seen[first_query_ + q]);
      for (std::int64_t g = 0; g < args_.group; ++g, to += args_.dim) {
        const std::int64_t head = head_ * args_.group + g;
        const float* from = args_.query + (first_query_ + q) * args_.query_token + head * args_.query_head;
        for (std::int64_t d = 0; d < args_.dim; ++d) to[d] = from[d] * args_.scale;
      }
    }
    return rows;
  }

  void scores_from(const std::vector<float>& left, const std::vector<float>& right, std::int64_t rows,
                   std::vector<float>& to) const {
    to.resize(rows * width_);
    product(left.data(), args_.dim, 1, rows, right.data(), width_, padded(most_seen_, kLanes), args_.dim, to.data(),
            width_, false);
  }

  // Gives what a query does not see no weight, up to a whole vector; returns where that ends.
  static std::int64_t hide(float* scores, std::int64_t seen) {
    const std::int64_t lanes = padded(seen, kLanes);
    std::fill(scores + seen, scores + lanes, -INFINITY);
    return lanes;
  }

  const PackedAttentionArgs& args_;
  std::int64_t head_, first_query_, queries_, first_key_, keys_, width_, at_a_time_;
  std::int64_t end_ = 0, most_seen_ = 0;
  std::vector<float> keys_turned_, values_turned_, query_, upstream_, scores_, slopes_, out_, inverse_;
  std::vector<float> grad_key_, grad_value_;
};

}  // namespace

void packed_attention(const PackedAttentionArgs& args) {
  parallel_for(args.rows * args.heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) Row(args, i).forward();
  });
}

void packed_attention_gradient(const PackedAttentionArgs& args) {
  parallel_for(args.rows * args.heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) Row(args, i).backward();
  });
}

}  // namespace manus_fast::cpu
