// Subscribers (FlashDMoE, Algorithm 3): they look at the flags that other ranks raise, and decode what has
// arrived into tasks. They alone wait for other ranks; processors never do.
//
// A thread has its own peers, cells and groups of tokens: every `count`-th from its number on. Where one of
// them has to wait, the others go on.
#pragma once
#include "comet/protocol.h"
#include "flashdmoe/places.cuh"
#include "flashdmoe/queue.h"

namespace pmoe::flashdmoe {

constexpr int32_t kUnannounced = 0, kHeard = -1;  // of a cell; else 1 + the tile that is awaited
constexpr int kTilesTogether = 8;  // of a cell, at most: each column of weights is read for all

// What a thread saw missing first, and since when nothing has come.
struct Missing {
  Wait wait = Wait::kNone;
  int peer = 0, expert = 0, part = 0;
  uint64_t since = 0;

  __device__ __forceinline__ void note(Wait what, int of, int e, int tile) {
    if (wait == Wait::kNone) wait = what, peer = of, expert = e, part = tile;
  }
  // Behind a look at everything. false: that was too long, or somebody else has failed.
  __device__ __forceinline__ bool may_go_on(const Watch& watch, bool moved) {
    if (comet::has_failed(watch)) return false;
    const uint64_t now = nanoseconds();
    if (moved || since == 0) since = now;
    if (now - since > watch.bound) {
      comet::report(watch, wait, peer, expert, part);
      return false;
    }
    wait = Wait::kNone;
    if (!moved) pause();
    return true;
  }
};

class Subscriber {
 public:
  __device__ __forceinline__ Subscriber(const Pass& pass, int number, int count)
      : pass_(pass), number_(number), count_(count), group_(number) {
    slot_ = group_ * kCombineTokens * pass.choices;
  }

  __device__ __forceinline__ void run() {
    const Watch& watch = pass_.watch;
    comet::nap(watch, 7000 + number_);
    for (int peer = number_; peer < pass_.layout.ranks; peer += count_)
      comet::signal(watch, pass_.heaps[peer] + pass_.layout.granted(pass_.rank));
    const int across = pass_.routing.products[1];
    for (int tile = number_; tile < pass_.routing.products[0]; tile += count_) {
      push({TaskType::kScores, pass_.rank, 0, tile, 0}, across);
      promised_ += static_cast<uint32_t>(across);
    }
    Missing missing;
    bool is_open = true;
    while (is_open) {
      moved_ = false, is_open = !is_routed(missing);
      for (int peer = number_, i = 0; peer < pass_.layout.ranks; peer += count_, ++i) {
        is_open |= !greet(peer, uint64_t{1} << i, missing);
        is_open |= !send(peer, uint64_t{1} << i, missing);
        is_open |= !grant(peer, uint64_t{1} << i, missing);
      }
      for (int cell = number_; cell < pass_.layout.cells(); cell += count_) is_open |= !hear(cell, missing);
      is_open |= !gather(missing);
      if (is_open && !missing.may_go_on(watch, moved_)) return;
    }
    for (int cell = number_; cell < pass_.layout.cells(); cell += count_)
      write(&pass_.heard[cell], kUnannounced);
    add_acq_rel(&pass_.queue.state->promised, promised_);
    add_acq_rel(&pass_.queue.state->listened, 1u);
  }

 private:
  __device__ __forceinline__ bool is_raised(int64_t flag, Wait wait) const {
    if (pass_.watch.not_waited >> static_cast<int>(wait) & 1) return true;
    const auto* const word = reinterpret_cast<const uint32_t*>(pass_.own() + flag);
    return comet::reached(load_acquire_system(word), pass_.watch.epoch);
  }

  __device__ __forceinline__ void push(const Task& task, int columns = 1, int down = 1) {
    flashdmoe::push(pass_.queue, task, columns, down);
    moved_ = true;
  }

  // This thread's groups of tokens, of a kind of task.
  __device__ __forceinline__ void route(TaskType type) {
    for (int group = number_; group < pass_.routing.groups; group += count_, ++promised_)
      push({type, pass_.rank, 0, group, 0});
  }

  // Whether this rank's own rows have their places. When all scores are there groups are counted, and placed
  // when all of them are.
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
    moved_ |= is_routed_;
    if (!is_routed_) missing.note(Wait::kRouted, pass_.rank, 0, 0);
    return is_routed_;
  }

  // A peer that has begun the round is told how many rows come. Whether that is done.
  __device__ __forceinline__ bool greet(int peer, uint64_t bit, Missing& missing) {
    if (greeted_ & bit) return true;
    if (!is_routed_) return false;
    if (!is_raised(pass_.layout.granted(peer), Wait::kGrant)) {
      missing.note(Wait::kGrant, peer, 0, 0);
      return false;
    }
    tell_counts(pass_, peer);
    comet::nap(pass_.watch, 7100 + number_);
    comet::signal(pass_.watch, pass_.heaps[peer] + pass_.layout.announced(pass_.rank));
    greeted_ |= bit;
    moved_ = true;
    return true;
  }

  // This rank's rows, where it is known where they go. Whether that is done.
  __device__ __forceinline__ bool send(int peer, uint64_t bit, Missing& missing) {
    if (sent_ & bit) return true;
    if (!(greeted_ & bit)) return false;
    if (pass_.layout.is_pool && !is_raised(pass_.layout.placed(peer), Wait::kPlaced)) {
      missing.note(Wait::kPlaced, peer, 0, 0);
      return false;
    }
    const int experts = pass_.layout.experts;
    for (int e = 0; e < experts; ++e) {
      const int tiles = pass_.layout.tiles(read(pass_.counts + peer * experts + e));
      for (int tile = 0; tile < tiles; ++tile) push({TaskType::kDispatch, peer, e, tile, 0});
      promised_ += static_cast<uint32_t>(tiles);
    }
    sent_ |= bit;
    moved_ = true;
    return true;
  }

  // Room in the pool for a source's rows. Whether it is granted.
  __device__ __forceinline__ bool grant(int source, uint64_t bit, Missing& missing) {
    if (granted_ & bit || !pass_.layout.is_pool) return true;
    if (!is_raised(pass_.layout.announced(source), Wait::kAnnounced)) {
      missing.note(Wait::kAnnounced, source, 0, 0);
      return false;
    }
    grant_room(pass_, source);
    granted_ |= bit;
    moved_ = true;
    return true;
  }

  // Whether a source has told how many rows come, and this rank knows where.
  __device__ __forceinline__ bool is_known(int source) const {
    if (!pass_.layout.is_pool) return is_raised(pass_.layout.announced(source), Wait::kAnnounced);
    return pass_.watch.not_waited & kKnownBit || is_raised(pass_.layout.known(source), Wait::kAnnounced);
  }

  // Each tile of a cell that has arrived: its first product's tasks. Whether all have.
  __device__ __forceinline__ bool hear(int cell, Missing& missing) {
    const Layout& layout = pass_.layout;
    int32_t heard = read(&pass_.heard[cell]);
    if (heard == kHeard) return true;
    const int source = pass_.by_experts.divide(cell), e = cell - source * layout.experts;
    const bool is_new = heard == kUnannounced;
    if (is_new && !is_known(source)) {
      missing.note(Wait::kAnnounced, source, 0, 0);
      return false;
    }
    const int tiles = layout.tiles(read(pass_.announced_rows(source) + e));
    const int first = offset_of(pass_, source, e) / layout.tile_rows;
    const Stages& stages = pass_.stages;
    if (is_new) {
      heard = 1;
      promised_ += static_cast<uint32_t>(tiles * stages.tasks());
      if (source == 0) promised_ += static_cast<uint32_t>(pass_.weights.tasks());
      if (pass_.is_backward) count_tiles(pass_, e, kSourceAnnounced + static_cast<uint32_t>(tiles));
    }
    int arrived = heard;
    const int whole = smaller(heard + kTilesTogether, tiles + 1);
    while (arrived < whole && is_raised(layout.arrival(source, e, first + arrived - 1), Wait::kArrival))
      ++arrived;
    // Fewer than could come together wait for the others while no processor waits for them.
    if (arrived > heard) {
      missing.since = 0;
      if (arrived == whole || load_relaxed(&pass_.queue.state->hungry) != 0) {
        push({stages.type[0], source, e, heard - 1, 0}, stages.columns[0], arrived - heard);
        heard = arrived;
      }
    }
    if (heard > tiles)
      heard = kHeard, moved_ = true;
    else
      missing.note(Wait::kArrival, source, e, arrived - 1);
    write(&pass_.heard[cell], heard);
    return heard == kHeard;
  }

  // Groups of tokens whose products have all come back, one after the other. Whether that is all of them.
  __device__ __forceinline__ bool gather(Missing& missing) {
    if (!is_routed_) return false;
    const Layout& layout = pass_.layout;
    for (; group_ < pass_.groups(); group_ += count_, slot_ = group_ * kCombineTokens * pass_.choices) {
      const int end = smaller((group_ + 1) * kCombineTokens, pass_.tokens) * pass_.choices;
      for (; slot_ < end; ++slot_) {
        const int row = read(pass_.row + slot_);
        if (row < 0) continue;
        const int expert = read(pass_.expert + slot_), peer = pass_.by_experts.divide(expert);
        const int e = expert - peer * layout.experts, tile = row / layout.tile_rows;
        if (is_raised(layout.returned(peer, e, tile), Wait::kReturn)) continue;
        missing.note(Wait::kReturn, peer, e, tile);
        return false;
      }
      push({TaskType::kCombine, pass_.rank, 0, group_, 0});
      ++promised_;
    }
    return true;
  }

  const Pass& pass_;
  int number_, count_;
  int group_, slot_;                               // of the tokens that are looked for
  uint64_t greeted_ = 0, sent_ = 0, granted_ = 0;  // a bit a peer of this thread's
  uint32_t promised_ = 0;                          // tasks that follow from what it has heard
  bool is_scored_ = false, is_counted_ = false, is_routed_ = false;  // this rank's tokens
  bool moved_ = false;                                               // something has come at this look
};

}  // namespace pmoe::flashdmoe
