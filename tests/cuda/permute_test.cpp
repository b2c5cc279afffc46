// The permute kernels' own source on the CPU (emulator.h), and the exhaustive check of how rows are cut among
// threads.
//
// Every array ends at an unreadable page, so that a scalar access past it stops the test, too.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <numeric>

#include "permute/kernel.cuh"

using namespace pmoe;
using namespace pmoe::permute;

namespace {

int failures = 0;

void fail_with(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

#define CHECK(holds, what)         \
  do {                             \
    if (!(holds)) fail_with(what); \
  } while (0)

// ---- how rows are cut

void check_cut(const Cut& cut, bool one_block, const std::string& name) {
  std::vector<int> times(cut.tokens * cut.row_vectors, 0);
  std::vector<std::set<int64_t>> blocks_of(cut.tokens);
  for (int64_t block = 0; block < cut.blocks(); ++block)
    for (int thread = 0; thread < cut.threads; ++thread) {
      const Cut::Place at = cut.place(block, thread);
      if (one_block && at.token < cut.tokens) {
        const int64_t inside = at.token - cut.block_token(block);
        CHECK(inside >= 0 && inside < cut.block_tokens(), name + ": block_token");
        CHECK(cut.group(thread) == inside * cut.parts + at.part,
              name + ": groups of a block are not in token order");
        blocks_of[at.token].insert(block);
      }
      if (at.token >= cut.tokens) continue;
      CHECK(at.part < cut.slices(), name + ": a part without slices");
      for (int from = cut.first(at); from < cut.row_vectors; from += cut.step())
        for (int i = 0; i < cut.per_lane; ++i)
          if (cut.vector(from, i) < cut.row_vectors)
            ++times[at.token * cut.row_vectors + cut.vector(from, i)];
    }
  for (int count : times) CHECK(count == 1, name + ": a vector moved " + std::to_string(count) + " times");
  for (const auto& blocks : blocks_of)
    CHECK(!one_block || blocks.size() == 1, name + ": a token in several blocks");
}

void test_every_vector_has_one_lane() {
  for (int64_t tokens : {1, 2, 3, 7, 33})
    for (int per_lane : {1, 2, 4})
      for (int threads : {32, 64, 256})
        for (int vectors = 1; vectors <= 70; ++vectors)
          for (bool one_block : {false, true})
            for (int parts : {0, 1}) {
              const Cut cut = make_cut(tokens, vectors * 16, per_lane, threads, one_block, parts);
              check_cut(cut, one_block, std::to_string(tokens) + " tokens of " + std::to_string(vectors));
            }
  for (int vectors : {127, 128, 129, 255, 360, 512, 513, 896, 4096})
    for (int per_lane : {2, 4})
      for (int parts : {0, 1, 2, 4})
        for (bool one_block : {false, true}) {
          const int slices = make_cut(3, vectors * 16, per_lane, 256, false, 1).slices();
          if (one_block && parts > slices) continue;
          check_cut(make_cut(3, vectors * 16, per_lane, 256, one_block, parts), one_block,
                    "3 tokens of " + std::to_string(vectors) + ", parts " + std::to_string(parts));
        }
}

void test_cuts_do_not_depend_on_the_number_of_tokens() {
  for (int vectors = 1; vectors < 600; ++vectors) {
    const Cut one = make_cut(1, vectors * 16, 2, 256, true),
              many = make_cut(100000, vectors * 16, 2, 256, true);
    CHECK(one.lanes == many.lanes && one.parts == many.parts, "a cut that depends on the tokens");
  }
}

template <class Do>
void refuses(const std::string& number, const Do& act) {
  try {
    act();
    fail_with("accepted " + number);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find(number) != std::string::npos,
          "no " + number + " in: " + error.what());
  }
}

void test_what_no_grid_holds_is_refused() {
  refuses("(0)", [] { make_cut(0, 64, 4, 256, false); });
  refuses("(24)", [] { make_cut(1, 24, 4, 256, false); });
  refuses("(0)", [] { make_cut(1, 0, 4, 256, false); });
  refuses("(3)", [] { make_cut(1, 8192, 2, 256, true, 3); });
  refuses("(4)", [] { make_cut(1, 64, 2, 256, true, 4); });
  refuses("(4294967296)", [] { make_cut(int64_t{1} << 32, 8192, 4, 256, false); });
  CHECK(make_cut(int64_t{1} << 31, 8192, 4, 256, false).blocks() == int64_t{1} << 30, "2**31 tokens");
  const Cut last = make_cut(kMostBlocks * 2, 8192, 4, 256, false);
  CHECK(last.blocks() == kMostBlocks, "the largest grid");
  CHECK(last.place(kMostBlocks - 1, 255).token == kMostBlocks * 2 - 1, "the last token of the largest grid");
}

// ---- memory between unreadable pages

class Array {
 public:
  Array(const std::string& name, size_t bytes, bool writable, unsigned char fill = 0xFF) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + 2 * page;
    map_ = static_cast<uint8_t*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (map_ == MAP_FAILED) throw std::runtime_error("no memory for " + name + ": " + std::to_string(bytes));
    mprotect(map_, page, PROT_NONE);
    mprotect(map_ + size_ - page, page, PROT_NONE);
    data_ = map_ + size_ - page - (bytes + 3) / 4 * 4;
    if (bytes < (size_t{1} << 30)) std::memset(data_, fill, bytes);
    emu::register_array(name, data_, bytes, writable);
  }
  ~Array() { munmap(map_, size_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::vector<uint8_t> copy() const { return {data_, data_ + bytes_}; }

 private:
  size_t bytes_, size_;
  uint8_t *map_, *data_;
};

// R rows of M elements; a row's bytes beyond its M elements are poison that nothing may change.
template <class T>
struct Matrix {
  Matrix(const std::string& name, int64_t rows, int64_t columns, int64_t stride, bool writable)
      : rows(rows),
        columns(columns),
        stride(stride),
        array(name, rows ? ((rows - 1) * stride + columns) * sizeof(T) : 0, writable) {}

  T* at(int64_t row, int64_t column) const { return array.as<T>() + row * stride + column; }
  float value(int64_t row, int64_t column) const { return widen<T>(*at(row, column)); }
  Rows view() const { return {array.as<uint8_t>(), stride * static_cast<int64_t>(sizeof(T))}; }

  void draw(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) *at(i, j) = narrow<T>(normal(random));
  }
  bool gaps_are_poison() const {
    for (int64_t i = 0; i + 1 < rows; ++i)
      for (int64_t j = columns; j < stride; ++j)
        for (size_t b = 0; b < sizeof(T); ++b)
          if (reinterpret_cast<uint8_t*>(at(i, j))[b] != 0xFF) return false;
    return true;
  }

  int64_t rows, columns, stride;
  Array array;
};

template <class T>
double rounding() {
  return sizeof(T) == 4            ? std::ldexp(1.0, -24)
         : std::is_same_v<T, bf16> ? std::ldexp(1.0, -8)
                                   : std::ldexp(1.0, -11);
}

// ---- one problem, and the plain loops

template <class T>
struct Problem {
  Problem(int64_t tokens, int choices, int64_t columns, double dropped, int64_t gap, unsigned seed)
      : tokens(tokens),
        choices(choices),
        columns(columns),
        stride(columns + gap),
        random(seed),
        position("position", tokens * choices * 4, false),
        weight("weight", tokens * choices * 4, false) {
    std::vector<int> kept;
    for (int64_t slot = 0; slot < tokens * choices; ++slot)
      if (std::uniform_real_distribution<>()(random) >= dropped) kept.push_back(static_cast<int>(slot));
    num_rows = static_cast<int64_t>(kept.size());
    std::vector<int> row(num_rows);
    std::iota(row.begin(), row.end(), 0);
    std::shuffle(row.begin(), row.end(), random);
    auto* p = position.as<int32_t>();
    const int32_t outside[] = {-1, static_cast<int32_t>(num_rows), INT32_MAX, INT32_MIN,
                               static_cast<int32_t>(num_rows) + 5};
    for (int64_t slot = 0; slot < tokens * choices; ++slot) p[slot] = outside[random() % 5];
    for (int64_t i = 0; i < num_rows; ++i) p[kept[i]] = row[i];
    auto* w = weight.as<float>();
    for (int64_t slot = 0; slot < tokens * choices; ++slot)
      w[slot] = slot_kept(slot) ? std::uniform_real_distribution<float>(-1, 1)(random) : NAN;
  }

  bool slot_kept(int64_t slot) const {
    const int32_t p = position.template as<int32_t>()[slot];
    return p >= 0 && p < num_rows;
  }
  int32_t row(int64_t t, int k) const {
    return slot_kept(t * choices + k) ? position.template as<int32_t>()[t * choices + k] : -1;
  }
  float factor(int64_t t, int k, bool weighted) const {
    return weighted ? weight.template as<float>()[t * choices + k] : 1.0f;
  }
  Slots slots(bool weighted) const {
    return {position.template as<int32_t>(), weighted ? weight.template as<float>() : nullptr, choices,
            static_cast<uint32_t>(num_rows)};
  }
  std::string name() const {
    return std::string(Scalar<T>::name) + " T=" + std::to_string(tokens) + " K=" + std::to_string(choices) +
           " M=" + std::to_string(columns) + " N=" + std::to_string(num_rows) +
           " stride=" + std::to_string(stride);
  }
  int64_t row_bytes() const { return columns * static_cast<int64_t>(sizeof(T)); }

  int64_t tokens;
  int choices;
  int64_t columns, stride, num_rows = 0;
  mutable std::mt19937 random;
  Array position, weight;
};

template <class Kernel>
void run(const Cut& cut, unsigned seed, const Kernel& kernel) {
  emu::launch(static_cast<unsigned>(cut.blocks()), static_cast<unsigned>(cut.threads), seed, kernel);
}

template <class T>
void check_permute(const Problem<T>& p, bool weighted, int parts) {
  Matrix<T> x("x", p.tokens, p.columns, p.stride, false), rows("rows", p.num_rows, p.columns, p.stride, true);
  x.draw(p.random);
  const Cut cut = make_cut(p.tokens, p.row_bytes(), kPermuteVectors, kThreads, false, parts);
  run(cut, p.random(), [&] {
    if (weighted)
      permute_kernel<T, true>(cut, p.slots(true), x.view(), rows.view());
    else
      permute_kernel<float, false>(cut, p.slots(false), x.view(), rows.view());
  });
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int k = 0; k < p.choices; ++k)
      for (int64_t m = 0; m < p.columns && p.row(t, k) >= 0; ++m) {
        const T expected = weighted ? narrow<T>(p.factor(t, k, true) * x.value(t, m)) : *x.at(t, m);
        CHECK(!std::memcmp(rows.at(p.row(t, k), m), &expected, sizeof(T)), "permute " + p.name());
      }
  CHECK(rows.gaps_are_poison(), "permute writes between rows, " + p.name());
}

// Several tensors in one launch, against a permute of each. The first two have all tokens and leave out the
// first third of the rows; the others have the tokens from the middle on, and all rows.
template <class T>
void check_permute_several(const Problem<T>& p, int parts) {
  const Cut cut = make_cut(p.tokens, p.row_bytes(), kPermuteVectors, kThreads, false, parts);
  const int count = 1 + static_cast<int>(p.random() % kMostCopies);
  const int64_t middle = p.tokens / 2;
  Copies copies{};
  copies.cut = cut;
  uint32_t blocks = 0;
  std::vector<std::unique_ptr<Matrix<T>>> x, rows, alone;
  for (int i = 0; i < kMostCopies; ++i) {
    copies.first_block[i] = i < count ? blocks : UINT32_MAX;
    x.push_back(std::make_unique<Matrix<T>>("x", p.tokens, p.columns, p.stride, false));
    x[i]->draw(p.random);
    rows.push_back(std::make_unique<Matrix<T>>("rows", p.num_rows, p.columns, p.stride, true));
    alone.push_back(std::make_unique<Matrix<T>>("alone", p.num_rows, p.columns, p.stride, true));
    if (i >= count) continue;
    Slots slots = p.slots(false);
    Rows from = x[i]->view();
    Cut own = cut;
    if (i < 2) {
      slots.first_row = slots.num_rows / 3;
      slots.num_rows -= slots.first_row;
    } else {
      slots.position += middle * slots.choices;
      from.base = from.at(middle, 0);
      own.tokens -= middle;
    }
    copies.tokens[i] = own.tokens;
    copies.slots[i] = slots;
    copies.a[i] = from, copies.b[i] = rows[i]->view();
    blocks += static_cast<uint32_t>(own.blocks());
    run(own, p.random(), [&] { permute_kernel<float, false>(own, slots, from, alone[i]->view()); });
  }
  emu::launch(blocks, kThreads, static_cast<unsigned>(p.random()), [&] { permute_several_kernel(copies); });
  for (int i = 0; i < kMostCopies; ++i) {
    for (int64_t row = 0; row < p.num_rows; ++row)
      for (int64_t m = 0; m < p.columns; ++m)
        CHECK(!std::memcmp(rows[i]->at(row, m), alone[i]->at(row, m), sizeof(T)),
              "permute_several " + p.name());
    CHECK(rows[i]->gaps_are_poison(), "permute_several writes between rows, " + p.name());
  }
}

// The sum in double, and what may be lost: roundings of the terms, and one of the result.
struct Sum {
  double value = 0, magnitude = 0;
  void add(double term) { value += term, magnitude += std::abs(term); }
  template <class T>
  bool near(double got, int terms) const {
    return std::abs(got - value) <=
           rounding<T>() * std::abs(value) + (terms + 2) * std::ldexp(magnitude, -24) + 1e-7;
  }
};

template <class T, int kVectors, int kChoices>
void check_unpermute(const Problem<T>& p, bool weighted, int parts) {
  Matrix<T> rows("rows", p.num_rows, p.columns, p.stride, false), y("y", p.tokens, p.columns, p.stride, true);
  rows.draw(p.random);
  const Cut cut = make_cut(p.tokens, p.row_bytes(), kVectors, kThreads, false, parts);
  run(cut, p.random(), [&] {
    if (weighted)
      unpermute_kernel<T, kVectors, kChoices, true>(cut, p.slots(true), rows.view(), y.view());
    else
      unpermute_kernel<T, kVectors, kChoices, false>(cut, p.slots(false), rows.view(), y.view());
  });
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t m = 0; m < p.columns; ++m) {
      Sum sum;
      for (int k = 0; k < p.choices; ++k)
        if (p.row(t, k) >= 0) sum.add(double{p.factor(t, k, weighted)} * rows.value(p.row(t, k), m));
      CHECK(sum.near<T>(y.value(t, m), p.choices), "unpermute " + p.name());
    }
  CHECK(y.gaps_are_poison(), "unpermute writes between rows, " + p.name());
}

template <class T, int kVectors, int kChoices, Of kOf>
void check_backward(const Problem<T>& p, int parts) {
  const std::string name =
      std::string(kOf == Of::kPermute ? "permute" : "unpermute") + "_backward " + p.name();
  Matrix<T> a("a", p.tokens, p.columns, p.stride, false), b("b", p.num_rows, p.columns, p.stride, false);
  a.draw(p.random);
  b.draw(p.random);
  if (p.tokens > 1) {  // infinity times nothing is still nothing for a dropped slot
    bool all_dropped = true;
    for (int k = 0; k < p.choices; ++k) all_dropped = all_dropped && p.row(1, k) < 0;
    if (all_dropped) *a.at(1, 0) = narrow<T>(INFINITY);
  }
  Cut cut = make_cut(p.tokens, p.row_bytes(), kVectors, kThreads, true, 0);
  if (parts) cut = make_cut(p.tokens, p.row_bytes(), kVectors, kThreads, true, smaller(parts, cut.parts));
  std::vector<uint8_t> before;
  for (int round = 0; round < 2; ++round) {
    Matrix<T> out("out", kOf == Of::kPermute ? p.tokens : p.num_rows, p.columns, p.stride, true);
    Array d_weight("d_weight", p.tokens * p.choices * 4, true);
    run(cut, p.random(), [&] {
      backward_kernel<T, kVectors, kChoices, kOf>(cut, p.slots(true), a.view(), b.view(), out.view(),
                                                  d_weight.as<float>());
    });
    for (int64_t t = 0; t < p.tokens; ++t) {
      for (int k = 0; k < p.choices; ++k) {
        const float got = d_weight.as<float>()[t * p.choices + k];
        Sum dot;
        for (int64_t m = 0; m < p.columns && p.row(t, k) >= 0; ++m)
          dot.add(double{a.value(t, m)} * b.value(p.row(t, k), m));
        CHECK(p.row(t, k) >= 0 ? dot.near<float>(got, 64) : got == 0, name + ": d_weight");
        for (int64_t m = 0; m < p.columns && p.row(t, k) >= 0 && kOf == Of::kUnpermute; ++m) {
          const T expected = narrow<T>(p.factor(t, k, true) * a.value(t, m));
          CHECK(!std::memcmp(out.at(p.row(t, k), m), &expected, sizeof(T)), name + ": d_rows");
        }
      }
      for (int64_t m = 0; m < p.columns && kOf == Of::kPermute; ++m) {
        Sum sum;
        for (int k = 0; k < p.choices; ++k)
          if (p.row(t, k) >= 0) sum.add(double{p.factor(t, k, true)} * b.value(p.row(t, k), m));
        CHECK(sum.near<T>(out.value(t, m), p.choices), name + ": d_x");
      }
    }
    CHECK(out.gaps_are_poison(), name + " writes between rows");
    const auto found = d_weight.copy();
    CHECK(round == 0 || found == before, name + ": another d_weight in another order of threads");
    before = found;
  }
}

template <class T>
void check_all(int64_t tokens, int choices, int64_t columns, double dropped, int64_t gap, unsigned seed,
               int parts) {
  const auto each = [&](const auto& check) {
    const Problem<T> p(tokens, choices, columns, dropped, gap, seed);
    check(p);
    emu::unregister_arrays();
  };
  for (bool weighted : {false, true}) {
    each([&](const auto& p) { check_permute(p, weighted, parts); });
    if (!weighted) each([&](const auto& p) { check_permute_several(p, parts); });
    each([&](const auto& p) { check_unpermute<T, 4, 2>(p, weighted, parts); });
    each([&](const auto& p) { check_unpermute<T, 2, 4>(p, weighted, parts); });
  }
  each([&](const auto& p) { check_backward<T, 4, 2, Of::kPermute>(p, parts); });
  each([&](const auto& p) { check_backward<T, 2, 4, Of::kPermute>(p, parts); });
  each([&](const auto& p) { check_backward<T, 4, 2, Of::kUnpermute>(p, parts); });
  each([&](const auto& p) { check_backward<T, 2, 4, Of::kUnpermute>(p, parts); });
}

void test_kernels_against_plain_loops() {
  std::mt19937 random(7);
  const int64_t vectors[] = {1, 3, 8, 17, 32, 64, 65, 128, 200, 300};
  const double dropped[] = {0, 0, 0.3, 1};
  unsigned seed = 100;
  for (int64_t tokens : {1, 5, 33})
    for (int choices : {1, 2, 3, 4, 5, 9}) {
      const int64_t v = vectors[random() % 10];
      const int64_t gap = random() % 3, parts = random() % 3;
      const double drop = dropped[random() % 4];
      switch (random() % 3) {
        case 0:
          check_all<float>(tokens, choices, v * 4, drop, gap * 4, ++seed, static_cast<int>(parts));
          break;
        case 1:
          check_all<bf16>(tokens, choices, v * 8, drop, gap * 8, ++seed, static_cast<int>(parts));
          break;
        default:
          check_all<fp16>(tokens, choices, v * 8, drop, gap * 8, ++seed, static_cast<int>(parts));
      }
    }
  for (int64_t v : vectors) {
    check_all<float>(4, 2, v * 4, 0.2, 0, ++seed, 0);
    check_all<bf16>(4, 4, v * 8, 0.2, 8, ++seed, 0);
    check_all<fp16>(3, 5, v * 8, 0.2, 0, ++seed, 0);
  }
  check_all<bf16>(3, kMostChoices, 16, 0.5, 0, ++seed, 0);
}

// Three rows that are more than 2**31 elements apart: nothing between them is ever touched.
template <class T>
void check_far_rows() {
  const int64_t stride = (int64_t{1} << 31) + 64, columns = 72;
  Array position("position", 3 * 4, false), weight("weight", 3 * 4, false), d_weight("d_weight", 3 * 4, true);
  for (int i = 0; i < 3; ++i) position.as<int32_t>()[i] = 2 - i, weight.as<float>()[i] = 1.0f;
  const Slots slots{position.as<int32_t>(), weight.as<float>(), 1, 3};
  std::mt19937 random(5);
  const auto equal = [&](const Matrix<T>& a, const Matrix<T>& b, const char* name) {
    for (int64_t i = 0; i < 3; ++i)
      CHECK(!std::memcmp(a.at(i, 0), b.at(2 - i, 0), columns * sizeof(T)), std::string(name) + ", far rows");
  };
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
  const Cut apart = make_cut(3, row_bytes, 4, kThreads, false),
            whole = make_cut(3, row_bytes, 4, kThreads, true);
  Matrix<T> from("far", 3, columns, stride, false);
  from.draw(random);
  {
    Matrix<T> to("far out", 3, columns, stride, true);
    run(apart, 1, [&] { permute_kernel<float, false>(apart, slots, from.view(), to.view()); });
    equal(from, to, "permute");
  }
  {
    Matrix<T> to("far out", 3, columns, stride, true);
    run(apart, 1, [&] { unpermute_kernel<T, 4, 2, true>(apart, slots, from.view(), to.view()); });
    equal(from, to, "unpermute");
  }
  {
    Matrix<T> to("far out", 3, columns, stride, true);
    run(whole, 1, [&] {
      backward_kernel<T, 4, 2, Of::kPermute>(whole, slots, from.view(), from.view(), to.view(),
                                             d_weight.as<float>());
    });
    equal(from, to, "permute_backward");
  }
  {
    Matrix<T> to("far out", 3, columns, stride, true);
    run(whole, 1, [&] {
      backward_kernel<T, 4, 2, Of::kUnpermute>(whole, slots, from.view(), from.view(), to.view(),
                                               d_weight.as<float>());
    });
    equal(from, to, "unpermute_backward");
  }
  emu::unregister_arrays();
}

// That the memory checks of this file see anything at all.
void test_an_access_past_a_row_is_seen() {
  Array position("position", 4, false);
  *position.as<int32_t>() = 0;
  Matrix<float> x("x", 1, 60, 60, false), rows("rows", 1, 64, 64, true);
  const Cut cut = make_cut(1, 64 * 4, kPermuteVectors, kThreads, false);
  const Slots slots{position.as<int32_t>(), nullptr, 1, 1};
  try {
    run(cut, 1, [&] { permute_kernel<float, false>(cut, slots, x.view(), rows.view()); });
    fail_with("a read past the last row went unseen");
  } catch (const emu::Error&) {
  }
  emu::unregister_arrays();
}

}  // namespace

int main() {
  test_every_vector_has_one_lane();
  test_cuts_do_not_depend_on_the_number_of_tokens();
  test_what_no_grid_holds_is_refused();
  test_an_access_past_a_row_is_seen();
  test_kernels_against_plain_loops();
  check_far_rows<float>();
  check_far_rows<bf16>();
  check_far_rows<fp16>();
  if (failures) {
    std::printf("%d checks failed\n", failures);
    return 1;
  }
  std::printf("permute: all checks passed\n");
}
