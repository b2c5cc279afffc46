// Exchanges rows by NCCL's point-to-point calls, on a communicator that only pass programs use.
//
// pmoe is not linked against NCCL. The functions are looked up in the library that torch has loaded, so that
// a process has one NCCL only. If torch was built with NCCL inside it, there is no library to look in, and
// loaded() throws.
//
// An exchange is one group of sends and receives:
//
//   ncclGroupStart()
//   ncclSend(rows to rank 1)   ncclRecv(rows from rank 1)
//   ncclSend(rows to rank 2)   ...                            pairs of ranks without rows are left out
//   ncclGroupEnd()
#pragma once
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/on_device.h"
#include "program/events.h"
#include "program/exchanger.h"

#ifndef PMOE_NCCL_LIBRARY  // tests name a stand-in
#define PMOE_NCCL_LIBRARY "libnccl.so.2"
#endif

namespace pmoe::program {

// NCCL's ncclUniqueId, which is passed by value.
struct NcclId {
  char bytes[128];
};

// The functions of NCCL that programs call, with NCCL's own signatures. A result of 0 means success.
struct Nccl {
  int (*GetUniqueId)(NcclId*);
  int (*CommInitRank)(void** communicator, int ranks, NcclId id, int rank);
  int (*CommAbort)(void* communicator);
  int (*CommGetAsyncError)(void* communicator, int* error);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*Send)(const void* from, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  int (*Recv)(void* to, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  const char* (*GetErrorString)(int);

  // Returns the functions of the library that is loaded. Throws std::runtime_error if there is none.
  static const Nccl& loaded() {
    static const Nccl nccl = look_up();  // if it throws, the next call of loaded() tries again
    return nccl;
  }

  void check(int error, const std::string& call) const {
    if (error)
      throw std::runtime_error(call + ": " + GetErrorString(error) + " (" + std::to_string(error) + ")");
  }

 private:
  static Nccl look_up() {
    // A second library of the same name may be on the search path. RTLD_NOLOAD takes only the loaded one.
    void* const library = dlopen(PMOE_NCCL_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    if (!library)
      throw std::runtime_error("pmoe._cuda: NCCL's library (" PMOE_NCCL_LIBRARY
                               ") is not loaded: torch is built without NCCL, or with NCCL inside it");
    const auto find = [&](const char* name) {
      void* const function = dlsym(library, name);
      if (!function) throw std::runtime_error(std::string("pmoe._cuda: NCCL's library has no ") + name);
      return function;
    };
    Nccl found;
    found.GetUniqueId = reinterpret_cast<decltype(found.GetUniqueId)>(find("ncclGetUniqueId"));
    found.CommInitRank = reinterpret_cast<decltype(found.CommInitRank)>(find("ncclCommInitRank"));
    found.CommAbort = reinterpret_cast<decltype(found.CommAbort)>(find("ncclCommAbort"));
    found.CommGetAsyncError =
        reinterpret_cast<decltype(found.CommGetAsyncError)>(find("ncclCommGetAsyncError"));
    found.GroupStart = reinterpret_cast<decltype(found.GroupStart)>(find("ncclGroupStart"));
    found.GroupEnd = reinterpret_cast<decltype(found.GroupEnd)>(find("ncclGroupEnd"));
    found.Send = reinterpret_cast<decltype(found.Send)>(find("ncclSend"));
    found.Recv = reinterpret_cast<decltype(found.Recv)>(find("ncclRecv"));
    found.GetErrorString = reinterpret_cast<decltype(found.GetErrorString)>(find("ncclGetErrorString"));
    return found;
  }
};

// Returns the bytes of a new id, with which ranks form a communicator. One rank makes it, and all ranks need
// it.
inline std::string make_id() {
  NcclId id;
  const Nccl& nccl = Nccl::loaded();
  nccl.check(nccl.GetUniqueId(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

// A group of NCCL's calls. Every group that was started is ended, even if a call inside it fails. Without its
// end, all later calls of the thread would belong to the group and not begin.
class NcclGroup {
 public:
  explicit NcclGroup(const Nccl& nccl) : nccl_(nccl) {
    nccl_.check(nccl_.GroupStart(), "ncclGroupStart");
    is_open_ = true;
  }
  void end() {
    is_open_ = false;
    nccl_.check(nccl_.GroupEnd(), "ncclGroupEnd");
  }
  ~NcclGroup() {
    if (is_open_) nccl_.GroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

 private:
  const Nccl& nccl_;
  bool is_open_ = false;
};

// One rank's part of a communicator. The communicator exists until it is aborted, or until the process ends.
// This class never destroys it, because NCCL would then wait for the other ranks.
//
// A peer may never come. NCCL then waits, on the device or on the host, and torch's watchdog does not know
// this communicator. So another thread calls abort_if_late() again and again. That function aborts the
// communicator if NCCL has not ended in time, and all later calls throw.
//
// NCCL also has communicators whose calls never wait on the host. They are not used here: they start a thread
// for each group of calls, which takes longer than the rest of an exchange.
class Communicator final : public Exchanger {
 public:
  // Waits until all ranks construct their part, at most for half of the time limit. A rank that failed before
  // does not come here: it waits for the others in a collective of torch, for at most the whole time limit.
  // Because the others wait here for only half of it, they join that collective in time.
  //
  // id: the bytes of make_id() of one rank.
  // device: this rank's device.
  // seconds: the time limit of a pass.
  //
  // Throws std::invalid_argument for a rank that is out of range, and std::runtime_error for an error of
  // NCCL, or if a rank has not come. In the last case a thread keeps waiting inside NCCL.
  Communicator(const std::string& id, int ranks, int rank, int device, double seconds)
      : nccl_(Nccl::loaded()), ranks_(ranks), rank_(rank), device_(device), limit_(seconds) {
    if (rank < 0 || rank >= ranks)
      throw std::invalid_argument("rank (" + std::to_string(rank) + ") must be below ranks (" +
                                  std::to_string(ranks) + ")");
    NcclId all;
    if (id.size() != sizeof all.bytes)
      throw std::invalid_argument("id (" + std::to_string(id.size()) + " bytes) must have " +
                                  std::to_string(sizeof all.bytes) + " bytes");
    std::memcpy(all.bytes, id.data(), sizeof all.bytes);
    std::packaged_task<void*()> connect([nccl = nccl_, all, ranks, rank, device] {
      const OnDevice on_device(device);
      void* made = nullptr;
      nccl.check(nccl.CommInitRank(&made, ranks, all, rank), "ncclCommInitRank");
      return made;
    });
    std::future<void*> connected = connect.get_future();
    std::thread(std::move(connect)).detach();
    if (connected.wait_for(limit_ / 2) != std::future_status::ready)
      throw std::runtime_error(told("ncclCommInitRank has not ended within " + in_seconds(limit_ / 2) +
                                    ": another rank never came"));
    communicator_ = connected.get();
  }
  ~Communicator() override {
    for (const Pass& pass : passes_) unused_.push_back(pass.ends);
    destroy_events(device_, unused_);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  size_t most_calls() const override { return 1; }

  // Throws std::runtime_error if an earlier exchange has failed on the device or in the network, or has not
  // ended in time.
  void begin(cudaStream_t) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_whole();
    nccl_.check(async_error(), "an earlier exchange");
  }

  // Issues an all-to-all on the call's stream. Rows for this rank itself are copied, not sent.
  void exchange(const std::vector<Call>& calls) override {
    const Call& call = calls.front();
    const auto stream = reinterpret_cast<cudaStream_t>(call.stream);
    if (leaves(call.send) || leaves(call.recv)) send_and_receive(call, stream);
    if (const int64_t rows = call.send[rank_])
      pmoe::check(cudaMemcpyAsync(rows_of(call.operand[1], call.recv), rows_of(call.operand[0], call.send),
                                  static_cast<size_t>(rows * call.operand[0].row_bytes),
                                  cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync of rows that stay");
  }

  // Begins to watch a pass, all calls of which have been issued. The pass ends when the device reaches the
  // event that this function records.
  void end(cudaStream_t stream) override {
    const cudaEvent_t end = take_event();
    // The lock is not held here, because this call waits while the queue of launches is full. Then only
    // abort_if_late() can end the wait, and it takes the lock.
    const cudaError_t error = cudaEventRecord(end, stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error) unused_.push_back(end);
    pmoe::check(error, "cudaEventRecord of a pass's end");
    passes_.push_back({end, Clock::now()});
  }

  // Aborts the communicator if the device or an exchange has failed, or if a pass has not ended in time. The
  // time of a pass begins when its calls have been issued or, if that is later, when the pass before it has
  // ended. A call of NCCL that waits on the host has the same limit.
  //
  // Returns why the communicator was aborted, now or earlier; "" if it was not. A thread other than that of
  // the passes calls this.
  std::string abort_if_late() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!communicator_) return reason_;
    const Clock::time_point now = Clock::now();
    // A call of NCCL that waits on the host may hold a lock of CUDA. So while such a call waits (is_inside_),
    // this function calls no function of CUDA.
    if (const int error = async_error())
      abort(std::string("an exchange of a pass program failed: ") + nccl_.GetErrorString(error) + " (" +
            std::to_string(error) + ")");
    else if (!is_inside_)
      abort_if_device_is_late(now);
    else if (now - entered_ > limit_)
      abort("an exchange of a pass program has waited for " + in_seconds(limit_) +
            ": another rank never came");
    return reason_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  struct Pass {
    cudaEvent_t ends;
    Clock::time_point issued;
  };

  static constexpr int kBytes = 0;  // ncclInt8

  static std::string in_seconds(Seconds time) {
    std::ostringstream text;
    text << time.count() << " s";
    return text.str();
  }

  std::string told(const std::string& reason) const {
    return "rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": " + reason;
  }

  // Throws if the communicator was aborted.
  void check_whole() const {
    if (!communicator_) throw std::runtime_error(reason_);
  }

  // Returns the error of an earlier call, or the error of this query itself; 0 for none.
  int async_error() const {
    int error = 0;
    const int failed = nccl_.CommGetAsyncError(communicator_, &error);
    return failed ? failed : error;
  }

  // Returns an unused event.
  cudaEvent_t take_event() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (unused_.empty()) return make_event();
    const cudaEvent_t event = unused_.back();
    unused_.pop_back();
    return event;
  }

  // Aborts the communicator if the device has failed, or has not ended a pass in time.
  void abort_if_device_is_late(Clock::time_point now) {
    try {
      take_ended(now);
    } catch (const std::runtime_error& failure) {
      return abort(std::string("the device of a pass program failed: ") + failure.what());
    }
    if (!passes_.empty() && now - larger(passes_.front().issued, last_end_) > limit_)
      abort("a pass program has not ended within " + in_seconds(limit_) +
            ": another rank never came, or the device is busy");
  }

  // Removes the passes that have ended. Throws std::runtime_error for an error of the device.
  void take_ended(Clock::time_point now) {
    const OnDevice on_device(device_);  // a thread begins with device 0
    // Without this mode, cudaEventQuery would end the capture of a CUDA graph by another thread.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t state = cudaSuccess;
    while (!passes_.empty()) {
      state = cudaEventQuery(passes_.front().ends);
      if (state != cudaSuccess) break;
      unused_.push_back(passes_.front().ends);
      passes_.pop_front();
      last_end_ = now;
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaGetLastError();  // "not ready" would stay this thread's last error
    if (state != cudaErrorNotReady) pmoe::check(state, "cudaEventQuery of a pass's end");
  }

  // Aborts the communicator. That ends NCCL's kernels on the device, and its calls that wait on the host.
  // NCCL may wait for the device or for other ranks while it aborts, so it does so in a thread of its own.
  void abort(const std::string& reason) {
    reason_ = told(reason) +
              ". The communicator of pass programs was aborted: results of this pass, and of " +
              "passes after it, are not valid";
    void* const aborted = std::exchange(communicator_, nullptr);
    // If a call waits on the host, the thread does not set the device: NCCL can end that call without a
    // current device, and cudaSetDevice might wait for that call.
    std::thread([nccl = nccl_, aborted, device = device_, on_device = !is_inside_] {
      if (on_device) cudaSetDevice(device);  // if this fails, NCCL's calls must end nevertheless
      nccl.CommAbort(aborted);
    }).detach();
  }

  // Marks the beginning of calls of NCCL that may wait on the host. Returns the communicator.
  void* enter() {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_whole();
    is_inside_ = true;
    entered_ = Clock::now();
    return communicator_;
  }

  // Marks the end of the calls that began with enter(). Throws if the communicator was aborted meanwhile.
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_inside_ = false;
    check_whole();
  }

  // Returns whether there are rows to or from another rank.
  //
  // rows: (ranks,) number of rows to, or from, each rank.
  bool leaves(const int64_t* rows) const {
    for (int rank = 0; rank < ranks_; ++rank)
      if (rank != rank_ && rows[rank]) return true;
    return false;
  }

  // Returns the address of the rows to or from this rank itself, in memory that has rows sorted by rank.
  void* rows_of(const Memory& memory, const int64_t* rows) const {
    int64_t before = 0;
    for (int rank = 0; rank < rank_; ++rank) before += rows[rank];
    return reinterpret_cast<void*>(memory.address + before * memory.row_bytes);
  }

  void send_and_receive(const Call& call, cudaStream_t stream) {
    void* const communicator = enter();
    try {
      issue_group(call, communicator, stream);
    } catch (const std::exception&) {
      leave();  // if the communicator was aborted, this throws why: the abort caused the present error
      throw;
    }
    leave();
  }

  void issue_group(const Call& call, void* communicator, cudaStream_t stream) const {
    int64_t from = call.operand[0].address;
    int64_t to = call.operand[1].address;
    NcclGroup group(nccl_);
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t sent = call.send[rank] * call.operand[0].row_bytes;
      const int64_t received = call.recv[rank] * call.operand[1].row_bytes;
      if (sent && rank != rank_)
        nccl_.check(nccl_.Send(reinterpret_cast<void*>(from), static_cast<size_t>(sent), kBytes, rank,
                               communicator, stream),
                    "ncclSend to rank " + std::to_string(rank));
      if (received && rank != rank_)
        nccl_.check(nccl_.Recv(reinterpret_cast<void*>(to), static_cast<size_t>(received), kBytes, rank,
                               communicator, stream),
                    "ncclRecv from rank " + std::to_string(rank));
      from += sent;
      to += received;
    }
    group.end();
  }

  const Nccl nccl_;
  const int ranks_, rank_, device_;
  const Seconds limit_;
  std::mutex mutex_;              // for all members below
  void* communicator_ = nullptr;  // null if it was aborted, for the reason in reason_
  std::string reason_;
  std::deque<Pass> passes_;  // that have not ended
  std::vector<cudaEvent_t> unused_;
  Clock::time_point last_end_;
  bool is_inside_ = false;     // whether a call of NCCL may wait on the host now
  Clock::time_point entered_;  // when that call began
};

}  // namespace pmoe::program
