// FlashDMoE's kernel in the emulator: the layer's forward pass in one launch, every thread of every rank,
// beside a plain loop.
#include <cuda_runtime.h>

#include <cmath>

#include "flashdmoe/ampere.cuh"
#include "flashdmoe_world.h"

using namespace world;

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
};

using Values = std::vector<T>;

Values values(std::mt19937& random, int count, float scale) {
  Values made(static_cast<size_t>(larger(count, 8)));
  for (T& each : made)
    each = narrow<T>(scale * (static_cast<float>(static_cast<int>(random() % 2001)) * 0.001f - 1.0f));
  return made;
}

float at(const Values& all, int64_t i) { return low_half<T>(all[static_cast<size_t>(i)].bits); }
float rounded(float x) { return low_half<T>(narrow<T>(x).bits); }

struct Rank {
  Routing routing;
  Values x, y;
  Values w1, b1, w2, b2, hidden, active;
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
std::vector<float> product(const Case& c, const Rank& owner, int e, const Values& x, int token) {
  const int wide = c.activation == Activation::kSwiglu ? 2 * c.hidden : c.hidden;
  std::vector<float> hidden, active, made;
  for (int h = 0; h < wide; ++h) {
    double sum = c.bias ? at(owner.b1, e * wide + h) : 0;
    for (int i = 0; i < c.model; ++i)
      sum += double{at(x, token * c.model + i)} * at(owner.w1, (e * wide + h) * c.model + i);
    hidden.push_back(rounded(static_cast<float>(sum)));
  }
  for (int h = 0; h < c.hidden; ++h)
    active.push_back(rounded(activated(c.activation, hidden[static_cast<size_t>(h)],
                                       wide > c.hidden ? hidden[static_cast<size_t>(c.hidden + h)] : 0)));
  for (int i = 0; i < c.model; ++i) {
    double sum = c.bias ? at(owner.b2, e * c.model + i) : 0;
    for (int h = 0; h < c.hidden; ++h)
      sum += double{active[static_cast<size_t>(h)]} * at(owner.w2, (e * c.model + i) * c.hidden + h);
    made.push_back(rounded(static_cast<float>(sum)));
  }
  return made;
}

void check(const Case& c, const std::vector<Rank>& all, const std::string& where) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Rank& own = all[rank];
    const Routing& g = own.routing;
    for (int t = 0; t < g.tokens; ++t) {
      std::vector<float> sum(static_cast<size_t>(c.model));
      for (int k = 0; k < c.choices; ++k) {
        const auto slot = static_cast<size_t>(t * c.choices + k);
        if (g.row[slot] < 0) continue;
        const Rank& owner = all[static_cast<size_t>(g.expert[slot] / c.experts)];
        const std::vector<float> made = product(c, owner, g.expert[slot] % c.experts, own.x, t);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += g.weight[slot] * made[i];
      }
      for (int i = 0; i < c.model; ++i) {
        const float wanted = sum[static_cast<size_t>(i)], found = at(own.y, t * c.model + i);
        // Two roundings of the type: of a product, and of the sum.
        if (std::fabs(found - wanted) <= 0.012f * std::fabs(wanted) + 0.004f) continue;
        expect(false, where + ", rank " + std::to_string(rank) + ", token " + std::to_string(t) +
                          ", column " + std::to_string(i) + ": " + std::to_string(found) + " and not " +
                          std::to_string(wanted));
        return;
      }
    }
  }
}

template <Activation kActivation>
void run(const Launch& launch, int blocks, unsigned seed, int eagerness) {
  emu::launch(
      static_cast<unsigned>(blocks * launch.ranks), ampere::kThreads, seed,
      [&] { forward_sm80<T, kActivation>(launch); }, eagerness, 1, sizeof(AmpereShared));
}

void play(const Case& c, unsigned seed, int absent = -1) {
  const bool halves = c.activation == Activation::kSwiglu;
  const int wide = halves ? 2 * c.hidden : c.hidden;
  const Layout layout = {c.ranks, c.experts, c.tiles * ampere::kRows, ampere::kRows, 1, c.model * 2};
  Heaps heaps(layout);
  std::mt19937 random(seed);
  const int columns_0 = ceil_div(c.hidden, ampere::tile_columns(halves));
  const int columns_1 = ceil_div(c.model, ampere::kColumns);
  std::vector<std::unique_ptr<Workspace>> work;
  for (int rank = 0; rank < c.ranks; ++rank)
    work.push_back(std::make_unique<Workspace>(layout, c.tokens[static_cast<size_t>(rank)], columns_0,
                                               columns_1, c.blocks - 1));
  for (int round = 1; round <= c.rounds; ++round) {
    const std::string where = std::string(c.name) + ", round " + std::to_string(round);
    std::vector<Rank> all(static_cast<size_t>(c.ranks));
    Launch launch;
    launch.ranks = c.ranks;
    emu::forget_arrays();
    const auto array = [](const char* name, auto& values, bool writable) {
      emu::register_array(name, values.data(), values.size() * sizeof(values[0]), writable);
    };
    for (int rank = 0; rank < c.ranks; ++rank) {
      const auto index = static_cast<size_t>(rank);
      Rank& own = all[index];
      const int tokens = c.tokens[index];
      own.routing = route(random, layout, tokens, c.choices, c.favoured);
      for (float& weight : own.routing.weight) weight *= 0.25f;
      own.x = values(random, tokens * c.model, 1.0f), own.y = Values(own.x.size(), T{0xFFFF});
      own.w1 = values(random, c.experts * wide * c.model, 0.3f);
      own.w2 = values(random, c.experts * c.model * c.hidden, 0.3f);
      own.b1 = values(random, c.experts * wide, 0.5f), own.b2 = values(random, c.experts * c.model, 0.5f);
      const int rows = layout.cells() * layout.capacity;
      own.hidden = Values(static_cast<size_t>(rows * wide), T{0xFFFF});
      own.active = Values(static_cast<size_t>(rows * c.hidden), T{0xFFFF});
      Forward& f = launch.of_rank[rank];
      Workspace& w = *work[index];
      f.pass = pass_of(heaps, rank, own.routing, w, static_cast<uint32_t>(round),
                       absent < 0 ? uint64_t{1} << 60 : 20000);
      f.pass.watch.nap_seed = seed % 2 ? seed : 0;
      f.pass.source = reinterpret_cast<const uint8_t*>(own.x.data());
      f.pass.result = reinterpret_cast<uint8_t*>(own.y.data());
      f.pass.source_stride = f.pass.result_stride = layout.row_bytes;
      f.pass.columns_0 = columns_0, f.pass.columns_1 = columns_1;
      Problem &up = f.gemm[0], &down = f.gemm[1];
      up.b = own.w1.data(), up.a_stride = c.model, up.n = wide, up.k = c.model;
      up.d = round == 1 ? own.hidden.data() : nullptr, up.d_stride = wide;
      up.active = own.active.data(), up.active_stride = c.hidden;
      down.a = own.active.data(), down.a_stride = c.hidden, down.b = own.w2.data();
      down.d_stride = c.model, down.n = c.model, down.k = c.hidden;
      if (c.bias) up.bias = own.b1.data(), down.bias = own.b2.data();
      up.experts = down.experts = c.experts, up.rows = down.rows = layout.capacity;
      emu::register_array("heap", heaps.at[index], static_cast<size_t>(layout.bytes()), true);
      for (auto* each : {&own.x, &own.w1, &own.w2, &own.b1, &own.b2}) array("given", *each, false);
      for (auto* each : {&own.y, &own.hidden, &own.active}) array("made", *each, true);
      for (auto* each : {&own.routing.counts, &own.routing.slot, &own.routing.expert, &own.routing.row})
        array("routing", *each, false);
      array("weights", own.routing.weight, false);
      array("queue", w.entry, true), array("heard", w.heard, true);
      for (auto* each : {&w.doors, &w.made, &w.sent}) array("workspace", *each, true);
      emu::register_array("state", &w.state, sizeof w.state, true);
      emu::register_array("report", &w.report, sizeof w.report, true);
    }
    emu::register_array("heaps", heaps.at.data(), heaps.at.size() * sizeof(uint8_t*), false);
    if (absent >= 0) launch.ranks = absent;  // the last ones do not come
    emu::room = nullptr;
    if (c.room) emu::room = [&c] { return static_cast<size_t>(c.room * c.ranks); };
    const int eagerness = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 50 : 100;
    try {
      switch (c.activation) {
        case Activation::kRelu:
          run<Activation::kRelu>(launch, c.blocks, seed, eagerness);
          break;
        case Activation::kGelu:
          run<Activation::kGelu>(launch, c.blocks, seed, eagerness);
          break;
        case Activation::kSilu:
          run<Activation::kSilu>(launch, c.blocks, seed, eagerness);
          break;
        default:
          run<Activation::kSwiglu>(launch, c.blocks, seed, eagerness);
      }
    } catch (const std::runtime_error& error) {
      expect(false, where + ": " + error.what());
      return;
    }
    if (absent >= 0) {
      for (int rank = 0; rank < absent; ++rank) {
        const comet::Report& report = work[static_cast<size_t>(rank)]->report;
        expect(report.wait != 0 && report.peer == absent && report.rank == rank,
               where + ": rank " + std::to_string(rank) + " reports wait " + std::to_string(report.wait) +
                   " for rank " + std::to_string(report.peer));
      }
      return;
    }
    check(c, all, where);
    for (const auto& each : work) {
      expect(each->report.wait == 0, where + ": a report");
      expect(each->is_clean(), where + ": what the next round would find");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string asked = argc > 1 ? argv[1] : "";
  unsigned seed = 1;
  const auto go = [&](const Case& c) { play(c, seed++); };
  go({"two ranks", 2, 2, 2, {40, 25}});
  Case alone = {"alone, more than one tile", 1, 2, 2, {150}};
  alone.tiles = 2, alone.model = 136, alone.hidden = 136, alone.activation = Activation::kSwiglu;
  alone.bias = false, alone.rounds = 1, go(alone);
  Case skewed = {"all to one expert, one rank without tokens", 2, 1, 1, {0, 140}};
  skewed.favoured = 0, skewed.rounds = 1, skewed.activation = Activation::kRelu, go(skewed);
  Case narrow_room = {"two blocks of a rank are resident", 2, 1, 2, {20, 30}};
  narrow_room.room = 2, narrow_room.blocks = 4, narrow_room.activation = Activation::kSilu, go(narrow_room);
  go({"nothing at all", 2, 2, 1, {0, 0}});
  play({"a rank that does not come", 2, 1, 1, {8, 8}}, seed++, 1);
  if (asked == "thorough") {
    go({"four ranks", 4, 2, 3, {30, 50, 1, 20}});
    for (const Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      Case one = {"every activation", 2, 2, 2, {130, 140}};
      one.activation = activation, one.model = 136, one.hidden = 72, one.tiles = 2, one.rounds = 1, go(one);
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
