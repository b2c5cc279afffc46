// The offsets at which cells begin in a pool that they share (layout.h), counted like `c` of a row. The
// offset of a cell with rows of its own is 0.
//
// A source announces how many rows come, and at which of its own offsets their products come home. The rows'
// rank gives each cell the next tiles of its pool, and tells the source where they begin. Which source comes
// first decides where rows lie and nothing else, because sums go by source and row.
#pragma once
#include "flashdmoe/pass.h"
#include "peers/protocol.h"

namespace pmoe::flashdmoe {

// Returns where the rows of `source` for this rank's expert e begin on this rank.
__device__ __forceinline__ int offset_of(const Pass& pass, int source, int e) {
  return pass.layout.is_pool ? read(pass.offset + pass.layout.cell(source, e)) : 0;
}

// Returns where this rank's rows for the peer's expert e begin on the peer.
__device__ __forceinline__ int offset_at(const Pass& pass, int peer, int e) {
  if (!pass.layout.is_pool) return 0;
  return read(reinterpret_cast<const int32_t*>(pass.own() + pass.layout.offsets(peer)) + e);
}

// Returns where the products of this rank's rows for an expert of all ranks come home.
__device__ __forceinline__ int own_home(const Pass& pass, int expert) {
  return pass.layout.is_pool ? read(pass.home + expert) : 0;
}

// Returns where the products of `source`'s rows for this rank's expert e go in the heap of `source`.
__device__ __forceinline__ int home_at(const Pass& pass, int source, int e) {
  if (!pass.layout.is_pool) return 0;
  return read(reinterpret_cast<const int32_t*>(pass.own() + pass.layout.homes(source)) + e);
}

// Writes to a peer how many rows come for each of its experts, and where their products come home. The caller
// then raises the flag.
__device__ __forceinline__ void write_counts(const Pass& pass, int peer) {
  const Layout& layout = pass.layout;
  auto* const counts = reinterpret_cast<int32_t*>(pass.heaps[peer] + layout.counts(pass.rank));
  auto* const homes = reinterpret_cast<int32_t*>(pass.heaps[peer] + layout.homes(pass.rank));
  for (int e = 0; e < layout.experts; ++e) {
    const int expert = layout.cell(peer, e);
    write(counts + e, read(pass.counts + expert));
    if (layout.is_pool) write(homes + e, own_home(pass, expert));
  }
}

// Gives room in the pool to a source that has announced its rows, and tells it. Backward uses the offsets of
// forward.
__device__ __forceinline__ void grant_room(const Pass& pass, int source) {
  const Layout& layout = pass.layout;
  const int32_t* const counts = pass.announced_rows(source);
  int32_t* const own = pass.offset + layout.cell(source, 0);
  if (!pass.is_backward) {
    uint32_t tiles = 0;
    for (int e = 0; e < layout.experts; ++e) tiles += static_cast<uint32_t>(layout.tiles(read(counts + e)));
    uint32_t next = add_acq_rel(&pass.queue.state->granted, tiles);
    // The host has compared the rows with the size of the pool, so this is an error of the host.
    if (next + tiles > static_cast<uint32_t>(layout.all_tiles()))
      return peers::report(pass.watch, peers::Wait::kRoom, source, 0, 0);
    for (int e = 0; e < layout.experts; ++e) {
      write(own + e, static_cast<int32_t>(next) * layout.tile_rows);
      next += static_cast<uint32_t>(layout.tiles(read(counts + e)));
    }
  }
  auto* const offsets_at_source = reinterpret_cast<int32_t*>(pass.heaps[source] + layout.offsets(pass.rank));
  for (int e = 0; e < layout.experts; ++e) write(offsets_at_source + e, read(own + e));
  peers::test_delay(pass.watch, 7500 + static_cast<uint32_t>(source));
  peers::signal(pass.watch, pass.own() + layout.known(source));
  peers::signal(pass.watch, pass.heaps[source] + layout.placed(pass.rank));
}

}  // namespace pmoe::flashdmoe
