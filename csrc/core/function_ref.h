// A view of something callable, for a callee that does not keep it: two words, no allocation.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace horon {

template <typename Signature>
class FunctionRef;

// Ownership: none; valid as long as what it was made from.
template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  // Converts as std::function does; the constraint keeps it from hiding the copy constructor.
  template <typename Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef>)
  // NOLINTNEXTLINE(google-explicit-constructor,bugprone-forwarding-reference-overload)
  FunctionRef(Callable&& callable)
      : callable_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(
              std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(callable_, std::forward<Args>(args)...); }

 private:
  void* callable_;
  Result (*call_)(void*, Args...);
};

}  // namespace horon
