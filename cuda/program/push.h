// An exchange of rows over heaps: where flags and pieces lie in a heap, and the arguments of its kernel.
//
// A heap is memory of one rank that all ranks can write. The kernel of push.cuh runs on every rank at the
// same time. It writes this rank's rows into the heaps of the ranks to which they go. It ends when all of
// them are written, and all rows for this rank have arrived. So one launch does what a group of NCCL's sends
// and receives does.
//
// Two exchanges may share a launch, if the target of each exchange has no bytes in common with the source and
// target of the other. The condition is needed because a channel begins the second exchange without waiting
// for the other channels. On other ranks, the same two exchanges may have a launch each.
//
// The rows for a rank are divided among channels. A channel is a warp of the kernel, and warp c of a rank
// exchanges data only with warp c of each other rank:
//
//   rank 0, channel c                                   rank 1, channel c
//                                                       grants: number 7, is_whole 0, offset 98304: "write a
//                                                       piece to offset 98304 of my heap"
//   waits for grant 7 of rank 1
//   writes the bytes, then the flag "piece 7 arrived"
//                                                       waits for the flag, and may use the bytes
//
// A rank grants memory only when its stream has reached the exchange. Before that, the stream has waited for
// all readers of this memory, so no row is overwritten before it was read.
//
// If the target of a rank lies in its heap, the rank grants the target at once, and the peer writes the rows
// where they belong. Peers cannot write other memory. If the target is elsewhere, the rank grants its landing
// place in the heap, for a piece at a time, and copies each piece from there into the target.
//
// For each pair of ranks and each channel, the grants and pieces of all launches are numbered from 1. A flag
// holds the number of the last grant or piece, so nothing is reset, and a launch that is repeated goes on
// counting.
//
//   heap of rank r:  failed | grants | arrivals | numbers | landing places | arena
//
//   failed          a word that is not 0 after a wait of rank r was too long. Only r uses it
//   grants          for each rank and channel, the last `Grant` of that rank to r. That rank writes it. It
//                   has no number of bytes, because sender and receiver compute the bytes from the row counts
//   arrivals        for each rank and channel, the number of the last piece that has arrived from that rank.
//                   That rank writes it
//   numbers         for each rank and channel, how many pieces r has sent to that rank, and how many it has
//                   received from it. Only r uses them
//   landing places  kPieceBytes for each rank and channel, into which that rank writes pieces
//   arena           memory for the ring slots of a pass
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "peers/sizes.h"
#include "peers/watch.h"

namespace pmoe::program {

constexpr int kMostHeaps = 16;    // the largest number of ranks
constexpr int kMostMessages = 2;  // the largest number of exchanges in a launch
#ifdef PMOE_SMALL_PIECES          // for tests, so that a few rows need several channels and pieces
constexpr int kPushThreads = 64;
constexpr int kMostChannels = 2;
constexpr int64_t kPieceBytes = 64;
constexpr int64_t kSmallestPart = 128;
#else
constexpr int kPushThreads = 256;
constexpr int kMostChannels = 128;     // a power of two
constexpr int64_t kPieceBytes = 4096;  // size of a landing place
constexpr int64_t kSmallestPart = 2048;
#endif

// Returns the logarithm, to base 2, of the number of channels that share the `bytes` from one rank to
// another. The number is doubled as long as each channel has more than kSmallestPart bytes, up to
// kMostChannels. If channels had fewer bytes, their flags would cost more time than further channels save.
// The number is a power of two, because a device divides 64-bit numbers slowly.
PMOE_HD int channel_shift(int64_t bytes) {
  int shift = 0;
  while (1 << shift < kMostChannels && bytes >> shift > kSmallestPart) ++shift;
  return shift;
}

// A grant, in the heap of the rank that gets permission to write. `number` is written last.
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

// One exchange. The rows to all ranks lie in `source`, sorted by rank, the rows from all ranks in `target`,
// sorted by rank. Both include the rows of this rank to itself.
struct Message {
  const uint8_t* source;
  uint8_t* target;
  int64_t target_offset;         // of the target, in bytes, in this rank's heap; -1 if it is elsewhere
  int64_t row_bytes;             // a multiple of 4. If it is a multiple of 16, both addresses are, too
  int64_t send_end[kMostHeaps];  // for each rank, the index behind the last row in `source` for it
  int64_t recv_end[kMostHeaps];  // for each rank, the index behind the last row in `target` from it
  // (W,) number of rows to each rank, and from each rank, on the device; null if the host knows them. If they
  // are not null, the last numbers of send_end and recv_end are the most rows of all ranks together.
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

// Returns the most bytes that go from one rank to another in an exchange, or more: a launch needs a thread
// block for each channel that shares them.
inline int64_t most_bytes_of(const Push& push) {
  int64_t most = 0;
  for (int i = 0; i < push.messages; ++i) {
    const Message& message = push.message[i];
    for (const int64_t* ends : {message.send_end, message.recv_end})
      for (int rank = 0; rank < push.ranks; ++rank) {
        // If only the device knows the rows of each rank, one rank may have all of them.
        const int64_t first = rank && !message.send_rows ? ends[rank - 1] : 0;
        const int64_t bytes = (ends[rank] - first) * message.row_bytes;
        if (bytes > most) most = bytes;
      }
  }
  return most;
}

// Launches a kernel for the exchanges of `push` on the current device, with as many blocks as their rows
// need. This function returns without waiting.
void push_rows(void* stream, const Push& push);

}  // namespace pmoe::program
