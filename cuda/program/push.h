// An exchange of rows over heaps: where flags and pieces lie in a heap, and the arguments of its kernel.
//
// A heap is memory of each rank that all ranks can write. The kernel of push.cuh runs on every rank at the
// same time. It writes this rank's rows into the memory of their ranks, and ends when these are written and
// all rows for this rank have arrived. So one launch does what a group of NCCL's sends and receives does.
//
// Two exchanges may share a launch, if the target of each has no bytes in common with the source and target
// of the other: channels do not wait for each other between the two. Other ranks may have a launch for each
// of the two.
//
// The rows for a rank are divided among channels. A channel is a warp of the kernel, and warp c of a rank
// talks to warp c of each other rank only:
//
//   rank 0, channel c                                   rank 1, channel c
//                                                       grants: number 7, is_whole 0, offset 98304: "write a
//                                                       piece to offset 98304 of my heap"
//   waits for grant 7 of rank 1
//   writes the bytes, then the flag "piece 7 arrived"
//                                                       waits for the flag, and may use the bytes
//
// A rank grants memory only when its stream has reached the exchange. The pass has waited before for all
// readers of this memory, so no row is overwritten before it was read.
//
// If a rank's memory for the rows lies in its heap, it grants all of it at once, and rows are written where
// they belong. Other memory cannot be written by peers. Then the rank grants its landing place in the heap, a
// piece at a time, and copies each piece to where it belongs.
//
// Grants and pieces of a pair of ranks and a channel are numbered from 1, over all launches. Flags hold the
// number of the last one, so nothing is reset, and a launch that is repeated goes on counting.
//
//   heap of rank r:  failed | grants | arrivals | numbers | landing places | arena
//
//   failed     a word that is not 0 after a wait of rank r was too long. Only r uses it
//   grants     `Grant` of each rank to r, for each channel: number, is_whole and offset. That rank writes it.
//              Sender and receiver compute the number of bytes from the row counts
//   arrivals   number of the last piece of each rank that has arrived, for each channel. That rank writes it
//   numbers    how many pieces r has sent to, and received from, each rank. Only r uses them
//   arena      memory for the ring slots of a pass
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "peers/sizes.h"
#include "peers/watch.h"

namespace pmoe::program {

constexpr int kMostHeaps = 16;    // most ranks
constexpr int kMostMessages = 2;  // most exchanges of a launch
#ifdef PMOE_SMALL_PIECES          // for tests, so that a few rows need several channels and pieces
constexpr int kPushThreads = 64;
constexpr int kMostChannels = 2;
constexpr int64_t kPieceBytes = 64;
constexpr int64_t kSmallestPart = 128;
#else
constexpr int kPushThreads = 256;
constexpr int kMostChannels = 128;     // a power of two
constexpr int64_t kPieceBytes = 4096;  // of a landing place
constexpr int64_t kSmallestPart = 2048;
#endif

// Returns the logarithm, to base 2, of the number of channels that share `bytes` of a rank for another one. A
// further channel is worth its flags from kSmallestPart bytes on. The numbers are powers of two, because a
// device divides 64-bit numbers slowly.
PMOE_HD int channel_shift(int64_t bytes) {
  int shift = 0;
  while (1 << shift < kMostChannels && bytes >> shift > kSmallestPart) ++shift;
  return shift;
}

// A grant, in the heap of the rank that may write. `number` is written last.
struct Grant {
  uint32_t number;
  uint32_t is_whole;  // 1 if the grant is for all bytes of the channel, 0 if it is for a landing place
  int64_t offset;     // in the heap of the rank that grants
  uint8_t unused[peers::kFlagBytes - 16];
};
static_assert(sizeof(Grant) == peers::kFlagBytes);

struct Arrival {
  uint32_t number;
  uint8_t unused[peers::kFlagBytes - 4];
};
static_assert(sizeof(Arrival) == peers::kFlagBytes);

struct Numbers {
  uint32_t sent, received;
};

// Byte offsets of the regions of a heap. They depend on the number of ranks only.
struct HeapRegions {
  int64_t failed, grants, arrivals, numbers, landing, arena;

  PMOE_HD static constexpr HeapRegions of(int ranks) {
    const int64_t cells = int64_t{ranks} * kMostChannels;
    HeapRegions regions = {};
    regions.failed = 0;
    regions.grants = regions.failed + peers::align_region(int64_t{sizeof(uint32_t)});
    regions.arrivals = regions.grants + peers::align_region(cells * int64_t{sizeof(Grant)});
    regions.numbers = regions.arrivals + peers::align_region(cells * int64_t{sizeof(Arrival)});
    regions.landing = regions.numbers + peers::align_region(cells * int64_t{sizeof(Numbers)});
    regions.arena = regions.landing + cells * kPieceBytes;
    return regions;
  }
};

// One exchange. Rows for other ranks lie one after another, by rank, and so do rows from other ranks.
struct Message {
  const uint8_t* source;
  uint8_t* target;
  int64_t target_offset;         // of the target in this rank's heap; -1 if it lies elsewhere
  int64_t row_bytes;             // a multiple of 4. If it is one of 16, so are source and target
  int64_t send_end[kMostHeaps];  // where the rows to each rank end, in rows
  int64_t recv_end[kMostHeaps];  // where the rows from each rank end
  // The rows to and from each rank, (W,) on the device; null if the host knows them. Then the last numbers of
  // send_end and recv_end are the most rows of all ranks together.
  const int64_t* send_rows;
  const int64_t* recv_rows;
};

// The arguments of a launch.
struct Push {
  peers::Watch watch;
  int32_t ranks;
  int32_t messages;
  uint8_t* heaps[kMostHeaps];  // addresses of the heaps of all ranks, in this process
  Message message[kMostMessages];
};

// Launches the exchanges of `push` on the current device, with as many blocks as their rows need. It returns
// without waiting.
void push_rows(void* stream, const Push& push);

}  // namespace pmoe::program
