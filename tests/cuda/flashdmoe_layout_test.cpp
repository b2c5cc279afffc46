// FlashDMoE's layout L: Table 6.2, Definition 5.3.2 and Theorem 5.3.1 over all coordinates, and that no two
// places are one.
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>

#include "flashdmoe/layout.h"

using namespace pmoe;
using namespace pmoe::flashdmoe;

namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

// A pool's rows belong to nobody.
template <class Visit>
void for_each(const Layout& layout, const Visit& visit) {
  const int ranks = layout.is_pool ? 1 : layout.ranks, experts = layout.is_pool ? 1 : layout.experts;
  for (int p = 0; p < ranks; ++p)
    for (Round r : {Round::kDispatch, Round::kCombine})
      for (Staging b : {Staging::kOutgoing, Staging::kIncoming}) {
        if (layout.buffers == 1 && b == Staging::kOutgoing) continue;
        for (int e = 0; e < experts; ++e)
          for (int c = 0; c < layout.capacity; ++c) visit(Coordinates{p, r, b, e, c});
      }
}

// Tokens of 4 KB, tiles of 128 rows, 8 ranks: Size(L) in MiB. (The paper prints up to 0.02 more than this.)
void test_table_6_2() {
  struct {
    int tokens, experts, capacity, mebibytes;
  } const lines[] = {{4096, 16, 256, 64},   {4096, 32, 128, 64},   {4096, 64, 64, 128},
                     {4096, 128, 32, 256},  {8192, 16, 512, 128},  {8192, 32, 256, 128},
                     {8192, 64, 128, 128},  {8192, 128, 64, 256},  {16384, 16, 1024, 256},
                     {16384, 32, 512, 256}, {16384, 64, 256, 256}, {16384, 128, 128, 256}};
  for (const auto& line : lines) {
    expect(line.capacity == line.tokens / line.experts, "Table 6.2: EC");
    const int capacity = larger(128, line.capacity);
    const Layout single = {8, line.experts / 8, capacity, 128, 2, 4096};
    expect(single.size() == int64_t{line.mebibytes} << 20, "Table 6.2: Size(L) of " +
                                                               std::to_string(line.tokens) + " tokens, " +
                                                               std::to_string(line.experts) + " experts");
    const Layout bf16 = {8, line.experts / 8, capacity, 128, 2, 2048};
    const Layout unstaged = {8, line.experts / 8, capacity, 128, 1, 2048};
    expect(2 * bf16.size() == single.size() && 4 * unstaged.size() == single.size(), "half, and half of it");
  }
}

void test_places(const Layout& layout) {
  std::set<int64_t> rows, flags;
  for_each(layout, [&](const Coordinates& i) {
    const int64_t at = layout.at(i);
    expect(at % 16 == 0 && at >= layout.begin() && at + layout.row_bytes <= layout.begin() + layout.size(),
           "a row outside L");
    expect(rows.insert(at).second, "two coordinates are one place");
    if (layout.is_pool) return;
    const Coordinates back = layout.of_byte(at + layout.row_bytes - 1);
    expect(back.p == i.p && back.r == i.r && back.b == i.b && back.e == i.e && back.c == i.c,
           "the coordinates of a place");
  });
  expect(static_cast<int64_t>(rows.size()) * layout.row_bytes == layout.size(), "Size(L)");
  const auto flag = [&](int64_t at) {
    expect(at >= 4 && at + 4 <= layout.begin() && at % 4 == 0, "a flag outside its region");
    expect(flags.insert(at).second, "two flags are one");
  };
  for (int p = 0; p < layout.ranks; ++p) {
    flag(layout.granted(p)), flag(layout.announced(p)), flag(layout.known(p)), flag(layout.placed(p));
    for (int e = 0; e < layout.experts; ++e)
      flag(layout.counts(p) + 4 * e), flag(layout.homes(p) + 4 * e), flag(layout.offsets(p) + 4 * e);
  }
  // By tile and by row: all tiles of all cells, or of the pool.
  const int ranks = layout.is_pool ? 1 : layout.ranks, experts = layout.is_pool ? 1 : layout.experts;
  for (int p = 0; p < ranks; ++p)
    for (int e = 0; e < experts; ++e) {
      for (int tile = 0; tile < layout.tiles(layout.capacity); ++tile)
        for (int half : {0, 4})  // a put writes 8 bytes
          flag(layout.arrival(p, e, tile) + half), flag(layout.returned(p, e, tile) + half);
      for (int row = 0; row < layout.capacity; ++row)
        flag(layout.weights(p, e) + 4 * row), flag(layout.dots(p, e) + 4 * row);
    }
  expect(*flags.rbegin() < layout.outgoing(), "incoming and outgoing regions overlap");
  expect(layout.outgoing() * layout.buffers <= layout.begin(), "an outgoing region is in L");
  expect(layout.bytes() >= layout.begin() + layout.size(), "the heap is too small");
}

// Theorem 5.3.1: of two sources with valid coordinates in one target's L, not both have the same.
void test_theorem(const Layout& layout) {
  for_each(layout, [&](const Coordinates& i) {
    for (int target = 0; target < layout.ranks; ++target) {
      int may = 0;
      for (int source = 0; source < layout.ranks; ++source) may += is_valid(source, target, i);
      expect(may == 1, "a place that not exactly one rank may write");
    }
  });
}

}  // namespace

int main() {
  test_table_6_2();
  for (int buffers : {1, 2})
    for (const Layout& layout : {Layout{1, 1, 4, 4, buffers, 16}, Layout{2, 3, 8, 4, buffers, 48},
                                 Layout{4, 2, 12, 4, buffers, 32}, Layout{5, 1, 128, 128, buffers, 16}}) {
      test_places(layout);
      test_theorem(layout);
    }
  for (int buffers : {1, 2}) test_places({3, 2, 20, 4, buffers, 32, kRounds, true});
  std::printf("%d failures\n", failures);
  return failures != 0;
}
