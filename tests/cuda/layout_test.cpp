// The control flow of the grouped products that host and device share, exhaustively over small ranges: tile
// order and group search, the ring of stages, boxes, and the exchange of layouts in the epilogue.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <vector>

#include "common/device.cuh"
#include "grouped_gemm/ampere.cuh"
#include "grouped_gemm/box.h"
#include "grouped_gemm/exchange.cuh"
#include "grouped_gemm/hopper.cuh"
#include "grouped_gemm/ring.h"
#include "grouped_gemm/tiles.h"

using namespace pmoe;

namespace {

long checks = 0;
int failures = 0;

void expect(bool holds, const std::string& what) {
  ++checks;
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

// ---- tiles: every element of the result lies in one tile, and every block finds its own by itself

int total_before(const std::vector<int>& groups, int expert) {
  int total = 0;
  for (int e = 0; e < expert; ++e) total += groups[e];
  return total;
}

template <Form kForm>
void test_tiles(const std::vector<int>& groups, int m, int columns, TileShape shape, int blocks) {
  std::vector<int32_t> ends;
  int total = 0;
  for (int g : groups) ends.push_back(total += g);
  const int experts = static_cast<int>(groups.size());
  const auto make = [&] { return TileWalk<kForm>(ends.data(), experts, m, columns, shape); };

  // The plain loop: all tiles that there must be.
  std::set<std::vector<int>> expected;
  for (int e = 0; e < experts; ++e) {
    const int lines = kForm == Form::kWeight ? m : groups[e];
    for (int row = 0; row < lines; row += shape.rows)
      for (int column = 0; column < columns; column += shape.columns)
        expected.insert(
            {e, total_before(groups, e), groups[e], row, smaller(shape.rows, lines - row), column});
  }
  std::set<std::vector<int>> found;
  long count = 0;
  for (int b = 0; b < blocks; ++b) {
    auto walk = make();
    Tile t;
    for (int w = b; walk.find(w, t); w += blocks) {
      found.insert({t.expert, t.group_begin, t.group_rows, t.row, t.rows, t.column});
      ++count;
    }
    expect(!walk.find(static_cast<int>(count) * blocks + b + 1000000, t), "a walk goes on after its end");
  }
  expect(found == expected, "tiles of " + std::to_string(total) + " rows");
  expect(count == static_cast<long>(expected.size()), "a tile is computed twice");
}

std::vector<std::vector<int>> vectors_of(const std::vector<int>& sizes, int length) {
  std::vector<std::vector<int>> all = {{}};
  for (int i = 0; i < length; ++i) {
    std::vector<std::vector<int>> longer;
    for (const auto& head : all)
      for (int size : sizes) {
        longer.push_back(head);
        longer.back().push_back(size);
      }
    all = longer;
  }
  return all;
}

void test_all_tiles() {
  for (int length = 1; length <= 4; ++length)
    for (const auto& groups : vectors_of({0, 1, 2, 3, 4, 5}, length))
      for (int columns : {1, 3, 4})
        for (int blocks : {1, 3}) {
          test_tiles<Form::kForward>(groups, 0, columns, {2, 2}, blocks);
          test_tiles<Form::kWeight>(groups, 5, columns, {2, 2}, blocks);
        }
  // Sizes around the edges of real tiles, and of bands of them.
  const std::vector<int> edges = {0, 1, 127, 128, 129, 128 * kBand - 1, 128 * kBand, 128 * kBand + 1, 5000};
  for (const auto& groups : vectors_of(edges, 3))
    for (int columns : {8, 256, 264, 1408}) test_tiles<Form::kForward>(groups, 0, columns, {128, 256}, 132);
  for (int m : edges) test_tiles<Form::kWeight>({3, 0}, m, 1408, {128, 256}, 7);
}

// Tiles that follow each other share rows and columns: inside a band all rows come before the next column.
void test_band_order() {
  const int32_t ends[] = {128 * (kBand + 2)};
  TileWalk<Form::kForward> walk(ends, 1, 0, 3 * 256, {128, 256});
  Tile t;
  std::vector<std::pair<int, int>> order;
  for (int w = 0; walk.find(w, t); ++w) order.push_back({t.row / 128, t.column / 256});
  std::vector<std::pair<int, int>> expected;
  for (int band : {0, 1})
    for (int column = 0; column < 3; ++column)
      for (int row = band * kBand; row < (band ? kBand + 2 : kBand); ++row) expected.push_back({row, column});
  expect(order == expected, "the order of tiles in a band");
}

// ---- the ring: a producer and consumers that may be interleaved in any way

// An mbarrier as the PTX ISA has it: a phase ends when all have arrived; waiting for a parity passes once the
// phase of that parity has ended.
struct Barrier {
  int expected, pending, phase = 0;
  explicit Barrier(int count) : expected(count), pending(count) {}
  void arrive() {
    if (--pending == 0) pending = expected, phase ^= 1;
  }
  bool passes(uint32_t parity) const { return static_cast<uint32_t>(phase) != parity; }
};

template <int kStages>
struct World {
  std::vector<Barrier> full, empty;
  Ring<kStages> producer, consumer[2];
  int produced = 0, consumed[2] = {0, 0};
  int content[kStages];

  World() : full(kStages, Barrier(1)), empty(kStages, Barrier(2)) {
    std::fill(content, content + kStages, -1);
  }
};

// Depth first over all interleavings of one producer and two consumers.
template <int kStages>
void explore(World<kStages> w, int steps, std::set<std::vector<int>>& seen) {
  std::vector<int> key = {w.produced, w.consumed[0], w.consumed[1]};
  if (!seen.insert(key).second) return;
  bool moved = false;
  if (w.produced < steps && w.empty[w.producer.stage].passes(w.producer.empty_parity())) {
    World<kStages> next = w;
    const int stage = next.producer.stage;
    expect(next.produced - smaller(next.consumed[0], next.consumed[1]) < kStages,
           "a stage is overwritten in use");
    next.content[stage] = next.produced++;
    next.full[stage].arrive();
    next.producer.advance();
    moved = true;
    explore(next, steps, seen);
  }
  for (int c = 0; c < 2; ++c) {
    if (w.consumed[c] == steps || !w.full[w.consumer[c].stage].passes(w.consumer[c].full_parity())) continue;
    World<kStages> next = w;
    const int stage = next.consumer[c].stage;
    expect(next.content[stage] == next.consumed[c], "a consumer reads another step's operands");
    ++next.consumed[c];
    next.empty[stage].arrive();
    next.consumer[c].advance();
    moved = true;
    explore(next, steps, seen);
  }
  const bool done = w.produced == steps && w.consumed[0] == steps && w.consumed[1] == steps;
  expect(moved || done, "the ring is stuck");
}

template <int kStages>
void test_ring() {
  for (int steps = 0; steps <= 4 * kStages + 1; ++steps) {
    std::set<std::vector<int>> seen;
    explore(World<kStages>(), steps, seen);
  }
}

// ---- boxes

void test_boxes() {
  for (int lines : {8, 64, 128}) {
    std::set<int> offsets;
    for (int line = 0; line < lines; ++line)
      for (int chunk = 0; chunk < kChunks; ++chunk) offsets.insert(chunk_offset(line, chunk));
    expect(static_cast<int>(offsets.size()) == lines * kChunks, "two chunks in one place");
    expect(*offsets.begin() == 0 && *offsets.rbegin() == box_bytes(lines) - 16, "a chunk outside its box");
  }
  // Eight lines of one chunk, as ldmatrix reads them, lie in eight groups of banks.
  for (int line = 0; line < 64; line += 8)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) banks.insert(chunk_offset(line + i, chunk) % 128);
      expect(banks.size() == 8, "a bank conflict");
    }
}

// Threads that copy a box fill every chunk of it once.
template <int kThreads, int kLines>
void test_copies() {
  std::vector<int> filled(box_bytes(kLines) / 16, 0);
  for (int thread = 0; thread < kThreads; ++thread) {
    const BoxCopy<kThreads, kLines> copy(thread);
    for (int i = 0; i < copy.kPerThread; ++i) ++filled[chunk_offset(copy.line(i), copy.chunk) / 16];
  }
  expect(std::all_of(filled.begin(), filled.end(), [](int n) { return n == 1; }), "a chunk not filled once");
}

// ---- division by a number that is known before

void test_divisor() {
  std::mt19937 random(1);
  for (int by : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 31, 32, 33, 64, 100, 1023, 1 << 30, 2147483647}) {
    const Divisor divisor(by);
    for (int64_t near = 0; near <= 2147483647; near += larger<int64_t>(2147483647 / 1000, 1))
      for (int64_t x : {near, near / by * by, near / by * by - 1})
        if (x >= 0) expect(divisor.divide(static_cast<int32_t>(x)) == x / by, "a quotient");
    for (int i = 0; i < 1000; ++i) {
      const int32_t x = static_cast<int32_t>(random() >> 1);
      expect(divisor.divide(x) == x / by, "a random quotient");
    }
    for (int32_t x : {0, 1, by - 1, by, 2147483646, 2147483647})
      expect(divisor.divide(x) == x / by, "a quotient");
  }
}

// ---- the epilogue

// Fragments become rows and rows fragments, each value in its place.
template <bool kByMatrix>
void test_exchange() {
  std::set<std::pair<int, int>> seen;
  emu::launch(1, 32, 3, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    const Exchange<kByMatrix> exchange(shared_memory(), lane);
    const auto value = [](int row, int column) { return static_cast<uint16_t>(row * 64 + column); };
    uint32_t word[16], again[16];
    for (int j = 0; j < 8; ++j)
      for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h, column = 8 * j + 2 * (lane % 4);
        word[2 * j + h] = value(row, column) | uint32_t{value(row, column + 1)} << 16;
      }
    Words rows[4];
    exchange.to_rows(word, rows);
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 8; ++k) {
        const int row = exchange.row(i), column = exchange.column() + k;
        const auto found = static_cast<uint16_t>(rows[i].word[k / 2] >> (k % 2 * 16));
        expect(found == value(row, column), "a value of another place");
        seen.insert({row, column});
      }
    exchange.to_fragments(rows, again);
    for (int i = 0; i < 16; ++i) expect(again[i] == word[i], "a fragment that did not come back");
  });
  expect(seen.size() == 16 * 64, "not all of 16 x 64 values");
}

// Against the functions as they are defined, in double; one part in 10^6 of the value or of x.
void test_activations() {
  for (int i = -4000; i <= 4000; ++i) {
    const float x = static_cast<float>(i) / 250;
    const double below = 0.5 * std::erfc(-static_cast<double>(x) / std::sqrt(2.0));
    const double density = std::exp(-0.5 * double(x) * x) / std::sqrt(2 * std::acos(-1.0));
    const double s = 1 / (1 + std::exp(-double(x)));
    const auto near = [&](float found, double expected, double size, const char* name) {
      expect(std::fabs(found - expected) <= 1e-6 * size + 1e-37,
             std::string(name) + " of " + std::to_string(x));
    };
    near(Gelu::value(x), x * below, std::fabs(x * below) * (1 + x * x), "gelu");
    near(Gelu::derivative(x), below + x * density, below + std::fabs(x * density) * (1 + x * x), "gelu'");
    near(Silu::value(x), x * s, std::fabs(x * s) * (1 + std::fabs(x)), "silu");
    near(Silu::derivative(x), s + x * s * (1 - s), s + std::fabs(x * s) * (1 + std::fabs(x)), "silu'");
    near(Relu::value(x), x > 0 ? x : 0, 0, "relu");
  }
}

}  // namespace

int main() {
  test_all_tiles();
  test_band_order();
  test_ring<1>();
  test_ring<2>();
  test_ring<3>();
  test_ring<4>();
  test_boxes();
  test_copies<128, 128>();
  test_copies<128, 64>();
  test_copies<256, 128>();
  test_copies<256, 64>();
  test_exchange<true>();
  test_exchange<false>();
  test_activations();
  test_divisor();
  std::printf("%ld checks, %d failures\n", checks, failures);
  return failures != 0;
}
