// Subscribers (FlashDMoE, Algorithm 3): threads that poll the flags which other ranks raise when they have
// written data, and push the tasks that need this data. Only subscribers wait for other ranks; processors
// (the blocks that do tasks) never do.
//
// Subscriber s of the n subscribers serves the ranks s, s + n, s + 2 n, ... In the same way it serves some of
// the cells (rows of one rank for one expert) and some of the groups of tokens. It polls their flags in turn,
// so a late rank does not hold up the others.
#pragma once
#include "flashdmoe/places.cuh"
#include "flashdmoe/queue.h"
#include "peers/protocol.h"

namespace pmoe::flashdmoe {

// The values of Pass::next_tile: which tiles of a cell have arrived. A cell holds the rows that one rank (the
// source) sends to one expert.
//
//   kUnannounced   the source has not announced its row counts yet
//   1 + tile       the tasks of all tiles before this tile have been pushed
//   kAllArrived    all tiles have arrived
constexpr int32_t kUnannounced = 0, kAllArrived = -1;

// Largest number of row tiles of one cell whose tasks are put into the task queue together. These tasks are
// ordered by column of tiles, so the weights of a column are read from memory once for all these row tiles.
constexpr int kTilesTogether = 8;

// The first flag that was not raised when a subscriber last polled all of its flags, and the time since which
// nothing has arrived. If nothing arrives for longer than the time limit, this flag is reported as missing.
struct Missing {
  Wait wait = Wait::kNone;
  int peer = 0, expert = 0, part = 0;
  uint64_t since = 0;

  __device__ __forceinline__ void note(Wait what, int of, int e, int tile) {
    if (wait == Wait::kNone) wait = what, peer = of, expert = e, part = tile;
  }
  // Ends a round of polling. Returns false if a wait of the rank has exceeded its time limit, or if nothing
  // has arrived here for too long. In the second case it reports the missing flag.
  //
  // has_progress: true if something has arrived in this round of polling.
  __device__ __forceinline__ bool may_go_on(const Watch& watch, bool has_progress) {
    if (peers::has_failed(watch)) return false;
    const uint64_t now = nanoseconds();
    if (has_progress || since == 0) since = now;
    if (now - since > watch.bound) {
      peers::report(watch, wait, peer, expert, part);
      return false;
    }
    wait = Wait::kNone;
    if (!has_progress) pause();
    return true;
  }
};

class Subscriber {
 public:
  __device__ __forceinline__ Subscriber(const Pass& pass, int number, int count)
      : pass_(pass), number_(number), count_(count), group_(number) {
    slot_ = group_ * kCombineTokens * pass.choices;
  }

  // Polls until everything that this thread waits for has arrived.
  __device__ __forceinline__ void run() {
    const Watch& watch = pass_.watch;
    peers::test_delay(watch, 7000 + number_);
    for (int peer = number_; peer < pass_.layout.ranks; peer += count_)
      raise_flag(pass_, peer, pass_.layout.granted(pass_.rank));
    const int across = pass_.routing.products[1];
    for (int tile = number_; tile < pass_.routing.products[0]; tile += count_) {
      push({TaskType::kScores, pass_.rank, 0, tile, 0}, across);
      expected_tasks_ += static_cast<uint32_t>(across);
    }
    Missing missing;
    bool is_open = true;
    while (is_open) {
      has_progress_ = false, is_open = !is_routed(missing);
      for (int peer = number_, i = 0; peer < pass_.layout.ranks; peer += count_, ++i) {
        is_open |= !announce_counts(peer, uint64_t{1} << i, missing);
        is_open |= !send(peer, uint64_t{1} << i, missing);
        is_open |= !grant(peer, uint64_t{1} << i, missing);
      }
      for (int cell = number_; cell < pass_.layout.cells(); cell += count_)
        is_open |= !push_arrived_tiles(cell, missing);
      is_open |= !push_combines(missing);
      if (is_open && !missing.may_go_on(watch, has_progress_)) return;
    }
    for (int cell = number_; cell < pass_.layout.cells(); cell += count_)
      write(&pass_.next_tile[cell], kUnannounced);
    add_acq_rel(&pass_.queue.state->expected_tasks, expected_tasks_);
    add_acq_rel(&pass_.queue.state->finished_subscribers, 1u);
  }

 private:
  // Returns whether a flag has been raised in this launch.
  //
  // flag: byte offset of the flag in this rank's heap.
  // peer: the rank that raises it.
  // wait: the event that the flag announces. If a test has set the event's bit in Watch::not_waited, the
  //     result is always true.
  __device__ __forceinline__ bool is_raised(int64_t flag, int peer, Wait wait) const {
    if (pass_.watch.not_waited >> static_cast<int>(wait) & 1) return true;
    const auto* const word = reinterpret_cast<const uint32_t*>(pass_.own() + flag);
    if (!peers::reached(load_acquire_system(word), peers::epoch_of(pass_.watch))) return false;
    if (!pass_.is_mapped(peer)) puts::see(word, peers::epoch_of(pass_.watch));
    return true;
  }

  __device__ __forceinline__ void push(const Task& task, int columns = 1, int down = 1) {
    flashdmoe::push(pass_.queue, task, columns, down);
    has_progress_ = true;
  }

  // Pushes the routing tasks of one type for the groups of tokens that this thread serves.
  __device__ __forceinline__ void route(TaskType type) {
    for (int group = number_; group < pass_.routing.groups; group += count_, ++expected_tasks_)
      push({type, pass_.rank, 0, group, 0});
  }

  // Returns whether routing is done, so that the destinations of this rank's rows are known. If routing is
  // not done, this function pushes the routing tasks that may begin now: kCount when all scores are computed,
  // kPlace when all groups of tokens are counted.
  __device__ __forceinline__ bool is_routed(Missing& missing) {
    if (is_routed_) return true;
    const auto scored = static_cast<uint32_t>(pass_.routing.scored());
    const uint32_t counted = scored + static_cast<uint32_t>(pass_.routing.groups);
    const uint32_t ended = load_acquire(&pass_.queue.state->routed), waits = pass_.watch.not_waited;
    if (!is_scored_ && (ended >= scored || waits & kScoredBit)) {
      is_scored_ = true;
      route(TaskType::kCount);
    }
    if (is_scored_ && !is_counted_ && (ended >= counted || waits & kCountedBit)) {
      is_counted_ = true;
      route(TaskType::kPlace);
    }
    is_routed_ =
        is_counted_ && (ended == 2 * counted - scored || waits >> static_cast<int>(Wait::kRouted) & 1);
    has_progress_ |= is_routed_;
    if (!is_routed_) missing.note(Wait::kRouted, pass_.rank, 0, 0);
    return is_routed_;
  }

  // Tells another rank how many rows this rank sends to it, if routing is done here and that rank has begun
  // the launch. Returns whether that rank has been told.
  //
  // bit: the bit of that rank in announced_.
  __device__ __forceinline__ bool announce_counts(int peer, uint64_t bit, Missing& missing) {
    if (announced_ & bit) return true;
    if (!is_routed_) return false;
    if (!is_raised(pass_.layout.granted(peer), peer, Wait::kGrant)) {
      missing.note(Wait::kGrant, peer, 0, 0);
      return false;
    }
    announce(pass_, peer, static_cast<uint32_t>(7100 + number_));
    announced_ |= bit;
    has_progress_ = true;
    return true;
  }

  // Pushes the tasks that send this rank's rows to another rank, if it is known at which addresses of that
  // rank's heap the rows must be written. Returns whether the tasks are pushed.
  //
  // bit: the bit of that rank in sent_.
  __device__ __forceinline__ bool send(int peer, uint64_t bit, Missing& missing) {
    if (sent_ & bit) return true;
    if (!(announced_ & bit)) return false;
    if (pass_.layout.is_pool && !is_raised(pass_.layout.placed(peer), peer, Wait::kPlaced)) {
      missing.note(Wait::kPlaced, peer, 0, 0);
      return false;
    }
    const int experts = pass_.layout.experts;
    for (int e = 0; e < experts; ++e) {
      const int tiles = pass_.layout.tiles(read(pass_.counts + peer * experts + e));
      for (int tile = 0; tile < tiles; ++tile) push({TaskType::kDispatch, peer, e, tile, 0});
      expected_tasks_ += static_cast<uint32_t>(tiles);
    }
    sent_ |= bit;
    has_progress_ = true;
    return true;
  }

  // Chooses at which offsets the rows of a source rank begin in this rank's pool (the buffer for all rows if
  // there is no capacity), if the source has announced its row counts. Returns whether the offsets are
  // chosen, or not needed.
  //
  // bit: the bit of the source in granted_.
  __device__ __forceinline__ bool grant(int source, uint64_t bit, Missing& missing) {
    if (granted_ & bit || !pass_.layout.is_pool) return true;
    if (!is_raised(pass_.layout.announced(source), source, Wait::kAnnounced)) {
      missing.note(Wait::kAnnounced, source, 0, 0);
      return false;
    }
    grant_room(pass_, source);
    granted_ |= bit;
    has_progress_ = true;
    return true;
  }

  // Returns whether a source has announced its row counts and, with a pool, this rank has chosen at which
  // offsets the rows of the source begin.
  __device__ __forceinline__ bool is_known(int source) const {
    if (!pass_.layout.is_pool) return is_raised(pass_.layout.announced(source), source, Wait::kAnnounced);
    return pass_.watch.not_waited & kKnownBit ||
           is_raised(pass_.layout.known(source), pass_.rank, Wait::kAnnounced);
  }

  // Pushes the tasks of the first product for the tiles of a cell that have arrived. A cell holds the rows of
  // one rank for one expert. Returns whether all tiles of the cell have arrived.
  __device__ __forceinline__ bool push_arrived_tiles(int cell, Missing& missing) {
    const Layout& layout = pass_.layout;
    int32_t next_tile = read(&pass_.next_tile[cell]);
    if (next_tile == kAllArrived) return true;
    const int source = pass_.by_experts.divide(cell), e = cell - source * layout.experts;
    const bool is_new = next_tile == kUnannounced;
    if (is_new && !is_known(source)) {
      missing.note(Wait::kAnnounced, source, 0, 0);
      return false;
    }
    const int tiles = layout.tiles(read(pass_.announced_rows(source) + e));
    const int first = offset_of(pass_, source, e) / layout.tile_rows;
    const Stages& stages = pass_.stages;
    if (is_new) {
      next_tile = 1;
      expected_tasks_ += static_cast<uint32_t>(tiles * stages.tasks());
      if (source == 0) expected_tasks_ += static_cast<uint32_t>(pass_.weights.tasks());
      if (pass_.is_backward) count_tiles(pass_, e, kSourceAnnounced + static_cast<uint32_t>(tiles));
    }
    int arrived = next_tile;
    const int limit = smaller(next_tile + kTilesTogether, tiles + 1);
    while (arrived < limit &&
           is_raised(layout.arrival(source, e, first + arrived - 1), source, Wait::kArrival))
      ++arrived;
    // Tasks that are pushed together read the same weights while these are in the L2 cache. So if fewer tiles
    // than kTilesTogether have arrived, they are not pushed until more have arrived, unless a processor is
    // idle.
    if (arrived > next_tile) {
      missing.since = 0;
      if (arrived == limit || load_relaxed(&pass_.queue.state->has_idle_processor) != 0) {
        push({stages.type[0], source, e, next_tile - 1, 0}, stages.columns[0], arrived - next_tile);
        next_tile = arrived;
      }
    }
    if (next_tile > tiles)
      next_tile = kAllArrived, has_progress_ = true;
    else
      missing.note(Wait::kArrival, source, e, arrived - 1);
    write(&pass_.next_tile[cell], next_tile);
    return next_tile == kAllArrived;
  }

  // Pushes the combine tasks of this thread's groups of tokens, in the order of the groups. A task is pushed
  // when all results of its group have come back. Returns whether all of these tasks are pushed.
  __device__ __forceinline__ bool push_combines(Missing& missing) {
    if (!is_routed_) return false;
    const Layout& layout = pass_.layout;
    for (; group_ < pass_.groups(); group_ += count_, slot_ = group_ * kCombineTokens * pass_.choices) {
      const int end = smaller((group_ + 1) * kCombineTokens, pass_.tokens) * pass_.choices;
      for (; slot_ < end; ++slot_) {
        const int row = read(pass_.row + slot_);
        if (row < 0) continue;
        const int expert = read(pass_.expert + slot_), peer = pass_.by_experts.divide(expert);
        const int e = expert - peer * layout.experts, tile = row / layout.tile_rows;
        if (is_raised(layout.returned(peer, e, tile), peer, Wait::kReturn)) continue;
        missing.note(Wait::kReturn, peer, e, tile);
        return false;
      }
      push({TaskType::kCombine, pass_.rank, 0, group_, 0});
      ++expected_tasks_;
    }
    return true;
  }

  const Pass& pass_;
  int number_, count_;
  int group_, slot_;                                 // the group and the slot that are polled
  uint64_t announced_ = 0, sent_ = 0, granted_ = 0;  // one bit for each peer of this thread
  uint32_t expected_tasks_ = 0;                      // number of tasks that are known to this thread so far
  bool is_scored_ = false, is_counted_ = false, is_routed_ = false;  // stages of this rank's routing
  bool has_progress_ = false;                                        // something has arrived in this poll
};

}  // namespace pmoe::flashdmoe
