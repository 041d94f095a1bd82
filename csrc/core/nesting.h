// How deep callbacks of one owner are nested on this thread.
//
// Note [Nested callbacks]
// A callback may start another operation, and whoever starts one carries out the callbacks of what
// has finished meanwhile: a callback in a callback. With thousands in flight they would use up the
// stack, or the interpreter's limit. So there are only so many levels. What finishes then is told
// at once to who waits or polls, but its callbacks are left to the level above, when its own
// callback has returned. Not from the first level on: a callback may wait for the one behind it, as
// the wait of a Future does, in a way that nobody sees.
#pragma once

namespace horon {

class Nesting {
 public:
  static constexpr int kMost = 16;

  // While it lives, this thread is in a callback of `owner`. Keep it on the stack.
  explicit Nesting(const void* owner) : owner_(owner), outer_(innermost_) { innermost_ = this; }
  ~Nesting() { innermost_ = outer_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

  // Whether further callbacks of `owner` are to be left to the ones that this thread is in.
  static bool is_deep(const void* owner) {
    int depth = 0;
    for (const Nesting* level = innermost_; level != nullptr; level = level->outer_) {
      depth += level->owner_ == owner ? 1 : 0;
    }
    return depth >= kMost;
  }

 private:
  static inline thread_local const Nesting* innermost_ = nullptr;

  const void* const owner_;
  const Nesting* const outer_;
};

}  // namespace horon
