// Exchanges rows by writing them into the heaps of the other ranks. One launch of a kernel performs one
// exchange, or two exchanges that directly follow each other (push.h).
//
// A kernel that waits too long for another rank writes a report into memory of the host, and ends. Later
// launches exchange nothing. When the host can read the report, the next pass to begin throws an error with
// its content. The results of the pass that waited, and of all passes after it, are not valid. The heap
// cannot be used any more.
//
// The last pass of a run has no later pass. And an optimizer may use gradients before the next pass begins.
// In both cases only a caller that waits for the device and calls throw_failure() notices wrong results.
//
// A CUDA graph may hold passes. The host does not see a replay, so the graph itself waits for the last pass
// outside of graphs, and records an event for which the next one waits. Replays of two graphs are not
// ordered.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/on_device.h"
#include "program/events.h"
#include "program/exchanger.h"
#include "program/push.h"

namespace pmoe::program {

// One rank's heap, and the addresses of all ranks' heaps in this process.
struct HeapPlace {
  std::vector<int64_t> heaps;  // by rank
  int rank;
  int device;
  int64_t bytes;          // size of this rank's heap, whose memory is zero at first
  peers::Report* report;  // in memory of the host that the device can write
  double seconds;         // longest wait for another rank
};

class HeapExchanger final : public Exchanger {
 public:
  // Throws std::invalid_argument if the number of ranks or this rank is out of range, or if the heap is too
  // small.
  explicit HeapExchanger(HeapPlace place)
      : place_(std::move(place)),
        regions_(HeapRegions::of(ranks())),
        ended_(std::make_unique<Events>(kNumEnds, place_.device)) {
    if (ranks() < 1 || ranks() > kMostHeaps)
      throw std::invalid_argument("heaps (" + std::to_string(ranks()) + ") must be from 1 to " +
                                  std::to_string(kMostHeaps));
    if (rank() < 0 || rank() >= ranks())
      throw std::invalid_argument("rank (" + std::to_string(rank()) + ") must be below ranks (" +
                                  std::to_string(ranks()) + ")");
    if (place_.bytes < regions_.arena)
      throw std::invalid_argument("a heap of " + std::to_string(place_.bytes) + " bytes must have at least " +
                                  std::to_string(regions_.arena) + " bytes for flags and landing places");
  }

  // A graph may outlive this object, and its nodes refer to the events without owning them. Destroying such a
  // graph is allowed. Replaying it is not, because the heaps are gone.
  ~HeapExchanger() override {
    if (is_in_graph_) ended_.release();
  }
  HeapExchanger(const HeapExchanger&) = delete;
  HeapExchanger& operator=(const HeapExchanger&) = delete;

  int ranks() const override { return static_cast<int>(place_.heaps.size()); }
  int rank() const override { return place_.rank; }
  size_t most_calls() const override { return kMostMessages; }

  // Returns 0 if the arena is too small, if another pass has it, or after close().
  int64_t take_arena(int64_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_ || is_taken_ || bytes > arena_bytes()) return 0;
    is_taken_ = true;
    return place_.heaps[static_cast<size_t>(place_.rank)] + regions_.arena;
  }

  void give_back_arena() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_taken_ = false;
  }

  int64_t arena_bytes() const override { return place_.bytes - regions_.arena; }

  bool reads_device_rows() const override { return true; }

  // Makes this object unusable: begin() throws from now on. Its memory will be freed.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
  }

  // Throws the errors of throw_failure(). Passes use the arena one after another. So if the last pass had
  // another compute stream, this pass waits for its end. Throws std::runtime_error in a capture if no pass
  // outside of graphs came before, because a capture leaves out a wait for an event that was never recorded.
  void begin(cudaStream_t compute) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_usable();
    if (is_captured(compute)) {
      if (!has_run_)
        throw std::runtime_error("run a pass over these heaps before a CUDA graph of one is captured");
      check(cudaStreamWaitEvent(compute, (*ended_)[kOutside], cudaEventWaitExternal),
            "cudaStreamWaitEvent for passes outside of a graph");
      return;
    }
    if (has_run_ && compute != last_)
      check(cudaStreamWaitEvent(compute, (*ended_)[kOutside], 0), "cudaStreamWaitEvent for an earlier pass");
    if (is_in_graph_)
      check(cudaStreamWaitEvent(compute, (*ended_)[kInGraph], 0), "cudaStreamWaitEvent for a replay");
  }

  // Throws std::runtime_error if an exchange has waited too long, or after close(). It does not wait for
  // exchanges that the device has not finished.
  void throw_failure() {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_usable();
  }

  // Issues the exchanges, in one launch. If the memory of two exchanges overlaps, each has a launch of its
  // own.
  //
  // Throws std::invalid_argument for rows that the kernel cannot copy.
  void exchange(const std::vector<Call>& calls) override {
    const auto stream = reinterpret_cast<void*>(calls.front().stream);
    std::vector<Message> messages;
    for (const Call& call : calls) {
      if (!has_rows(call)) continue;
      const Message message = message_of(call);
      if (std::any_of(messages.begin(), messages.end(), [&](const Message& other) {
            return overlap(message, other) || overlap(other, message);
          })) {
        launch(stream, messages);
        messages.clear();
      }
      messages.push_back(message);
    }
    if (!messages.empty()) launch(stream, messages);
  }

  // Nothing watches the pass that ends here, because its kernels have time limits of their own. The event is
  // recorded now, and not when a later pass waits for it, because the stream may have been destroyed by then.
  void end(cudaStream_t compute) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_captured(compute)) {
      check(cudaEventRecordWithFlags((*ended_)[kInGraph], compute, cudaEventRecordExternal),
            "cudaEventRecordWithFlags of the end of a replay");
      is_in_graph_ = true;
      return;
    }
    check(cudaEventRecord((*ended_)[kOutside], compute), "cudaEventRecord of the end of a pass");
    last_ = compute;
    has_run_ = true;
  }

 private:
  // Numbers of the events at the ends of passes: of passes outside of graphs, and of replays.
  static constexpr int64_t kOutside = 0;
  static constexpr int64_t kInGraph = 1;
  static constexpr int64_t kNumEnds = 2;

  static bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void launch(void* stream, const std::vector<Message>& messages) const {
    Push push = {};
    std::copy(messages.begin(), messages.end(), push.message);
    push.messages = static_cast<int32_t>(messages.size());
    push.ranks = ranks();
    for (int rank = 0; rank < ranks(); ++rank)
      push.heaps[rank] = reinterpret_cast<uint8_t*>(place_.heaps[static_cast<size_t>(rank)]);
    push.watch.failed = reinterpret_cast<uint32_t*>(push.heaps[rank()] + regions_.failed);
    push.watch.report = place_.report;
    push.watch.rank = rank();
    push.watch.bound = static_cast<uint64_t>(std::llround(place_.seconds * 1e9));
    push_rows(stream, push);
  }

  // Returns whether the target of a message has bytes in common with the source or target of another one.
  bool overlap(const Message& message, const Message& other) const {
    const uint8_t* const target = message.target;
    const int64_t bytes = message.recv_end[ranks() - 1] * message.row_bytes;
    const auto meets = [&](const uint8_t* begin, int64_t rows) {
      return bytes && rows && target < begin + rows * other.row_bytes && begin < target + bytes;
    };
    return meets(other.source, other.send_end[ranks() - 1]) ||
           meets(other.target, other.recv_end[ranks() - 1]);
  }

  bool has_rows(const Call& call) const {
    const auto any = [this](const int64_t* rows) {
      return std::any_of(rows, rows + ranks(), [](int64_t count) { return count != 0; });
    };
    return any(call.send) || any(call.recv);
  }

  Message message_of(const Call& call) const {
    const Memory& source = call.operand[0];
    const Memory& target = call.operand[1];
    if (source.row_bytes <= 0 || source.row_bytes % 4)
      throw std::invalid_argument("row_bytes (" + std::to_string(source.row_bytes) +
                                  ") must be a positive multiple of 4: 16 or 4 bytes are copied at a time");
    Message message = {};
    message.source = reinterpret_cast<const uint8_t*>(source.address);
    message.target = reinterpret_cast<uint8_t*>(target.address);
    message.row_bytes = source.row_bytes;
    message.send_rows = call.device_send;
    message.recv_rows = call.device_recv;
    int64_t sent = 0;
    int64_t received = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      message.send_end[rank] = sent += call.send[rank];
      message.recv_end[rank] = received += call.recv[rank];
    }
    const int64_t offset = target.address - place_.heaps[static_cast<size_t>(place_.rank)];
    const bool is_inside = offset >= 0 && offset + received * message.row_bytes <= place_.bytes;
    message.target_offset = is_inside ? offset : -1;
    return message;
  }

  void check_usable() const {
    if (is_closed_) throw std::runtime_error("the heap of pass programs is closed");
    const volatile int32_t& wait = place_.report->wait;  // the kernel writes it last
    if (wait == 0) return;
    const bool is_grant = wait == static_cast<int32_t>(peers::Wait::kGrant);
    std::ostringstream text;
    text << "rank " << place_.rank << " of " << ranks() << ": an exchange of a pass program has waited "
         << place_.seconds << " s in vain for rank " << place_.report->peer << ": "
         << (is_grant ? "it has not granted memory for this rank's rows" : "its rows have not arrived")
         << ". That rank has ended, has failed before, or needs more time (PMOE_WAIT_SECONDS sets the "
         << "limit). Results of that pass, and of all passes since, are not valid. To go on, call "
         << "pmoe.comm.heap.close_heaps on every "
         << "rank";
    throw std::runtime_error(text.str());
  }

  const HeapPlace place_;
  const HeapRegions regions_;
  std::unique_ptr<Events> ended_;
  std::mutex mutex_;             // for all members below
  cudaStream_t last_ = nullptr;  // the compute lane of the last pass
  bool has_run_ = false;
  bool is_in_graph_ = false;  // whether a CUDA graph holds passes
  bool is_taken_ = false;     // whether a pass has the arena
  bool is_closed_ = false;
};

}  // namespace pmoe::program
