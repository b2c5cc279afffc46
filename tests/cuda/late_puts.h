// Puts on the CPU (cuda/peers/puts.cuh says what they must do), in plain threads and in the emulator: a
// network that delivers them late, in parts, and in any order. A put's bytes are read only when they are
// delivered, so a rank that writes to them too early spoils them.
//
// Posting gives the network's thread what the poster has written, and takes nothing from it: under
// ThreadSanitizer, nobody is ordered behind a delivery but who has seen its flag, or was quiet.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace pmoe::peers::puts {

// What a test plants: the network breaks a promise of cuda/peers/puts.cuh.
enum class Broken {
  kNothing,
  kFlagFirst,   // a put's flag is written before its bytes
  kUnordered,   // a put without a flag may arrive after the flag of the next put
  kNeverQuiet,  // quiet() waits for nothing
};

class Network {
 public:
  // heaps: of all ranks.
  Network(std::vector<uint8_t*> heaps, int64_t heap_bytes, uint32_t seed, Broken broken = Broken::kNothing)
      : heaps_(std::move(heaps)),
        bytes_(heap_bytes),
        broken_(broken),
        random_(seed),
        posted_(heaps_.size()),
        arrived_(heaps_.size()) {}

  ~Network() { take_posted(); }

  // Called before each delivery, with the sending rank and the value of the put's flag.
  void (*on_delivery)(int, uint32_t) = nullptr;

  void put(int peer, void* to, const void* from, int64_t bytes) {
    std::vector<Part>& own = unflagged()[poster()];
    if (!own.empty() && own.back().peer != peer) fail("a put with a flag for another peer has to come first");
    own.push_back(part(peer, to, from, bytes));
  }

  void put_with_flag(int peer, void* to, const void* from, int64_t bytes, void* flag, uint32_t value) {
    std::vector<Part>& own = unflagged()[poster()];
    std::vector<Part> parts;
    parts.swap(own);
    if (bytes > 0) parts.push_back(part(peer, to, from, bytes));
    if (broken_ == Broken::kUnordered && parts.size() > 1) {
      const Part flagged = parts.back();
      parts.pop_back();
      post(peer, std::move(parts), flag, value, false);
      parts = {flagged};
    }
    post(peer, std::move(parts), flag, value);
  }

  void put_flag(int peer, void* flag, uint32_t value) { post(peer, {}, flag, value); }

  // The reader has seen a flag, and now sees the bytes.
  void see([[maybe_unused]] const void* flag, [[maybe_unused]] uint32_t value) {
#if !defined(PMOE_THREADS)  // keeping a list would order threads
    unseen_.erase({flag, value});
#endif
  }

  // Flags that have been written, and after which the reader did not call see().
  size_t unseen() const { return unseen_.size(); }
  bool is_empty() const { return messages_.empty() && newest_.load(std::memory_order_relaxed) == nullptr; }

  bool is_quiet(const void* heap) const {
    if (broken_ == Broken::kNeverQuiet) return true;
    const auto rank = static_cast<size_t>(rank_of(heap));
    return arrived_[rank].load(std::memory_order_acquire) == posted_[rank].load(std::memory_order_relaxed);
  }

  // Delivers a part of one of the messages that may arrive by now. One thread calls this, again and again.
  void step() {
    ++now_;
    take_posted();
    if (messages_.empty()) return;
    const size_t i = random_() % messages_.size();
    Message& message = messages_[i];
    if (message.not_before > now_) return;
    if (on_delivery != nullptr) on_delivery(message.source, message.value);
    if (broken_ == Broken::kFlagFirst && !message.has_flag) raise(message);
    if (!message.parts.empty()) return deliver(message);
    if (!message.has_flag) raise(message);
    arrived_[static_cast<size_t>(message.source)].fetch_add(1, std::memory_order_release);
    messages_.erase(messages_.begin() + static_cast<long>(i));
  }

  int64_t delivered() const { return delivered_; }

 private:
  struct Part {
    int peer;
    uint32_t* to;
    const uint32_t* from;
    int64_t words;
  };
  struct Message {
    int source;
    std::vector<Part> parts;
    uint32_t* flag;
    uint32_t value;
    bool has_flag;  // none is left to write
    uint64_t not_before = 0;
    Message* next = nullptr;
  };

  [[noreturn]] static void fail(const char* why) {
    std::printf("FAILED: a put: %s\n", why);
    std::fflush(stdout);
    std::abort();
  }

  // The puts of a thread that still have no flag, by thread.
  static std::map<const void*, std::vector<Part>>& unflagged() {
    thread_local std::map<const void*, std::vector<Part>> parts;
    return parts;
  }

  static const void* poster() {
#if defined(PMOE_THREADS)
    return nullptr;
#else
    return &emu::self();
#endif
  }

  int rank_of(const void* p) const {
    for (size_t rank = 0; rank < heaps_.size(); ++rank) {
      const int64_t offset = static_cast<const uint8_t*>(p) - heaps_[rank];
      if (offset >= 0 && offset < bytes_) return static_cast<int>(rank);
    }
    fail("an address that is in no heap");
  }

  // The same place in another rank's heap.
  uint32_t* at_peer(int peer, const void* p) const {
    const int64_t offset = static_cast<const uint8_t*>(p) - heaps_[static_cast<size_t>(rank_of(p))];
    return reinterpret_cast<uint32_t*>(heaps_[static_cast<size_t>(peer)] + offset);
  }

  Part part(int peer, void* to, const void* from, int64_t bytes) const {
    if (bytes <= 0 || bytes % 4 != 0) fail("not whole words");
    const auto* const last = static_cast<const uint8_t*>(from) + bytes - 1;
    if (rank_of(from) != rank_of(last) || rank_of(from) != rank_of(to) || rank_of(from) == peer)
      fail("bytes that are not the sender's, or a put to itself");
    return {peer, at_peer(peer, to), static_cast<const uint32_t*>(from), bytes / 4};
  }

  void post(int peer, std::vector<Part> parts, void* flag, uint32_t value, bool writes_flag = true) {
    if (reinterpret_cast<uintptr_t>(flag) % 8) fail("a flag that is not aligned");
    const int source = rank_of(flag);
    for (const Part& each : parts)
      if (each.peer != peer) fail("bytes and flag for different peers");
    posted_[static_cast<size_t>(source)].fetch_add(1, std::memory_order_relaxed);
    auto* const message = new Message{source, std::move(parts), at_peer(peer, flag), value, !writes_flag};
    message->next = newest_.load(std::memory_order_relaxed);
    while (!newest_.compare_exchange_weak(message->next, message, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
  }

  // Takes what has been posted. Some messages leave at once, others late.
  void take_posted() {
    Message* message = newest_.exchange(nullptr, std::memory_order_acquire);
    // If nobody waits for puts, the next round shall have begun before some of them have left.
    const unsigned latest = broken_ == Broken::kNeverQuiet ? 2000 : 150;
    while (message != nullptr) {
      message->not_before = now_ + (random_() % 3 == 0 ? random_() % latest : random_() % 10);
      if (message->has_flag) message->not_before += 1000;  // out of order, if puts may be
      messages_.push_back(*message);
      Message* const next = message->next;
      delete message;
      message = next;
    }
  }

  // Delivers one part of a message, or a piece of it.
  void deliver(Message& message) {
    const size_t i = random_() % message.parts.size();
    Part part = message.parts[i];
    message.parts.erase(message.parts.begin() + static_cast<long>(i));
    if (part.words > 1 && random_() % 4 == 0) {
      const int64_t half = part.words / 2;
      const Part first = {part.peer, part.to, part.from, half};
      part = {part.peer, part.to + half, part.from + half, part.words - half};
      message.parts.insert(message.parts.begin() + static_cast<long>(i), first);
    }
    for (int64_t word = 0; word < part.words; ++word) write(part.to + word, read(part.from + word));
    ++delivered_;
  }

  // Writes 8 bytes, as NVSHMEM does.
  void raise(Message& message) {
    write(message.flag + 1, 0u);
    store_release_system(message.flag, message.value);
    message.has_flag = true;
#if !defined(PMOE_THREADS)
    unseen_.insert({message.flag, message.value});
#endif
  }

  std::vector<uint8_t*> heaps_;
  int64_t bytes_;
  Broken broken_;
  std::mt19937 random_;
  std::vector<Message> messages_;  // in flight
  std::atomic<Message*> newest_{nullptr};
  std::vector<std::atomic<int64_t>> posted_, arrived_;  // messages, by sender
  std::set<std::pair<const void*, uint32_t>> unseen_;
  uint64_t now_ = 0;
  int64_t delivered_ = 0;
};

inline Network* network = nullptr;  // set before any thread begins

inline void put(int peer, void* to, const void* from, int64_t bytes) { network->put(peer, to, from, bytes); }

inline void put_with_flag(int peer, void* to, const void* from, int64_t bytes, void* flag, uint32_t value) {
  network->put_with_flag(peer, to, from, bytes, flag, value);
}

inline void put_flag(int peer, void* flag, uint32_t value) { network->put_flag(peer, flag, value); }

inline void quiet(const void* heap) {
  while (!network->is_quiet(heap)) pause();
}

inline void see(const void* flag, uint32_t value) { network->see(flag, value); }

}  // namespace pmoe::peers::puts
