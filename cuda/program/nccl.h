// NCCL's point-to-point calls, on a communicator that belongs to pass programs alone.
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

#include <cstring>
#include <stdexcept>
#include <string>

#include "common/errors.h"
#include "program/interpreter.h"

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
  int (*CommGetAsyncError)(void* communicator, int* error);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*Send)(const void* from, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  int (*Recv)(void* to, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  const char* (*GetErrorString)(int);

  // Returns the functions of the library that is loaded. Throws std::runtime_error if there is none.
  static const Nccl& loaded() {
    static const Nccl nccl = look_up();  // a thread that throws leaves it to the next call
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

// Returns the bytes of a new id. One rank makes it, and all ranks need it.
inline std::string make_id() {
  NcclId id;
  const Nccl& nccl = Nccl::loaded();
  nccl.check(nccl.GetUniqueId(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

// A group of NCCL's calls. Every group that was started is ended, also if a call inside it fails: without the
// end, all later calls of the thread would wait for it.
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

// One rank's part of a communicator. NCCL keeps it until the process ends: to destroy it, NCCL would have to
// wait for the other ranks.
class Communicator {
 public:
  // Waits until all ranks have come. The rank's device must be the current one.
  //
  // id: the bytes of make_id() of one rank.
  //
  // Throws std::invalid_argument for a rank that cannot be, and std::runtime_error for an error of NCCL.
  Communicator(const std::string& id, int ranks, int rank)
      : nccl_(Nccl::loaded()), ranks_(ranks), rank_(rank) {
    if (rank < 0 || rank >= ranks)
      throw std::invalid_argument("rank (" + std::to_string(rank) + ") must be below ranks (" +
                                  std::to_string(ranks) + ")");
    NcclId all;
    if (id.size() != sizeof all.bytes)
      throw std::invalid_argument("id (" + std::to_string(id.size()) + " bytes) must have " +
                                  std::to_string(sizeof all.bytes) + " bytes");
    std::memcpy(all.bytes, id.data(), sizeof all.bytes);
    nccl_.check(nccl_.CommInitRank(&communicator_, ranks, all, rank), "ncclCommInitRank");
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  // Throws std::runtime_error if an earlier exchange has failed on the device or in the network.
  void check() const {
    int error = 0;
    nccl_.check(nccl_.CommGetAsyncError(communicator_, &error), "ncclCommGetAsyncError");
    nccl_.check(error, "an earlier exchange");
  }

  // Issues an all-to-all on the call's stream. Rows for this rank itself are copied, not sent.
  void exchange(const Call& call) const {
    const auto stream = reinterpret_cast<cudaStream_t>(call.stream);
    if (leaves(call.send) || leaves(call.recv)) send_and_receive(call, stream);
    if (const int64_t rows = call.send[rank_])
      pmoe::check(cudaMemcpyAsync(rows_of(call.operand[1], call.recv), rows_of(call.operand[0], call.send),
                                  static_cast<size_t>(rows * call.operand[0].row_bytes),
                                  cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync of rows that stay");
  }

 private:
  static constexpr int kBytes = 0;  // ncclInt8

  // Returns whether there are rows of another rank.
  bool leaves(const int64_t* rows) const {
    for (int rank = 0; rank < ranks_; ++rank)
      if (rank != rank_ && rows[rank]) return true;
    return false;
  }

  // Returns the address of the rows of this rank.
  void* rows_of(const Memory& memory, const int64_t* rows) const {
    int64_t before = 0;
    for (int rank = 0; rank < rank_; ++rank) before += rows[rank];
    return reinterpret_cast<void*>(memory.address + before * memory.row_bytes);
  }

  void send_and_receive(const Call& call, cudaStream_t stream) const {
    int64_t from = call.operand[0].address;
    int64_t to = call.operand[1].address;
    NcclGroup group(nccl_);
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t sent = call.send[rank] * call.operand[0].row_bytes;
      const int64_t received = call.recv[rank] * call.operand[1].row_bytes;
      if (sent && rank != rank_)
        nccl_.check(nccl_.Send(reinterpret_cast<void*>(from), static_cast<size_t>(sent), kBytes, rank,
                               communicator_, stream),
                    "ncclSend to rank " + std::to_string(rank));
      if (received && rank != rank_)
        nccl_.check(nccl_.Recv(reinterpret_cast<void*>(to), static_cast<size_t>(received), kBytes, rank,
                               communicator_, stream),
                    "ncclRecv from rank " + std::to_string(rank));
      from += sent;
      to += received;
    }
    group.end();
  }

  const Nccl& nccl_;
  const int ranks_, rank_;
  void* communicator_ = nullptr;
};

}  // namespace pmoe::program
