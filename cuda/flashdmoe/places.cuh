// Offsets of cells in a pool. A cell is the rows that one rank (the source) sends to one expert. Without a
// capacity, all cells of a round share one buffer, the pool (layout.h).
//
// The source announces how many rows it sends, and at which offset of its own pool it wants their results.
// The receiving rank gives each cell the next free tiles of its pool, and writes the offset of these tiles
// into the heap of the source. The offsets depend on the order in which sources announce their rows. The
// values of the results do not depend on it, because sums are computed by source and row.
//
// With a capacity every cell has memory of its own, and these functions return 0.
#pragma once
#include "flashdmoe/packets.cuh"

namespace pmoe::flashdmoe {

// Returns the offset in this rank's pool at which the rows of rank `source` for this rank's expert e begin; 0
// without a pool.
__device__ __forceinline__ int offset_of(const Pass& pass, int source, int e) {
  return pass.layout.is_pool ? read(pass.offset + pass.layout.cell(source, e)) : 0;
}

// Returns the offset in the peer's pool at which this rank's rows for the peer's expert e begin; 0 without a
// pool.
__device__ __forceinline__ int offset_at(const Pass& pass, int peer, int e) {
  if (!pass.layout.is_pool) return 0;
  return read(reinterpret_cast<const int32_t*>(pass.own() + pass.layout.offsets(peer)) + e);
}

// Returns the offset in this rank's pool at which the results of this rank's rows for an expert begin; 0
// without a pool.
//
// expert: an index among the experts of all ranks.
__device__ __forceinline__ int own_home(const Pass& pass, int expert) {
  return pass.layout.is_pool ? read(pass.home + expert) : 0;
}

// Returns the offset in the pool of rank `source` at which the results of its rows for this rank's expert e
// begin; 0 without a pool.
__device__ __forceinline__ int home_at(const Pass& pass, int source, int e) {
  if (!pass.layout.is_pool) return 0;
  return read(reinterpret_cast<const int32_t*>(pass.own() + pass.layout.homes(source)) + e);
}

// Tells another rank how many rows this rank sends to each of that rank's experts and, with a pool, at which
// offsets this rank wants the results of these rows. Then raises the flag `announced` there.
//
// delay: the argument `who` of peers::test_delay, for tests.
__device__ __forceinline__ void announce(const Pass& pass, int peer, uint32_t delay) {
  const Layout& layout = pass.layout;
  const Ends counts_ends = {layout.counts(pass.rank), layout.counts(peer)};
  const Ends homes_ends = {layout.homes(pass.rank), layout.homes(peer)};
  auto* const counts = reinterpret_cast<int32_t*>(region_for(pass, peer, counts_ends));
  auto* const homes = reinterpret_cast<int32_t*>(region_for(pass, peer, homes_ends));
  for (int e = 0; e < layout.experts; ++e) {
    const int expert = layout.cell(peer, e);
    write(counts + e, read(pass.counts + expert));
    if (layout.is_pool) write(homes + e, own_home(pass, expert));
  }
  peers::test_delay(pass.watch, delay);
  const int64_t flag = layout.announced(pass.rank), bytes = int64_t{layout.experts} * 4;
  if (pass.is_mapped(peer)) return peers::signal(pass.watch, pass.heaps[peer] + flag);
  if (layout.is_pool) put_region(pass, peer, homes_ends, bytes);
  put_region_with_flag(pass, peer, counts_ends, bytes, flag);
}

// Chooses at which offsets the rows of a source begin in this rank's pool, and writes these offsets into the
// heap of the source. The source has announced how many rows it sends. In backward this function chooses
// nothing, and writes the offsets that forward has chosen.
__device__ __forceinline__ void grant_room(const Pass& pass, int source) {
  const Layout& layout = pass.layout;
  const int32_t* const counts = pass.announced_rows(source);
  int32_t* const own = pass.offset + layout.cell(source, 0);
  if (!pass.is_backward) {
    uint32_t tiles = 0;
    for (int e = 0; e < layout.experts; ++e) tiles += static_cast<uint32_t>(layout.tiles(read(counts + e)));
    uint32_t next = add_acq_rel(&pass.queue.state->granted, tiles);
    // The host has checked that the rows fit into the pool. If they do not, that check has a mistake.
    if (next + tiles > static_cast<uint32_t>(layout.all_tiles()))
      return peers::report(pass.watch, peers::Wait::kRoom, source, 0, 0);
    for (int e = 0; e < layout.experts; ++e) {
      write(own + e, static_cast<int32_t>(next) * layout.tile_rows);
      next += static_cast<uint32_t>(layout.tiles(read(counts + e)));
    }
  }
  const Ends ends = {layout.offsets(pass.rank), layout.offsets(source)};
  auto* const offsets_for_source = reinterpret_cast<int32_t*>(region_for(pass, source, ends));
  for (int e = 0; e < layout.experts; ++e) write(offsets_for_source + e, read(own + e));
  peers::test_delay(pass.watch, 7500 + static_cast<uint32_t>(source));
  peers::signal(pass.watch, pass.own() + layout.known(source));
  const int64_t flag = layout.placed(pass.rank);
  if (pass.is_mapped(source)) return peers::signal(pass.watch, pass.heaps[source] + flag);
  put_region_with_flag(pass, source, ends, int64_t{layout.experts} * 4, flag);
}

}  // namespace pmoe::flashdmoe
