#include "watch/watch_door.h"

#include <poll.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/random_nonce.h"
#include "core/wait_context.h"
#include "net/tcp_socket.h"
#include "watch/watch_post.h"

namespace horon {
namespace {

constexpr std::uint64_t kDoorMagic = 0x3130726f6f64726e;  // "nrdoor01": changes with the protocol
constexpr std::chrono::milliseconds kQuestionPatience{500};
constexpr std::chrono::milliseconds kAnotherPostPatience{1500};
constexpr std::chrono::seconds kSaidAgain{1};

// Plain data.
struct Question {
  std::uint64_t magic = kDoorMagic;
  std::uint64_t nonce = 0;
  std::uint64_t post = 0;  // 0: who sits behind the door
};

struct ReplyHead {
  std::uint64_t post = 0;  // 0: that one can not be asked here
  std::uint32_t is_late = 0;
  std::uint32_t bytes = 0;  // that follow
};

// Null where that post can not be asked here.
const OpenDoor::Said* what_to_say(OpenDoor& door, std::uint64_t post, std::uint64_t own,
                                  const std::function<std::string()>& tell) {
  const auto is_old = [](const auto& entry) {
    return Clock::now() - entry.second.at >= kSaidAgain;
  };
  std::erase_if(door.said, is_old);
  if (const auto known = door.said.find(post); known != door.said.end()) {
    return &known->second;
  }
  OpenDoor::Said said;
  if (post == own) {
    said.message = tell();
  } else if (auto answer = ask(post, Deadline::after(kAnotherPostPatience))) {
    said.is_late = answer->is_late;
    said.message = answer->text ? encode_answer(std::move(*answer->text), answer->late) : "";
  } else {
    return nullptr;
  }
  said.at = Clock::now();
  return &(door.said[post] = std::move(said));
}

}  // namespace

OpenDoor open_door() {
  OpenDoor door;
  door.key.nonce = random_nonce();
  door.listener = listen_tcp(&door.key.port);
  return door;
}

bool answer_at(OpenDoor& door, std::uint64_t own, const std::function<std::string()>& tell) {
  const UniqueFd socket = accept_tcp(door.listener.get());
  if (!socket) {
    return false;
  }
  try {
    Question question;
    receive_all(socket.get(), &question, sizeof question,
                {Deadline::after(kQuestionPatience), nullptr});
    if (question.magic != kDoorMagic || question.nonce != door.key.nonce) {
      return false;
    }
    ReplyHead head;
    head.post = question.post == 0 ? own : question.post;
    const OpenDoor::Said* const said = what_to_say(door, head.post, own, tell);
    if (said == nullptr) {
      head.post = 0;
    } else {
      head.is_late = said->is_late ? 1 : 0;
      head.bytes = static_cast<std::uint32_t>(said->message.size());
    }
    const WaitContext sending{Deadline::after(kQuestionPatience), nullptr};
    send_all(socket.get(), &head, sizeof head, sending);
    if (said != nullptr) {
      send_all(socket.get(), said->message.data(), said->message.size(), sending);
    }
    return said != nullptr;
  } catch (const Error&) {
    return false;  // it has gone meanwhile
  }
}

std::optional<Answer> ask_at(const Door& door, std::uint64_t post, const Deadline& deadline) {
  Answer answer;
  try {
    const WaitContext context{deadline, nullptr};
    const UniqueFd socket = begin_connect(door.address, door.key.port);
    if (!socket || !wait_for_socket(socket.get(), POLLOUT, context) ||
        connect_error(socket.get()) != 0) {
      return std::nullopt;
    }
    Question question;
    question.nonce = door.key.nonce;
    question.post = post;
    send_all(socket.get(), &question, sizeof question, context);
    ReplyHead head;
    receive_all(socket.get(), &head, sizeof head, context);
    if (head.post == 0 || head.bytes > kMostAnswerBytes) {
      return std::nullopt;
    }
    answer.post = head.post;
    answer.is_late = head.is_late != 0;
    if (head.bytes > 0) {
      std::string message(head.bytes, '\0');
      receive_all(socket.get(), message.data(), message.size(), context);
      decode_answer(message, &answer);
    }
  } catch (const TimeoutError&) {
    answer.post = post;
    answer.is_late = true;  // the system took the connection, and nobody came for it
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (LateRank& rank : answer.late) {
    if (!rank.door) {
      rank.door = door;  // its post is of that host
    }
  }
  return answer;
}

}  // namespace horon
