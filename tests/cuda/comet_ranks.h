// Ranks of COMET's two kernels in one emulated grid, round after round on the same heaps, and the plain loop
// that their results must equal.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "comet/ampere.cuh"
#include "comet/hopper.cuh"
#include "comet/launch.h"
#include "grouped_gemm/parts.h"

using namespace pmoe;
using namespace pmoe::comet;

namespace {

using T = bf16;

int failures = 0;
bool quiet = false;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  if (++failures < 20 && !quiet) std::printf("FAILED: %s\n", what.c_str());
}

// Memory on 1024 bytes.
struct Bytes {
  std::vector<uint8_t> memory;
  uint8_t* data = nullptr;
  size_t size = 0;
  Bytes() = default;
  Bytes(size_t bytes, uint8_t fill) : memory(bytes + 1024, fill), size(bytes) {
    data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 1023) & ~uintptr_t{1023});
  }
  Bytes(Bytes&&) = default;
  Bytes& operator=(Bytes&&) = default;
  template <class V>
  V* as() const {
    return reinterpret_cast<V*>(data);
  }
};

struct Case {
  int ranks = 2, experts = 2, top_k = 2;
  std::vector<int> tokens;  // by rank
  int model = 72, hidden = 64;
  Activation activation = Activation::kGelu;
  bool hopper = true, bias = true;
  int drop_percent = 0, favour = -1;  // an expert that most tokens choose
  int communicating = 1, blocks = 3, chunk_columns = 256;
  int blocks_across = 1;  // blocks of a cluster
  int rounds = 2;
  unsigned seed = 1, delay_seed = 0;
  int eagerness = 50;
  int missing = -1;         // a rank that never runs
  uint32_t not_waited = 0;  // see Watch
};

std::string told(const Case& c) {
  std::string text = c.hopper ? "hopper" : "ampere";
  text += " ranks " + std::to_string(c.ranks) + " experts " + std::to_string(c.experts) + " top_k " +
          std::to_string(c.top_k) + " tokens";
  for (int t : c.tokens) text += " " + std::to_string(t);
  return text + " model " + std::to_string(c.model) + " hidden " + std::to_string(c.hidden) + " activation " +
         std::to_string(static_cast<int>(c.activation)) + " n_c " + std::to_string(c.communicating) +
         " beside " + std::to_string(c.blocks_across) + " seed " + std::to_string(c.seed);
}

class World {
 public:
  explicit World(const Case& given) : c(given), random(given.seed), first_token(given.ranks + 1, 0) {
    std::partial_sum(c.tokens.begin(), c.tokens.end(), first_token.begin() + 1);
    all_tokens = first_token.back();
    gated = c.activation == Activation::kSwiglu;
    wide = gated ? 2 * c.hidden : c.hidden;
    capacity = larger(all_tokens * c.top_k, 1);
    const int most = larger(*std::max_element(c.tokens.begin(), c.tokens.end()) * c.top_k, 1);
    layout = {c.ranks, c.experts, capacity, most, c.model * 2};
    x = rows(all_tokens, c.model), grad = rows(all_tokens, c.model);
    for (int r = 0; r < c.ranks; ++r) {
      heaps.emplace_back(size_t(layout.bytes()), 0);
      bases.push_back(heaps[r].data);
      w1.push_back(rows(c.experts * wide, c.model)), w2.push_back(rows(c.experts * c.model, c.hidden));
      b1.push_back(rows(c.experts, wide)), b2.push_back(rows(c.experts, c.model));
      reports.push_back({});
    }
    parts = c.hopper ? hopper_row_dot_parts(c.hidden) : ampere_row_dot_parts(c.hidden);
  }

  void play() {
    for (int round = 0; round < c.rounds; ++round) {
      route();
      clear();
      if (!step("dispatch + GEMM", [&] { forward_dispatch(); })) return;
      check_dispatched(x);
      check_hidden();
      if (!step("GEMM + combine", [&] { forward_combine(); })) return;
      check_output();
      check_tiles();
      poison_inboxes();
      if (!step("dispatch + GEMM, backward", [&] { backward_dispatch(); })) return;
      check_dispatched(grad);
      check_gradients();
      if (!step("dispatch alone", [&] { dispatch_alone(); })) return;
      check_dispatched(x);
      if (!step("GEMM + combine, backward", [&] { backward_combine(); })) return;
      check_input_gradient();
      check_tiles();
    }
  }

  const Case c;
  std::vector<Report> reports;
  uint32_t epoch = 0;

  void forward_dispatch() {
    each([&](int r, Fused& f) {
      problem_dispatch(r, f.problem, w1[r], wide, c.model, hidden[r], wide);
      f.problem.active = active[r].data, f.problem.active_stride = c.hidden;
      if (c.bias) f.problem.bias = b1[r].data;
      f.rank.source = x.data, f.rank.source_stride = c.model * 2;
    });
    start(Kernel::kDispatch, Form::kForward, Epilogue::kHidden, c.activation);
  }

  void route() {
    const int all = c.ranks * c.experts;
    counts.assign(size_t(c.ranks) * all, 0);
    expert.assign(size_t(all_tokens) * c.top_k + 1, 0);
    position.assign(expert.size(), -1), slot.assign(expert.size(), 0), weight.assign(expert.size(), 0);
    std::vector<bool> kept(expert.size());
    for (int t = 0; t < all_tokens; ++t) {
      std::vector<int> order(all);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      if (c.favour >= 0 && random() % 8)
        std::iter_swap(order.begin(), std::find(order.begin(), order.end(), c.favour));
      for (int k = 0; k < c.top_k; ++k) {
        expert[t * c.top_k + k] = order[k];
        weight[t * c.top_k + k] = 0.25f + 0.001f * static_cast<float>(random() % 512);
        kept[t * c.top_k + k] = static_cast<int>(random() % 100) >= c.drop_percent;
      }
    }
    sent.assign(c.ranks, {});
    for (int r = 0; r < c.ranks; ++r) {
      for (int s = first_token[r] * c.top_k; s < first_token[r + 1] * c.top_k; ++s)
        if (kept[s]) sent[r].push_back(s);
      std::stable_sort(sent[r].begin(), sent[r].end(), [&](int a, int b) { return expert[a] < expert[b]; });
      for (size_t i = 0; i < sent[r].size(); ++i) {
        const int first = first_token[r] * c.top_k, s = sent[r][i];
        slot[first + i] = s, position[s] = first + static_cast<int>(i);
        ++counts[size_t(r) * all + expert[s]];
      }
    }
    received.assign(c.ranks, {});
    ends.assign(c.ranks, {});
    for (int d = 0; d < c.ranks; ++d)
      for (int e = 0; e < c.experts; ++e) {
        for (int l = 0; l < c.ranks; ++l)
          for (int s : sent[source_at(l, d, c.ranks)])
            if (expert[s] == d * c.experts + e) received[d].push_back(s);
        ends[d].push_back(static_cast<int>(received[d].size()));
      }
  }

  void clear() {
    hidden.clear(), active.clear(), gradient.clear(), weighted.clear(), dots.clear();
    for (int r = 0; r < c.ranks; ++r) {
      hidden.emplace_back(size_t(capacity) * wide * 2, 0xFF);
      active.emplace_back(size_t(capacity) * c.hidden * 2, 0xFF);
      gradient.emplace_back(size_t(capacity) * wide * 2, 0xFF);
      weighted.emplace_back(size_t(capacity) * c.hidden * 2, 0xFF);
      dots.emplace_back(size_t(capacity) * parts * 4, 0xFF);
    }
    y = Bytes(size_t(larger(all_tokens, 1)) * c.model * 2, 0xFF);
    of_x = Bytes(y.size, 0xFF), of_weight = Bytes(expert.size() * 4, 0xFF);
    poison_inboxes();
    for (int r = 0; r < c.ranks; ++r)
      std::memset(bases[r] + layout.home(), 0xFF, size_t(layout.home_rows * layout.row_bytes));
  }

  bool step(const char* what, const std::function<void()>& go) {
    try {
      ++launches;
      go();
    } catch (const std::runtime_error& error) {
      expect(false, told(c) + " " + what + ": " + error.what());
      return false;
    }
    return true;
  }

 private:
  Bytes rows(int count, int columns) {
    Bytes made(size_t(larger(count, 1)) * columns * 2, 0);
    for (int i = 0; i < count * columns; ++i)
      made.as<T>()[i] = narrow<T>(0.002f * static_cast<float>(static_cast<int>(random() % 1000) - 500));
    return made;
  }

  void poison_inboxes() {
    for (int r = 0; r < c.ranks; ++r)
      std::memset(bases[r] + layout.weights(), 0xFF, size_t(layout.dots() - layout.weights())),
          std::memset(bases[r] + layout.inbox(), 0xFF, size_t(layout.rows * layout.row_bytes));
  }

  void each(const std::function<void(int, Fused&)>& fill) {
    launch = Launch();
    launch.blocks = c.blocks;
    emu::unregister_arrays();
    const auto array = [](const std::string& name, const Bytes& bytes, bool writable) {
      emu::register_array(name, bytes.data, bytes.size, writable);
    };
    for (int r = 0; r < c.ranks; ++r) {
      Fused& f = launch.fused[r];
      Rank& k = f.rank;
      k.layout = layout, k.heaps = bases.data(), k.rank = r;
      k.watch = {&k.counters()->failed, &reports[r], r, epoch, bound, c.delay_seed, c.not_waited};
      k.send_counts = counts.data() + size_t(r) * c.ranks * c.experts;
      k.recv_counts = counts.data() + r * c.experts, k.recv_stride = c.ranks * c.experts;
      k.expert = expert.data(), k.weight = weight.data(), k.position = position.data(), k.slot = slot.data();
      k.first_row = first_token[r] * c.top_k, k.choices = c.top_k, k.by_choices = Divisor(c.top_k);
      k.by_experts = Divisor(c.experts);
      k.first_token = first_token[r], k.tokens = c.tokens[r];
      k.chunks = {c.model, c.chunk_columns};
      k.communicating = c.communicating, k.blocks = c.blocks;
      fill(r, f);
      f.problem.blocks_across = c.blocks_across;
      array("heap " + std::to_string(r), heaps[r], true);
      for (const auto* each : {&w1[r], &w2[r], &b1[r], &b2[r]}) array("parameters", *each, false);
      for (const auto* each : {&hidden[r], &active[r], &gradient[r], &weighted[r], &dots[r]})
        array("rows", *each, true);
      emu::register_array("report", &reports[r], sizeof(Report), true);
    }
    for (const auto* each : {&x, &grad}) array("tokens", *each, false);
    for (const auto* each : {&y, &of_x, &of_weight}) array("results", *each, true);
    emu::register_array("counts", counts.data(), counts.size() * 4, false);
    emu::register_array("expert", expert.data(), expert.size() * 4, false);
    emu::register_array("position", position.data(), position.size() * 4, false);
    emu::register_array("slot", slot.data(), slot.size() * 4, false);
    emu::register_array("weight", weight.data(), weight.size() * 4, false);
  }

  void problem_dispatch(int r, Problem& p, const Bytes& b, int n, int k, const Bytes& d, int d_stride) {
    p.a = bases[r] + layout.inbox(), p.a_stride = c.model, p.b = b.data, p.d = d.data, p.d_stride = d_stride;
    p.experts = c.experts, p.rows = capacity, p.n = n, p.k = k;
    p.weight = reinterpret_cast<const float*>(bases[r] + layout.weights());
    launch.fused[r].rank.watch.epoch = epoch + 1;
  }

  void problem_combine(int r, Problem& p, const Bytes& a, int k, const Bytes& b) {
    p.a = a.data, p.a_stride = k, p.b = b.data, p.d = bases[r] + layout.inbox(), p.d_stride = c.model;
    p.experts = c.experts, p.rows = capacity, p.n = c.model, p.k = k;
  }

  void backward_dispatch() {
    each([&](int r, Fused& f) {
      problem_dispatch(r, f.problem, w2[r], c.hidden, c.model, gradient[r], wide);
      f.problem.hidden = hidden[r].data, f.problem.hidden_stride = wide;
      f.problem.active = weighted[r].data, f.problem.active_stride = c.hidden, f.problem.weighs_active = 1;
      f.problem.row_dots = dots[r].as<float>();
      f.rank.source = grad.data, f.rank.source_stride = c.model * 2;
    });
    start(Kernel::kDispatch, Form::kInput, Epilogue::kHiddenGradient, c.activation);
  }

  void dispatch_alone() {
    each([&](int r, Fused& f) {
      problem_dispatch(r, f.problem, w1[r], wide, c.model, hidden[r], wide);
      f.rank.source = x.data, f.rank.source_stride = c.model * 2;
      f.rank.computes = 0, f.rank.communicating = c.blocks;
    });
    start(Kernel::kDispatch, Form::kForward, Epilogue::kHidden, Activation::kRelu);
  }

  void forward_combine() {
    each([&](int r, Fused& f) {
      problem_combine(r, f.problem, active[r], c.hidden, w2[r]);
      f.problem.weight = reinterpret_cast<const float*>(bases[r] + layout.weights());
      if (c.bias) f.problem.bias = b2[r].data;
      f.rank.result = y.data, f.rank.result_stride = c.model * 2;
    });
    start(Kernel::kCombine, Form::kForward, Epilogue::kPlain, Activation::kNone);
  }

  void backward_combine() {
    each([&](int r, Fused& f) {
      problem_combine(r, f.problem, gradient[r], wide, w1[r]);
      f.rank.result = of_x.data, f.rank.result_stride = c.model * 2;
      f.rank.row_dots = dots[r].as<float>(), f.rank.dot_parts = parts, f.rank.dot_rows = capacity;
      f.rank.weight_gradient = of_weight.as<float>();
    });
    start(Kernel::kCombine, Form::kInput, Epilogue::kPlain, Activation::kNone);
  }

  // By the product's own launch, which encodes maps for the emulator (runtime/).
  void start(Kernel kernel, Form form, Epilogue epilogue, Activation activation) {
    if (kernel == Kernel::kDispatch) ++epoch;
    const std::vector<int64_t> a_rows(static_cast<size_t>(c.ranks), capacity);
    stub::seed = c.seed + 31 * launches, stub::eagerness = c.eagerness;
    stub::absent = [this] { return static_cast<int>(blockIdx.x) / c.blocks == c.missing; };
    comet::launch(c.hopper ? comet::hopper_path : comet::ampere_path,
                  {kernel, Element::kBf16, form, epilogue, activation}, launch, c.ranks, a_rows.data(),
                  nullptr);
  }

  // ---- the plain definition

  static double at(const Bytes& b, size_t i) { return widen(b.as<T>()[i]); }

  void near(double found, double expected, double size, const std::string& what) {
    const double allowed = std::fabs(expected) / 256 + 1e-5 * size + 1e-6;
    expect(std::fabs(found - expected) <= allowed,
           told(c) + " " + what + ": " + std::to_string(found) + " is not " + std::to_string(expected));
  }

  int expert_of(int r, int row) const {
    int e = 0;
    while (row >= ends[r][e]) ++e;
    return e;
  }

  void check_dispatched(const Bytes& from) {
    for (int r = 0; r < c.ranks; ++r)
      for (size_t i = 0; i < received[r].size(); ++i) {
        const int s = received[r][i], t = s / c.top_k;
        const auto* const row = reinterpret_cast<const T*>(bases[r] + layout.inbox()) + i * c.model;
        for (int j = 0; j < c.model; ++j)
          expect(row[j].bits == from.as<T>()[size_t(t) * c.model + j].bits,
                 told(c) + " a row is not its token's");
        expect(reinterpret_cast<const float*>(bases[r] + layout.weights())[i] == weight[s],
               told(c) + " a row's weight");
      }
  }

  void check_hidden() {
    for (int r = 0; r < c.ranks; ++r)
      for (int i = 0; i < static_cast<int>(received[r].size()); ++i) {
        const int e = expert_of(r, i), t = received[r][i] / c.top_k;
        for (int g = 0; g < wide; ++g) {
          double sum = c.bias ? at(b1[r], size_t(e) * wide + g) : 0, size = 0;
          for (int j = 0; j < c.model; ++j) {
            const double term =
                at(x, size_t(t) * c.model + j) * at(w1[r], (size_t(e) * wide + g) * c.model + j);
            sum += term, size += std::fabs(term);
          }
          near(at(hidden[r], size_t(i) * wide + g), sum, size, "T_M");
        }
        for (int h = 0; h < c.hidden; ++h)
          near(at(active[r], size_t(i) * c.hidden + h), value(r, i, h), 1, "the activated hidden");
      }
  }

  double slope_or_value(float v, bool slope) const {
    switch (c.activation) {
      case Activation::kRelu:
        return slope ? Relu::derivative(v) : Relu::value(v);
      case Activation::kGelu:
        return slope ? Gelu::derivative(v) : Gelu::value(v);
      default:
        return slope ? Silu::derivative(v) : Silu::value(v);
    }
  }

  double value(int r, int row, int h) const {
    const double v = slope_or_value(widen(hidden[r].as<T>()[size_t(row) * wide + h]), false);
    return gated ? v * at(hidden[r], size_t(row) * wide + c.hidden + h) : v;
  }

  // Sums of rows' results at home. row(r, i, j): of row i of rank r, column j.
  template <class Row>
  void check_sums(const Bytes& found, const Row& row, const char* what) {
    std::vector<double> sum(size_t(all_tokens) * c.model, 0), size(sum.size(), 0);
    for (int r = 0; r < c.ranks; ++r)
      for (int i = 0; i < static_cast<int>(received[r].size()); ++i)
        for (int j = 0; j < c.model; ++j) {
          const double v = row(r, i, j);
          const size_t to = size_t(received[r][i] / c.top_k) * c.model + j;
          sum[to] += v, size[to] += std::fabs(v);
        }
    for (size_t i = 0; i < sum.size(); ++i) {
      // Rounded by row, by rank, and in all.
      const double allowed = 3 * size[i] / 256 + 1e-4, got = at(found, i);
      expect(std::fabs(got - sum[i]) <= allowed, told(c) + " " + what + " " + std::to_string(i) + ": " +
                                                     std::to_string(got) + " is not " +
                                                     std::to_string(sum[i]));
    }
  }

  void check_output() {
    check_sums(
        y,
        [&](int r, int i, int j) {
          const int e = expert_of(r, i);
          double sum = c.bias ? at(b2[r], size_t(e) * c.model + j) : 0;
          for (int h = 0; h < c.hidden; ++h)
            sum +=
                at(active[r], size_t(i) * c.hidden + h) * at(w2[r], (size_t(e) * c.model + j) * c.hidden + h);
          return sum * weight[received[r][i]];
        },
        "T_O");
  }

  // Each tile of the second product has counted once.
  void check_tiles() {
    const Path& path = c.hopper ? pmoe::comet::hopper_path : pmoe::comet::ampere_path;
    const Chunks chunks = {c.model, c.chunk_columns};
    for (int r = 0; r < c.ranks; ++r) {
      int down = 0;
      for (int e = 0; e < c.experts; ++e)
        down += ceil_div(ends[r][e] - (e ? ends[r][e - 1] : 0), path.tile_rows);
      const auto* const counters = reinterpret_cast<const Counters*>(bases[r] + layout.counters());
      for (int chunk = 0; chunk < chunks.count(); ++chunk)
        expect(counters->done[chunk] ==
                   static_cast<uint32_t>(down * ceil_div(chunks.width(chunk), path.tile_columns)),
               told(c) + " tiles of chunk " + std::to_string(chunk) + ": " +
                   std::to_string(counters->done[chunk]));
    }
  }

  void check_gradients() {
    expected_dot.assign(expert.size(), 0), dot_size.assign(expert.size(), 0);
    for (int r = 0; r < c.ranks; ++r)
      for (int i = 0; i < static_cast<int>(received[r].size()); ++i) {
        const int e = expert_of(r, i), s = received[r][i], t = s / c.top_k;
        for (int h = 0; h < c.hidden; ++h) {
          double of_active = 0, size = 0;
          for (int j = 0; j < c.model; ++j) {
            const double term =
                at(grad, size_t(t) * c.model + j) * at(w2[r], (size_t(e) * c.model + j) * c.hidden + h);
            of_active += term, size += std::fabs(term);
          }
          const float v = widen(hidden[r].as<T>()[size_t(i) * wide + h]);
          if (gated) {
            const double up = at(hidden[r], size_t(i) * wide + c.hidden + h);
            near(at(gradient[r], size_t(i) * wide + h), weight[s] * of_active * up * slope_or_value(v, true),
                 2 * size, "dT_M gate");
            near(at(gradient[r], size_t(i) * wide + c.hidden + h),
                 weight[s] * of_active * slope_or_value(v, false), 2 * size, "dT_M up");
          } else {
            near(at(gradient[r], size_t(i) * wide + h), weight[s] * of_active * slope_or_value(v, true),
                 2 * size, "dT_M");
          }
          near(at(weighted[r], size_t(i) * c.hidden + h), value(r, i, h) * weight[s], 1,
               "the weighted hidden");
          expected_dot[s] += value(r, i, h) * of_active, dot_size[s] += std::fabs(value(r, i, h)) * size;
        }
      }
  }

  void check_input_gradient() {
    check_sums(
        of_x,
        [&](int r, int i, int j) {
          const int e = expert_of(r, i);
          double sum = 0;
          for (int g = 0; g < wide; ++g)
            sum += at(gradient[r], size_t(i) * wide + g) * at(w1[r], (size_t(e) * wide + g) * c.model + j);
          return sum;
        },
        "dT_I");
    for (int s = 0; s < all_tokens * c.top_k; ++s) {
      const double found = of_weight.as<float>()[s];
      expect(std::fabs(found - expected_dot[s]) <= 1e-5 * dot_size[s] + 1e-6,
             told(c) + " the gradient of a weight: " + std::to_string(found) + " is not " +
                 std::to_string(expected_dot[s]));
    }
  }

  std::mt19937 random;
  std::vector<int> first_token;
  int all_tokens = 0, wide = 0, capacity = 0, parts = 0;
  unsigned launches = 0;
  bool gated = false;
  Layout layout{};
  Launch launch;
  std::vector<Bytes> heaps, w1, w2, b1, b2, hidden, active, gradient, weighted, dots;
  std::vector<uint8_t*> bases;
  Bytes x, grad, y, of_x, of_weight;
  std::vector<int32_t> counts, expert, position, slot;
  std::vector<float> weight;
  std::vector<std::vector<int>> sent, received, ends;  // slots by rank
  std::vector<double> expected_dot, dot_size;

 public:
  uint64_t bound = uint64_t{1} << 40;
};

}  // namespace
