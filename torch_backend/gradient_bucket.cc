#include "gradient_bucket.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <utility>

#include "core/error.h"

namespace horon::torch_backend {
namespace {

// Whether a gradient lies in memory as expected, so that its elements are in the same order on all
// ranks.
bool lies_as_expected(const at::Tensor& gradient, const at::Tensor& parameter, c10::Device device,
                      at::IntArrayRef strides) {
  return gradient.layout() == c10::kStrided && gradient.device() == device &&
         !gradient.requires_grad() && !gradient.is_neg() && !gradient.is_conj() &&
         gradient.sizes() == parameter.sizes() && gradient.strides() == strides &&
         gradient.is_non_overlapping_and_dense();
}

at::Tensor flattened(const at::Tensor& gradient) {
  return gradient.as_strided({gradient.numel()}, {1});
}

}  // namespace

GradientBucket::GradientBucket(Order order, at::Tensor parameter, std::vector<std::int64_t> strides)
    : order_(std::move(order)),
      device_(parameter.device()),
      parameter_(std::move(parameter)),
      strides_(std::move(strides)) {}

GradientBucket::GradientBucket(Order order, std::shared_ptr<GradientPack> pack, at::Tensor buffer)
    : order_(std::move(order)),
      device_(buffer.device()),
      pack_(std::move(pack)),
      buffer_(std::move(buffer)) {}

bool GradientBucket::try_send() {
  std::shared_ptr<NamedEngineHost> host = host_.lock();
  if (!host) {
    return false;
  }
  try {
    if (!host->engine().is_running()) {
      return false;
    }
    const at::NoGradGuard no_grad;
    const at::Tensor tensor = tensor_to_send();
    if (!tensor.defined()) {
      return false;
    }
    const OperationPtr operation =
        host->make_allreduce(process_set_, tensor, tensor, order_.name, order_.how);
    operation->began = std::exchange(began_, std::nullopt);
    const bool will_wait = device_.is_cpu() && !host->has_spare_cores();
    const std::uint64_t handle = host->submit(operation, will_wait);
    out_ = Out{.host = std::move(host),
               .handle = handle,
               .gradient = pack_ ? at::Tensor() : parameter_.grad(),
               .sent = tensor};
  } catch (const UsageError&) {
    return false;
  } catch (const c10::Error&) {
    return false;
  }
  if (device_.is_cpu()) {
    out_->host->meet(out_->handle);
    out_->done = out_->host->engine().try_wait(out_->handle);
  }
  return true;
}

void GradientBucket::make(const at::Tensor& gradient, PartMaker::Make make) {
  const auto began = std::chrono::steady_clock::now();
  const auto maker = std::make_shared<PartMaker>(gradient.nbytes(), std::move(make));
  const at::Tensor tensor = flattened(gradient);
  const std::shared_ptr<NamedEngineHost> host = host_.lock();
  began_.reset();
  try {
    if (host && host->engine().is_running()) {
      const OperationPtr operation =
          host->make_allreduce(process_set_, tensor, tensor, order_.name, order_.how);
      const std::optional<bool> in_parts = host->engine().wants_parts(*operation->request);
      if (in_parts) {
        began_ = began;
      }
      if (in_parts.value_or(false)) {
        operation->maker = maker;
        operation->began = std::exchange(began_, std::nullopt);
        Out out{.host = host,
                .gradient = tensor.view(parameter_.sizes()),
                .sent = tensor,
                .is_made = true};
        out.handle = host->submit(operation, !host->has_spare_cores());
        out_ = std::move(out);
      }
    }
  } catch (const UsageError&) {
    out_.reset();  // try_send() says what is wrong
  } catch (const c10::Error&) {
    out_.reset();
  }
  if (!out_) {
    maker->finish();
    return;
  }
  ++n_made_;
  std::exception_ptr interruption;
  try {
    host->meet(out_->handle);
  } catch (...) {
    interruption = std::current_exception();
  }
  maker->finish();  // in any case: others may wait for it
  if (interruption) {
    std::rethrow_exception(interruption);
  }
  out_->done = host->engine().try_wait(out_->handle);
}

void GradientBucket::settle_made(const at::Tensor& came) {
  HORON_CHECK(out_.has_value(), "'", order_.name, "' is not out");
  Out& out = *out_;
  out.gradient = parameter_.grad();
  out.is_made = false;
  out.is_lost = !came.defined() || !came.has_storage() ||
                came.const_data_ptr() != out.sent.const_data_ptr() ||
                !lies_as_expected(came, parameter_, device_, strides_);
  TORCH_CHECK(!out.is_lost, "horon: the gradient '", order_.name,
              "' was reduced while the backward pass made it, but has become something else before "
              "it came to its parameter. HORON_REDUCE_WHILE_MADE=off lets it come first.");
}

at::Tensor GradientBucket::tensor_to_send() {
  if (pack_) {
    return pack_->pack().empty() ? buffer_ : at::Tensor();
  }
  const at::Tensor& gradient = parameter_.grad();
  const bool is_easy =
      gradient.defined() && lies_as_expected(gradient, parameter_, device_, strides_);
  return is_easy ? flattened(gradient) : at::Tensor();
}

void GradientBucket::receive() {
  HORON_CHECK(out_.has_value(), "'", order_.name, "' is not out");
  Out& out = *out_;
  if (out.is_received) {
    return;
  }
  try {
    if (!out.done) {
      out.host->wait(out.handle);
    } else if (out.done->error) {
      std::rethrow_exception(out.done->error);
    }
  } catch (const Error&) {
    out.is_received = true;
    throw;
  }  // after anything else, a signal handler's, it can be waited for again
  out.is_received = true;
  if (out.is_lost) {
    throw Error(concat("the gradient '", order_.name, "' is not the one that was reduced"));
  }
  put_back(out);
}

void GradientBucket::put_back(const Out& out) {
  if (pack_) {
    pack_->put_back();
    return;
  }
  const at::NoGradGuard no_grad;
  // See Note [Gradients that have moved] in python/horon/torch/_gradient_parts.py.
  if (out.gradient.scalar_type() != out.sent.scalar_type() || out.gradient.device() != device_ ||
      out.gradient.const_data_ptr() != out.sent.const_data_ptr()) {
    out.gradient.copy_(out.sent.as_strided(out.gradient.sizes(), strides_));
  }
  at::Tensor& current = parameter_.mutable_grad();
  if (!current.is_same(out.gradient)) {
    current = out.gradient.to(parameter_.device(), parameter_.scalar_type());
  }
}

}  // namespace horon::torch_backend
