#include "in_turn.h"

#include "errors.h"
#include "interrupt.h"
#include "process_exit.h"

namespace horon::torch_backend {

void run_in_turn(Group& group, AbortHooks& on_abort, std::chrono::milliseconds timeout,
                 FunctionRef<void(const WaitContext&)> operation) {
  const WaitContext context{Deadline::after(timeout), interrupt_check(), true};
  const InterruptScope interrupts;
  try {
    const auto give_up = [&] {
      group.set_failed();
      group.transport().abort("a signal interrupted an operation that waited for its turn");
    };
    group.lane()->run([&] { operation(context); }, context.check_interrupt, give_up);
    stay_if_process_exits();
  } catch (...) {
    if (ends_group(std::current_exception())) {
      group.set_failed();
      stay_if_process_exits();
      on_abort.call_all_beside();
    }
    stay_if_process_exits();
    interrupts.rethrow();
    rethrow_translated();
  }
}

}  // namespace horon::torch_backend
