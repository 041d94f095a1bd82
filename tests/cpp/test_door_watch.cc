#include "watch/door_watch.h"

#include <atomic>
#include <memory>
#include <thread>

#include "catch.h"
#include "rank_threads.h"
#include "watch/watch_post.h"

using namespace horon;
using namespace horon::testing;

namespace {

// Until it is not empty any more.
std::vector<int> await_ended(DoorWatch& watch) {
  const Deadline deadline = patient();
  std::vector<int> ended;
  while (ended.empty() && !deadline.has_passed()) {
    ended = watch.ended();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return ended;
}

}  // namespace

TEST_CASE("door watch: a process has ended when its door is closed that was open") {
  WatchPost stays({});
  auto goes = std::make_unique<WatchPost>(WatchPost::Tell());
  DoorWatch watch({{3, {"127.0.0.1", stays.open_door()}}, {5, {"127.0.0.1", goes->open_door()}}});
  watch.reach(patient());
  REQUIRE(watch.ended().empty());
  goes.reset();
  REQUIRE(await_ended(watch) == std::vector<int>{5});
  REQUIRE(watch.ended() == std::vector<int>{5});
}

TEST_CASE("door watch: whom nobody asks about is not looked at") {
  auto first = std::make_unique<WatchPost>(WatchPost::Tell());
  auto second = std::make_unique<WatchPost>(WatchPost::Tell());
  DoorWatch watch({{3, {"127.0.0.1", first->open_door()}, "rank 3 (pid 33 on a)"},
                   {5, {"127.0.0.1", second->open_door()}, "rank 5 (pid 55 on b)"},
                   {6, {}, "rank 6 (pid 66 on c)"}});
  watch.reach(patient());
  REQUIRE(watch.known_of({1, 5, 6}) == std::vector<int>{5});
  first.reset();
  second.reset();
  const Deadline deadline = patient();
  std::vector<DoorWatch::Neighbour> ended;
  while (ended.empty() && !deadline.has_passed()) {
    ended = watch.ended_of({5, 6});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  REQUIRE(ended.size() == 1);
  REQUIRE(ended[0].rank == 5);
  REQUIRE(ended[0].description == "rank 5 (pid 55 on b)");
}

TEST_CASE("door watch: a door that could never be reached says nothing") {
  DoorKey key;
  {
    WatchPost post({});
    key = post.open_door();
  }
  // Somebody listens, does not know the nonce, and ends then.
  auto stranger = std::make_unique<WatchPost>(WatchPost::Tell());
  const DoorKey strange{1, stranger->open_door().port};
  DoorWatch watch({{5, {"127.0.0.1", strange}},
                   {1, {"127.0.0.1", key}},
                   {2, {"", {1, 1}}},
                   {3, {"127.0.0.1", {}}},
                   {4, {}}});
  watch.reach(patient());
  stranger.reset();
  for (int look = 0; look < 4; ++look) {
    REQUIRE(watch.ended().empty());
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // more than between two looks
  }
}

TEST_CASE("door watch: one that does not answer is no dead one") {
  std::atomic<bool> may_go{false};
  WatchPost busy([&](const Deadline&) {
    while (!may_go) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::string();
  });
  const Door door{"127.0.0.1", busy.open_door()};
  DoorWatch watch({{1, door}});
  watch.reach(patient());
  (void)ask_at(door, 0, soon());  // keeps its thread
  REQUIRE(watch.ended().empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  REQUIRE(watch.ended().empty());
  may_go = true;
}
