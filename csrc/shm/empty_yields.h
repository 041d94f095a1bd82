// Whether yields hand the core on: a pure decision, fed with how often the thread has lost its
// core.
#pragma once

namespace horon {

// Note [Empty yields]
// Linux gives the core back at once to a thread that yields if the others on it have had more than
// their share so far: they have to wait, however often it yields, until it has used up what it is
// short of, up to milliseconds. If one of them is waited for, only sleeping hands the core on.
//
// Thread safety: none; one object for each wait.
class EmptyYields {
 public:
  // So many take 6 us if they come back at once. The first look only says where counting begins: it
  // takes twice as many, about as long as falling asleep and being woken.
  static constexpr int kPerLook = 16;

  // After each yield: whether it is time to count.
  bool is_look_due() { return ++yields_ % kPerLook == 0; }

  // Given how often the thread has ever lost its core: true if it has not since the look before.
  bool look(long losses) {
    const bool have_been_empty = losses == losses_;
    losses_ = losses;
    return have_been_empty;
  }

 private:
  int yields_ = 0;
  long losses_ = -1;
};

}  // namespace horon
