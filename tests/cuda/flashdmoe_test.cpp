// FlashDMoE's kernels in the emulator: a pass of the layer in one launch, every thread of every rank, beside
// a plain loop. The product's own launch runs them, and encodes maps for the emulator (runtime/). With
// PMOE_LATE_PUTS, ranks on different nodes send by puts (late_puts.h), and get what ranks of one node get.
#include <cuda_runtime.h>

#include <cmath>

#include "common/activation.h"
#include "common/scalar.h"
#include "flashdmoe/launch.h"
#include "flashdmoe_world.h"
#include "grouped_gemm/parts.h"
#include "peers/puts.cuh"

using namespace world;

#if defined(PMOE_LATE_PUTS)  // this program is linked without the kernels of fp16, which it never launches

namespace pmoe::flashdmoe {

PassKernel ampere_fp16(Activation) { return nullptr; }
PassKernel backward_fp16(Activation) { return nullptr; }
ForwardKernel hopper_fp16(Activation) { return nullptr; }
BackwardKernel hopper_backward_fp16(Activation) { return nullptr; }

}  // namespace pmoe::flashdmoe

#endif

namespace {

using T = bf16;

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

struct Case {
  const char* name;
  int ranks, experts, choices;
  std::vector<int> tokens;  // by rank
  int model = 72, hidden = 64, blocks = 3;
  Activation activation = Activation::kGelu;
  int favoured = -1;
  bool bias = true;
  int room = 0;   // blocks of a rank that are resident; 0: all
  int tiles = 1;  // of an expert's capacity
  int rounds = 2;
  bool trains = false, recomputes = false, sends_again = false;
  bool hopper = false;
  int pool = 0;  // rows that all cells of a rank share; 0: each has its own
  Scores scores = Scores::kNone;
  int node_ranks = 0;  // ranks that map each other's heaps; 0: all do
};

constexpr int kTileRows = 128;

using Values = std::vector<T>;

Values values(std::mt19937& random, int count, float scale) {
  Values computed(static_cast<size_t>(larger(count, 8)));
  for (T& each : computed)
    each = narrow<T>(scale * (static_cast<float>(static_cast<int>(random() % 2001)) * 0.001f - 1.0f));
  return computed;
}

float at(const Values& all, int64_t i) { return low_half<T>(all[static_cast<size_t>(i)].bits); }
float rounded(float x) { return low_half<T>(narrow<T>(x).bits); }

struct Rank {
  Routing routing;
  Values x, y, dy, dx, gate;
  Values w1, b1, w2, b2, wide, active, input;
  Values gradient, of_w1, of_b1, of_w2, of_b2;
  std::vector<float> dots, of_weight;
};

std::vector<std::vector<Rank>> played;  // what each pass of the last play() has made

// What one expert makes of one row, and of its gradient.
struct Row {
  std::vector<float> wide, active, computed;
  std::vector<float> gradient, weighed, dx;
  double dot = 0;
};

float activated(Activation which, float gate, float up) {
  switch (which) {
    case Activation::kRelu:
      return Function<Activation::kRelu>::value(gate);
    case Activation::kGelu:
      return Function<Activation::kGelu>::value(gate);
    case Activation::kSilu:
      return Function<Activation::kSilu>::value(gate);
    default:
      return Silu::value(gate) * up;
  }
}

// The plain definition of one row: what expert `e` of `owner` makes of it.
Row product(const Case& c, const Rank& owner, int e, const Values& x, int token) {
  const int wide = c.activation == Activation::kSwiglu ? 2 * c.hidden : c.hidden;
  Row row;
  for (int h = 0; h < wide; ++h) {
    double sum = c.bias ? at(owner.b1, e * wide + h) : 0;
    for (int i = 0; i < c.model; ++i)
      sum += double{at(x, token * c.model + i)} * at(owner.w1, (e * wide + h) * c.model + i);
    row.wide.push_back(rounded(static_cast<float>(sum)));
  }
  for (int h = 0; h < c.hidden; ++h)
    row.active.push_back(
        rounded(activated(c.activation, row.wide[static_cast<size_t>(h)],
                          wide > c.hidden ? row.wide[static_cast<size_t>(c.hidden + h)] : 0)));
  for (int i = 0; i < c.model; ++i) {
    double sum = c.bias ? at(owner.b2, e * c.model + i) : 0;
    for (int h = 0; h < c.hidden; ++h)
      sum += double{row.active[static_cast<size_t>(h)]} * at(owner.w2, (e * c.model + i) * c.hidden + h);
    row.computed.push_back(rounded(static_cast<float>(sum)));
  }
  return row;
}

float derivative(Activation which, float x) {
  switch (which) {
    case Activation::kRelu:
      return Function<Activation::kRelu>::derivative(x);
    case Activation::kGelu:
      return Function<Activation::kGelu>::derivative(x);
    default:
      return Function<Activation::kSilu>::derivative(x);
  }
}

void differentiate(const Case& c, const Rank& owner, int e, const Values& dy, int token, float weight,
                   Row& row) {
  const auto wide = static_cast<int>(row.wide.size());
  row.gradient.resize(row.wide.size());
  for (int i = 0; c.bias && i < c.model; ++i)
    row.dot += double{at(dy, token * c.model + i)} * at(owner.b2, e * c.model + i);
  for (int h = 0; h < c.hidden; ++h) {
    const auto own = static_cast<size_t>(h), up = static_cast<size_t>(h + c.hidden);
    double of_active = 0;
    for (int i = 0; i < c.model; ++i)
      of_active += double{at(dy, token * c.model + i)} * at(owner.w2, (e * c.model + i) * c.hidden + h);
    const float gate = row.wide[own], other = wide > c.hidden ? row.wide[up] : 1.0f;
    const float active = activated(c.activation, gate, other);
    const double weighed = weight * of_active;
    row.dot += active * of_active;
    row.weighed.push_back(rounded(active * weight));
    row.gradient[own] = rounded(static_cast<float>(weighed * derivative(c.activation, gate) * other));
    if (wide > c.hidden) row.gradient[up] = rounded(static_cast<float>(weighed * Silu::value(gate)));
  }
  for (int i = 0; i < c.model; ++i) {
    double sum = 0;
    for (int h = 0; h < wide; ++h)
      sum += double{row.gradient[static_cast<size_t>(h)]} * at(owner.w1, (e * wide + h) * c.model + i);
    row.dx.push_back(rounded(static_cast<float>(sum)));
  }
}

// All values within a hundredth of the largest.
template <class Found>
void expect_near(const Found& found, const std::vector<double>& wanted, const std::string& what) {
  double largest = 0;
  for (double each : wanted) largest = larger(largest, std::fabs(each));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto own = static_cast<double>(found(i));
    if (std::fabs(own - wanted[i]) <= 0.012 * largest + 1e-6) continue;
    expect(false, what + " " + std::to_string(i) + ": " + std::to_string(own) + " and not " +
                      std::to_string(wanted[i]));
    return;
  }
}

void check_gradients(const Case& c, const std::vector<Rank>& all, const std::string& where) {
  const auto wide = static_cast<size_t>(c.activation == Activation::kSwiglu ? 2 * c.hidden : c.hidden);
  const auto model = static_cast<size_t>(c.model), hidden = static_cast<size_t>(c.hidden);
  struct Sums {
    std::vector<double> w1, b1, w2, b2;
  };
  const auto experts = static_cast<size_t>(c.experts);
  const Sums zeros = {std::vector<double>(experts * wide * model), std::vector<double>(experts * wide),
                      std::vector<double>(experts * model * hidden), std::vector<double>(experts * model)};
  std::vector<Sums> sums(all.size(), zeros);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Rank& own = all[rank];
    const Routing& g = own.routing;
    std::vector<double> dx(static_cast<size_t>(g.tokens) * model), dots;
    for (int slot = 0; slot < g.tokens * c.choices; ++slot) {
      const auto at_slot = static_cast<size_t>(slot);
      const int token = slot / c.choices, owner = g.expert[at_slot] / c.experts,
                e = g.expert[at_slot] % c.experts;
      if (g.row[at_slot] < 0) {
        dots.push_back(0);
        continue;
      }
      const float weight = g.weight[at_slot];
      const Rank& of = all[static_cast<size_t>(owner)];
      Row row = product(c, of, e, own.x, token);
      differentiate(c, of, e, own.dy, token, weight, row);
      dots.push_back(row.dot);
      Sums& to = sums[static_cast<size_t>(owner)];
      const auto expert = static_cast<size_t>(e);
      for (size_t i = 0; i < model; ++i) {
        const auto x = double{at(own.x, token * c.model + static_cast<int>(i))};
        const auto dy = double{at(own.dy, token * c.model + static_cast<int>(i))};
        dx[static_cast<size_t>(token) * model + i] += row.dx[i];
        to.b2[expert * model + i] += dy * weight;
        for (size_t h = 0; h < wide; ++h) to.w1[(expert * wide + h) * model + i] += row.gradient[h] * x;
        for (size_t h = 0; h < hidden; ++h) to.w2[(expert * model + i) * hidden + h] += row.weighed[h] * dy;
      }
      for (size_t h = 0; h < wide; ++h) to.b1[expert * wide + h] += row.gradient[h];
    }
    const std::string who = where + ", rank " + std::to_string(rank) + ": ";
    const auto of = [](const Values& v) { return [&v](size_t i) { return at(v, static_cast<int64_t>(i)); }; };
    expect_near(of(own.dx), dx, who + "dX");
    expect_near([&](size_t i) { return own.of_weight[i]; }, dots, who + "the weights' gradient");
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Rank& own = all[rank];
    const std::string who = where + ", rank " + std::to_string(rank) + ": ";
    const auto of = [](const Values& v) { return [&v](size_t i) { return at(v, static_cast<int64_t>(i)); }; };
    expect_near(of(own.of_w1), sums[rank].w1, who + "dW1");
    expect_near(of(own.of_w2), sums[rank].w2, who + "dW2");
    if (!c.bias) continue;
    expect_near(of(own.of_b1), sums[rank].b1, who + "db1");
    expect_near(of(own.of_b2), sums[rank].b2, who + "db2");
  }
}

bool are_near(float found, float wanted) {
  return std::isnan(wanted) ? std::isnan(found)
                            : std::fabs(found - wanted) <= 2e-6f * (1 + std::fabs(wanted));
}

void check_choice(const Routing& g, const std::string& who) {
  const Scored &found = g.scored, &wanted = g.wanted;
  expect(found.totals == wanted.totals, who + "rows of all choices");
  expect(are_near(found.l_aux, wanted.l_aux),
         who + "l_aux " + std::to_string(found.l_aux) + " and not " + std::to_string(wanted.l_aux));
  for (size_t i = 0; i < wanted.weight.size(); ++i)
    expect(are_near(found.weight[i], wanted.weight[i]), who + "the weight of slot " + std::to_string(i));
}

void check(const Case& c, const std::vector<Rank>& all, const std::string& where) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Rank& own = all[rank];
    const Routing& g = own.routing;
    expect(g.computed == g, where + ", rank " + std::to_string(rank) + ": places of rows");
    if (g.is_scored()) check_choice(g, where + ", rank " + std::to_string(rank) + ": ");
    for (int t = 0; t < g.tokens; ++t) {
      std::vector<float> sum(static_cast<size_t>(c.model));
      for (int k = 0; k < c.choices; ++k) {
        const auto slot = static_cast<size_t>(t * c.choices + k);
        if (g.row[slot] < 0) continue;
        const Rank& owner = all[static_cast<size_t>(g.expert[slot] / c.experts)];
        const std::vector<float> computed = product(c, owner, g.expert[slot] % c.experts, own.x, t).computed;
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += g.weight[slot] * computed[i];
      }
      for (int i = 0; i < c.model; ++i) {
        const float wanted = sum[static_cast<size_t>(i)], found = at(own.y, t * c.model + i);
        // Two roundings of the type: of a product, and of the sum.
        if (std::isnan(wanted) && std::isnan(found)) continue;
        if (std::fabs(found - wanted) <= 0.012f * std::fabs(wanted) + 0.004f) continue;
        expect(false, where + ", rank " + std::to_string(rank) + ", token " + std::to_string(t) +
                          ", column " + std::to_string(i) + ": " + std::to_string(found) + " and not " +
                          std::to_string(wanted));
        return;
      }
    }
  }
}

// The gate's, by token and expert of all ranks.
std::vector<float> product(const Case& c, const Rank& own, int tokens, int experts) {
  std::vector<float> computed;
  for (int t = 0; t < tokens; ++t)
    for (int e = 0; e < experts; ++e) {
      double sum = 0;
      for (int i = 0; i < c.model; ++i)
        sum += double{at(own.x, t * c.model + i)} * at(own.gate, e * c.model + i);
      computed.push_back(static_cast<float>(sum));
    }
  return computed;
}

// Tensors of a rank in a round; what nobody has written is no number.
Rank random_rank(const Case& c, const Layout& layout, std::mt19937& random, int tokens) {
  const int wide = c.activation == Activation::kSwiglu ? 2 * c.hidden : c.hidden;
  const auto unwritten = [](int64_t count) { return Values(static_cast<size_t>(count), T{0xFFFF}); };
  Rank own;
  const bool is_product = c.scores == Scores::kProduct;
  if (is_product) {
    own.x = values(random, tokens * c.model, 1.0f), own.gate = values(random, layout.cells() * c.model, 0.5f);
  }
  const std::vector<float> scores =
      is_product ? product(c, own, tokens, layout.cells()) : std::vector<float>();
  own.routing = random_routing(random, layout, tokens, c.choices, c.favoured, c.scores, scores);
  for (float& weight : own.routing.weight) weight *= c.scores == Scores::kNone ? 0.25f : 1.0f;
  if (!is_product) own.x = values(random, tokens * c.model, 1.0f);
  own.dy = values(random, tokens * c.model, 1.0f);
  own.y = own.dx = Values(own.x.size(), T{0xFFFF});
  own.w1 = values(random, c.experts * wide * c.model, 0.3f);
  own.w2 = values(random, c.experts * c.model * c.hidden, 0.3f);
  own.b1 = values(random, c.experts * wide, 0.5f), own.b2 = values(random, c.experts * c.model, 0.5f);
  const int64_t rows = layout.all_rows();
  own.wide = own.gradient = unwritten(rows * wide), own.active = unwritten(rows * c.hidden);
  own.input = unwritten(rows * c.model);
  own.of_w1 = own.w1, own.of_w2 = own.w2, own.of_b1 = own.b1, own.of_b2 = own.b2;
  for (Values* each : {&own.of_w1, &own.of_w2, &own.of_b1, &own.of_b2})
    std::fill(each->begin(), each->end(), T{0xFFFF});
  own.dots.assign(static_cast<size_t>(rows * ampere_row_dot_parts(c.hidden)), NAN);
  own.of_weight.assign(own.routing.weight.size(), NAN);
  return own;
}

enum class Direction { kForward, kBackward };

Which which(const Case& c, bool is_backward) { return {Element::kBf16, c.activation, is_backward, c.hopper}; }

Member member(const Case& c, const Heaps& heaps, int rank, Rank& own, Workspace& w, uint32_t epoch,
              Direction direction) {
  const bool halves = c.activation == Activation::kSwiglu, is_backward = direction == Direction::kBackward;
  const int columns = path_of(which(c, is_backward)).tile_columns;
  Member m;
  m.pass = pass_of(heaps, rank, own.routing, w, epoch, uint64_t{1} << 60, !is_backward);
  const Values &source = is_backward ? own.dy : own.x, &result = is_backward ? own.dx : own.y;
  m.pass.source = reinterpret_cast<const uint8_t*>(source.data());
  m.pass.result = reinterpret_cast<uint8_t*>(const_cast<T*>(result.data()));
  m.pass.source_stride = m.pass.result_stride = m.pass.again_stride = heaps.layout.row_bytes;
  Experts& e = m.experts;
  e.model = c.model, e.hidden = c.hidden;
  e.w1 = own.w1.data(), e.w2 = own.w2.data();
  if (c.bias) e.b1 = own.b1.data(), e.b2 = own.b2.data();
  e.active = own.active.data();
  if (c.trains && !c.sends_again) e.input = own.input.data();
  if (is_backward || (c.trains && !c.recomputes)) e.wide = own.wide.data();
  if (!is_backward) {
    if (own.routing.is_product) m.pass.routing.choice.weight = own.gate.data();
    plan_forward(m.pass, e, halves, columns);
    return m;
  }
  e.gradient = own.gradient.data(), e.dots = own.dots.data();
  e.of_w1 = own.of_w1.data(), e.of_w2 = own.of_w2.data();
  if (c.bias) e.of_b1 = own.of_b1.data(), e.of_b2 = own.of_b2.data();
  if (c.sends_again) m.pass.again = reinterpret_cast<const uint8_t*>(own.x.data());
  m.pass.weight_gradient = own.of_weight.data();
  plan_backward(m.pass, e, halves, kTileRows, columns, c.recomputes);
  return m;
}

void register_rank(const Heaps& heaps, size_t index, Rank& own, Workspace& w) {
  const auto array = [](const char* name, auto& values, bool writable) {
    emu::register_array(name, values.data(), values.size() * sizeof(values[0]), writable);
  };
  emu::register_array("heap", heaps.at[index], static_cast<size_t>(heaps.layout.bytes()), true);
  if (!own.gate.empty()) array("gate", own.gate, false);
  for (auto* each : {&own.x, &own.dy, &own.w1, &own.w2, &own.b1, &own.b2}) array("given", *each, false);
  for (auto* each : {&own.y, &own.wide, &own.active, &own.input, &own.dx, &own.gradient, &own.of_w1,
                     &own.of_w2, &own.of_b1, &own.of_b2})
    array("computed", *each, true);
  Routing& g = own.routing;
  for (auto* each : {&g.counts, &g.slot, &g.expert, &g.row}) array("routing", *each, false);
  for (auto* each : {&g.computed.counts, &g.computed.slot, &g.computed.expert, &g.computed.row})
    array("places", *each, true);
  array("offsets", g.offset, true);
  if (heaps.layout.is_pool) array("homes", g.home, false), array("homes", g.computed.home, true);
  array("chosen", g.chosen, false), array("kept", g.keep, false), array("rows of groups", w.routed, true);
  array("weights", g.weight, false);
  if (g.is_scored()) {
    array("logits", g.logits, g.is_product), array("chosen weights", g.scored.weight, true);
    array("rows of all choices", g.scored.totals, true);
    emu::register_array("l_aux", &g.scored.l_aux, sizeof g.scored.l_aux, true);
  }
  array("probabilities of groups", w.probability, true), array("squares of groups", w.z, true);
  array("dots", own.dots, true), array("weights' gradient", own.of_weight, true);
  array("queue", w.entry, true), array("next tiles", w.next_tile, true);
  for (auto* each : {&w.mailboxes, &w.finished_tiles, &w.expert_progress}) array("workspace", *each, true);
  emu::register_array("state", &w.state, sizeof w.state, true);
  emu::register_array("report", &w.report, sizeof w.report, true);
}

using Workspaces = std::vector<std::unique_ptr<Workspace>>;

bool is_broken = false;  // puts break a promise

#if defined(PMOE_LATE_PUTS)

peers::puts::Broken broken = peers::puts::Broken::kNothing;

// Delivers puts as long as it lives, between the passes of the emulator.
class Deliveries {
 public:
  Deliveries(const Heaps& heaps, unsigned seed) : network_(heaps.at, heaps.layout.bytes(), seed, broken) {
    peers::puts::network = &network_;
    emu::between_passes = [this] { network_.step(), network_.step(); };
  }
  ~Deliveries() { emu::between_passes = nullptr; }

  void check(const std::string& where) const {
    expect(network_.is_empty(), where + ": a put that arrives after the launch");
    expect(network_.unseen() == 0, where + ": a put's flag after which see() was not called");
  }
  bool has_delivered() const { return network_.delivered() > 0; }

 private:
  peers::puts::Network network_;
};

#else

struct Deliveries {  // there are no puts
  Deliveries(const Heaps&, unsigned) {}
  void check(const std::string&) const {}
  bool has_delivered() const { return false; }
};

#endif

// One launch of all ranks; of those below `absent`, where there is such. Whether it has ended.
bool launch_pass(const Case& c, const Heaps& heaps, std::vector<Rank>& all, const Workspaces& work,
                 uint32_t epoch, Direction direction, unsigned seed, int absent, const std::string& where) {
  Launch launch;
  launch.ranks = absent < 0 ? c.ranks : absent;
  emu::unregister_arrays();
  for (size_t i = 0; i < all.size(); ++i) {
    register_rank(heaps, i, all[i], *work[i]);
    Member& m = launch.of_rank[i];
    m = member(c, heaps, static_cast<int>(i), all[i], *work[i], epoch, direction);
    if (absent >= 0) m.pass.watch.bound = 20000;
    m.pass.watch.delay_seed = seed % 2 ? seed : 0;
  }
  emu::register_array("heaps", heaps.at.data(), heaps.at.size() * sizeof(uint8_t*), false);
  emu::room = nullptr;
  if (c.room) emu::room = [&c] { return static_cast<size_t>(c.room * c.ranks); };
  stub::seed = seed, stub::eagerness = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 50 : 100;
  try {
    pmoe::flashdmoe::launch(which(c, direction == Direction::kBackward), launch, c.blocks, nullptr);
  } catch (const std::runtime_error& error) {
    expect(false, where + ": " + error.what());
    return false;
  }
  if (absent >= 0) return true;
  for (const auto& each : work) {
    expect(each->report.wait == 0, where + ": a report");
    expect(each->is_clean(), where + ": what the next round would find");
  }
  return true;
}

bool are_same(const Values& a, const Values& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Forward once more in another order: what it chooses is the same to the bit.
bool choose_again(const Case& c, const Heaps& heaps, std::vector<Rank>& all, const Workspaces& work,
                  uint32_t epoch, unsigned seed, const std::string& where) {
  const std::vector<Rank> first = all;
  for (Rank& own : all) own.routing.clear_computed();
  if (!launch_pass(c, heaps, all, work, epoch + 1, Direction::kForward, seed + 1, -1, where)) return false;
  for (size_t i = 0; i < all.size(); ++i) {
    const Scored &before = first[i].routing.scored, &now = all[i].routing.scored;
    expect(std::memcmp(&before.l_aux, &now.l_aux, 4) == 0, where + ": another l_aux at another time");
    expect(std::memcmp(before.weight.data(), now.weight.data(), 4 * (now.weight.size() - 1)) == 0,
           where + ": other weights at another time");
  }
  return true;
}

// Both passes of a round, and backward once more in another order: its results are the same to the bit.
bool train(const Case& c, const Heaps& heaps, std::vector<Rank>& all, const Workspaces& work, uint32_t epoch,
           unsigned seed, const std::string& where) {
  if (!launch_pass(c, heaps, all, work, epoch + 1, Direction::kBackward, seed + 1, -1, where)) return false;
  check_gradients(c, all, where + ", backward");
  const std::vector<Rank> first = all;
  if (!launch_pass(c, heaps, all, work, epoch + 2, Direction::kBackward, seed + 2, -1, where)) return false;
  for (size_t i = 0; i < all.size(); ++i) {
    expect(are_same(first[i].of_w1, all[i].of_w1) && are_same(first[i].of_w2, all[i].of_w2) &&
               are_same(first[i].of_b1, all[i].of_b1) && are_same(first[i].of_b2, all[i].of_b2) &&
               are_same(first[i].dx, all[i].dx),
           where + ": another result at another time");
  }
  return true;
}

void play(const Case& c, unsigned seed, int absent = -1) {
  const int rows = c.pool > 0 ? c.pool : c.tiles * kTileRows;
  const int buffers = c.node_ranks > 0 ? 2 : 1, sent_rounds = c.sends_again ? 3 : kRounds;
  const Layout layout = {c.ranks, c.experts, rows, kTileRows, buffers, c.model * 2, sent_rounds, c.pool > 0};
  Heaps heaps(layout, c.node_ranks);
  const Deliveries deliveries(heaps, seed);
  played.clear();
  std::mt19937 random(seed);
  Workspaces work;
  for (int tokens : c.tokens) {
    Rank largest = random_rank(c, layout, random, tokens);
    Pass small;
    small.layout = layout;
    Workspace none(small, 1);
    Case most = c;
    most.recomputes = true;
    const Member m = member(most, heaps, 0, largest, none, 1, Direction::kBackward);
    work.push_back(std::make_unique<Workspace>(m.pass, c.blocks - 1));
  }
  uint32_t epoch = 1;
  for (int round = 1; round <= c.rounds; ++round) {
    const std::string where = std::string(c.name) + ", round " + std::to_string(round);
    std::vector<Rank> all;
    for (int tokens : c.tokens) all.push_back(random_rank(c, layout, random, tokens));
    if (!launch_pass(c, heaps, all, work, epoch, Direction::kForward, seed, absent, where)) return;
    if (absent >= 0) {
      for (int rank = 0; rank < absent; ++rank) {
        const peers::Report& report = work[static_cast<size_t>(rank)]->report;
        expect(report.wait != 0 && report.peer == absent && report.rank == rank,
               where + ": rank " + std::to_string(rank) + " reports wait " + std::to_string(report.wait) +
                   " for rank " + std::to_string(report.peer));
      }
      return;
    }
    check(c, all, where);
    deliveries.check(where);
    played.push_back(all);
    if (c.trains && !train(c, heaps, all, work, epoch, seed, where)) return;
    const bool is_scored = c.scores != Scores::kNone;
    if (c.trains) played.push_back(all);
    if (is_scored && !c.trains && !choose_again(c, heaps, all, work, epoch, seed, where)) return;
    deliveries.check(where);
    epoch += c.trains ? 3 : is_scored ? 2 : 1;
  }
  if (c.node_ranks > 0) expect(deliveries.has_delivered(), std::string(c.name) + ": no puts");
}

// Ranks of several nodes get what the same ranks get on one node, to the bit.
void play_apart(Case c, unsigned seed) {
  const int node_ranks = c.node_ranks;
  c.node_ranks = 0;
  play(c, seed);
  const std::vector<std::vector<Rank>> mapped = played;
  if (is_broken) emu::most_passes = 10 * emu::last_passes;  // ranks may wait for ever
  c.node_ranks = node_ranks;
  play(c, seed);
  expect(played.size() == mapped.size(), std::string(c.name) + ": passes");
  for (size_t i = 0; i < smaller(played.size(), mapped.size()); ++i)
    for (size_t rank = 0; rank < mapped[i].size(); ++rank) {
      const Rank &a = mapped[i][rank], &b = played[i][rank];
      expect(are_same(a.y, b.y), std::string(c.name) + ": another y by puts");
      if (i % 2 == 0) continue;
      expect(are_same(a.dx, b.dx) && are_same(a.of_w1, b.of_w1) && are_same(a.of_w2, b.of_w2) &&
                 are_same(a.of_b1, b.of_b1) && are_same(a.of_b2, b.of_b2) &&
                 std::memcmp(a.of_weight.data(), b.of_weight.data(), a.of_weight.size() * 4) == 0,
             std::string(c.name) + ": another gradient by puts");
    }
}

}  // namespace

// The first argument: by which architecture's instructions.
int main(int argc, char** argv) {
  const std::string arch = argc > 1 ? argv[1] : "", asked = argc > 2 ? argv[2] : "";
  unsigned seed = 1;
  const auto play = [&](Case c, int absent = -1) {
    c.hopper = arch == "sm_90a";
    ::play(c, seed++, absent);
  };
  const auto go = [&](const Case& c) { play(c); };
#if defined(PMOE_LATE_PUTS)
  const std::string planted = argc > 3 ? argv[3] : "";
  if (planted == "flag_before_its_bytes") broken = peers::puts::Broken::kFlagFirst;
  if (planted == "puts_in_any_order") broken = peers::puts::Broken::kUnordered;
  is_broken = broken != peers::puts::Broken::kNothing;
#endif
  const auto go_apart = [&](Case c) {
    c.hopper = arch == "sm_90a";
    play_apart(c, seed++);
  };
  if (asked == "apart") {
    Case two = {"two nodes", 2, 2, 2, {40, 25}};
    two.node_ranks = 1, two.trains = true, two.rounds = 1;
    if (!is_broken) go_apart(two);
    Case skewed = {"two nodes, rows are dropped, one rank without tokens", 2, 1, 1, {0, 140}};
    skewed.favoured = 0, skewed.rounds = 1, skewed.activation = Activation::kRelu, skewed.trains = true;
    skewed.node_ranks = 1, skewed.recomputes = true, go_apart(skewed);
    Case pool = {"a node of two and one of one, cells of a pool", 3, 1, 2, {30, 0, 135}};
    pool.pool = 5 * kTileRows, pool.trains = pool.sends_again = true, pool.rounds = 1;
    pool.node_ranks = 2, go_apart(pool);
    Case chosen = {"three nodes choose", 3, 1, 2, {70, 0, 20}};
    chosen.scores = Scores::kSome, chosen.rounds = 1, chosen.pool = 4 * kTileRows;
    chosen.node_ranks = 1;
    if (!is_broken) go_apart(chosen);
  } else if (asked == "apart thoroughly") {
    Case four = {"two nodes of two ranks", 4, 2, 3, {30, 50, 1, 20}};
    four.node_ranks = 2, four.trains = true, go_apart(four);
    four.name = "four nodes, cells of a pool", four.node_ranks = 1, four.pool = 12 * kTileRows;
    four.sends_again = true, go_apart(four);
    four.name = "four nodes choose", four.trains = false, four.scores = Scores::kProduct, go_apart(four);
  } else if (asked == "backward") {
    Case two = {"two ranks", 2, 2, 2, {40, 25}};
    two.trains = true, go(two);
    Case pool = {"cells of a pool", 2, 2, 2, {70, 75}};
    pool.pool = 6 * kTileRows, pool.trains = pool.sends_again = true, pool.rounds = 1, go(pool);
    Case alone = {"alone, more than one tile", 1, 2, 2, {150}};
    alone.tiles = 2, alone.model = 136, alone.hidden = 136, alone.activation = Activation::kSwiglu;
    alone.bias = false, alone.rounds = 1, alone.trains = alone.recomputes = alone.sends_again = true;
    go(alone);
    Case skewed = {"all to one expert, one rank without tokens", 2, 1, 1, {0, 140}};
    skewed.favoured = 0, skewed.rounds = 1, skewed.activation = Activation::kRelu, skewed.trains = true;
    skewed.room = 2, skewed.recomputes = true, go(skewed);
    Case nothing = {"nothing at all", 2, 2, 1, {0, 0}};
    nothing.trains = nothing.sends_again = true, nothing.rounds = 1, go(nothing);
  } else if (asked == "backward thoroughly") {
    Case four = {"four ranks", 4, 2, 3, {30, 50, 1, 20}};
    four.trains = true, go(four);
    for (const Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      Case one = {"every activation", 2, 2, 2, {130, 140}};
      one.activation = activation, one.model = 136, one.hidden = 72, one.tiles = 2, one.rounds = 1;
      one.trains = true, one.sends_again = activation < Activation::kSilu;
      one.recomputes = static_cast<int>(activation) % 2 == 0, go(one);
      one.pool = 8 * kTileRows, go(one);
    }
  } else {
    go({"two ranks", 2, 2, 2, {40, 25}});
    Case alone = {"alone, more than one tile", 1, 2, 2, {150}};
    alone.tiles = 2, alone.model = 136, alone.hidden = 136, alone.activation = Activation::kSwiglu;
    alone.bias = false, alone.rounds = 1, go(alone);
    Case skewed = {"all to one expert, one rank without tokens", 2, 1, 1, {0, 140}};
    skewed.favoured = 0, skewed.rounds = 1, skewed.activation = Activation::kRelu, go(skewed);
    Case narrow_room = {"two blocks of a rank are resident", 2, 1, 2, {20, 30}};
    narrow_room.room = 2, narrow_room.blocks = 4, narrow_room.activation = Activation::kSilu, go(narrow_room);
    go({"nothing at all", 2, 2, 1, {0, 0}});
    Case chosen = {"two ranks choose", 2, 3, 2, {70, 0}};
    chosen.scores = Scores::kSome, chosen.tiles = 2, chosen.rounds = 1, go(chosen);
    Case strange = {"alone, from a score that is no number", 1, 5, 3, {140}};
    strange.scores = Scores::kNoNumber, strange.rounds = 1, strange.favoured = 2, go(strange);
    Case scored = {"two ranks score and choose", 2, 3, 2, {140, 0}};
    scored.scores = Scores::kProduct, scored.tiles = 2, scored.rounds = 1, go(scored);
    play({"a rank that does not come", 2, 1, 1, {8, 8}}, 1);
    Case pool = {"all to one expert of a pool", 2, 2, 2, {30, 140}};
    pool.favoured = 1, pool.pool = 7 * kTileRows, go(pool);
    Case full = {"a pool that is full to its last row", 1, 1, 1, {2 * kTileRows}};
    full.pool = 2 * kTileRows, full.rounds = 1, go(full);
    if (asked == "thorough") {
      Case four = {"four ranks", 4, 2, 3, {30, 50, 1, 20}};
      go(four), four.scores = Scores::kSome, four.name = "four ranks choose", go(four);
      Case many = {"alone, of as many experts as a launch takes", 1, kMostChosen, 32, {65}};
      many.scores = Scores::kSome, many.hidden = 16, many.rounds = 1, many.blocks = 5, go(many);
      many.scores = Scores::kProduct, many.name = "alone, scoring them, too", go(many);
      for (const Activation activation :
           {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
        Case one = {"every activation", 2, 2, 2, {130, 140}};
        one.activation = activation, one.model = 136, one.hidden = 72, one.tiles = 2, one.rounds = 1, go(one);
        one.pool = 8 * kTileRows, go(one);
      }
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
