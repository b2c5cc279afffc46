// FlashDMoE's actors as threads: subscribers, scheduler and processors of several ranks, round after round
// (every second one is a backward pass), with experts whose sums are exact in any order. Ranks map each
// other's heaps, or send by puts to those of other nodes (late_puts.h). Under ThreadSanitizer, and recording
// every write.
#define PMOE_LATE_PUTS
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>

// Who writes what into the heaps, where that is asked for.
inline void (*on_write)(const void*, size_t) = nullptr;
#define PMOE_ACCESS(pointer, bytes, writes) \
  if (writes && on_write != nullptr) on_write(pointer, bytes)

#include "flashdmoe/processor.cuh"
#include "flashdmoe/scheduler.h"
#include "flashdmoe/subscriber.h"
#include "flashdmoe_whole_gate.h"
#include "flashdmoe_whole_numbers.h"
#include "flashdmoe_world.h"

using namespace whole_numbers;
using namespace world;

namespace {

constexpr int kTileRows = 4, kAcross = 2;  // tiles across either product
constexpr int kProcessors = 3, kSubscribers = 2, kRoundsPlayed = 4;

std::atomic<int> failures{0};

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

struct Mistake {
  const char* name;
  Wait not_waited;
  bool is_relaxed, reuses_flags;
  uint32_t bits = 0;  // of not_waited
  puts::Broken broken = puts::Broken::kNothing;
};
constexpr Mistake kMistakes[] = {
    {"none", Wait::kNone, false, false},
    {"no_grant_wait", Wait::kGrant, false, false},
    {"no_announcement_wait", Wait::kAnnounced, false, false},
    {"no_arrival_wait", Wait::kArrival, false, false},
    {"no_done_wait", Wait::kDone, false, false},
    {"no_return_wait", Wait::kReturn, false, false},
    {"no_routing_wait", Wait::kRouted, false, false},
    {"choice_of_some_scores", Wait::kNone, false, false, kScoredBit},
    {"places_of_some_counts", Wait::kNone, false, false, kCountedBit},
    {"relaxed_signal", Wait::kNone, true, false},
    {"reused_flags", Wait::kNone, false, true},
    {"sums_of_some_rows", Wait::kNone, false, false, kCompleteBit},
    {"no_wait_for_offsets", Wait::kPlaced, false, false},
    {"offsets_before_they_are_chosen", Wait::kNone, false, false, kKnownBit},
    {"flag_before_its_bytes", Wait::kNone, false, false, 0, puts::Broken::kFlagFirst},
    {"puts_in_any_order", Wait::kNone, false, false, 0, puts::Broken::kUnordered},
    {"staging_used_again_too_early", Wait::kNone, false, false, 0, puts::Broken::kNeverQuiet},
};

// ---- a rank in a round

struct Actor {
  Routing routing;
  std::vector<bf16> source, result;
  std::vector<float> hidden;  // by cell and row; backward: its gradient
  // Backward: `source` is dY. The sums are by expert.
  std::vector<bf16> again;
  std::vector<float> dots, of_weight, of_w, of_b;
  Pass pass;
};

struct World {
  Heaps heaps;
  std::vector<std::unique_ptr<Workspace>> work;  // by rank
  std::vector<std::vector<Actor>> rounds;        // by round and rank
  std::unique_ptr<puts::Network> network;

  int ranks() const { return heaps.layout.ranks; }
};

constexpr WeightTasks kSums = {{kAcross, 0}, {kAcross, 0}, {0, kAcross}};

Pass largest(const Layout& layout) {
  Pass pass;
  pass.layout = layout, pass.tokens = 80;
  pass.stages.columns[0] = pass.stages.columns[1] = kAcross;
  pass.weights = kSums;
  return pass;
}

void go_back(Actor& m, std::mt19937& random) {
  Pass& pass = m.pass;
  const auto rows = static_cast<size_t>(pass.layout.all_rows());
  for (size_t i = 0; i < m.source.size(); ++i)
    m.again.push_back(narrow<bf16>(static_cast<float>(random() % 4)));
  m.again.push_back({0});  // never nothing: that would be no tensor
  m.dots.assign(kAcross * rows, NAN), m.of_weight.assign(m.routing.weight.size(), NAN);
  m.of_w.assign(static_cast<size_t>(pass.layout.experts * kHidden * kModel), NAN);
  m.of_b.assign(static_cast<size_t>(pass.layout.experts * kModel), NAN);
  pass.is_backward = true, pass.weights = kSums;
  pass.stages.type[0] = TaskType::kHiddenGradient, pass.stages.type[1] = TaskType::kInputGradient;
  pass.again = reinterpret_cast<const uint8_t*>(m.again.data()), pass.again_stride = pass.layout.row_bytes;
  pass.weight_gradient = m.of_weight.data();
}

thread_local int acting = -1;      // the rank whose thread this is
thread_local size_t in_round = 0;  // among World::rounds

// Every second one's cells share a pool, which holds all rows of all ranks.
//
// node_ranks: ranks that map each other's heaps; 0: all do.
World make(int ranks, int experts, uint32_t seed, double bound_seconds, const Mistake& mistake = kMistakes[0],
           int node_ranks = 0) {
  const bool is_pool = seed / 2 % 2 == 1;
  const int rows = is_pool ? ranks * (2 * 80 + experts * kTileRows) : 2 * kTileRows;
  const int buffers = node_ranks > 0 ? 2 : 1 + static_cast<int>(seed % 2);
  const Layout layout = {ranks, experts, rows, kTileRows, buffers, kModel * 2, 3, is_pool};
  World w = {Heaps(layout, node_ranks), {}, {}, nullptr};
  w.network = std::make_unique<puts::Network>(w.heaps.at, layout.bytes(), seed, mistake.broken);
  w.network->on_delivery = [](int source, uint32_t epoch) { acting = source, in_round = epoch - 1; };
  puts::network = w.network.get();
  std::mt19937 random(seed);
  for (int rank = 0; rank < ranks; ++rank)
    w.work.push_back(std::make_unique<Workspace>(largest(layout), kProcessors));
  for (int round = 0; round < kRoundsPlayed; ++round) {
    w.rounds.emplace_back(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      Actor& m = w.rounds.back()[static_cast<size_t>(rank)];
      // Some have no tokens; now and then all go to one expert, and more than fit.
      const int tokens = round != 1 && (rank + round) % 3 == 2 ? 0 : 1 + static_cast<int>(random() % 79);
      const int choices = 1 + (ranks * experts > 1), favoured = round == 1 ? 0 : -1;
      const bool chooses = round % 2 == 0 && (seed + static_cast<uint32_t>(rank)) % 2 == 0;
      m.routing =
          random_routing(random, layout, tokens, choices, favoured, chooses ? Scores::kSome : Scores::kNone);
      if (chooses) expect_choice(m.routing, layout.cells());
      for (int i = 0; i < tokens * kModel; ++i)
        m.source.push_back(narrow<bf16>(static_cast<float>(random() % 4)));
      m.result.assign(m.source.size(), bf16{0xFFFF});
      m.hidden.assign(static_cast<size_t>(layout.all_rows() * kHidden), -1.0f);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      std::vector<Actor>& all = w.rounds.back();
      Actor& m = all[at];
      if (is_pool && round % 2)
        m.routing.offset = granted_offsets(layout, rank, [&](int source) -> const std::vector<int32_t>& {
          return all[static_cast<size_t>(source)].routing.counts;
        });
      const int epoch = mistake.reuses_flags ? 1 : round + 1;
      m.pass = pass_of(w.heaps, rank, m.routing, *w.work[at], static_cast<uint32_t>(epoch),
                       static_cast<uint64_t>(bound_seconds * 1e9), round % 2 == 0);
      if (round % 2 == 0) m.pass.routing.groups = 1 + m.routing.tokens / 8;
      if (m.routing.is_scored() && seed / 2 % 2 == 0) ask_for_scores(m.routing, m.pass);
      m.pass.watch.delay_seed = seed;
      if (mistake.not_waited != Wait::kNone)
        m.pass.watch.not_waited = 1u << static_cast<int>(mistake.not_waited);
      m.pass.watch.not_waited |= mistake.bits;
      m.pass.source = reinterpret_cast<const uint8_t*>(m.source.data());
      m.pass.result = reinterpret_cast<uint8_t*>(m.result.data());
      m.pass.source_stride = m.pass.result_stride = layout.row_bytes;
      m.pass.stages.columns[0] = m.pass.stages.columns[1] = kAcross;
      if (round % 2) go_back(m, random);
    }
  }
  return w;
}

const float* arrived_weights(const Pass& pass, int source, int e) {
  return reinterpret_cast<const float*>(pass.own() + pass.layout.weights(source, e)) +
         offset_of(pass, source, e);
}

// A quarter of dT_M^T T_DI, or half of the sum of weighed dY.
void sum_rows(Actor& m, const Task& task) {
  const Pass& pass = m.pass;
  const Layout& layout = pass.layout;
  const bool is_bias = task.type == TaskType::kBiasGradient;
  constexpr int kTall = kHidden / kAcross, kWide = kModel / kAcross;
  float sum[kTall][kWide] = {};
  for (int source = 0; source < layout.ranks; ++source)
    for (int row = 0; row < read(pass.announced_rows(source) + task.expert); ++row) {
      const Round round = is_bias ? Round::kDispatch : Round::kAgain;
      float x[kModel];
      const int own = offset_of(pass, source, task.expert) + row;
      read_row(pass.at(pass.rank, {source, round, Staging::kIncoming, task.expert, own}), x);
      const float weight = read(arrived_weights(pass, source, task.expert) + row);
      const float* const gradient = m.hidden.data() + (layout.first_row(source, task.expert) + own) * kHidden;
      for (int h = 0; h < (is_bias ? 1 : kTall); ++h)
        for (int i = 0; i < kWide; ++i)
          sum[h][i] += x[task.column * kWide + i] * (is_bias ? weight : gradient[task.tile * kTall + h]);
    }
  for (int h = 0; h < (is_bias ? 1 : kTall); ++h)
    for (int i = 0; i < kWide; ++i) {
      const int column = task.column * kWide + i;
      float* const to =
          is_bias ? &m.of_b[static_cast<size_t>(task.expert * kModel)]
                  : &m.of_w[static_cast<size_t>((task.expert * kHidden + task.tile * kTall + h) * kModel)];
      to[column] = sum[h][i];
    }
}

// A group's rows, by plain loops.
void route_group(const Pass& pass, const Task& task) {
  const RoutingTasks& routing = pass.routing;
  const int group = task.tile, experts = pass.layout.cells();
  const int begin = group * pass.tokens / routing.groups * pass.choices;
  const int end = (group + 1) * pass.tokens / routing.groups * pass.choices;
  std::vector<int32_t> count(static_cast<size_t>(experts)), total = count;
  const bool is_choice = routing.choice.is_asked;
  peers::test_delay(pass.watch, static_cast<uint32_t>(7400 + group));
  if (is_choice && task.type == TaskType::kCount)
    choose_group(pass, group, begin / pass.choices, end / pass.choices);
  for (int e = 0; e < experts && task.type == TaskType::kPlace; ++e)
    for (int each = 0; each < routing.groups; ++each) {
      const int32_t rows = read(routing.rows + each * experts + e);
      total[static_cast<size_t>(e)] += rows;
      count[static_cast<size_t>(e)] += each < group ? rows : 0;
    }
  std::vector<int32_t> home;
  for (int e = 0, next = 0; e < experts && pass.layout.is_pool; ++e) {
    home.push_back(next);
    const int32_t rows = smaller(total[static_cast<size_t>(e)], routing.capacity);
    next += pass.layout.tiles(rows) * pass.layout.tile_rows;
  }
  for (int slot = begin; slot < end; ++slot) {
    const auto expert = is_choice ? read(pass.expert + slot) : static_cast<int>(read(routing.chosen + slot));
    int32_t& row = count[static_cast<size_t>(expert)];
    const bool is_kept = is_choice || read(routing.keep + slot), has_row = is_kept && row < routing.capacity;
    if (task.type == TaskType::kPlace) {
      if (!is_choice) write(pass.expert + slot, expert);
      const int32_t at = row + (home.empty() ? 0 : home[static_cast<size_t>(expert)]);
      write(pass.row + slot, has_row ? at : -1);
      if (has_row) write(pass.slot + pass.layout.first_row(0, expert) + at, slot);
    }
    row += is_kept;
  }
  for (int e = 0; e < experts; ++e) {
    const auto at = static_cast<size_t>(e);
    if (task.type == TaskType::kCount)
      write(routing.rows + group * experts + e, count[at]);
    else if (group == 0)
      write(pass.counts + e, smaller(total[at], routing.capacity));
    if (task.type == TaskType::kPlace && group == 0 && !home.empty()) write(pass.home + e, home[at]);
  }
  if (is_choice && task.type == TaskType::kPlace && group == 0) write_loss(pass, total);
}

void multiply(Actor& m, const Task& task) {
  const Pass& pass = m.pass;
  const Layout& layout = pass.layout;
  if (task.type == TaskType::kScores) return score_tile(pass, task);
  if (task.type <= TaskType::kPlace) return route_group(pass, task);
  if (task.type == TaskType::kWeightGradient || task.type == TaskType::kBiasGradient)
    return sum_rows(m, task);
  const int expert = layout.cell(pass.rank, task.expert), first = task.tile * kTileRows;
  const int rows = pass.rows_of(read(pass.announced_rows(task.peer) + task.expert), task.tile);
  const auto all = static_cast<size_t>(layout.all_rows());
  const int cell_offset = offset_of(pass, task.peer, task.expert),
            home_offset = home_at(pass, task.peer, task.expert);
  const int begin = task.column * kHidden / kAcross, end = (task.column + 1) * kHidden / kAcross;
  for (int row = first; row < first + rows; ++row) {
    const auto own = static_cast<size_t>(layout.first_row(task.peer, task.expert) + cell_offset + row);
    float* const hidden = m.hidden.data() + own * kHidden;
    const uint8_t* const from =
        pass.at(pass.rank, {task.peer, Round::kDispatch, Staging::kIncoming, task.expert, cell_offset + row});
    uint8_t* const to =
        rows_for(pass, {task.peer, task.expert, home_offset + row, cell_offset + row}, Round::kCombine);
    float x[kModel];
    if (task.type == TaskType::kGemm0) {
      read_row(from, x);
      for (int h = begin; h < end; ++h) hidden[h] = hidden_value(expert, x, h);
    } else if (task.type == TaskType::kHiddenGradient) {
      read_row(from, x);
      float& dot = m.dots[static_cast<size_t>(task.column) * all + own];
      dot = 0;
      for (int h = begin; h < end; ++h) {
        const float value = active_gradient(expert, x, h);
        dot += static_cast<float>(h + 1) * value;
        hidden[h] = value * read(arrived_weights(pass, task.peer, task.expert) + row);
      }
    } else if (task.type == TaskType::kInputGradient) {
      write_columns(to, task.column, [&](int column) { return input_gradient(expert, hidden, column); });
    } else {
      write_columns(to, task.column, [&](int column) { return product_value(expert, hidden, column); });
    }
  }
  if (task.type == TaskType::kInputGradient && task.column == 0)
    send_dots<bf16>(pass, task, m.dots.data(), kAcross, nullptr, kModel, 0, 1, 0, 1);
}

// One launch: all its threads, until they have ended. room: processors that run at one time.
void launch(Actor& m, int room = kProcessors) {
  std::vector<std::thread> threads;
  const auto start = [&](auto body) {
    threads.emplace_back([&m, body] {
      acting = m.pass.rank, in_round = m.pass.watch.epoch - 1;
      body();
    });
  };
  start([&m] { Scheduler(m.pass, 0, 1).run(kSubscribers); });
  for (int i = 0; i < kSubscribers; ++i) start([&m, i] { Subscriber(m.pass, i, kSubscribers).run(); });
  for (int first = 0; first < room; ++first)
    start([&m, first, room] {
      for (int i = first; i < kProcessors; i += room) {
        int place = 0;
        run_uniform_processor<bf16>(
            m.pass, i, &place, 0, 1, 1, [] {}, [&](const Task& task) { multiply(m, task); });
      }
    });
  for (std::thread& thread : threads) thread.join();
}

void check_forward(const Actor& m, const std::string& where) {
  const Routing& g = m.routing;
  expect(g.computed == g, where + ": places of rows");
  expect(!g.is_scored() || has_choice(g), where + ": weights or the loss");
  for (int t = 0; t < g.tokens; ++t) {
    float x[kModel];
    for (int i = 0; i < kModel; ++i)
      x[i] = low_half<bf16>(m.source[static_cast<size_t>(t * kModel + i)].bits);
    for (int column = 0; column < kModel; ++column) {
      float sum = 0;
      for (int k = 0; k < g.choices; ++k) {
        const auto slot = static_cast<size_t>(t * g.choices + k);
        if (g.row[slot] < 0) continue;
        float hidden[kHidden];
        for (int h = 0; h < kHidden; ++h) hidden[h] = hidden_value(g.expert[slot], x, h);
        sum += g.weight[slot] * low_half<bf16>(product_value(g.expert[slot], hidden, column).bits);
      }
      if (narrow<bf16>(sum).bits == m.result[static_cast<size_t>(t * kModel + column)].bits) continue;
      expect(false, where + ": token " + std::to_string(t) + ", column " + std::to_string(column));
      return;
    }
  }
}

void check_backward(const std::vector<Actor>& all, const std::string& where) {
  const int experts = all[0].pass.layout.experts;
  std::vector<float> of_w(all.size() * all[0].of_w.size()), of_b(all.size() * all[0].of_b.size());
  for (const Actor& m : all) {
    const Routing& g = m.routing;
    std::vector<float> sum(m.result.size());
    for (int slot = 0; slot < g.tokens * g.choices; ++slot) {
      const auto at = static_cast<size_t>(slot);
      float dy[kModel], gradient[kHidden], dot = 0;
      if (g.row[at] < 0) {
        expect(m.of_weight[at] == 0, where + ": a dropped row's gradient");
        continue;
      }
      const auto first = at / static_cast<size_t>(g.choices) * kModel;
      for (size_t i = 0; i < kModel; ++i) dy[i] = low_half<bf16>(m.source[first + i].bits);
      for (int h = 0; h < kHidden; ++h) {
        const float value = active_gradient(g.expert[at], dy, h);
        dot += static_cast<float>(h + 1) * value, gradient[h] = g.weight[at] * value;
      }
      expect(m.of_weight[at] == dot, where + ": a weight's gradient");
      const auto e = static_cast<size_t>(g.expert[at]);
      for (size_t i = 0; i < kModel; ++i) {
        sum[first + i] += low_half<bf16>(input_gradient(g.expert[at], gradient, static_cast<int>(i)).bits);
        of_b[e * kModel + i] += g.weight[at] * dy[i];
        for (size_t h = 0; h < kHidden; ++h)
          of_w[(e * kHidden + h) * kModel + i] += gradient[h] * low_half<bf16>(m.again[first + i].bits);
      }
    }
    for (size_t i = 0; i < sum.size(); ++i)
      expect(narrow<bf16>(sum[i]).bits == m.result[i].bits, where + ": dX " + std::to_string(i));
  }
  for (size_t e = 0; e < all.size() * static_cast<size_t>(experts); ++e) {
    const Actor& owner = all[e / static_cast<size_t>(experts)];
    const size_t own = e % static_cast<size_t>(experts);
    for (size_t i = 0; i < kHidden * kModel; ++i)
      expect(owner.of_w[own * kHidden * kModel + i] == of_w[e * kHidden * kModel + i], where + ": dW");
    for (size_t i = 0; i < kModel; ++i)
      expect(owner.of_b[own * kModel + i] == of_b[e * kModel + i], where + ": db");
  }
}

template <class Body>
void for_ranks(int ranks, const Body& body) {
  std::vector<std::thread> drivers;
  for (int rank = 0; rank < ranks; ++rank)
    drivers.emplace_back([&body, rank] { body(static_cast<size_t>(rank)); });
  for (std::thread& driver : drivers) driver.join();
}

// Delivers puts as long as it lives, if some rank is not mapped.
class Deliveries {
 public:
  explicit Deliveries(World& w) {
    if (w.heaps.mapped[0] == w.heaps.at) return;
    thread_ = std::thread([&w, this] {
      while (!is_over_.load(std::memory_order_relaxed)) {
        w.network->step();
        pmoe::pause();
      }
    });
  }
  ~Deliveries() {
    is_over_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

// Ranks meet nowhere but in their heaps.
void play(World& w, int room) {
  const Deliveries deliveries(w);
  for_ranks(w.ranks(), [&](size_t rank) {
    for (auto& round : w.rounds) launch(round[rank], room);
  });
}

void test_rounds(int ranks, const Mistake& mistake, int room = kProcessors, int node_ranks = 0) {
  signals_are_relaxed = mistake.is_relaxed;
  const bool is_right = mistake.name == kMistakes[0].name;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    World w = make(ranks, 1 + static_cast<int>(seed % 3), seed, is_right ? 60 : 2, mistake, node_ranks);
    play(w, room);
    expect((w.network->delivered() > 0) == (node_ranks > 0 && node_ranks < ranks), "puts of a node, or none");
    expect(w.network->is_empty() || !is_right, "a put that arrives after the launch");
    for (size_t rank = 0; rank < w.work.size(); ++rank) {
      const std::string where = "seed " + std::to_string(seed) + ", rank " + std::to_string(rank);
      for (size_t round = 0; round < w.rounds.size(); ++round) {
        const std::string what = where + ", round " + std::to_string(round + 1);
        if (round % 2 == 0) check_forward(w.rounds[round][rank], what);
        if (round % 2 && rank == 0) check_backward(w.rounds[round], what);
      }
      expect(w.work[rank]->report.wait == 0, where + ": a report");
      expect(w.work[rank]->is_clean(), where + ": what the next round would find");
    }
  }
}

// ---- Theorem 5.3.1, by every write

const World* recorded = nullptr;
std::vector<std::vector<std::atomic<int8_t>>> authors;  // 1 + the rank that wrote the word, by heap
std::atomic<int64_t> words_written{0};

// Whether the row c of a pool is one of a source's for an expert of `owner`: of what the owner has granted
// it, or of where its products come home.
bool is_granted(int source, int owner, bool is_home, int c) {
  const Layout& layout = recorded->heaps.layout;
  const std::vector<Actor>& all = recorded->rounds[in_round];
  const Routing &of = all[static_cast<size_t>(source)].routing, &to = all[static_cast<size_t>(owner)].routing;
  for (int e = 0; e < layout.experts; ++e) {
    const auto home_offset = static_cast<size_t>(layout.cell(owner, e));
    const int begin = is_home ? of.home[home_offset] : to.offset[static_cast<size_t>(layout.cell(source, e))];
    if (c >= begin && c < begin + of.counts[home_offset]) return true;
  }
  return false;
}

// The flag of a tile in a pool, or the number of a row: written by those that write the row.
bool may_write_word(int target, int64_t offset) {
  const Layout& layout = recorded->heaps.layout;
  const auto own = [&](int64_t begin, int rows) {
    return static_cast<int>((offset - begin) / (rows > 1 ? kTileFlagBytes : 4) * rows);
  };
  if (offset >= layout.dots(0, 0)) return is_granted(target, acting, true, own(layout.dots(0, 0), 1));
  if (offset >= layout.weights(0, 0)) return is_granted(acting, target, false, own(layout.weights(0, 0), 1));
  if (offset >= layout.returned(0, 0, 0))
    return is_granted(target, acting, true, own(layout.returned(0, 0, 0), layout.tile_rows));
  return is_granted(acting, target, false, own(layout.arrival(0, 0, 0), layout.tile_rows));
}

// Definition 5.3.2, and what it says where cells share a pool.
bool may_write(int target, int64_t offset) {
  const Layout& layout = recorded->heaps.layout;
  if (!layout.is_pool) return is_valid(acting, target, layout.of_byte(offset));
  if (offset < layout.outgoing()) return may_write_word(target, offset);
  if (offset < layout.begin()) return acting == target;
  const auto row = (offset - layout.begin()) / layout.row_bytes, slab = row / layout.capacity;
  const bool is_home = slab / layout.buffers == static_cast<int>(Round::kCombine);
  const auto c = static_cast<int>(row % layout.capacity);
  if (slab % layout.buffers + 2 - layout.buffers != static_cast<int>(Staging::kIncoming))
    return acting == target;
  return is_home ? is_granted(target, acting, true, c) : is_granted(acting, target, false, c);
}

void record(const void* pointer, size_t bytes) {
  const Layout& layout = recorded->heaps.layout;
  for (size_t target = 0; target < authors.size(); ++target) {
    const int64_t offset = static_cast<const uint8_t*>(pointer) - recorded->heaps.at[target];
    if (offset < 0 || offset >= layout.bytes()) continue;
    const auto last = offset + static_cast<int64_t>(bytes);
    expect(last <= layout.bytes(), "a write beyond a heap");
    if (offset >= (layout.is_pool ? layout.arrival(0, 0, 0) : layout.begin()))
      expect(may_write(static_cast<int>(target), offset), "a write that is not valid");
    words_written += static_cast<int64_t>(bytes / 4);
    if (layout.is_pool && offset >= layout.arrival(0, 0, 0))
      continue;  // whose row it is changes with the round
    for (int64_t at = offset; at < last; at += 4) {
      const int8_t before =
          authors[target][static_cast<size_t>(at / 4)].exchange(static_cast<int8_t>(acting + 1));
      expect(before == 0 || before == acting + 1, "two ranks write one word");
    }
  }
}

// No row is granted twice.
void check_grants(const std::vector<Actor>& all, const std::string& where) {
  const Layout& layout = all[0].pass.layout;
  for (const Actor& m : all) {
    std::vector<int> taken(static_cast<size_t>(layout.all_tiles()));
    for (int cell = 0; cell < layout.cells(); ++cell) {
      const Routing& of = all[static_cast<size_t>(cell / layout.experts)].routing;
      const int count = of.counts[static_cast<size_t>(layout.cell(m.pass.rank, cell % layout.experts))];
      const int begin = m.routing.offset[static_cast<size_t>(cell)] / layout.tile_rows;
      for (int tile = begin; tile < begin + layout.tiles(count); ++tile) {
        expect(tile < layout.all_tiles(), where + ": a tile beyond the pool");
        if (tile < layout.all_tiles())
          expect(taken[static_cast<size_t>(tile)]++ == 0, where + ": granted twice");
      }
    }
  }
}

void test_writes(int ranks, bool is_pool, int node_ranks = 0) {
  World w = make(ranks, 2, is_pool ? 7 : 5, 60, kMistakes[0], node_ranks);
  recorded = &w, authors.clear(), words_written = 0;
  for (int rank = 0; rank < ranks; ++rank)
    authors.emplace_back(static_cast<size_t>(w.heaps.layout.bytes() / 4));
  on_write = record;
  play(w, kProcessors);
  on_write = nullptr;
  expect(words_written > 1000, "nothing was recorded");
  for (size_t round = 0; is_pool && round < w.rounds.size(); round += 2)
    check_grants(w.rounds[round], "round " + std::to_string(round + 1));
  // It notices one that is not valid.
  const int before = failures;
  acting = 0, in_round = 0;
  const int last = w.heaps.layout.capacity - 1;  // of a pool, which is not full
  record(w.heaps.at[1] + w.heaps.layout.at({1, Round::kDispatch, Staging::kIncoming, 0, last}), 4);
  expect(failures > before, "a write to another's cell goes unnoticed");
  failures = before;
}

// ---- a rank that does not come

// It has raised so many of its flags in the second round: granted; announced no rows, or some that never
// come.
struct Absence {
  const char* name;
  bool grants, announces;
  int rows;
  Wait wait, other;
};

void test_absence(int ranks, const Absence& absence, bool is_pool, int node_ranks = 0) {
  constexpr double kBound = 1.0;
  World w = make(ranks, 2, is_pool ? 2 : 4, kBound, kMistakes[0], node_ranks);
  const Deliveries deliveries(w);
  const Layout& layout = w.heaps.layout;
  for_ranks(ranks, [&](size_t rank) { launch(w.rounds[0][rank]); });
  const peers::Watch& watch = w.rounds[1][0].pass.watch;
  for (int peer = 1; peer < ranks; ++peer) {
    uint8_t* const heap = w.heaps.at[static_cast<size_t>(peer)];
    for (int e = 0; e < layout.experts; ++e)
      reinterpret_cast<int32_t*>(heap + layout.counts(0))[e] = e == 1 ? absence.rows : 0;
    if (absence.grants) peers::signal(watch, heap + layout.granted(0));
    if (absence.announces) peers::signal(watch, heap + layout.announced(0));
  }
  for_ranks(ranks, [&](size_t rank) {
    if (rank == 0) return;
    // To rank 0 as to all.
    const uint64_t start = nanoseconds();
    launch(w.rounds[1][rank]);
    const double seconds = static_cast<double>(nanoseconds() - start) * 1e-9;
    const peers::Report& found = w.work[rank]->report;
    const std::string where = std::string(absence.name) + ", rank " + std::to_string(rank);
    const auto wait = static_cast<Wait>(found.wait);
    expect(
        (wait == absence.wait || wait == absence.other || (is_pool && wait == Wait::kPlaced)) &&
            found.peer == 0,
        where + ": reports wait " + std::to_string(found.wait) + " for rank " + std::to_string(found.peer));
    expect(found.epoch == 2 && found.rank == static_cast<int>(rank), where + ": another round or rank");
    expect(seconds >= kBound && seconds < 2 * kBound + 5, where + ": took " + std::to_string(seconds) + " s");
  });
}

// More rows than the pool holds: against what the host has made sure of, but nothing is written beyond it.
void test_too_many_rows() {
  World w = make(1, 2, 2, 1.0);
  Actor& m = w.rounds[0][0];
  m.pass.layout.capacity = kTileRows;
  launch(m);
  expect(static_cast<Wait>(w.work[0]->report.wait) == Wait::kRoom, "a pool that is too small");
}

// Processors of this rank that do not come.
void test_nobody_works() {
  World w = make(1, 2, 3, 1.0);
  Actor& m = w.rounds[0][0];
  launch(m, 0);
  const auto wait = static_cast<Wait>(w.work[0]->report.wait);
  expect((wait == Wait::kDone || wait == Wait::kRouted) && w.work[0]->report.peer == 0,
         "processors that never come");
}

constexpr Absence kAbsences[] = {
    {"nothing", false, false, 0, Wait::kGrant, Wait::kAnnounced},
    {"a grant alone", true, false, 0, Wait::kAnnounced, Wait::kReturn},
    {"no rows", true, true, 3, Wait::kArrival, Wait::kReturn},
    {"no return", true, true, 0, Wait::kReturn, Wait::kReturn},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 2;
  const std::string planted = argc > 3 ? argv[3] : "none";
  const bool is_apart = what == "apart";
  if (what == "rounds" || is_apart) {
    bool is_known = false;
    for (const Mistake& mistake : kMistakes)
      if (planted == mistake.name) {
        is_known = true;
        if (!is_apart) test_rounds(ranks, mistake);
        for (int node_ranks = 1; is_apart && node_ranks <= smaller(2, ranks - 1); ++node_ranks)
          test_rounds(ranks, mistake, kProcessors, node_ranks);
      }
    expect(is_known, "no such mistake: " + planted);
  } else if (what == "room") {
    test_rounds(ranks, kMistakes[0], 1);
  } else if (what == "writes") {
    for (int node_ranks : {0, 1}) test_writes(ranks, false, node_ranks), test_writes(ranks, true, node_ranks);
  } else if (what == "absent") {
    for (const Absence& absence : kAbsences)
      test_absence(ranks, absence, false), test_absence(ranks, absence, true),
          test_absence(ranks, absence, false, 1);
    test_nobody_works(), test_too_many_rows();
  } else {
    expect(false, "nothing to run");
  }
  std::printf("%d failures\n", failures.load());
  return failures != 0;
}
