// Threads that take no signals: those belong to the threads of the program under test.
#pragma once

#include <csignal>
#include <thread>
#include <utility>

namespace horon::simulator {

template <class Function>
std::thread quiet_thread(Function&& function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Function>(function));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace horon::simulator
