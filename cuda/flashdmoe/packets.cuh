// How data gets from this rank to a peer (section 5.3, Figure 5.3).
//
//   the peer is mapped        the rank writes into the peer's heap, and raises a flag there
//   the peer is not mapped    the rank writes the same data into the outgoing part of its own heap (b = 0).
//                             Then puts copy the data into the incoming part of the peer's heap (b = 1). When
//                             the data have arrived, the last put raises the flag there
//
// The peer sees no difference. Functions whose names end in `_for` return the address where this rank must
// write. Functions whose names begin with `put` are only called for a peer that is not mapped, after all data
// are written.
//
// When may a rank overwrite its outgoing part? Without a pool, each peer has a place of its own there. The
// rank may overwrite the place when the peer has granted the next round, because a peer grants a round only
// after all data of the round before have arrived. With a pool, the place of a peer may be used for another
// peer in the next round, and the rank does not wait for a grant of the first peer. So a launch ends only
// when all of its puts have arrived (scheduler.h).
#pragma once
#include "flashdmoe/pass.h"
#include "peers/protocol.h"
#include "peers/puts.cuh"

namespace pmoe::flashdmoe {

namespace puts = peers::puts;

// The two places of the same data, in a region that has a part for each rank:
//
// at_peer: byte offset in the peer's heap, in the part for data of this rank.
// own: byte offset in this rank's heap, in the part for data of the peer. Data for a peer that is not mapped
//     are written `Layout::outgoing()` bytes behind this offset.
struct Ends {
  int64_t at_peer, own;
};

// A run of rows that this rank sends to a peer: rows for one of the peer's experts (dispatch), or the results
// of the peer's rows for one of this rank's experts (combine).
//
// at_peer: index of the first row in the peer's cell or pool.
// staged: index of the first row in this rank's outgoing cell or pool.
struct Packet {
  int peer, expert, at_peer, staged;
};

// Returns the address at which this rank writes data for a peer's region: in the peer's heap, or in the
// outgoing part of its own heap.
__device__ __forceinline__ uint8_t* region_for(const Pass& pass, int peer, const Ends& ends) {
  if (pass.is_mapped(peer)) return pass.heaps[peer] + ends.at_peer;
  return pass.own() + ends.own + pass.layout.outgoing();
}

// Returns the address at which this rank writes the rows of a packet: in the peer's heap, or in the outgoing
// part of its own heap.
__device__ __forceinline__ uint8_t* rows_for(const Pass& pass, const Packet& packet, Round round) {
  if (pass.is_mapped(packet.peer))
    return pass.at(packet.peer, {pass.rank, round, Staging::kIncoming, packet.expert, packet.at_peer});
  return pass.at(pass.rank, {packet.peer, round, Staging::kOutgoing, packet.expert, packet.staged});
}

// Copies a region's outgoing data to a peer. The data arrive before the flag that this thread's next put to
// the peer raises.
__device__ __forceinline__ void put_region(const Pass& pass, int peer, const Ends& ends, int64_t bytes) {
  if (peers::has_failed(pass.watch)) return;
  puts::put(peer, pass.own() + ends.at_peer, pass.own() + ends.own + pass.layout.outgoing(), bytes);
}

// Copies a region's outgoing data to a peer, and raises a flag there.
//
// flag: byte offset of the flag in the peer's heap.
__device__ __forceinline__ void put_region_with_flag(const Pass& pass, int peer, const Ends& ends,
                                                     int64_t bytes, int64_t flag) {
  if (peers::has_failed(pass.watch)) return;
  uint8_t* const own = pass.own();
  puts::put_with_flag(peer, own + ends.at_peer, own + ends.own + pass.layout.outgoing(), bytes, own + flag,
                      peers::epoch_of(pass.watch));
}

// Copies the outgoing rows of a packet to its peer. The rows arrive before the flag that this thread's next
// put to the peer raises.
__device__ __forceinline__ void put_rows(const Pass& pass, const Packet& packet, int rows, Round round) {
  if (peers::has_failed(pass.watch)) return;
  const Layout& layout = pass.layout;
  puts::put(packet.peer,
            pass.own() + layout.at({pass.rank, round, Staging::kIncoming, packet.expert, packet.at_peer}),
            rows_for(pass, packet, round), rows * layout.row_bytes);
}

// Copies the outgoing rows of a packet to its peer, and raises a flag there.
//
// flag: byte offset of the flag in the peer's heap.
__device__ __forceinline__ void put_rows_with_flag(const Pass& pass, const Packet& packet, int rows,
                                                   Round round, int64_t flag) {
  if (peers::has_failed(pass.watch)) return;
  const Layout& layout = pass.layout;
  puts::put_with_flag(
      packet.peer,
      pass.own() + layout.at({pass.rank, round, Staging::kIncoming, packet.expert, packet.at_peer}),
      rows_for(pass, packet, round), rows * layout.row_bytes, pass.own() + flag, peers::epoch_of(pass.watch));
}

// Raises a flag in a peer's heap, if the flag announces no data.
//
// flag: byte offset of the flag in the peer's heap.
__device__ __forceinline__ void raise_flag(const Pass& pass, int peer, int64_t flag) {
  if (pass.is_mapped(peer)) return peers::signal(pass.watch, pass.heaps[peer] + flag);
  if (!peers::has_failed(pass.watch)) puts::put_flag(peer, pass.own() + flag, peers::epoch_of(pass.watch));
}

}  // namespace pmoe::flashdmoe
