// A few ranks in one process, for tests of cuda/flashdmoe: where their tokens are routed to, their heaps, and
// what each launch is told.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "flashdmoe/experts.h"
#include "route/layout.h"

namespace world {

using namespace pmoe;
using namespace pmoe::flashdmoe;

// Where rows stand: a launch makes it, or a plain loop.
struct Places {
  std::vector<int32_t> counts, slot, expert, row, home;
};

inline bool operator==(const Places& a, const Places& b) {
  return a.counts == b.counts && a.slot == b.slot && a.expert == b.expert && a.row == b.row &&
         a.home == b.home;
}

// What follows from scores beside the experts: a launch makes it, or a plain loop in double. totals: by
// expert, of all choices.
struct Scored {
  std::vector<float> weight;
  std::vector<int32_t> totals;
  float l_aux = 0;
};

// What a rank's gate has decided about its tokens; some slots it drops itself, others are beyond the
// capacity. Or its scores, from which a launch decides: then it drops none itself.
struct Routing : Places {
  int tokens = 0, choices = 1, capacity = 0;
  std::vector<int64_t> chosen;
  std::vector<uint8_t> keep;
  std::vector<float> weight;
  Places computed;              // by the last launch that was to make them
  std::vector<int32_t> offset;  // by cell: in a pool a launch makes it
  std::vector<float> logits;
  bool normalizes = false;
  double z_loss_weight = 0;
  bool is_product = false;   // of tokens and the gate's weight
  std::vector<float> given;  // scores that a launch copies, in place of a product
  Scored wanted, scored;

  bool is_scored() const { return !logits.empty(); }
  void clear_computed() {
    computed = *this;
    if (is_product) std::fill(logits.begin(), logits.end(), NAN);
    scored = {std::vector<float>(weight.size(), NAN), std::vector<int32_t>(counts.size(), -1), NAN};
    std::fill(computed.counts.begin(), computed.counts.end(), -1),
        std::fill(computed.slot.begin(), computed.slot.end(), -1);
    std::fill(computed.expert.begin(), computed.expert.end() - 1, -1);
    std::fill(computed.row.begin(), computed.row.end() - 1, -2);
    std::fill(computed.home.begin(), computed.home.end(), -1);
  }

  // Of cells that have their own rows: into a pool, behind each other.
  void move_into_pool(const Layout& layout) {
    int next = 0;
    slot.assign(static_cast<size_t>(layout.all_rows()), -1);
    for (const int32_t count : counts) home.push_back(next), next += layout.tiles(count) * layout.tile_rows;
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      if (row[i] < 0) continue;
      row[i] += home[static_cast<size_t>(expert[i])];
      slot[static_cast<size_t>(row[i])] = static_cast<int32_t>(i);
    }
  }
};

// kProduct: the launch makes them, too.
enum class Scores { kNone, kSome, kNoNumber, kProduct };

// Experts by their scores, from the largest on; what is no number is larger than all.
inline std::vector<int> by_score(const float* score, int experts) {
  std::vector<int> order(static_cast<size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int e) { return std::isnan(score[e]) ? INFINITY : score[e]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  return order;
}

// Weights and the loss of scored tokens, as pmoe.kernels.route.Routes says.
inline void weigh(Routing& g, int experts) {
  std::vector<double> mean(static_cast<size_t>(experts));
  const double tokens = larger(g.tokens, 1);
  double squares = 0, l_aux = 0;
  g.wanted.totals.assign(static_cast<size_t>(experts), 0);
  for (int t = 0; t < g.tokens; ++t) {
    const float* const score = g.logits.data() + t * experts;
    double sum = 0, chosen = 0;
    for (int e = 0; e < experts; ++e) sum += std::exp(double{score[e]});
    for (int e = 0; e < experts; ++e)
      mean[static_cast<size_t>(e)] += std::exp(double{score[e]}) / sum / tokens;
    const auto probability = [&](int k) {
      return std::exp(double{score[g.chosen[static_cast<size_t>(t * g.choices + k)]]}) / sum;
    };
    for (int k = 0; k < g.choices; ++k) chosen += probability(k);
    for (int k = 0; k < g.choices; ++k) {
      const auto slot = static_cast<size_t>(t * g.choices + k);
      g.weight[slot] = static_cast<float>(probability(k) / (g.normalizes ? chosen : 1));
      ++g.wanted.totals[static_cast<size_t>(g.chosen[slot])];
    }
    squares += std::log(sum) * std::log(sum);
  }
  for (size_t e = 0; e < mean.size(); ++e)
    l_aux += experts * mean[e] * g.wanted.totals[e] / (tokens * g.choices);
  g.wanted.weight = g.weight;
  g.wanted.l_aux = static_cast<float>(l_aux + g.z_loss_weight * squares / tokens);
}

inline Routing random_routing(std::mt19937& random, const Layout& layout, int tokens, int choices,
                              int favoured = -1, Scores scores = Scores::kNone,
                              const std::vector<float>& product = {}) {
  Routing g;
  const int experts = layout.cells();
  g.tokens = tokens, g.choices = choices, g.capacity = layout.capacity - static_cast<int>(random() % 3);
  g.counts.assign(static_cast<size_t>(experts), 0);
  g.offset.assign(static_cast<size_t>(experts), -1);
  g.slot.assign(static_cast<size_t>(experts * layout.capacity), -1);
  const bool drops = random() % 2 == 0 && scores == Scores::kNone;
  for (int t = 0; t < tokens; ++t) {
    std::vector<int> order;
    for (int e = 0; e < experts; ++e) order.push_back(e);
    std::shuffle(order.begin(), order.end(), random);
    if (favoured >= 0) std::iter_swap(order.begin(), std::find(order.begin(), order.end(), favoured));
    if (scores != Scores::kNone) {
      // Equal ones among them.
      for (int e = 0; e < experts; ++e)
        g.logits.push_back(scores == Scores::kProduct ? product[static_cast<size_t>(t * experts + e)]
                           : e == favoured            ? 9.0f
                                                      : static_cast<float>(random() % 12) * 0.25f);
      if (scores == Scores::kNoNumber && t == 0) g.logits.back() = NAN;
      order = by_score(g.logits.data() + t * experts, experts);
    }
    for (int k = 0; k < choices; ++k) {
      const int e = order[static_cast<size_t>(k)];
      int32_t& count = g.counts[static_cast<size_t>(e)];
      const bool is_kept = !drops || random() % 8 > 0, has_row = is_kept && count < g.capacity;
      g.chosen.push_back(e), g.keep.push_back(is_kept), g.expert.push_back(e);
      g.row.push_back(has_row ? count : -1);
      g.weight.push_back(static_cast<float>(1 + random() % 3));
      if (has_row) g.slot[static_cast<size_t>(e * layout.capacity + count++)] = t * choices + k;
    }
  }
  g.is_product = scores == Scores::kProduct;
  if (scores != Scores::kNone) {
    g.normalizes = random() % 2 == 0, g.z_loss_weight = random() % 2 == 0 ? 0.125 : 0;
    weigh(g, experts);
    g.logits.push_back(0);
  }
  // Never empty: a pointer to nothing is none that may be registered.
  g.chosen.push_back(0), g.keep.push_back(0);
  g.expert.push_back(0), g.row.push_back(-1), g.weight.push_back(0);
  if (layout.is_pool) g.move_into_pool(layout);
  g.clear_computed();
  return g;
}

// What a forward pass would have granted, in some order. counts(source): of a source's rows.
template <class Counts>
std::vector<int32_t> granted_offsets(const Layout& layout, int rank, const Counts& counts) {
  std::vector<int32_t> offset(static_cast<size_t>(layout.cells()));
  int next = 0;
  for (int source = layout.ranks - 1; source >= 0; --source)
    for (int e = 0; e < layout.experts; ++e) {
      offset[static_cast<size_t>(layout.cell(source, e))] = next;
      next += layout.tiles(counts(source)[static_cast<size_t>(layout.cell(rank, e))]) * layout.tile_rows;
    }
  return offset;
}

struct alignas(1024) Kilobyte {
  uint8_t byte[1024];
};

// What lives from round to round.
struct Heaps {
  Layout layout;
  std::vector<std::unique_ptr<Kilobyte[]>> memory;
  std::vector<uint8_t*> at;
  std::vector<std::vector<uint8_t*>> mapped;  // as each rank addresses them: null on another node

  // node_ranks: ranks of a node, which map each other's heaps; 0: all ranks are on one.
  explicit Heaps(const Layout& told, int node_ranks = 0) : layout(told) {
    for (int rank = 0; rank < layout.ranks; ++rank) {
      memory.push_back(std::make_unique<Kilobyte[]>(static_cast<size_t>(layout.bytes() / 1024 + 1)));
      at.push_back(memory.back()[0].byte);
      // What nobody has written is no number.
      std::fill_n(at.back() + layout.begin(), layout.size(), uint8_t{0xFF});
    }
    for (int rank = 0; rank < layout.ranks; ++rank) {
      mapped.push_back(at);
      for (int peer = 0; node_ranks > 0 && peer < layout.ranks; ++peer)
        if (peer / node_ranks != rank / node_ranks) mapped.back()[static_cast<size_t>(peer)] = nullptr;
    }
  }
};

struct Workspace {
  std::vector<Entry> entry;
  std::vector<uint32_t> mailboxes, finished_tiles, expert_progress;
  std::vector<int32_t> next_tile, routed;
  std::vector<float> probability, z;
  State state = {};
  peers::Report report = {};

  // largest: a pass of as many tasks and stages as any.
  Workspace(const Pass& largest, int processors)
      : entry(static_cast<size_t>(most_tasks(largest) + 3 * kMostGroups)),
        mailboxes(static_cast<size_t>(processors)),
        finished_tiles(static_cast<size_t>(kMostStages * largest.layout.all_tiles())),
        expert_progress(static_cast<size_t>(largest.layout.experts)),
        next_tile(static_cast<size_t>(largest.layout.cells())),
        routed(static_cast<size_t>(kMostGroups * largest.layout.cells())),
        probability(routed.size()),
        z(static_cast<size_t>(kMostGroups)) {}

  // Whether the next round finds what the first one found.
  bool is_clean() const {
    const auto zeros = [](const auto& all) {
      return std::all_of(all.begin(), all.end(), [](auto each) { return each == 0; });
    };
    const auto unready = [](const Entry& each) { return each.ready == 0; };
    return zeros(mailboxes) && zeros(finished_tiles) && zeros(expert_progress) && zeros(next_tile) &&
           state.tail == 0 && state.expected_tasks == 0 && state.finished_subscribers == 0 &&
           state.granted == 0 && state.routed == 0 && state.has_idle_processor == 0 &&
           std::all_of(entry.begin(), entry.end(), unready);
  }
};

// routes: the launch itself, from what the gate has chosen.
inline Pass pass_of(const Heaps& heaps, int rank, Routing& g, Workspace& w, uint32_t epoch, uint64_t bound,
                    bool routes) {
  Pass pass;
  pass.layout = heaps.layout, pass.rank = rank;
  pass.heaps = heaps.mapped[static_cast<size_t>(rank)].data();
  auto* const failed =
      reinterpret_cast<uint32_t*>(heaps.at[static_cast<size_t>(rank)] + heaps.layout.failed());
  pass.watch = {failed, &w.report, rank, epoch, bound, 0, 0};
  Places& places = routes ? g.computed : g;
  pass.counts = places.counts.data(), pass.slot = places.slot.data(), pass.expert = places.expert.data();
  pass.row = places.row.data(), pass.weight = g.weight.data();
  pass.home = places.home.data(), pass.offset = g.offset.data();
  if (routes) {
    pass.routing.is_asked = true;
    pass.routing.chosen = g.chosen.data(), pass.routing.keep = g.keep.data();
    pass.routing.capacity = g.capacity;
  }
  if (routes && g.is_scored()) {
    pass.routing.chosen = nullptr, pass.routing.keep = nullptr, pass.weight = g.scored.weight.data();
    pass.routing.choice = {true,
                           g.normalizes,
                           route::balance_scale(g.tokens, heaps.layout.cells(), g.choices),
                           route::z_scale(g.z_loss_weight, g.tokens),
                           g.logits.data(),
                           nullptr,
                           g.scored.totals.data(),
                           &g.scored.l_aux,
                           w.probability.data(),
                           w.z.data()};
  }
  pass.routing.rows = w.routed.data();
  pass.tokens = g.tokens, pass.choices = g.choices;
  pass.by_choices = Divisor(g.choices), pass.by_experts = Divisor(heaps.layout.experts);
  pass.queue = {w.entry.data(), static_cast<int>(w.entry.size()), &w.state};
  pass.mailboxes = w.mailboxes.data(), pass.finished_tiles = w.finished_tiles.data(),
  pass.expert_progress = w.expert_progress.data();
  pass.next_tile = w.next_tile.data();
  pass.processors = static_cast<int>(w.mailboxes.size());
  return pass;
}

}  // namespace world
