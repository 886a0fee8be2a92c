// What NCCL demands of the ranks of a group. A rank that breaks a rule throws one sentence, and so
// do all ranks that wait, because the sentence is in the store. Ranks are numbered in their group.
#pragma once
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace emu {
using Clock = std::chrono::steady_clock;
constexpr auto PAUSE = std::chrono::microseconds(200);
constexpr auto LOOK = std::chrono::milliseconds(20);   // how often a rank looks for a refusal
constexpr auto STAY = std::chrono::seconds(3);         // how long a rank waits until all know a refusal

// The first operations of ranks, and the order of operations, of one group.
class Rules {
 public:
  Rules(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : store_(store->clone()), job_(store_), rank_(rank), size_(size) {
    if (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store_)) {
      job_ = prefixed->getUnderlyingNonPrefixStore();
    }
    const char* limit = std::getenv("EMU_FIRST_SECONDS");
    limit_ = std::chrono::seconds(limit && *limit ? std::atoi(limit) : 30);
  }

  // Compare a collective with those of the other ranks. Return a key that is in the store when all
  // ranks have begun it.
  std::string begin_collective(const std::string& what) {
    check_refused();
    if (!has_begun_) {
      has_begun_ = true;
      agree_on_first("a collective");
    }
    auto key = "operation/" + std::to_string(num_operations_++);
    if (auto other = differing(key, what)) {
      refuse("the ranks of a group must call the same operations in the same order: operation " +
             std::to_string(num_operations_) + " is " + what + " on " + me() + " and " + *other);
    }
    return arrive(key, size_);
  }

  // If a batch is the group's first operation, wait until all ranks have begun with a batch.
  void begin_batch() {
    check_refused();
    if (has_begun_) return;
    has_begun_ = true;
    agree_on_first("a batch of sends and receives");
    store_->set("batch/" + std::to_string(rank_), "yes");
    std::string missing;
    auto end = Clock::now() + limit_;
    for (; Clock::now() < end; std::this_thread::sleep_for(LOOK)) {
      missing.clear();
      for (int rank = 0; rank < size_; ++rank) {
        if (!store_->check({"batch/" + std::to_string(rank)})) {
          missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
        }
      }
      if (missing.empty()) return;
      look_for_refusal();
    }
    refuse(FIRST + "it is a batch of sends and receives that these ranks have not begun: " +
           missing);
  }

  // Compare a send with its receive. Return a key as `begin_collective` does.
  std::string begin_transfer(int from, int to, std::string what, bool is_batched) {
    check_refused();
    what = (is_batched ? "in a batch, " : "without a batch, ") + what;
    auto pair = std::to_string(from) + ">" + std::to_string(to);
    auto key = "transfer/" + pair + "/" + std::to_string(num_transfers_[pair]++);
    if (auto other = differing(key, what)) {
      refuse("a receive must fit its send: transfer " + std::to_string(num_transfers_[pair]) +
             " from rank " + std::to_string(from) + " to rank " + std::to_string(to) + " is " +
             what + " on " + me() + " and " + *other);
    }
    if (!is_batched) begin_alone(from, to, pair);
    return arrive(key, 2);
  }

  // Wait until all ranks have begun an operation, or throw the refusal of any of them. After a
  // while, leave the operation to gloo, because a rank may have died.
  template <class F> void wait_for_all(const std::string& key, F is_completed) {
    auto start = Clock::now();
    auto next = start + LOOK;
    while (!is_completed() && !is_in_store(*store_, key) && is_alive_) {
      if (Clock::now() > next) {
        look_for_refusal();
        if (Clock::now() > start + limit_) return;
        next = Clock::now() + LOOK;
      }
      std::this_thread::sleep_for(PAUSE);
    }
  }

  // Throw the refusal of any rank.
  void look_for_refusal() {
    check_refused();
    if (is_in_store(*job_, "emu/refused")) fail_when_all_know(job_->get_to_str("emu/refused"));
  }

  [[noreturn]] void refuse(const std::string& sentence) {
    try {
      job_->set("emu/refused", me() + " was refused: " + sentence);
    } catch (const c10::Error&) {
      is_alive_ = false;
    }
    fail_when_all_know(sentence);
  }

 private:
  inline static const std::string FIRST =
      "the first operation of a group must be one in which all its ranks take part, because NCCL "
      "creates the communicator in it: ";
  c10::intrusive_ptr<c10d::Store> store_, job_;  // `job_` is the same for all groups
  int rank_, size_;
  std::chrono::seconds limit_;
  std::atomic<bool> is_alive_{true};  // false after the rank with the store has ended
  bool has_begun_ = false;
  int64_t num_operations_ = 0;
  std::map<std::string, int64_t> num_transfers_;
  std::mutex mutex_;
  std::string refused_;

  std::string me() const { return "rank " + std::to_string(rank_); }

  [[noreturn]] void fail(const std::string& sentence) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (refused_.empty()) refused_ = sentence;
    }
    C10_THROW_ERROR(DistBackendError, sentence);
  }

  // A rank that throws may end, and the store may be this rank's.
  [[noreturn]] void fail_when_all_know(const std::string& sentence) {
    auto end = Clock::now() + STAY;
    std::vector<std::string> all;
    for (int rank = 0; rank < std::stoi(std::getenv("WORLD_SIZE")); ++rank) {
      all.push_back("emu/know/" + std::to_string(rank));
    }
    try {
      job_->set(all[std::stoi(std::getenv("RANK"))], "yes");
      while (Clock::now() < end && !job_->check(all)) std::this_thread::sleep_for(LOOK);
    } catch (const c10::Error&) {
      is_alive_ = false;
    }
    fail(sentence);
  }

  void check_refused() {
    std::string sentence;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      sentence = refused_;
    }
    if (!sentence.empty()) fail(sentence);
  }

  bool is_in_store(c10d::Store& store, const std::string& key) {
    try {
      return is_alive_ && store.check({key});
    } catch (const c10::Error&) {
      is_alive_ = false;
      return false;
    }
  }

  std::string arrive(const std::string& key, int num_ranks) {
    try {
      bool is_last = is_alive_ && store_->add(key + "/begun", 1) == num_ranks;
      if (is_last) store_->set(key + "/all", "yes");
    } catch (const c10::Error&) {
      is_alive_ = false;
    }
    return key + "/all";
  }

  // The rank that comes first writes `what`. Return what that rank does, if it is something else.
  std::optional<std::string> differing(const std::string& key, const std::string& what) {
    std::string found;
    if (!is_alive_) return std::nullopt;
    try {
      found = store_->compareSet(key, "", std::to_string(rank_) + " " + what);
    } catch (const c10::Error&) {
      is_alive_ = false;
      return std::nullopt;
    }
    auto space = found.find(' ');
    auto other = found.substr(0, space);
    if (found.substr(space + 1) == what) return std::nullopt;
    return found.substr(space + 1) + " on rank " + other;
  }

  void agree_on_first(const std::string& what) {
    if (auto other = differing("first", what)) {
      refuse(FIRST + "it is " + what + " on " + me() + " and " + *other);
    }
  }

  // NCCL has a communicator for each pair of ranks, whose transfers run one after another.
  void begin_alone(int from, int to, const std::string& direction) {
    auto pair = std::to_string(std::min(from, to)) + "-" + std::to_string(std::max(from, to));
    auto key = "alone/" + pair + "/" + std::to_string(num_transfers_[pair]++);
    if (auto other = differing(key, direction)) {
      refuse("sends and receives between two ranks must be in the same order, or in one batch: " +
             direction + " comes first on " + me() + " and " + *other);
    }
  }
};
}  // namespace emu
