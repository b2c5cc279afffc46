// Both grouped products on the CPU, every thread of them, against a plain loop.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "common/device.cuh"
#include "grouped_gemm/ampere.cuh"
#include "grouped_gemm/hopper.cuh"
#include "grouped_gemm/launch.h"
#include "grouped_gemm/parts.h"
#include "grouped_gemm/storing.h"

using namespace pmoe;

namespace {

struct Random {
  std::mt19937 engine;
  float operator()() { return std::uniform_real_distribution<float>(-1, 1)(engine); }
};

template <class T>
std::vector<T> random_rows(Random& random, size_t count, float scale = 1) {
  std::vector<T> rows(count + 8);
  for (auto& each : rows) each = narrow<T>(scale * random());
  return rows;
}

template <class T>
T* aligned(std::vector<T>& v) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(v.data()) + 15) & ~uintptr_t{15});
}

struct Case {
  std::vector<int> groups;
  int m = 0, n = 0, k = 0;
  bool hopper = true;
  Sharing sharing = Sharing::kNothing;
  bool in_turns = false, boxed = false;
  bool gated = false, bias = false, weighted = false;
  bool gathered = false;    // forward products alone gather rows of A
  bool b_gathered = false;  // weight gradients alone gather rows of B
  bool placed = false;      // plain products alone store rows at places
  Activation activation = Activation::kGelu;
  bool wide = false, accumulates = false, weighs_active = false, no_hidden = false;
  int top_k = 1, spare_rows = 0;
  unsigned grid = 2, seed = 1;
  int eagerness = 50;
};

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  if (++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

std::string told(const Case& c, const char* form) {
  std::string text = std::string(form) + (c.hopper ? " hopper" : " ampere") +
                     (c.sharing == Sharing::kB   ? " sharing B"
                      : c.sharing == Sharing::kA ? " sharing A"
                                                 : "") +
                     (c.in_turns ? " in turns" : "") + (c.boxed ? " boxed" : "") + " groups";
  for (int g : c.groups) text += " " + std::to_string(g);
  return text + " m " + std::to_string(c.m) + " n " + std::to_string(c.n) + " k " + std::to_string(c.k) +
         " gated " + std::to_string(c.gated) + " gathered " + std::to_string(c.gathered) + " B gathered " +
         std::to_string(c.b_gathered) + " placed " + std::to_string(c.placed) + " bias " +
         std::to_string(c.bias) + " weighted " + std::to_string(c.weighted) + " seed " +
         std::to_string(c.seed);
}

// By the product's own launch, which encodes maps for the emulator (runtime/).
template <class T>
void run(const Case& c, Problem p, Form form, Epilogue epilogue, Activation activation, int sources) {
  GroupedGemm which = {std::is_same_v<T, bf16> ? Element::kBf16 : Element::kFp16, form, epilogue, activation,
                       c.sharing == Sharing::kB ? 2 : 1};
  which.in_turns = c.in_turns && can_take_turns(which, p);
  which.boxed = c.boxed && can_store_boxes(which, c.sharing);
  which.b_gathered = c.b_gathered;
  const GroupedGemmPath& path = c.hopper ? hopper_path : ampere_path;
  p.blocks_across = c.sharing == Sharing::kA ? 2 : 1;
  const int blocks = static_cast<int>(c.grid) * which.cluster * p.blocks_across;
  stub::seed = c.seed, stub::eagerness = c.eagerness;
  path.launch(which, p, c.gathered ? sources : p.rows, c.b_gathered ? sources : p.rows, blocks, nullptr);
}

template <class T>
struct Operands {
  int total = 0, rows = 0, sources = 0;
  std::vector<int32_t> ends, slot, place;
  std::vector<float> weight;

  Operands(const Case& c, Random& random) {
    for (int g : c.groups) ends.push_back(total += g);
    rows = total + c.spare_rows;
    const int slots = static_cast<int>(ceil_div(larger(rows, 1), c.top_k)) * c.top_k;
    sources = slots / c.top_k;
    slot.resize(slots);
    for (int i = 0; i < slots; ++i) slot[i] = i;
    std::shuffle(slot.begin(), slot.end(), random.engine);
    for (int i = 0; i < slots; ++i) weight.push_back(0.25f + 0.5f * random());
    for (int r = 0; r < rows; ++r) place.push_back(r);
    if (c.placed) std::shuffle(place.begin(), place.end(), random.engine);
  }

  int source(const Case& c, int r) const { return c.gathered ? slot[r] / c.top_k : r; }
  int source_of_b(const Case& c, int r) const { return c.b_gathered ? slot[r] / c.top_k : r; }
  float weight_of(const Case& c, int r) const { return c.weighted ? weight[c.gathered ? slot[r] : r] : 1.0f; }
  int expert(int r) const {
    int e = 0;
    while (r >= ends[e]) ++e;
    return e;
  }
};

template <class T>
void common(const Case& c, const Operands<T>& o, Problem& p) {
  p.ends = o.ends.data();
  p.slot = c.gathered || c.b_gathered ? o.slot.data() : nullptr;
  p.top_k = Divisor(c.top_k);
  p.experts = static_cast<int>(c.groups.size());
  p.rows = o.rows;
  p.m = c.m, p.n = c.n, p.k = c.k;
  p.a_gathered = c.gathered;
  p.weight = c.weighted ? o.weight.data() : nullptr;
  emu::unregister_arrays();
  emu::register_array("ends", o.ends.data(), o.ends.size() * 4, false);
  emu::register_array("slot", o.slot.data(), o.slot.size() * 4, false);
  emu::register_array("weight", o.weight.data(), o.weight.size() * 4, false);
}

constexpr uint16_t kPoison = 0xFFFF;  // a NaN in both types

std::vector<uint8_t> results;  // the bytes of all results of the last product

template <class T>
void keep(std::initializer_list<const std::vector<T>*> arrays) {
  results.clear();
  for (const std::vector<T>* array : arrays) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(array->data());
    results.insert(results.end(), bytes, bytes + array->size() * sizeof(T));
  }
}

template <class T>
bool is_poison(T x) {
  return x.bits == kPoison;
}

// |got - expected| within the rounding of T, and of sums in another order.
template <class T>
void expect_close(float got, double expected, double magnitude, const std::string& what) {
  const double unit = std::is_same_v<T, bf16> ? 1.0 / 256 : 1.0 / 2048;
  const double allowed = unit * std::fabs(expected) + 1e-5 * magnitude + 1e-6;
  expect(std::fabs(got - expected) <= allowed,
         what + ": " + std::to_string(got) + " is not " + std::to_string(expected));
}

template <class T, Form kForm>
void test_plain(const Case& c) {
  Random random{std::mt19937(c.seed)};
  const Operands<T> o(c, random);
  const int experts = static_cast<int>(c.groups.size()), stride = c.k + 8;
  const int sources = c.gathered ? o.sources : larger(o.rows, 1);
  auto a_memory = random_rows<T>(random, size_t(sources) * stride),
       b_memory = random_rows<T>(random, size_t(experts) * c.n * c.k);
  auto bias_memory = random_rows<T>(random, size_t(experts) * c.n);
  T *a = aligned(a_memory), *b = aligned(b_memory), *bias = aligned(bias_memory);
  std::vector<T> d_memory(size_t(larger(o.rows, 1)) * c.n + 8, T{kPoison});
  T* d = aligned(d_memory);
  Problem p;
  common(c, o, p);
  p.a = a, p.a_stride = stride, p.b = b, p.d = d, p.d_stride = c.n;
  if (c.bias) p.bias = bias;
  if (c.placed) p.place = o.place.data();
  emu::register_array("place", o.place.data(), o.place.size() * 4, false);
  emu::register_array("A", a, size_t(sources) * stride * 2, false);
  emu::register_array("B", b, size_t(experts) * c.n * c.k * 2, false);
  emu::register_array("bias", bias, size_t(experts) * c.n * 2, false);
  emu::register_array("D", d, size_t(larger(o.rows, 1)) * c.n * 2, true);
  const auto text = told(c, kForm == Form::kForward ? "forward" : "input");
  try {
    run<T>(c, p, kForm, Epilogue::kPlain, Activation::kNone, o.sources);
  } catch (const std::runtime_error& error) {
    return expect(false, text + ": " + error.what());
  }
  keep<T>({&d_memory});
  for (int r = 0; r < o.rows; ++r)
    for (int j = 0; j < c.n; ++j) {
      const T found = d[size_t(o.place[r]) * c.n + j];
      if (r >= o.total) {
        expect(is_poison(found), text + ": a row beyond all groups was written");
        continue;
      }
      const int e = o.expert(r);
      double sum = c.bias ? widen(bias[size_t(e) * c.n + j]) : 0, size = 0;
      for (int i = 0; i < c.k; ++i) {
        const double x = widen(a[size_t(o.source(c, r)) * stride + i]);
        const double y = kForm == Form::kForward ? widen(b[(size_t(e) * c.n + j) * c.k + i])
                                                 : widen(b[(size_t(e) * c.k + i) * c.n + j]);
        sum += x * y, size += std::fabs(x * y);
      }
      expect_close<T>(widen(found), sum * o.weight_of(c, r), size, text);
    }
}

template <class T, Activation kActivation>
void test_hidden_of(const Case& c) {
  constexpr bool kGated = kActivation == Activation::kSwiglu;
  Random random{std::mt19937(c.seed)};
  const Operands<T> o(c, random);
  const int experts = static_cast<int>(c.groups.size()), stride = c.k, hidden = kGated ? c.n / 2 : c.n;
  const int sources = c.gathered ? o.sources : larger(o.rows, 1);
  auto a_memory = random_rows<T>(random, size_t(sources) * stride),
       b_memory = random_rows<T>(random, size_t(experts) * c.n * c.k);
  auto bias_memory = random_rows<T>(random, size_t(experts) * c.n);
  T *a = aligned(a_memory), *b = aligned(b_memory), *bias = aligned(bias_memory);
  std::vector<T> d_memory(size_t(larger(o.rows, 1)) * c.n + 8, T{kPoison}),
      active_memory(size_t(larger(o.rows, 1)) * hidden + 8, T{kPoison});
  T *d = aligned(d_memory), *active = aligned(active_memory);
  Problem p;
  common(c, o, p);
  p.a = a, p.a_stride = stride, p.b = b, p.d = c.no_hidden ? nullptr : d, p.d_stride = c.n;
  p.active = active, p.active_stride = hidden;
  if (c.bias) p.bias = bias;
  emu::register_array("A", a, size_t(sources) * stride * 2, false);
  emu::register_array("B", b, size_t(experts) * c.n * c.k * 2, false);
  emu::register_array("bias", bias, size_t(experts) * c.n * 2, false);
  emu::register_array("T_M", d, size_t(larger(o.rows, 1)) * c.n * 2, true);
  emu::register_array("active", active, size_t(larger(o.rows, 1)) * hidden * 2, true);
  const auto text = told(c, "hidden");
  try {
    run<T>(c, p, Form::kForward, Epilogue::kHidden, kActivation, o.sources);
  } catch (const std::runtime_error& error) {
    return expect(false, text + ": " + error.what());
  }
  keep<T>({&d_memory, &active_memory});
  for (int r = 0; r < o.rows; ++r)
    for (int j = 0; j < hidden; ++j) {
      if (r >= o.total) {
        expect(is_poison(active[size_t(r) * hidden + j]), text + ": a row beyond all groups was written");
        continue;
      }
      const int e = o.expert(r);
      // What each half of T_M may be: the activation takes T_M as it was rounded. Where T_M is not stored,
      // only the sum and its error are known.
      std::vector<float> possible[2] = {{0}, {0}};
      for (int half = 0; half < (kGated ? 2 : 1); ++half) {
        const int column = half * hidden + j;
        double sum = c.bias ? widen(bias[size_t(e) * c.n + column]) : 0, size = 0;
        for (int i = 0; i < c.k; ++i) {
          const double u = widen(a[size_t(o.source(c, r)) * stride + i]),
                       v = widen(b[(size_t(e) * c.n + column) * c.k + i]);
          sum += u * v, size += std::fabs(u * v);
        }
        const T stored = d[size_t(r) * c.n + column];
        if (c.no_hidden) {
          expect(is_poison(stored), text + ": T_M was written");
          possible[half].clear();
          for (const double error : {-1e-5 * size, 0.0, 1e-5 * size})
            possible[half].push_back(widen(narrow<T>(static_cast<float>(sum + error))));
        } else {
          expect_close<T>(widen(stored), sum, size, text + " T_M");
          possible[half] = {widen(stored)};
        }
      }
      const float found = widen(active[size_t(r) * hidden + j]);
      double least = INFINITY;
      double most = -INFINITY;
      for (const float x : possible[0])
        for (const float up : possible[1]) {
          const double value = kGated ? double(Silu::value(x)) * up : double(Function<kActivation>::value(x));
          least = std::min(least, value);
          most = std::max(most, value);
        }
      const double expected = std::min(std::max(double(found), least), most);  // the nearest possible value
      expect_close<T>(found, expected, 1, text + " active");
    }
}

template <class T, Activation kActivation>
void test_hidden_gradient_of(const Case& c) {
  constexpr bool kGated = kActivation == Activation::kSwiglu;
  Random random{std::mt19937(c.seed)};
  const Operands<T> o(c, random);
  const int experts = static_cast<int>(c.groups.size()), stride = c.k, width = kGated ? 2 * c.n : c.n;
  const size_t rows = larger(o.rows, 1);
  auto a_memory = random_rows<T>(random, rows * stride),
       b_memory = random_rows<T>(random, size_t(experts) * c.n * c.k);
  auto hidden_memory = random_rows<T>(random, rows * width, 2);
  T *a = aligned(a_memory), *b = aligned(b_memory), *hidden = aligned(hidden_memory);
  std::vector<T> d_memory(rows * width + 8, T{kPoison}), active_memory(rows * c.n + 8, T{kPoison});
  T *d = aligned(d_memory), *active = aligned(active_memory);
  const int parts = c.in_turns && kGated ? turns_row_dot_parts(c.n)
                    : c.hopper           ? hopper_row_dot_parts(c.n)
                                         : ampere_row_dot_parts(c.n);
  std::vector<float> dots(parts * rows, NAN);
  Problem p;
  common(c, o, p);
  p.a = a, p.a_stride = stride, p.b = b, p.d = d, p.d_stride = width, p.active = active,
  p.active_stride = c.n;
  p.hidden = hidden, p.hidden_stride = width, p.row_dots = dots.data(), p.weighs_active = c.weighs_active;
  emu::register_array("A", a, rows * stride * 2, false);
  emu::register_array("B", b, size_t(experts) * c.n * c.k * 2, false);
  emu::register_array("T_M", hidden, rows * width * 2, false);
  emu::register_array("dT_M", d, rows * width * 2, true);
  emu::register_array("active", active, rows * c.n * 2, true);
  emu::register_array("row_dots", dots.data(), dots.size() * 4, true);
  const auto text = told(c, "hidden gradient");
  try {
    run<T>(c, p, Form::kInput, Epilogue::kHiddenGradient, kActivation, o.sources);
  } catch (const std::runtime_error& error) {
    return expect(false, text + ": " + error.what());
  }
  keep<T>({&d_memory, &active_memory});
  for (int r = 0; r < o.total; ++r) {
    const int e = o.expert(r);
    const double weight = o.weight_of(c, r);
    double dot = 0, dot_size = 0;
    for (int j = 0; j < c.n; ++j) {
      double grad = 0, size = 0;
      for (int i = 0; i < c.k; ++i) {
        const double u = widen(a[size_t(r) * stride + i]), v = widen(b[(size_t(e) * c.k + i) * c.n + j]);
        grad += u * v, size += std::fabs(u * v);
      }
      const float x = widen(hidden[size_t(r) * width + j]);
      double value;
      if (kGated) {
        const float up = widen(hidden[size_t(r) * width + c.n + j]);
        value = double(Silu::value(x)) * up;
        expect_close<T>(widen(d[size_t(r) * width + j]), weight * grad * up * Silu::derivative(x), 2 * size,
                        text + " gate");
        expect_close<T>(widen(d[size_t(r) * width + c.n + j]), weight * grad * Silu::value(x), 2 * size,
                        text + " up");
      } else {
        value = Function<kActivation>::value(x);
        expect_close<T>(widen(d[size_t(r) * width + j]), weight * grad * Function<kActivation>::derivative(x),
                        2 * size, text + " dT_M");
      }
      dot += value * grad, dot_size += std::fabs(value) * size;
      expect_close<T>(widen(active[size_t(r) * c.n + j]), value * (c.weighs_active ? weight : 1), 1,
                      text + " active");
    }
    float found = 0;
    for (int part = 0; part < parts; ++part) found += dots[part * rows + r];
    expect(std::fabs(found - dot) <= 1e-5 * dot_size + 1e-6,
           text + " row dot: " + std::to_string(found) + " is not " + std::to_string(dot));
  }
}

template <class T>
void test_weight(const Case& c) {
  Random random{std::mt19937(c.seed)};
  const Operands<T> o(c, random);
  const int experts = static_cast<int>(c.groups.size());
  const size_t rows = larger(o.rows, 1);
  const int stride_a = c.m + 8, stride_b = c.n + 16;
  const size_t rows_of_b = c.b_gathered ? o.sources : rows;
  auto a_memory = random_rows<T>(random, rows * stride_a),
       b_memory = random_rows<T>(random, rows_of_b * stride_b);
  T *a = aligned(a_memory), *b = aligned(b_memory);
  // What lies behind a group must not be touched by arithmetic: infinity times zero is no zero.
  for (int r = o.total; r < o.rows; ++r) {
    for (int i = 0; i < c.m; ++i) a[r * stride_a + i] = narrow<T>(INFINITY);
    for (int i = 0; i < c.n && !c.b_gathered; ++i) b[r * stride_b + i] = narrow<T>(INFINITY);
  }
  const size_t count = size_t(experts) * c.m * c.n;
  std::vector<float> wide_memory(count + 8, NAN);
  std::vector<T> narrow_memory(count + 8, T{kPoison});
  float* wide = aligned(wide_memory);
  T* thin = aligned(narrow_memory);
  std::vector<float> before(count, 0);
  if (c.accumulates)
    for (size_t i = 0; i < count; ++i) wide[i] = before[i] = random();
  Problem p;
  common(c, o, p);
  p.a = a, p.b = b, p.a_stride = stride_a, p.b_stride = stride_b;
  p.d = c.wide ? static_cast<void*>(wide) : thin, p.d_stride = c.n, p.wide = c.wide,
  p.accumulates = c.accumulates;
  emu::register_array("A", a, rows * stride_a * 2, false);
  emu::register_array("B", b, rows_of_b * stride_b * 2, false);
  emu::register_array("D", p.d, count * (c.wide ? 4 : 2), true);
  const auto text = told(c, "weight");
  try {
    run<T>(c, p, Form::kWeight, Epilogue::kPlain, Activation::kNone, o.sources);
  } catch (const std::runtime_error& error) {
    return expect(false, text + ": " + error.what());
  }
  keep<T>({&narrow_memory});
  for (int e = 0; e < experts; ++e)
    for (int i = 0; i < c.m; ++i)
      for (int j = 0; j < c.n; ++j) {
        const size_t at = (size_t(e) * c.m + i) * c.n + j;
        double sum = before[at], size = 0;
        for (int r = e ? o.ends[e - 1] : 0; r < o.ends[e]; ++r) {
          const double x = widen(a[r * stride_a + i]), y = widen(b[o.source_of_b(c, r) * stride_b + j]);
          sum += x * y, size += std::fabs(x * y);
        }
        if (c.wide)
          expect(std::fabs(wide[at] - sum) <= 1e-5 * size + 1e-6,
                 text + ": " + std::to_string(wide[at]) + " is not " + std::to_string(sum));
        else
          expect_close<T>(widen(thin[at]), sum, size, text);
      }
}

template <class T, bool kGated>
void test_hidden(const Case& c) {
  if (kGated) return test_hidden_of<T, Activation::kSwiglu>(c);
  if (c.activation == Activation::kRelu) return test_hidden_of<T, Activation::kRelu>(c);
  if (c.activation == Activation::kGelu) return test_hidden_of<T, Activation::kGelu>(c);
  return test_hidden_of<T, Activation::kSilu>(c);
}

template <class T, bool kGated>
void test_hidden_gradient(const Case& c) {
  if (kGated) return test_hidden_gradient_of<T, Activation::kSwiglu>(c);
  if (c.activation == Activation::kRelu) return test_hidden_gradient_of<T, Activation::kRelu>(c);
  if (c.activation == Activation::kGelu) return test_hidden_gradient_of<T, Activation::kGelu>(c);
  return test_hidden_gradient_of<T, Activation::kSilu>(c);
}

constexpr struct {
  bool hopper;
  Sharing sharing;
} kPaths[] = {
    {true, Sharing::kNothing}, {true, Sharing::kB}, {true, Sharing::kA}, {false, Sharing::kNothing}};

Case in_place(Case c) {
  c.gathered = false;
  return c;
}

void every_form(Case c) {
  for (const auto& path : kPaths) {
    c.hopper = path.hopper, c.sharing = path.sharing;
    test_plain<bf16, Form::kForward>(c);
    test_plain<bf16, Form::kInput>(in_place(c));
  }
}

// Products by two warpgroups that take turns. A block has up to 14 tiles, so the places of tiles are used
// several times. Tiles have fewer steps than the ring has stages, as many, and more.
void in_turns(bool thorough) {
  Case c;
  c.in_turns = true;
  unsigned seed = 500;
  for (int eagerness : {0, 30, 100}) {
    if (eagerness == 30 && !thorough) continue;
    for (Sharing sharing : {Sharing::kNothing, Sharing::kA}) {
      c.sharing = sharing, c.eagerness = eagerness;
      for (int k : {72, 64 * 6, 64 * 7 + 8}) {
        if (k == 64 * 6 && !thorough) continue;
        c.seed = ++seed, c.k = k, c.grid = 1 + seed % 2, c.spare_rows = seed % 2 ? 5 : 0;
        c.groups = k == 72 ? std::vector<int>{0, 129, 3, 0, 127} : std::vector<int>{130, 0, 70};
        c.n = 264, c.placed = false, c.bias = c.weighted = seed % 2;
        test_plain<bf16, Form::kForward>(c);
        c.placed = true, c.n = 40;
        test_plain<fp16, Form::kInput>(c);
        c.bias = false, c.weighted = true, c.weighs_active = seed % 2, c.n = k == 72 ? 264 : 144;
        test_hidden_gradient<bf16, true>(c);
        c.n = k == 72 ? 272 : 144, c.bias = seed % 2 == 0, c.no_hidden = k > 72 && eagerness > 0;
        test_hidden<fp16, true>(c);
        c.bias = c.no_hidden = false;
        c.groups = {1}, c.n = 8;
        test_hidden_gradient<fp16, true>(c);
        c.n = 16;
        test_hidden<bf16, true>(c);
      }
    }
  }
  // The first step of tile 0 arrives long after the other stages. Tile 1, 2 or 3 is the next to use its
  // stage.
  c = Case{};
  c.in_turns = true;
  c.eagerness = 100;
  c.grid = 1;
  c.groups = {3, 0, 2};
  emu::late_boxes = 1;
  for (Sharing sharing : {Sharing::kNothing, Sharing::kA}) {
    c.sharing = sharing;
    c.n = sharing == Sharing::kA ? 1024 : 512;
    for (int steps = 1; steps <= 8; ++steps) {
      c.seed = ++seed;
      c.k = 64 * steps;
      test_plain<bf16, Form::kForward>(c);
    }
  }
  emu::late_boxes = 0;
  if (!thorough) return;
  Random random{std::mt19937(77)};
  const auto draw = [&](int least, int most) {
    return least + static_cast<int>(random.engine() % (most - least + 1));
  };
  for (int i = 0; i < 30; ++i) {
    c.groups.clear();
    for (int e = draw(1, 6); e > 0; --e)
      c.groups.push_back(draw(0, 3) ? draw(0, 140) : draw(0, 1) * draw(100, 400));
    c.sharing = i % 2 ? Sharing::kA : Sharing::kNothing;
    c.seed = 2000 + i, c.eagerness = draw(0, 100), c.grid = draw(1, 4), c.spare_rows = draw(0, 9);
    c.n = 8 * draw(1, 50), c.k = 8 * draw(1, 70), c.placed = draw(0, 1), c.bias = draw(0, 1);
    c.weighted = draw(0, 1), c.weighs_active = draw(0, 1);
    test_plain<bf16, Form::kForward>(c);
    test_plain<fp16, Form::kInput>(c);
    c.weighted = true;
    test_hidden_gradient<bf16, true>(c);
    test_hidden_gradient<fp16, true>(c);
    c.n = 16 * draw(1, 25), c.no_hidden = draw(0, 1);
    test_hidden<bf16, true>(c);
    test_hidden<fp16, true>(c);
  }
}

// The ways to store a product's tiles beside other products for which there are kernels.
struct Ways {
  bool boxes, turns;
};

// Runs a test with tiles that are stored alone, through registers, and in the other ways. The results must be
// equal to the bit.
template <class Test>
void same_bits(Case c, const Test& test, Ways ways) {
  const auto results_of = [&](bool boxed, bool in_turns) {
    c.boxed = boxed, c.in_turns = in_turns;
    test(c);
    return results;
  };
  const std::vector<uint8_t> alone = results_of(false, false);
  if (ways.boxes) expect(results_of(true, false) == alone, told(c, "boxes differ from registers:"));
  if (ways.turns) expect(results_of(false, true) == alone, told(c, "turns differ from registers:"));
}

// Compares all products that can be stored beside others with the same products that are stored alone.
template <class T>
void same_bits_of_all(const Case& c) {
  same_bits(c, test_weight<T>, {true, false});
  if (c.sharing == Sharing::kB) return;  // the others have no kernel that shares B
  same_bits(c, test_plain<T, Form::kForward>, {true, true});
  same_bits(c, test_plain<T, Form::kInput>, {true, true});
  Case gated = c;
  gated.n = 336;  // 168 columns of each half
  same_bits(gated, test_hidden<T, true>, {true, true});
  gated.weighted = true;  // the gradient takes routing weights
  same_bits(gated, test_hidden_gradient<T, true>, {false, true});
}

// Products whose results the tensor memory accelerator stores. Tiles have whole boxes, boxes with fewer rows
// or columns, and boxes beyond the columns.
void boxes(bool thorough) {
  unsigned seed = 700;
  for (int eagerness : {0, 40, 100}) {
    if (eagerness == 40 && !thorough) continue;
    for (Sharing sharing : {Sharing::kNothing, Sharing::kA, Sharing::kB}) {
      Case c;
      c.sharing = sharing, c.eagerness = eagerness, c.seed = ++seed;
      c.grid = 1 + seed % 2, c.spare_rows = 5;
      c.n = 328, c.k = 72, c.m = 136, c.bias = c.weighted = seed % 2;
      c.groups = {0, 129, 3, 0, 144};
      same_bits_of_all<bf16>(c);
      same_bits_of_all<fp16>(c);
      if (eagerness == 100) {
        c.groups = {128, 16};  // whole tiles, and one whole box of each warp
        same_bits_of_all<bf16>(c);
        same_bits_of_all<fp16>(c);
      }
      // What is stored by threads, or loaded by them.
      c.boxed = true;
      c.groups = {0, 129, 3, 0, 144};
      c.wide = true;
      test_weight<fp16>(c);
      c.wide = false;
      if (sharing == Sharing::kB) continue;
      c.placed = true;
      test_plain<bf16, Form::kInput>(c);
      c.placed = false, c.gathered = true, c.top_k = 2;
      test_plain<bf16, Form::kForward>(c);
      c.n = 336;
      test_hidden<bf16, true>(c);
      c.no_hidden = true;
      test_hidden<bf16, true>(c);
      c.no_hidden = c.gathered = false;
      // The ring goes round several times, and some tiles have no step.
      c.b_gathered = true, c.n = 328, c.groups = {0, 300, 3, 0, 64};
      test_weight<bf16>(c);
      c.top_k = 1, c.n = 40, c.groups = {0, 0, 0, 70, 0};
      test_weight<fp16>(c);
    }
  }
  if (!thorough) return;
  Random random{std::mt19937(78)};
  const auto draw = [&](int least, int most) {
    return least + static_cast<int>(random.engine() % (most - least + 1));
  };
  for (int i = 0; i < 30; ++i) {
    Case c;
    c.boxed = true;
    for (int e = draw(1, 6); e > 0; --e)
      c.groups.push_back(draw(0, 3) ? draw(0, 140) : draw(0, 1) * draw(100, 400));
    c.sharing = i % 2 ? Sharing::kA : Sharing::kNothing;
    c.seed = 3000 + i, c.eagerness = draw(0, 100), c.grid = draw(1, 4), c.spare_rows = draw(0, 9);
    c.n = 8 * draw(1, 70), c.k = 8 * draw(1, 40), c.m = 8 * draw(1, 40);
    c.bias = draw(0, 1), c.weighted = draw(0, 1);
    same_bits(c, test_plain<bf16, Form::kForward>, {true, true});
    same_bits(c, test_plain<fp16, Form::kInput>, {true, true});
    same_bits(c, test_weight<bf16>, {true, false});
    c.b_gathered = true, c.top_k = draw(1, 4);
    test_weight<fp16>(c);
    c.b_gathered = false, c.top_k = 1;
    c.n = 16 * draw(1, 35), c.no_hidden = draw(0, 1);
    same_bits(c, test_hidden<bf16, true>, {true, true});
  }
}

int report() {
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}

}  // namespace

// Arguments: "turns" for products in turns instead of all others, "boxes" for those that are stored as boxes;
// "thorough" for many random sizes.
int main(int argc, char** argv) {
  const auto has = [&](const char* word) {
    return std::any_of(argv + 1, argv + argc, [&](const char* each) { return std::string(each) == word; });
  };
  const bool thorough = has("thorough");
  if (has("turns")) {
    in_turns(thorough);
    return report();
  }
  if (has("boxes")) {
    boxes(thorough);
    return report();
  }
  unsigned seed = 1;
  // Sizes around tile edges, empty groups, one row; columns and depth that end inside a tile.
  std::vector<std::vector<int>> groups = {{0, 3, 0}, {127, 129}};
  if (thorough) groups.insert(groups.end(), {{0}, {128, 0, 1}, {1}, {40, 300}});
  for (const auto& each : groups) {
    Case c;
    c.groups = each, c.seed = ++seed, c.n = 264, c.k = 72, c.eagerness = seed * 37 % 101,
    c.grid = 1 + seed % 3;
    c.spare_rows = seed % 2 ? 5 : 0;
    every_form(c);
    c.placed = true;
    every_form(c);
    c.placed = seed % 2;
    c.gathered = true, c.top_k = 1 + seed % 3, c.bias = true, c.weighted = true, c.n = 40, c.k = 136;
    every_form(c);
    for (const auto& path : kPaths) {
      c.hopper = path.hopper, c.sharing = path.sharing;
      c.gathered = seed % 2, c.k = 72, c.n = 272, c.bias = seed % 3 == 0;
      c.activation = static_cast<Activation>(1 + seed % 3);
      test_hidden<bf16, true>(c);
      c.n = 136;
      test_hidden<fp16, false>(c);
      c.no_hidden = seed % 2, c.n = 144;
      test_hidden<bf16, true>(c);
      c.no_hidden = false;
      c.n = 264, c.weighs_active = seed % 2;
      test_hidden_gradient<bf16, true>(in_place(c));
      c.n = 72;
      test_hidden_gradient<fp16, false>(in_place(c));
      c.bias = false;
      c.gathered = false;
      c.m = 72, c.n = 264, c.k = 0, c.wide = seed % 2, c.accumulates = false;
      test_weight<bf16>(c);
      c.wide = c.accumulates = true, c.m = 136, c.n = 40;
      test_weight<bf16>(c);
      c.wide = c.accumulates = false;
      test_weight<fp16>(c);
    }
  }
  // A ring that goes round several times, at every haste of what is asynchronous.
  for (int eagerness : {0, 20, 100}) {
    if (eagerness == 20 && !thorough) continue;
    Case c;
    c.groups = {130, 0, 70}, c.n = 40, c.k = 64 * 6 + 8, c.seed = ++seed, c.eagerness = eagerness, c.grid = 2;
    every_form(c);
    c.gathered = true, c.top_k = 2;
    every_form(c);
    c.m = 40, c.groups = {400, 70};
    for (const auto& path : kPaths) {
      c.hopper = path.hopper, c.sharing = path.sharing;
      test_weight<bf16>(in_place(c));
    }
  }
  // Tiles without a step behind one of a step, more of them than are handed on ahead.
  for (int eagerness : {0, 100}) {
    Case c;
    c.groups = {10, 0, 0, 0, 70, 0, 0, 0, 0, 5}, c.m = 40, c.n = 40, c.seed = ++seed, c.eagerness = eagerness,
    c.grid = 1;
    for (const auto& path : kPaths) {
      c.hopper = path.hopper, c.sharing = path.sharing;
      test_weight<bf16>(c);
    }
  }
  if (thorough) {
    Random random{std::mt19937(99)};
    const auto draw = [&](int least, int most) {
      return least + static_cast<int>(random.engine() % (most - least + 1));
    };
    for (int i = 0; i < 30; ++i) {
      Case c;
      for (int e = draw(1, 6); e > 0; --e)
        c.groups.push_back(draw(0, 3) ? draw(0, 140) : draw(0, 1) * draw(100, 400));
      c.seed = 1000 + i, c.eagerness = draw(0, 100), c.grid = draw(1, 4), c.spare_rows = draw(0, 9);
      c.n = 16 * draw(1, 20), c.k = 8 * draw(1, 40), c.m = 8 * draw(1, 24), c.top_k = draw(1, 4);
      c.bias = draw(0, 1), c.weighted = draw(0, 1), c.gathered = draw(0, 1), c.placed = draw(0, 1);
      c.activation = static_cast<Activation>(draw(1, 3)), c.weighs_active = draw(0, 1),
      c.no_hidden = draw(0, 1);
      every_form(c);
      c.hopper = i % 4 != 0, c.sharing = c.hopper ? static_cast<Sharing>(1 + i % 3) : Sharing::kNothing;
      test_hidden<bf16, true>(c);
      test_hidden<fp16, false>(c);
      Case back = c;
      back.weighted = true, back.bias = false;
      test_hidden_gradient<bf16, true>(in_place(back));
      test_hidden_gradient<fp16, false>(in_place(back));
      c.wide = draw(0, 1), c.accumulates = c.wide && draw(0, 1);
      test_weight<bf16>(in_place(c));
    }
  }
  return report();
}
