// The kernel that exchanges rows over heaps. push.h has the protocol.
#pragma once
#include "common/device.cuh"
#include "peers/protocol.h"
#include "peers/rows.cuh"
#include "program/push.h"

namespace pmoe::program {

// The bytes that one channel sends to one rank, or receives from one rank: a range of the message's source or
// target.
struct Part {
  int64_t begin;
  int64_t bytes;
};

// Returns a channel's part of `rows` rows that go from one rank to another. `begin` counts from the first of
// these rows. Sender and receiver compute the same part.
__device__ __forceinline__ Part part_of(int64_t rows, int64_t row_bytes, int channel) {
  const int unit_shift = row_bytes % 16 ? 2 : 4;
  const int64_t units = rows * row_bytes >> unit_shift;
  const int shift = channel_shift(rows * row_bytes);
  if (channel >> shift) return {0, 0};
  const int64_t begin = units * channel >> shift;
  const int64_t end = units * (channel + 1) >> shift;
  return {begin << unit_shift, (end - begin) << unit_shift};
}

// Copies `bytes` bytes. All lanes of a team call this function.
//
// by_16: whether both addresses and `bytes` are multiples of 16. If not, they must be multiples of 4.
__device__ __forceinline__ void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes, bool by_16,
                                           const peers::WarpTeam& team) {
  if (by_16) return peers::copy_row(to, from, bytes, team);
  for (int64_t i = team.lane; i < bytes / 4; i += team.lanes)
    write(reinterpret_cast<uint32_t*>(to) + i, read(reinterpret_cast<const uint32_t*>(from) + i));
}

// The work of one channel of this rank for one message.
class Channel {
 public:
  __device__ Channel(const Push& push, const Message& message, const peers::WarpTeam& team)
      : push_(push), message_(message), team_(team), regions_(HeapRegions::of(push.ranks)) {}

  // Exchanges the channel's part of the message with all ranks. Returns false if a wait was too long.
  //
  // In a round, at most one piece goes to each other rank, and at most one piece comes from each. A rank
  // makes all of its grants of a round before it waits for anything, so ranks cannot wait for each other in a
  // circle.
  __device__ bool run() {
    copy_own();
    uint32_t done = 0;  // one bit for each rank that has granted the whole part
    bool goes_on = true;
    for (int64_t round = 0; goes_on; ++round) {
      goes_on = false;
      for (int step = 1; step < push_.ranks; ++step) grant(peer_at(step), round);
      for (int step = 1; step < push_.ranks; ++step)
        if (!send(peer_at(step), round, done, goes_on)) return false;
      for (int step = 1; step < push_.ranks; ++step)
        if (!receive(peer_at(step), round, goes_on)) return false;
    }
    return true;
  }

 private:
  // Returns the rank that is `step` ranks after this one, counted in a circle. At the same step all ranks
  // have different peers, so that they do not all write to the same rank at once.
  __device__ int peer_at(int step) const {
    const int rank = push_.watch.rank + step;
    return rank < push_.ranks ? rank : rank - push_.ranks;
  }

  __device__ uint8_t* own() const { return push_.heaps[push_.watch.rank]; }

  // Returns whether rows for this rank arrive in landing places, because the target is not in this rank's
  // heap.
  __device__ bool lands() const { return message_.target_offset < 0; }
  __device__ bool by_16() const { return message_.row_bytes % 16 == 0; }

  __device__ int64_t cell(int rank) const { return int64_t{rank} * kMostChannels + team_.number; }
  __device__ Grant* grant_at(uint8_t* heap, int rank) const {
    return reinterpret_cast<Grant*>(heap + regions_.grants) + cell(rank);
  }
  __device__ Arrival* arrival_at(uint8_t* heap, int rank) const {
    return reinterpret_cast<Arrival*>(heap + regions_.arrivals) + cell(rank);
  }
  __device__ Numbers* numbers_of(int peer) const {
    return reinterpret_cast<Numbers*>(own() + regions_.numbers) + cell(peer);
  }
  __device__ int64_t landing_of(int peer) const { return regions_.landing + cell(peer) * kPieceBytes; }

  // Returns this channel's part of the rows to a rank (in the source), or of the rows from a rank (in the
  // target).
  //
  // ends: Message::send_end or Message::recv_end.
  __device__ Part part(const int64_t* ends, int rank) const {
    const int64_t first = rank ? ends[rank - 1] : 0;
    const Part own = part_of(ends[rank] - first, message_.row_bytes, team_.number);
    return {first * message_.row_bytes + own.begin, own.bytes};
  }
  __device__ Part sent_to(int rank) const { return part(message_.send_end, rank); }
  __device__ Part received_from(int rank) const { return part(message_.recv_end, rank); }

  // Returns whether bytes of a part are left for a round.
  //
  // in_pieces: whether the part is sent in pieces, one in each round. If not, round 0 sends the whole part.
  __device__ static bool has(const Part& part, int64_t round, bool in_pieces) {
    return in_pieces ? part.bytes > round * kPieceBytes : round == 0 && part.bytes > 0;
  }

  // Copies the rows that this rank sends to itself.
  __device__ void copy_own() {
    const Part from = sent_to(push_.watch.rank);
    const Part to = received_from(push_.watch.rank);
    copy_bytes(message_.target + to.begin, message_.source + from.begin, from.bytes, by_16(), team_);
  }

  // Grants a peer the memory for its next piece.
  __device__ void grant(int peer, int64_t round) {
    const Part to = received_from(peer);
    if (!has(to, round, lands()) || team_.lane != 0) return;
    Grant* const there = grant_at(push_.heaps[peer], push_.watch.rank);
    write(&there->offset, lands() ? landing_of(peer) : message_.target_offset + to.begin);
    write(&there->is_whole, lands() ? 0u : 1u);
    raise(&there->number, read(&numbers_of(peer)->received) + 1);
  }

  // Waits for a peer's grant, writes the next piece (or the whole part), and raises the flag that it has
  // arrived. Returns false if the wait was too long.
  //
  // done: one bit for each rank that has granted the whole part.
  // goes_on: becomes true if there will be another piece.
  __device__ bool send(int peer, int64_t round, uint32_t& done, bool& goes_on) {
    const Part from = sent_to(peer);
    if (done >> peer & 1 || !has(from, round, true)) return true;
    Grant* const granted = grant_at(own(), peer);
    if (!await(&granted->number, read(&numbers_of(peer)->sent) + 1, peers::Wait::kGrant, peer)) return false;
    const bool is_whole = read(&granted->is_whole) != 0;
    const int64_t offset = read(&granted->offset);
    const int64_t begin = is_whole ? 0 : round * kPieceBytes;
    const int64_t bytes = is_whole ? from.bytes : smaller(from.bytes - begin, kPieceBytes);
    peers::test_delay(push_.watch, static_cast<uint32_t>(team_.number));
    copy_bytes(push_.heaps[peer] + offset, message_.source + from.begin + begin, bytes, by_16(), team_);
    sync_warp();
    if (team_.lane == 0) {
      Numbers* const numbers = numbers_of(peer);
      const uint32_t number = read(&numbers->sent) + 1;
      write(&numbers->sent, number);
      raise(&arrival_at(push_.heaps[peer], push_.watch.rank)->number, number);
    }
    sync_warp();
    if (is_whole) done |= 1u << peer;
    goes_on = goes_on || begin + bytes < from.bytes;
    return true;
  }

  // Waits until a peer's next piece (or its whole part) has arrived. If rows arrive in landing places, this
  // function copies the piece into the target. Returns false if the wait was too long.
  //
  // goes_on: becomes true if there will be another piece.
  __device__ bool receive(int peer, int64_t round, bool& goes_on) {
    const Part to = received_from(peer);
    if (!has(to, round, lands())) return true;
    const uint32_t number = read(&numbers_of(peer)->received) + 1;
    if (!await(&arrival_at(own(), peer)->number, number, peers::Wait::kArrival, peer)) return false;
    if (lands()) {
      const int64_t begin = round * kPieceBytes;
      const int64_t bytes = smaller(to.bytes - begin, kPieceBytes);
      copy_bytes(message_.target + to.begin + begin, own() + landing_of(peer), bytes, by_16(), team_);
      goes_on = goes_on || begin + bytes < to.bytes;
    }
    sync_warp();
    if (team_.lane == 0) write(&numbers_of(peer)->received, number);
    sync_warp();
    return true;
  }

  // Waits until another rank has raised a flag of this rank to `number`. Returns false on all lanes if this
  // rank has failed.
  __device__ bool await(const uint32_t* flag, uint32_t number, peers::Wait wait, int peer) const {
    if (team_.lane == 0)
      peers::wait_until_reached(
          push_.watch, [&] { return load_acquire_system(flag); }, number, wait, peer, 0, team_.number);
    sync_warp();
    return ballot(peers::has_failed(push_.watch)) == 0;
  }

  // Raises a flag of another rank, unless this rank has failed.
  __device__ void raise(uint32_t* flag, uint32_t number) const {
    if (!peers::has_failed(push_.watch)) store_release_system(flag, number);
  }

  const Push& push_;
  const Message& message_;
  const peers::WarpTeam team_;
  const HeapRegions regions_;
};

// Runs one channel for all messages of a launch, one message after the other.
__device__ __forceinline__ void push_channel(const Push& push, const peers::WarpTeam& team) {
  for (int i = 0; i < push.messages; ++i)
    if (!Channel(push, push.message[i], team).run()) return;
}

}  // namespace pmoe::program
