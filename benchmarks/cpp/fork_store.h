// A store for processes that one parent forked: a table in shared memory.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>

#include "core/error.h"
#include "core/store.h"

namespace horon::benchmark {

// Made before the fork; parent and children use the same object.
// Ownership: owns the mapping. Thread safety: all methods, also between processes.
class ForkStore final : public Store {
 public:
  ForkStore() {
    void* memory =
        ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    HORON_CHECK(memory != MAP_FAILED, "mmap of ", sizeof(Table), " bytes: ", std::strerror(errno));
    table_ = static_cast<Table*>(memory);
    pthread_mutexattr_t mutex_attributes;
    pthread_mutexattr_init(&mutex_attributes);
    pthread_mutexattr_setpshared(&mutex_attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&table_->mutex, &mutex_attributes);
    pthread_condattr_t changed_attributes;
    pthread_condattr_init(&changed_attributes);
    pthread_condattr_setpshared(&changed_attributes, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setclock(&changed_attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&table_->changed, &changed_attributes);
  }
  ForkStore(const ForkStore&) = delete;
  ForkStore& operator=(const ForkStore&) = delete;
  ~ForkStore() override { ::munmap(table_, sizeof(Table)); }

  void set(const std::string& key, const std::string& value) override {
    const Lock lock(table_);
    write(make(key), value);
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    const Lock lock(table_);
    timespec until = {};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += std::chrono::duration_cast<std::chrono::seconds>(deadline.remaining()).count();
    for (;;) {
      if (const Entry* entry = find(key)) {
        return {entry->value.data(), entry->value_bytes};
      }
      if (pthread_cond_timedwait(&table_->changed, &table_->mutex, &until) != 0) {
        throw TimeoutError("store: get('" + key + "'): nobody set it in time");
      }
    }
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const Lock lock(table_);
    Entry& entry = make(key);
    const std::string before(entry.value.data(), entry.value_bytes);
    const std::int64_t sum = (before.empty() ? 0 : std::stoll(before)) + amount;
    write(entry, std::to_string(sum));
    return sum;
  }

 private:
  struct Entry {
    std::array<char, 256> key;
    std::size_t value_bytes;
    std::array<char, 4096> value;
  };
  struct Table {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    std::size_t n_entries;
    std::array<Entry, 256> entries;
  };

  class Lock {
   public:
    explicit Lock(Table* table) : table_(table) { pthread_mutex_lock(&table_->mutex); }
    ~Lock() { pthread_mutex_unlock(&table_->mutex); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Table* const table_;
  };

  Entry* find(const std::string& key) {
    for (std::size_t i = 0; i < table_->n_entries; ++i) {
      if (key == table_->entries[i].key.data()) {
        return &table_->entries[i];
      }
    }
    return nullptr;
  }

  Entry& make(const std::string& key) {
    if (Entry* entry = find(key)) {
      return *entry;
    }
    HORON_CHECK(table_->n_entries < table_->entries.size() && key.size() < sizeof(Entry::key),
                "store: no room for '", key, "'");
    Entry& entry = table_->entries[table_->n_entries];
    std::memcpy(entry.key.data(), key.c_str(), key.size() + 1);
    ++table_->n_entries;
    return entry;
  }

  void write(Entry& entry, const std::string& value) {
    HORON_CHECK(value.size() <= entry.value.size(), "store: a value of ", value.size(), " bytes");
    std::memcpy(entry.value.data(), value.data(), value.size());
    entry.value_bytes = value.size();
    pthread_cond_broadcast(&table_->changed);
  }

  Table* table_ = nullptr;
};

}  // namespace horon::benchmark
