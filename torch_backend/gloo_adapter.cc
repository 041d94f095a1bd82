#include "gloo_adapter.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "core/error.h"

namespace horon::torch_backend {
namespace {

at::Tensor view_bytes(const std::byte* data, std::size_t bytes) {
  // Gloo does not write through the tensors that it only sends.
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte));
}

std::chrono::milliseconds timeout_left(const WaitContext& context) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(context.deadline.remaining());
  return std::max(left, std::chrono::milliseconds(1));
}

// How long Gloo gets to let go of our memory after it was aborted.
constexpr std::chrono::seconds kLetGoPatience{5};

// Waits for Gloo, which enforces the deadline itself, and looks for Ctrl-C meanwhile. It does not
// return, and does not throw, while Gloo may still write into the caller's memory.
void wait_for(const c10::intrusive_ptr<c10d::Backend>& gloo,
              const c10::intrusive_ptr<c10d::Work>& work, const WaitContext& context) {
  struct State {
    std::mutex mutex;
    std::condition_variable finished;
    bool is_finished = false;
  };
  const auto state = std::make_shared<State>();  // shared: the callback may come after an interrupt
  work->getFuture()->addCallback([state](c10::ivalue::Future&) {
    const std::lock_guard lock(state->mutex);
    state->is_finished = true;
    state->finished.notify_all();
  });
  std::unique_lock lock(state->mutex);
  while (!state->finished.wait_for(lock, std::chrono::milliseconds(100),
                                   [&] { return state->is_finished; })) {
    if (context.check_interrupt != nullptr) {
      lock.unlock();
      try {
        (*context.check_interrupt)();
      } catch (...) {
        gloo->abort();
        lock.lock();
        state->finished.wait_for(lock, kLetGoPatience, [&] { return state->is_finished; });
        throw;
      }
      lock.lock();
    }
  }
  lock.unlock();
  work->wait();
}

template <typename Call>
void run_on_gloo(const c10::intrusive_ptr<c10d::Backend>& gloo, const Call& call,
                 const WaitContext& context) {
  try {
    wait_for(gloo, call(), context);
  } catch (const c10::Error& error) {
    throw GroupError(concat("Gloo, between hosts: ", error.what_without_backtrace()));
  } catch (const std::runtime_error& error) {
    throw GroupError(concat("Gloo, between hosts: ", error.what()));
  }
}

}  // namespace

void GlooAdapter::all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                             const WaitContext& context) {
  at::Tensor input = view_bytes(send, bytes);
  at::Tensor output = view_bytes(receive, bytes * static_cast<std::size_t>(gloo_->getSize()));
  c10d::AllgatherOptions options;
  options.timeout = timeout_left(context);
  run_on_gloo(gloo_, [&] { return gloo_->_allgather_base(output, input, options); }, context);
}

void GlooAdapter::exchange(const SentSpans& send, const ReceivedSpans& receive,
                           const WaitContext& context) {
  const auto own = static_cast<std::size_t>(gloo_->getRank());
  const auto sizes_of = [&](const auto& spans) {
    std::vector<int64_t> sizes;
    sizes.reserve(spans.size());
    for (std::size_t rank = 0; rank < spans.size(); ++rank) {
      sizes.push_back(rank == own ? 0 : static_cast<int64_t>(spans[rank].bytes));
    }
    return sizes;
  };
  const std::vector<int64_t> send_sizes = sizes_of(send);
  const std::vector<int64_t> receive_sizes = sizes_of(receive);
  const auto total = [](const std::vector<int64_t>& sizes) {
    return static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  };
  std::byte* const sent = sent_.need(total(send_sizes));
  std::byte* const received = received_.need(total(receive_sizes));
  std::byte* to = sent;
  for (std::size_t rank = 0; rank < send.size(); ++rank) {
    if (send_sizes[rank] > 0) {
      to = std::copy_n(send[rank].data, send[rank].bytes, to);
    }
  }
  at::Tensor input = view_bytes(sent, total(send_sizes));
  at::Tensor output = view_bytes(received, total(receive_sizes));
  c10d::AllToAllOptions options;
  options.timeout = timeout_left(context);
  auto given_send_sizes = send_sizes;  // Gloo takes them away
  auto given_receive_sizes = receive_sizes;
  run_on_gloo(
      gloo_,
      [&] {
        return gloo_->alltoall_base(output, input, given_receive_sizes, given_send_sizes, options);
      },
      context);
  const std::byte* from = received;
  for (std::size_t rank = 0; rank < receive.size(); ++rank) {
    if (receive_sizes[rank] > 0) {
      std::copy_n(from, receive[rank].bytes, receive[rank].data);
      from += receive[rank].bytes;
    }
  }
}

void GlooAdapter::abort(const std::string&) { gloo_->abort(); }

}  // namespace horon::torch_backend
