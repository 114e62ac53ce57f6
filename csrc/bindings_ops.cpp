// The ops for Python, by keyword. Arrays arrive as addresses (tensor.data_ptr(), 0 for None): the Python layer has
// checked shapes, types and lifetimes. Every call gives up the GIL while it works.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "common/check.h"
#include "ops/linear_logprob.h"
#include "ops/ops.h"

namespace py = pybind11;

namespace manus_fast {
namespace {

// Reads each keyword once; a missing one is a KeyError, one that nothing reads a ValueError.
class Arguments {
 public:
  explicit Arguments(const py::kwargs& given) : given_(given) {}

  template <typename T>
  T get(const char* name) {
    ++read_;
    return given_[name].cast<T>();
  }

  template <typename T>
  T* array(const char* name) {
    return reinterpret_cast<T*>(get<std::uintptr_t>(name));
  }

  void done() const {
    if (read_ != given_.size()) throw py::value_error("arguments: expected only the op's own keywords, got others");
  }

 private:
  const py::kwargs& given_;
  std::size_t read_ = 0;
};

GaeArgs gae_args(Arguments& a) {
  GaeArgs args{};
  args.rewards = a.array<const float>("rewards");
  args.values = a.array<const float>("values");
  args.mask = a.array<const std::uint8_t>("mask");
  args.turn_id = a.array<const std::int32_t>("turn_id");
  args.bootstrap = a.array<const float>("bootstrap");
  args.cu_seqlens = a.array<const std::int32_t>("cu_seqlens");
  args.rows = a.get<std::int64_t>("rows");
  args.row_length = a.get<std::int64_t>("row_length");
  args.tokens = a.get<std::int64_t>("tokens");
  args.gamma = a.get<double>("gamma");
  args.lam = a.get<double>("lam");
  args.token_gamma = a.get<double>("token_gamma");
  args.token_lam = a.get<double>("token_lam");
  args.advantages = a.array<float>("advantages");
  args.returns = a.array<float>("returns");
  args.stats = a.array<double>("stats");
  return args;
}

Scalar scalar(Arguments& a, const std::string& name) {
  return Scalar{a.array<const double>((name + "_pointer").c_str()), a.get<double>((name + "_value").c_str())};
}

PpoLossArgs ppo_loss_args(Arguments& a) {
  // A module older than the Python beside it must not write past the end.
  const auto entries = a.get<std::int64_t>("entries");
  MF_CHECK(entries == kLossStats, "entries: expected ", static_cast<int>(kLossStats), " statistics, got ", entries);
  PpoLossArgs args{};
  args.log_prob = a.array<const float>("log_prob");
  args.old_log_prob = a.array<const float>("old_log_prob");
  args.advantages = a.array<const float>("advantages");
  args.mask = a.array<const std::uint8_t>("mask");
  args.weights = a.array<const float>("weights");
  args.scale = a.array<const float>("scale");
  args.sequence_log_ratio = a.array<const float>("sequence_log_ratio");
  args.values = a.array<const float>("values");
  args.old_values = a.array<const float>("old_values");
  args.returns = a.array<const float>("returns");
  args.ref_log_prob = a.array<const float>("ref_log_prob");
  args.entropy = a.array<const float>("entropy");
  args.n = a.get<std::int64_t>("n");
  args.mean = scalar(a, "mean");
  args.rstd = scalar(a, "rstd");
  args.denominator = scalar(a, "denominator");
  args.clip_low = a.get<float>("clip_low");
  args.clip_high = a.get<float>("clip_high");
  args.dual_clip = a.get<float>("dual_clip");
  args.value_clip = a.get<float>("value_clip");
  args.vf_coef = a.get<float>("vf_coef");
  args.kl_coef = a.get<float>("kl_coef");
  args.ent_coef = a.get<float>("ent_coef");
  args.clip = static_cast<Clip>(a.get<int>("clip"));
  args.kl = static_cast<Kl>(a.get<int>("kl"));
  args.grad_log_prob = a.array<float>("grad_log_prob");
  args.grad_values = a.array<float>("grad_values");
  args.grad_entropy = a.array<float>("grad_entropy");
  args.loss = a.array<float>("loss");
  args.stats = a.array<double>("stats");
  return args;
}

GroupArgs group_args(Arguments& a) {
  GroupArgs args{};
  args.rewards = a.array<const float>("rewards");
  args.group = a.array<const std::int64_t>("group");
  args.counted = a.array<const std::uint8_t>("counted");
  args.order = a.array<const std::int64_t>("order");
  args.n = a.get<std::int64_t>("n");
  args.kind = a.get<int>("kind");
  args.raw_singleton = a.get<bool>("raw_singleton");
  args.eps = a.get<double>("eps");
  args.advantages = a.array<float>("advantages");
  return args;
}

SlotAttentionArgs slot_attention_args(Arguments& a) {
  SlotAttentionArgs args{};
  args.query = a.array<const float>("query");
  args.keys = a.array<const float>("keys");
  args.values = a.array<const float>("values");
  args.slots = a.array<const std::int64_t>("slots");
  args.lengths = a.array<const std::int64_t>("lengths");
  args.n = a.get<std::int64_t>("n");
  args.heads = a.get<std::int64_t>("heads");
  args.group = a.get<std::int64_t>("group");
  args.length = a.get<std::int64_t>("length");
  args.dim = a.get<std::int64_t>("dim");
  args.scale = a.get<float>("scale");
  args.output = a.array<float>("output");
  return args;
}

PackedAttentionArgs packed_attention_args(Arguments& a) {
  PackedAttentionArgs args{};
  args.query = a.array<const float>("query");
  args.key = a.array<const float>("key");
  args.value = a.array<const float>("value");
  args.query_token = a.get<std::int64_t>("query_token");
  args.query_head = a.get<std::int64_t>("query_head");
  args.key_token = a.get<std::int64_t>("key_token");
  args.key_head = a.get<std::int64_t>("key_head");
  args.value_token = a.get<std::int64_t>("value_token");
  args.value_head = a.get<std::int64_t>("value_head");
  args.cu_queries = a.array<const std::int32_t>("cu_queries");
  args.cu_keys = a.array<const std::int32_t>("cu_keys");
  args.seen = a.array<const std::int64_t>("seen");
  args.rows = a.get<std::int64_t>("rows");
  args.heads = a.get<std::int64_t>("heads");
  args.group = a.get<std::int64_t>("group");
  args.dim = a.get<std::int64_t>("dim");
  args.scale = a.get<float>("scale");
  args.output = a.array<float>("output");
  args.log_sum = a.array<float>("log_sum");
  return args;
}

PackedAttentionArgs packed_attention_backward_args(Arguments& a) {
  PackedAttentionArgs args = packed_attention_args(a);
  args.grad_output = a.array<const float>("grad_output");
  args.grad_query = a.array<float>("grad_query");
  args.grad_key = a.array<float>("grad_key");
  args.grad_value = a.array<float>("grad_value");
  return args;
}

template <typename Logit, typename Number>
LogitRows<Logit, Number> logit_rows(Arguments& a) {
  LogitRows<Logit, Number> args{};
  args.logits = a.array<const Logit>("logits");
  args.target = a.array<const std::int64_t>("target");
  args.temperature = a.array<const Number>("temperature");
  args.one_temperature = a.get<Number>("one_temperature");
  args.rows = a.get<std::int64_t>("rows");
  args.vocabulary = a.get<std::int64_t>("vocabulary");
  args.stride = a.get<std::int64_t>("stride");
  args.top = a.array<Number>("top");
  args.log_total = a.array<Number>("log_total");
  args.entropy = a.array<Number>("entropy");
  return args;
}

template <typename Logit, typename Number>
LogitRows<Logit, Number> logit_rows_forward(Arguments& a) {
  LogitRows<Logit, Number> args = logit_rows<Logit, Number>(a);
  args.log_prob = a.array<Number>("log_prob");
  return args;
}

template <typename Logit, typename Number>
LogitRows<Logit, Number> logit_rows_backward(Arguments& a) {
  LogitRows<Logit, Number> args = logit_rows<Logit, Number>(a);
  args.grad_log_prob = a.array<const Number>("grad_log_prob");
  args.grad_entropy = a.array<const Number>("grad_entropy");
  args.gradient = a.array<Logit>("gradient");
  args.gradient_stride = a.get<std::int64_t>("gradient_stride");
  return args;
}

#if MF_BUILD_CUDA
cuda::LogitTileArgs logit_tile_args(Arguments& a) {
  cuda::LogitTileArgs args{};
  args.hidden = a.array<const void>("hidden");
  args.weight = a.array<const void>("weight");
  args.target = a.array<const std::int64_t>("target");
  args.temperature = a.array<const float>("temperature");
  args.inverse_temperature = a.get<float>("inverse_temperature");
  args.tokens = a.get<std::int64_t>("tokens");
  args.width = a.get<std::int64_t>("width");
  args.vocabulary = a.get<std::int64_t>("vocabulary");
  args.hidden_stride = a.get<std::int64_t>("hidden_stride");
  args.weight_stride = a.get<std::int64_t>("weight_stride");
  args.first = a.get<std::int64_t>("first");
  args.out = a.array<void>("out");
  args.out_stride = a.get<std::int64_t>("out_stride");
  args.stream = a.array<void>("stream");
  return args;
}

cuda::LogitTileArgs logit_statistics_args(Arguments& a) {
  cuda::LogitTileArgs args = logit_tile_args(a);
  args.partials = a.array<float>("partials");
  args.target_logit = a.array<float>("target_logit");
  return args;
}

cuda::LogitTileArgs logit_gradient_args(Arguments& a) {
  cuda::LogitTileArgs args = logit_tile_args(a);
  args.log_total = a.array<const float>("log_total");
  args.grad_log_prob = a.array<const float>("grad_log_prob");
  args.grad_entropy = a.array<const float>("grad_entropy");
  args.entropy = a.array<const float>("entropy");
  return args;
}

cuda::MergeArgs merge_args(Arguments& a) {
  cuda::MergeArgs args{};
  args.target = a.array<const std::int64_t>("target");
  args.temperature = a.array<const float>("temperature");
  args.inverse_temperature = a.get<float>("inverse_temperature");
  args.tokens = a.get<std::int64_t>("tokens");
  args.vocabulary = a.get<std::int64_t>("vocabulary");
  args.partials = a.array<const float>("partials");
  args.target_logit = a.array<const float>("target_logit");
  args.log_prob = a.array<float>("log_prob");
  args.entropy = a.array<float>("entropy");
  args.log_total = a.array<float>("log_total");
  args.stream = a.array<void>("stream");
  return args;
}
#endif

template <typename Args>
void define(py::module_& module, const char* name, Args (*read)(Arguments&), void (*run)(const Args&)) {
  module.def(name, [read, run](const py::kwargs& given) {
    Arguments arguments(given);
    const Args args = read(arguments);
    arguments.done();
    const py::gil_scoped_release release;
    run(args);
  });
}

template <typename Logit, typename Number>
void define_logprob(py::module_& module, const std::string& suffix) {
  define(module, ("logprob_statistics_cpu" + suffix).c_str(), &logit_rows_forward<Logit, Number>,
         &cpu::logprob_statistics<Logit, Number>);
  define(module, ("logprob_gradient_cpu" + suffix).c_str(), &logit_rows_backward<Logit, Number>,
         &cpu::logprob_gradient<Logit, Number>);
}

#if MF_BUILD_CUDA
// The same, on the GPU: workspace is device memory, stream a cudaStream_t.
template <typename Args>
void define_cuda(py::module_& module, const char* name, Args (*read)(Arguments&),
                 void (*run)(const Args&, void*, Stream)) {
  module.def(name, [read, run](const py::kwargs& given) {
    Arguments arguments(given);
    const Args args = read(arguments);
    void* const workspace = arguments.array<void>("workspace");
    const Stream stream{arguments.array<void>("stream")};
    arguments.done();
    const py::gil_scoped_release release;
    run(args, workspace, stream);
  });
}

void scale_gradients(const std::vector<std::uintptr_t>& gradients, std::int64_t n, std::uintptr_t factor,
                     std::uintptr_t stream) {
  float* arrays[3] = {};
  if (gradients.size() > 3) throw py::value_error("gradients: expected at most 3 arrays");
  for (std::size_t i = 0; i < gradients.size(); ++i) arrays[i] = reinterpret_cast<float*>(gradients[i]);
  const py::gil_scoped_release release;
  cuda::scale_gradients(arrays, n, reinterpret_cast<const float*>(factor), Stream{reinterpret_cast<void*>(stream)});
}
#endif

}  // namespace

void register_ops(py::module_& module) {
  define(module, "gae_cpu", &gae_args, &cpu::gae);
  define(module, "ppo_loss_cpu", &ppo_loss_args, &cpu::ppo_loss);
  define(module, "group_advantages_cpu", &group_args, &cpu::group_advantages);
  define(module, "slot_attention_cpu", &slot_attention_args, &cpu::slot_attention);
  define(module, "packed_attention_cpu", &packed_attention_args, &cpu::packed_attention);
  define(module, "packed_attention_gradient_cpu", &packed_attention_backward_args, &cpu::packed_attention_gradient);
  define_logprob<float, float>(module, "");
  define_logprob<double, double>(module, "_double");
  define_logprob<BFloat16, float>(module, "_bfloat16");
#if MF_BUILD_CUDA
  define_cuda(module, "gae_cuda", &gae_args, &cuda::gae);
  define_cuda(module, "ppo_loss_cuda", &ppo_loss_args, &cuda::ppo_loss);
  module.def("gae_workspace", &cuda::gae_workspace, py::arg("tokens"), py::arg("turns"));
  module.def("ppo_loss_workspace", &cuda::ppo_loss_workspace);
  module.def("scale_gradients_cuda", &scale_gradients, py::arg("gradients"), py::arg("n"), py::arg("factor"),
             py::arg("stream"));
  define(module, "logit_statistics", &logit_statistics_args, &cuda::logit_statistics);
  define(module, "logit_gradient", &logit_gradient_args, &cuda::logit_gradient);
  define(module, "merge_statistics", &merge_args, &cuda::merge_statistics);
#endif
}

}  // namespace manus_fast
