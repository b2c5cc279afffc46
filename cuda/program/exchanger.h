// The interface by which a pass exchanges rows with other ranks. There are two implementations:
//
//   Communicator    NCCL's sends and receives (nccl.h)
//   HeapExchanger   a kernel that writes into the heaps of the other ranks (heap_exchanger.h)
#pragma once
#include <cuda_runtime_api.h>

#include <vector>

#include "program/interpreter.h"

namespace pmoe::program {

class Exchanger {
 public:
  virtual ~Exchanger() = default;

  virtual int ranks() const = 0;
  virtual int rank() const = 0;

  // The largest number of calls that one exchange() takes.
  virtual size_t most_calls() const = 0;

  // Lends memory for the ring slots of a pass, until give_back_arena(). Returns its address, or 0 if there
  // are not as many bytes as the argument says. Ring slots in other memory work, too, but rows may travel
  // more slowly to them.
  virtual int64_t take_arena(int64_t) { return 0; }
  virtual void give_back_arena() {}

  // Bytes that take_arena() gives at most.
  virtual int64_t arena_bytes() const { return 0; }

  // Begins a pass, before its first call. Throws std::runtime_error if an earlier exchange has failed or has
  // not ended in time.
  //
  // compute: the stream of the compute lane.
  virtual void begin(cudaStream_t compute) = 0;

  // Issues the all-to-alls of 1 to most_calls() calls, which all have the same stream.
  virtual void exchange(const std::vector<Call>& calls) = 0;

  // Ends a pass, all calls of which have been issued.
  virtual void end(cudaStream_t compute) = 0;
};

}  // namespace pmoe::program
