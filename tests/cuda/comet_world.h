// A few ranks in one process, for tests of cuda/comet: tokens, where they are routed to, and heaps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comet/rank.h"
#include "peers/protocol.h"

namespace world {

using pmoe::comet::Layout;
using pmoe::comet::Rank;

struct Random {
  uint32_t state;

  uint32_t next() { return pmoe::peers::hash32(state += 0x9E3779B9u); }
  int below(int n) { return static_cast<int>(next() % static_cast<uint32_t>(n)); }
};

// What a rank has decided about its tokens. Tokens before first_token, and rows before first_row, belong to
// another part of the layer: what is said of them here is nonsense, and must not be read.
struct Routing {
  int choices = 1, first_token = 0, tokens = 0, first_row = 0;
  std::vector<int32_t> expert, position;  // by slot
  std::vector<float> weight;              // by slot
  std::vector<int32_t> slot;              // by row
  std::vector<int32_t> send_counts;       // by expert of all ranks

  int slots() const { return (first_token + tokens) * choices; }
  int first_slot() const { return first_token * choices; }
  int rows() const { return static_cast<int>(slot.size()) - first_row; }
  bool is_kept(int s) const { return position[static_cast<size_t>(s)] >= 0; }
};

// Rows in the order in which they are sent: by expert, inside an expert by slot. kept: by slot.
inline void arrange(Routing& g, int experts, const std::vector<bool>& kept) {
  g.position.assign(g.expert.size(), -1);
  g.slot.assign(static_cast<size_t>(g.first_row), -1);
  g.send_counts.assign(static_cast<size_t>(experts), 0);
  for (int e = 0; e < experts; ++e)
    for (int s = g.first_slot(); s < g.slots(); ++s) {
      const auto at = static_cast<size_t>(s);
      if (g.expert[at] != e || !kept[at]) continue;
      g.position[at] = static_cast<int32_t>(g.slot.size());
      g.slot.push_back(s);
      ++g.send_counts[static_cast<size_t>(e)];
    }
}

inline Routing unrouted(Random& random, int tokens, int choices, bool is_part) {
  Routing g;
  g.choices = choices;
  g.tokens = tokens;
  g.first_token = is_part ? 1 + random.below(3) : 0;
  g.first_row = is_part ? 1 + random.below(20) : 0;
  g.expert.assign(static_cast<size_t>(g.slots()), 1 << 20);
  for (int s = 0; s < g.slots(); ++s) g.weight.push_back(static_cast<float>(1 + random.below(3)));
  return g;
}

// Each token's choices differ; some experts are asked for more often; a slot in eight is dropped.
inline Routing route(Random& random, int experts, int tokens, int choices, bool is_part) {
  Routing g = unrouted(random, tokens, choices, is_part);
  std::vector<bool> kept(g.expert.size());
  const int popular = random.below(experts);
  for (int s = g.first_slot(); s < g.slots(); ++s) {
    const int begin = s / choices * choices;
    int e;
    bool is_new;
    do {
      e = random.below(3) ? random.below(experts) : popular;
      is_new = true;
      for (int other = begin; other < s; ++other)
        is_new = is_new && g.expert[static_cast<size_t>(other)] != e;
    } while (!is_new);
    g.expert[static_cast<size_t>(s)] = e;
    kept[static_cast<size_t>(s)] = random.below(8) != 0;
  }
  arrange(g, experts, kept);
  return g;
}

// So many rows for each expert, of tokens in any order; what is missing to whole tokens is dropped.
inline Routing route_counts(Random& random, const std::vector<int>& counts, int choices, bool is_part) {
  std::vector<std::pair<int, bool>> row;
  for (size_t e = 0; e < counts.size(); ++e)
    for (int i = 0; i < counts[e]; ++i) row.push_back({static_cast<int>(e), true});
  while (row.size() % static_cast<size_t>(choices))
    row.push_back({random.below(static_cast<int>(counts.size())), false});
  for (size_t i = row.size(); i > 1; --i)
    std::swap(row[i - 1], row[static_cast<size_t>(random.below(static_cast<int>(i)))]);
  Routing g = unrouted(random, static_cast<int>(row.size()) / choices, choices, is_part);
  std::vector<bool> kept(g.expert.size());
  for (size_t i = 0; i < row.size(); ++i) {
    const size_t s = i + static_cast<size_t>(g.first_slot());
    g.expert[s] = row[i].first;
    kept[s] = row[i].second;
  }
  arrange(g, static_cast<int>(counts.size()), kept);
  return g;
}

// Rows that a rank receives, in the order of its inbox: by expert, inside an expert by source, the rank
// itself first and then upwards around, inside a source as it sends them.
struct Arrived {
  int expert, source, slot;
};

inline std::vector<Arrived> arrivals(const std::vector<Routing>& all, int rank, int experts) {
  const int ranks = static_cast<int>(all.size());
  std::vector<Arrived> rows;
  for (int e = 0; e < experts; ++e)
    for (int i = 0; i < ranks; ++i) {
      const int source = (rank + i) % ranks;
      const Routing& g = all[static_cast<size_t>(source)];
      for (int s = g.first_slot(); s < g.slots(); ++s)
        if (g.is_kept(s) && g.expert[static_cast<size_t>(s)] == rank * experts + e)
          rows.push_back({e, source, s});
    }
  return rows;
}

// Rows by source and expert that a rank receives: lines of experts + 1, the last entry of each is nonsense.
inline std::vector<int32_t> receive_counts(const std::vector<Routing>& all, int rank, int experts) {
  std::vector<int32_t> counts;
  for (const Routing& g : all) {
    for (int e = 0; e < experts; ++e)
      counts.push_back(g.send_counts[static_cast<size_t>(rank * experts + e)]);
    counts.push_back(1 << 20);
  }
  return counts;
}

// The heaps of all ranks, and room behind each for what a planted mistake may write there.
class Heaps {
 public:
  explicit Heaps(const Layout& layout) : layout_(layout) {
    for (int i = 0; i < layout.ranks; ++i) {
      memory_.push_back(std::make_unique<Kilobyte[]>(static_cast<size_t>(2 * layout.bytes() / 1024)));
      at_.push_back(memory_.back()[0].byte);
    }
  }

  const Layout& layout() const { return layout_; }
  uint8_t* const* table() const { return at_.data(); }
  uint8_t* operator[](int rank) const { return at_[static_cast<size_t>(rank)]; }
  bool has_failed(int rank) const {
    return reinterpret_cast<pmoe::comet::Counters*>(at_[static_cast<size_t>(rank)])->failed;
  }

 private:
  struct alignas(1024) Kilobyte {
    uint8_t byte[1024];
  };
  Layout layout_;
  std::vector<std::unique_ptr<Kilobyte[]>> memory_;
  std::vector<uint8_t*> at_;
};

// What a rank's kernels are told, but for its rows and columns.
inline Rank rank_of(const Heaps& heaps, int rank, const Routing& g, const std::vector<int32_t>& receives,
                    uint32_t epoch, pmoe::peers::Report* report) {
  Rank r;
  r.layout = heaps.layout();
  r.heaps = heaps.table();
  r.rank = rank;
  r.watch = {};
  r.watch.failed = &r.counters()->failed;
  r.watch.report = report;
  r.watch.rank = rank;
  r.watch.epoch = epoch;
  r.watch.bound = uint64_t{20} * 1000 * 1000 * 1000;
  r.send_counts = g.send_counts.data();
  r.recv_counts = receives.data();
  r.recv_stride = heaps.layout().experts + 1;
  r.expert = g.expert.data();
  r.weight = g.weight.data();
  r.position = g.position.data();
  r.slot = g.slot.data();
  r.first_row = g.first_row;
  r.choices = g.choices;
  r.by_choices = pmoe::Divisor(g.choices);
  r.by_experts = pmoe::Divisor(r.layout.experts);
  r.first_token = g.first_token;
  r.tokens = g.tokens;
  return r;
}

template <class Sync>
void fill(const Rank& r, pmoe::comet::ArrivalBoard& board, int thread, int threads, const Sync& sync) {
  board.fill(
      r.rank, [&](int source, int e) { return r.recv_counts[source * r.recv_stride + e]; }, thread, threads,
      sync);
}

template <class Sync>
void fill(const Rank& r, pmoe::comet::SendTable& send_table, int thread, int threads, const Sync& sync) {
  send_table.fill([&](int i) { return r.send_counts[i]; }, thread, threads, sync);
}

}  // namespace world
