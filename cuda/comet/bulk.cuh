// Sends rows to other ranks on Hopper by bulk copies (cp.async.bulk) through shared memory.
//
// In COMET's kernels some blocks only communicate; their warps run this code. One lane of a warp starts the
// copies. No row is held in registers, and four times as many bytes are in flight as with copies through
// registers. A communicating block multiplies nothing, so it can use the shared memory in which other blocks
// keep their operands.
//
// If the extension is built with -DPMOE_LANE_COPIES, rows go through registers as on other devices. If
// results are wrong, a comparison of both builds shows whether the bulk copies are at fault.
#pragma once
#include "comet/dispatch.cuh"

namespace pmoe::comet {

constexpr int kBulkSlots = 4, kBulkBytes = 4096;  // number of slots of a warp, and their size
constexpr int kStoring = 1;                       // number of slots that stores may read when a load begins

// The buffers of one warp in shared memory: kBulkSlots slots, each with a barrier that is signalled when a
// load has filled the slot.
struct BulkRing {
  alignas(128) uint8_t slot[kBulkSlots][kBulkBytes];
  uint64_t full[kBulkSlots];
};

#if PMOE_HOPPER_CODE

// Copies rows to another rank by bulk copies: begin() starts to copy a run of rows, finish() ends the copies.
// LaneCopies in dispatch.cuh has the same interface.
//
// A row is cut into parts of kBulkBytes bytes; its last part may be shorter. Parts are numbered from 0 on,
// over all calls, and part i goes through slot i % kBulkSlots: a bulk load fills the slot, and a bulk store
// empties it.
//
// loaded_: number of parts whose load has been started.
// stored_: number of parts whose store has been started.
// first_: number of parts that earlier calls of finish() have stored.
class BulkCopies {
 public:
  __device__ __forceinline__ BulkCopies(BulkRing& ring, const WarpTeam& team) : ring_(ring) {
    if (team.lane == 0) {
      for (int i = 0; i < kBulkSlots; ++i) mbarrier_init(&ring.full[i], 1);
      fence_mbarrier_init();
    }
    sync_warp();
  }

  __device__ __forceinline__ void begin(const Rank& r, uint8_t* to, int from, int rows,
                                        const WarpTeam& team) {
    if (team.lane != 0) return;
    // The receiving rank read its inbox in the round before, and then raised a flag that the inbox is free.
    // This thread has read the flag. The fence makes the bulk writes come after that, and so after the reads
    // of the inbox.
    fence_proxy_async_global();
    to_ = to, slot_ = r.slot + from, rows_ = rows, offset_ = 0;
    for (int i = 0; i < kBulkSlots && rows_ > 0; ++i) load(r);
  }

  __device__ __forceinline__ void finish(const Rank& r, const WarpTeam& team) {
    if (team.lane != 0) return;
    const int row_bytes = static_cast<int>(r.layout.row_bytes);
    for (int left = row_bytes; stored_ != loaded_; ++stored_) {
      const uint32_t slot = stored_ % kBulkSlots;
      const int bytes = smaller(left, kBulkBytes);
      mbarrier_wait(&ring_.full[slot], stored_ / kBulkSlots % 2);
      bulk_store(to_, ring_.slot[slot], bytes);
      bulk_commit();
      to_ += bytes;
      left = left == bytes ? row_bytes : left - bytes;
      if (rows_ == 0 || static_cast<int>(stored_ - first_) < kStoring) continue;
      bulk_wait_read<kStoring>();
      load(r);
    }
    first_ = stored_;
    bulk_wait<0>();
  }

 private:
  // Starts the load of the next part of a row into its slot, which must be free.
  __device__ __forceinline__ void load(const Rank& r) {
    const int64_t left = r.layout.row_bytes - offset_;
    const int bytes = static_cast<int>(smaller<int64_t>(left, kBulkBytes));
    const int64_t token = r.by_choices.divide(read(slot_));
    const uint32_t slot = loaded_++ % kBulkSlots;
    mbarrier_arrive_expect(&ring_.full[slot], bytes);
    bulk_load(ring_.slot[slot], r.source + token * r.source_stride + offset_, &ring_.full[slot], bytes);
    offset_ += bytes;
    if (bytes < left) return;
    offset_ = 0, ++slot_, --rows_;
  }

  BulkRing& ring_;
  uint8_t* to_ = nullptr;
  const int32_t* slot_ = nullptr;
  int rows_ = 0, offset_ = 0;
  uint32_t loaded_ = 0, stored_ = 0, first_ = 0;
};

#ifndef PMOE_LANE_COPIES
using HopperCopies = BulkCopies;
#else
struct HopperCopies : LaneCopies {
  __device__ __forceinline__ HopperCopies(BulkRing&, const WarpTeam&) {}
};
#endif

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe::comet
