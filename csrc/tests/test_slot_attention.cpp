#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "ops/ops.h"

using namespace manus_fast;

TEST_CASE("slot attention equals the plain formula and reads nothing beyond a slot's length") {
  for (const std::int64_t dim : {16, 32, 64, 80, 256}) {
    for (const std::int64_t group : {1, 2, 7}) {
      const std::int64_t slots = 3, heads = 2, length = 37, n = 2;
      std::vector<float> query(n * heads * group * dim), keys(slots * heads * length * dim), values(keys.size());
      std::vector<float> output(query.size(), NAN);
      std::uint32_t state = 7;
      const auto uniform = [&] {
        state = state * 1664525u + 1013904223u;
        return float(state >> 8) / float(1 << 24) - 0.5f;
      };
      for (auto* v : {&query, &keys, &values})
        for (float& x : *v) x = uniform();
      const std::vector<std::int64_t> where{2, 0}, lengths{17, 37};
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t t = lengths[i]; t < length; ++t)
            for (std::int64_t d = 0; d < dim; ++d)
              keys[((where[i] * heads + h) * length + t) * dim + d] =
                  values[((where[i] * heads + h) * length + t) * dim + d] = NAN;
      SlotAttentionArgs args{};
      args.query = query.data();
      args.keys = keys.data();
      args.values = values.data();
      args.slots = where.data();
      args.lengths = lengths.data();
      args.n = n;
      args.heads = heads;
      args.group = group;
      args.length = length;
      args.dim = dim;
      args.scale = 0.7f;
      args.output = output.data();
      cpu::slot_attention(args);
      double worst = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t slot = (where[i] * heads + h) * length * dim;
          for (std::int64_t g = 0; g < group; ++g) {
            const std::int64_t row = ((i * heads + h) * group + g) * dim;
            std::vector<double> weight(lengths[i]);
            double sum = 0;
            for (std::int64_t t = 0; t < lengths[i]; ++t) {
              double score = 0;
              for (std::int64_t d = 0; d < dim; ++d) score += double(query[row + d]) * keys[slot + t * dim + d];
              sum += weight[t] = std::exp(0.7 * score);
            }
            for (std::int64_t d = 0; d < dim; ++d) {
              double expected = 0;
              for (std::int64_t t = 0; t < lengths[i]; ++t) expected += weight[t] / sum * values[slot + t * dim + d];
              // Written so that a NaN counts as wrong.
              const double error = std::abs(output[row + d] - expected);
              worst = error <= worst ? worst : error;
            }
          }
        }
      }
      CHECK(worst <= 1e-6);
    }
  }
}
