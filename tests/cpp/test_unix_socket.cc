#include "core/unix_socket.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "catch.h"
#include "rank_threads.h"
#include "shm/mapping.h"

using namespace horon;
using namespace horon::testing;

namespace {

std::string socket_name() {
  static int counter = 0;
  return concat("horon-test-", ::getpid(), '-', counter++);
}

struct Connection {
  UniqueFd client;
  UniqueFd server;

  Connection() {
    const std::string name = socket_name();
    const UniqueFd listener = listen_on(name);
    client = connect_to(name);
    server = accept_until(listener.get(), patient());
    REQUIRE(client);
    REQUIRE(server);
  }
};

ino_t inode(int fd) {
  struct stat status{};
  REQUIRE(::fstat(fd, &status) == 0);
  return status.st_ino;
}

}  // namespace

TEST_CASE("messages and their descriptors arrive whole and in order") {
  const Connection connection;
  REQUIRE(peer_credentials(connection.server.get()).uid == ::getuid());
  std::vector<UniqueFd> files;
  std::vector<int> raw;
  for (int i = 0; i < 201; ++i) {
    files.push_back(create_shared_file(4096, 4096));
    raw.push_back(files.back().get());
  }
  send_message(connection.client.get(), {42, 3, 0}, raw, patient());
  send_message(connection.client.get(), {43, 4, 0}, {raw[7]}, patient());
  send_message(connection.client.get(), {44, 5, 0}, {}, patient());
  std::vector<UniqueFd> received;
  SocketMessage message = receive_message(connection.server.get(), &received, patient());
  REQUIRE(message.nonce == 42);
  REQUIRE(message.rank == 3);
  REQUIRE(message.n_descriptors == 201);
  REQUIRE(received.size() == 201);
  message = receive_message(connection.server.get(), &received, patient());
  REQUIRE(message.n_descriptors == 1);
  REQUIRE(received.size() == 202);
  message = receive_message(connection.server.get(), &received, patient());
  REQUIRE(message.nonce == 44);
  REQUIRE(received.size() == 202);
  for (std::size_t i = 0; i < 201; ++i) {
    REQUIRE(inode(received[i].get()) == inode(raw[i]));
    REQUIRE((::fcntl(received[i].get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  REQUIRE(inode(received[201].get()) == inode(raw[7]));
}

TEST_CASE("nobody there, nobody speaking, nobody left") {
  REQUIRE_FALSE(connect_to(socket_name()));
  const std::string name = socket_name();
  const UniqueFd listener = listen_on(name);
  REQUIRE_FALSE(accept_until(listener.get(), Deadline::after(std::chrono::milliseconds(1))));
  REQUIRE_THROWS_AS(listen_on(name), Error);  // taken
  REQUIRE_THROWS_AS(listen_on(std::string(200, 'x')), Error);

  Connection connection;
  std::vector<UniqueFd> received;
  REQUIRE_THROWS_AS(receive_message(connection.server.get(), &received, soon()), TimeoutError);
  connection.client.reset();
  REQUIRE_THROWS_AS(receive_message(connection.server.get(), &received, patient()), Error);
  REQUIRE_THROWS_AS(send_message(connection.server.get(), {}, {}, patient()), Error);
  REQUIRE(received.empty());
}

TEST_CASE("a name is free again when its listener is gone") {
  const std::string name = socket_name();
  {
    const UniqueFd listener = listen_on(name);
  }
  REQUIRE_FALSE(connect_to(name));
  REQUIRE(listen_on(name));
}
