// Who writes what into the heaps of cuda/comet (FlashDMoE, section 5.3): no byte is written by two ranks,
// none outside its region, none is missing, and a flag stands behind the rows that it announces. Every write
// that the functions of dispatch.cuh and combine.cuh make is looked at, against plain loops.
#include <cstddef>
void look(const void* p, size_t bytes, bool writes);
#define PMOE_ACCESS(pointer, bytes, writes) look(pointer, bytes, writes)

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "comet/combine.cuh"
#include "comet/dispatch.cuh"
#include "comet_world.h"

using namespace pmoe;
using namespace pmoe::comet;
using world::Arrived;
using world::Random;
using world::Routing;

namespace {

long checks = 0;
int failures = 0;
std::string named;  // the case

void expect(bool holds, const char* what) {
  ++checks;
  if (holds || ++failures >= 20) return;
  std::printf("FAILED: %s, %s\n", what, named.c_str());
  std::fflush(stdout);  // wrong places may be outside all memory
}

// ---- what is written, and looked at, while a rank's functions run

struct Access {
  int rank, heap;
  int64_t at;
  int bytes;
};

const world::Heaps* heaps = nullptr;
int running = -1;  // the rank
std::vector<Access> written, seen;

}  // namespace

void look(const void* p, size_t bytes, bool writes) {
  if (heaps == nullptr) return;
  for (int h = 0; h < heaps->layout().ranks; ++h) {
    const int64_t at = static_cast<const uint8_t*>(p) - (*heaps)[h];
    if (at < 0 || at >= 2 * heaps->layout().bytes()) continue;
    (writes ? written : seen).push_back({running, h, at, static_cast<int>(bytes)});
  }
}

namespace {

// ---- regions

enum Region { kCounters, kGranted, kGrants, kReturned, kArrivals, kWeights, kLinks, kDots, kInbox, kHome };

struct Part {  // of a heap: what belongs to one peer, or is of one row
  Region region;
  int index;  // the peer or the row
  int64_t begin, end;
};

// chunks: of columns, that there are flags for.
std::vector<Part> parts_of(const Layout& l, int chunks) {
  std::vector<Part> parts = {{kCounters, 0, l.counters(), l.counters() + int64_t{sizeof(Counters)}}};
  for (int p = 0; p < l.ranks; ++p) parts.push_back({kGranted, p, l.granted(p), l.granted(p) + 4});
  for (int p = 0; p < l.ranks; ++p) parts.push_back({kGrants, p, l.grants(p), l.grants(p) + 4 * l.experts});
  for (int p = 0; p < l.ranks; ++p)
    for (int c = 0; c < chunks; ++c) parts.push_back({kReturned, p, l.returned(p, c), l.returned(p, c) + 4});
  for (int p = 0; p < l.ranks; ++p)
    parts.push_back({kArrivals, p, l.arrivals(p), l.arrivals(p) + 4 * l.most_pieces()});
  const auto rows = [&](Region region, int64_t begin, int64_t each, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      parts.push_back({region, static_cast<int>(i), begin + i * each, begin + (i + 1) * each});
  };
  rows(kWeights, l.weights(), 4, l.rows);
  rows(kLinks, l.links(), sizeof(Link), l.rows);
  rows(kDots, l.dots(), 4, l.home_rows);
  rows(kInbox, l.inbox(), l.row_bytes, l.rows);
  rows(kHome, l.home(), l.row_bytes, l.home_rows);
  return parts;
}

// Parts in the order of their addresses: each ends before the next begins, all lie in the heap.
void test_regions(const Layout& l) {
  const std::vector<Part> parts = parts_of(l, kMostChunks);
  int64_t before = 0;
  for (const Part& p : parts) {
    expect(p.begin >= before && p.end >= p.begin, "regions that overlap");
    before = p.end;
    if (p.region == kInbox || p.region == kHome) expect(p.begin % 16 == 0, "a row that is not aligned");
    if (p.region == kGranted || p.region == kReturned)
      expect(p.begin % kFlagBytes == 0, "two flags that are waited for in one sector");
  }
  expect(before <= l.bytes(), "a region outside the heap");
  for (int64_t begin : {l.counters(), l.granted(0), l.grants(0), l.returned(0, 0), l.arrivals(0), l.weights(),
                        l.links(), l.dots(), l.inbox(), l.home(), l.bytes()})
    expect(begin % 1024 == 0, "a region that does not begin on 1024 bytes");
}

void test_all_regions() {
  named = "regions";
  for (int ranks : {1, 2, 3, 4, 7, 64})
    for (int experts : {1, 2, 3, 32})
      for (int64_t rows : {0, 1, 15, 16, 17, 300})
        for (int64_t home_rows : {0, 1, 257})
          for (int64_t row_bytes : {16, 48, 2048}) test_regions({ranks, experts, rows, home_rows, row_bytes});
  // Beyond 2^31 bytes.
  const Layout big = {8, 32, 1 << 20, 1 << 20, 16384};
  expect(big.home() - big.inbox() == int64_t{1} << 34 && big.bytes() - big.home() == int64_t{1} << 34,
         "a big heap");
  expect(big.inbox() > big.links(), "a big heap");
}

// ---- one round of all ranks

struct World {
  int ranks, experts;
  Chunks chunks;
  std::vector<Routing> routing;
  std::vector<std::vector<Arrived>> rows;  // by rank: of its inbox
  std::vector<std::vector<int32_t>> receives, boards, send_table;
  std::vector<std::vector<uint16_t>> source, result;
  std::vector<std::vector<float>> dots, gradient;
  Layout layout;
};

constexpr int kDotParts = 2;

World make(std::vector<Routing> routing, int experts, Chunks chunks) {
  World w;
  w.ranks = static_cast<int>(routing.size());
  w.experts = experts;
  w.chunks = chunks;
  w.routing = std::move(routing);
  int64_t most = 0, most_home = 0;
  for (int r = 0; r < w.ranks; ++r) {
    const Routing& g = w.routing[static_cast<size_t>(r)];
    w.rows.push_back(world::arrivals(w.routing, r, experts));
    w.receives.push_back(world::receive_counts(w.routing, r, experts));
    w.boards.emplace_back(ArrivalBoard::words(w.ranks, experts));
    w.send_table.emplace_back(SendTable::words(w.ranks, experts));
    const auto values = static_cast<size_t>((g.first_token + g.tokens) * chunks.columns);
    w.source.emplace_back(values);
    for (size_t i = 0; i < values; ++i)
      w.source.back()[i] = static_cast<uint16_t>(r * 10007 + static_cast<int>(i));
    w.result.emplace_back(values);
    w.dots.emplace_back();
    for (size_t i = 0; i < kDotParts * w.rows.back().size(); ++i)
      w.dots.back().push_back(static_cast<float>(r * 1000 + static_cast<int>(i)));
    w.gradient.emplace_back(static_cast<size_t>(g.slots()));
    most = std::max(most, static_cast<int64_t>(w.rows.back().size()));
    most_home = std::max(most_home, int64_t{g.rows()});
  }
  w.layout = {w.ranks, experts, most, most_home, int64_t{chunks.columns} * 2};
  return w;
}

Rank rank_of(World& w, int rank) {
  const auto at = static_cast<size_t>(rank);
  static Report report;
  Rank r = world::rank_of(*heaps, rank, w.routing[at], w.receives[at], 1, &report);
  r.source = reinterpret_cast<const uint8_t*>(w.source[at].data());
  r.source_stride = r.result_stride = w.layout.row_bytes;
  r.result = reinterpret_cast<uint8_t*>(w.result[at].data());
  r.chunks = w.chunks;
  r.watch.bound = 1000 * 1000;  // whatever is waited for is there
  r.row_dots = w.dots[at].data();
  r.dot_parts = kDotParts;
  r.dot_rows = static_cast<int64_t>(w.rows[at].size());
  r.weight_gradient = w.gradient[at].data();
  return r;
}

// A row's products, in the inbox: whole numbers, whose sums need no rounding.
float product(int rank, int row, int column) { return static_cast<float>((rank + 3 * row + column) % 16); }

// The rows that lie on one rank of a slot's token, in the order of its choices.
std::vector<int> slots_beside(const World& w, int source, int slot) {
  const Routing& g = w.routing[static_cast<size_t>(source)];
  std::vector<int> found;
  const int begin = slot / g.choices * g.choices;
  for (int s = begin; s < begin + g.choices; ++s)
    if (g.is_kept(s) &&
        g.expert[static_cast<size_t>(s)] / w.experts == g.expert[static_cast<size_t>(slot)] / w.experts)
      found.push_back(s);
  return found;
}

int row_of(const World& w, int rank, int source, int slot) {
  const auto& rows = w.rows[static_cast<size_t>(rank)];
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i].source == source && rows[i].slot == slot) return static_cast<int>(i);
  return -1;
}

// Which rank may write a part; -1: nobody.
int writer_of(const World& w, int heap, const Part& part, bool combining) {
  const auto& rows = w.rows[static_cast<size_t>(heap)];
  const Routing& g = w.routing[static_cast<size_t>(heap)];
  switch (part.region) {
    case kCounters:
      return heap;
    case kGranted:
    case kGrants:
      return combining ? -1 : part.index;
    case kArrivals:
      return combining ? -1 : part.index;
    case kReturned:
      return combining ? part.index : -1;
    case kWeights:
    case kLinks:
    case kInbox:
      return combining || part.index >= static_cast<int>(rows.size())
                 ? -1
                 : rows[static_cast<size_t>(part.index)].source;
    case kDots:
    case kHome: {
      if (!combining || part.index >= g.rows()) return -1;
      const int slot = g.slot[static_cast<size_t>(g.first_row + part.index)];
      if (part.region == kHome && slots_beside(w, heap, slot).front() != slot) return -1;
      return g.expert[static_cast<size_t>(slot)] / w.experts;
    }
  }
  return -1;
}

// Every write lies in one part, and its rank may write that; no byte is written twice; of the parts that are
// written whole, none is left out.
void test_writes(const World& w, const std::vector<Part>& parts, bool combining) {
  std::vector<std::vector<int64_t>> bytes(static_cast<size_t>(w.ranks),
                                          std::vector<int64_t>(parts.size(), 0));
  std::sort(written.begin(), written.end(), [](const Access& a, const Access& b) {
    return a.heap != b.heap ? a.heap < b.heap : a.at < b.at;
  });
  for (size_t i = 0; i < written.size(); ++i) {
    const Access& a = written[i];
    const auto after = std::upper_bound(parts.begin(), parts.end(), a.at,
                                        [](int64_t at, const Part& p) { return at < p.begin; });
    expect(after != parts.begin(), "a write before every region");
    const Part& part = *(after - 1);
    expect(a.at + a.bytes <= part.end, "a write outside its region");
    expect(writer_of(w, a.heap, part, combining) == a.rank, "a write by another rank than the region's");
    if (part.region == kCounters) continue;  // between a rank's own warps
    if (i > 0 && written[i - 1].heap == a.heap)
      expect(written[i - 1].at + written[i - 1].bytes <= a.at, "a byte that is written twice");
    bytes[static_cast<size_t>(a.heap)][static_cast<size_t>(&part - parts.data())] += a.bytes;
  }
  for (int h = 0; h < w.ranks; ++h)
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      if (part.region == kCounters || part.region == kArrivals) continue;
      const bool whole = writer_of(w, h, part, combining) >= 0;
      expect(bytes[static_cast<size_t>(h)][i] == (whole ? part.end - part.begin : 0),
             "a part that is not written");
    }
}

// By heap: the flag that stands behind each row's writes, as they were made.
using Flags = std::vector<std::vector<int64_t>>;

Flags flags_behind_rows(const World& w) {
  Flags flags;
  for (const auto& rows : w.rows) flags.emplace_back(rows.size(), -1);
  std::vector<std::pair<int, int64_t>> open;  // rows without a flag yet
  std::set<std::pair<int, int64_t>> raised;
  for (const Access& a : written) {
    const Layout& l = w.layout;
    if (a.at >= l.inbox() && a.at < l.home()) {
      const std::pair<int, int64_t> row = {a.heap, (a.at - l.inbox()) / l.row_bytes};
      if (open.empty() || open.back() != row) open.push_back(row);
    } else if (a.at >= l.arrivals(0) && a.at < l.weights()) {
      expect(raised.insert({a.heap, a.at}).second, "two pieces that share a flag");
      expect(!open.empty() && static_cast<int>(open.size()) <= kPiece,
             "a piece of too many rows, or of none");
      for (const auto& [heap, row] : open) {
        expect(heap == a.heap && row < static_cast<int64_t>(flags[static_cast<size_t>(heap)].size()),
               "a flag in another heap than its rows");
        flags[static_cast<size_t>(heap)][static_cast<size_t>(row)] = a.at;
      }
      open.clear();
    }
  }
  expect(open.empty(), "rows that no flag announces");
  return flags;
}

std::vector<int64_t> looked_at() {
  std::vector<int64_t> flags;
  for (const Access& a : seen) flags.push_back(a.at);
  std::sort(flags.begin(), flags.end());
  return flags;
}

// Who waits for rows looks at the flags behind them: all of those, once each, and at no others.
void test_awaited(World& w, const Flags& flags) {
  for (int rank = 0; rank < w.ranks; ++rank) {
    const Rank r = rank_of(w, rank);
    const ArrivalBoard board(w.boards[static_cast<size_t>(rank)].data(), w.ranks, w.experts);
    const auto& of_row = flags[static_cast<size_t>(rank)];
    for (int e = 0; e < w.experts; ++e)
      for (int height : {1, 5, 128})
        for (int begin = board.begin(e); begin < board.end(e); begin += height) {
          const int end = std::min(begin + height, board.end(e));
          const std::set<int64_t> expected(of_row.begin() + begin, of_row.begin() + end);
          for (int lanes : {1, 3, 32}) {
            seen.clear();
            for (int lane = 0; lane < lanes; ++lane) await_rows(r, board, e, begin, end, lane, lanes);
            expect(looked_at() == std::vector<int64_t>(expected.begin(), expected.end()),
                   "flags that a tile awaits");
          }
        }
    seen.clear();
    for (int warp = 0; warp < 3; ++warp) await_all(r, board, {0, 1, warp, 3});
    const std::set<int64_t> expected(of_row.begin(), of_row.end());
    expect(looked_at() == std::vector<int64_t>(expected.begin(), expected.end()), "flags of all rows");
  }
}

// What has arrived: the rows themselves, their weights and links.
void test_inbox(const World& w) {
  const size_t row_bytes = static_cast<size_t>(w.layout.row_bytes);
  for (int rank = 0; rank < w.ranks; ++rank) {
    const uint8_t* const heap = (*heaps)[rank];
    const auto& rows = w.rows[static_cast<size_t>(rank)];
    for (size_t i = 0; i < rows.size(); ++i) {
      const Arrived& row = rows[i];
      const Routing& g = w.routing[static_cast<size_t>(row.source)];
      const uint16_t* const token =
          w.source[static_cast<size_t>(row.source)].data() + row.slot / g.choices * w.chunks.columns;
      expect(std::memcmp(heap + w.layout.inbox() + i * row_bytes, token, row_bytes) == 0,
             "another token's row");
      float weight;
      std::memcpy(&weight, heap + w.layout.weights() + 4 * i, 4);
      expect(weight == g.weight[static_cast<size_t>(row.slot)], "another row's weight");
      Link link;
      std::memcpy(&link, heap + w.layout.links() + i * sizeof(Link), sizeof(Link));
      const std::vector<int> beside = slots_beside(w, row.source, row.slot);
      const auto at = std::find(beside.begin(), beside.end(), row.slot);
      expect(
          link.home == g.position[static_cast<size_t>(row.slot)] - g.first_row && link.source == row.source,
          "where a row's sum goes");
      expect(link.first == (at == beside.begin()), "a token's first row on a rank");
      expect(link.next == (at + 1 == beside.end() ? -1 : row_of(w, rank, row.source, *(at + 1))),
             "a token's next row");
    }
  }
}

// The tokens' sums and the weights' gradients, by a loop over slots.
void test_results(const World& w) {
  for (int rank = 0; rank < w.ranks; ++rank) {
    const auto at = static_cast<size_t>(rank);
    const Routing& g = w.routing[at];
    for (int t = g.first_token; t < g.first_token + g.tokens; ++t) {
      std::vector<float> sum(static_cast<size_t>(w.chunks.columns), 0.0f);
      for (int s = t * g.choices; s < (t + 1) * g.choices; ++s) {
        float gradient = 0;
        if (g.is_kept(s)) {
          const int target = g.expert[static_cast<size_t>(s)] / w.experts, row = row_of(w, target, rank, s);
          for (int c = 0; c < w.chunks.columns; ++c) sum[static_cast<size_t>(c)] += product(target, row, c);
          for (size_t part = 0; part < kDotParts; ++part) {
            const auto& dots = w.dots[static_cast<size_t>(target)];
            gradient += dots[part * w.rows[static_cast<size_t>(target)].size() + static_cast<size_t>(row)];
          }
        }
        expect(w.gradient[at][static_cast<size_t>(s)] == gradient, "the gradient of a weight");
      }
      for (int c = 0; c < w.chunks.columns; ++c)
        expect(widen(bf16{w.result[at][static_cast<size_t>(t * w.chunks.columns + c)]}) ==
                   sum[static_cast<size_t>(c)],
               "a token's sum");
    }
  }
}

void test_world(World w, int warps) {
  const world::Heaps memory(w.layout);
  const std::vector<Part> parts = parts_of(w.layout, w.chunks.count());
  heaps = &memory;
  const auto each = [&](const auto& body) {
    for (int rank = 0; rank < w.ranks; ++rank) {
      running = rank;
      const auto at = static_cast<size_t>(rank);
      ArrivalBoard board(w.boards[at].data(), w.ranks, w.experts);
      SendTable send_table(w.send_table[at].data(), w.ranks, w.experts);
      body(rank_of(w, rank), board, send_table);
    }
  };
  written.clear();
  each([&](const Rank& r, ArrivalBoard& board, SendTable& send_table) {
    world::fill(r, board, 0, 1, [] {});
    world::fill(r, send_table, 0, 1, [] {});
    for (int thread = 0; thread < 3; ++thread) grant(r, board, thread, 3, [] {});
  });
  each([&](const Rank& r, ArrivalBoard&, SendTable& send_table) {
    LaneCopies copies;
    for (int warp = 0; warp < warps; ++warp) send_rows(r, send_table, {0, 1, warp, warps}, copies);
  });
  const Flags flags = flags_behind_rows(w);
  test_writes(w, parts, false);
  test_inbox(w);
  test_awaited(w, flags);
  // The products, by the rank's own experts.
  for (int rank = 0; rank < w.ranks; ++rank)
    for (size_t i = 0; i < w.rows[static_cast<size_t>(rank)].size(); ++i)
      for (int c = 0; c < w.chunks.columns; ++c) {
        const bf16 value = narrow<bf16>(product(rank, static_cast<int>(i), c));
        std::memcpy(memory[rank] + w.layout.inbox() + static_cast<int64_t>(i) * w.layout.row_bytes + c * 2,
                    &value, 2);
      }
  written.clear();
  // One rank after the other: nobody waits, so what is summed in between is not yet there.
  each([&](Rank r, ArrivalBoard& board, SendTable& send_table) {
    r.watch.not_waited = 1u << static_cast<int>(Wait::kDone) | 1u << static_cast<int>(Wait::kReturn);
    for (int warp = 0; warp < warps; ++warp)
      combine<bf16>(r, board, send_table, {row_tiles(board, 4), 8}, {0, 1, warp, warps}, 0);
  });
  test_writes(w, parts, true);
  each([&](const Rank& r, ArrivalBoard&, SendTable& send_table) {
    for (int chunk = 0; chunk < w.chunks.count(); ++chunk) {
      await_returns(r, send_table, chunk, {0, 1, 0, 1});
      sum_tokens<bf16>(r, chunk, {0, 1, 0, 1});
    }
  });
  test_results(w);
  for (int rank = 0; rank < w.ranks; ++rank) expect(!memory.has_failed(rank), "a wait that did not end");
  heaps = nullptr;
}

// counts: by rank, by expert of all ranks.
void test_counts(Random& random, int ranks, int experts, const std::vector<int>& counts, int choices) {
  named = std::to_string(ranks) + " ranks, " + std::to_string(choices) + " choices:";
  for (int n : counts) named += " " + std::to_string(n);
  std::vector<Routing> routing;
  const auto line = static_cast<ptrdiff_t>(ranks * experts);
  for (int rank = 0; rank < ranks; ++rank)
    routing.push_back(world::route_counts(random,
                                          {counts.begin() + rank * line, counts.begin() + (rank + 1) * line},
                                          choices, random.below(2) != 0));
  test_world(make(std::move(routing), experts, random.below(2) ? Chunks{8, 8} : Chunks{24, 16}),
             1 + random.below(3));
}

// Every table whose entries are among these; more than so many are drawn instead.
void test_tables(int ranks, int experts, const std::vector<int>& sizes, long most) {
  Random random = {static_cast<uint32_t>(ranks * 100 + experts)};
  const size_t entries = static_cast<size_t>(ranks * ranks * experts);
  double all = 1;
  for (size_t i = 0; i < entries; ++i) all *= static_cast<double>(sizes.size());
  const bool drawn = all > static_cast<double>(most);
  const long tables = drawn ? most : static_cast<long>(all);
  for (long table = 0; table < tables; ++table) {
    std::vector<int> counts;
    long rest = table;
    for (size_t i = 0; i < entries; ++i, rest /= static_cast<long>(sizes.size()))
      counts.push_back(
          sizes[static_cast<size_t>(drawn ? random.below(static_cast<int>(sizes.size()))
                                          : static_cast<int>(rest % static_cast<long>(sizes.size())))]);
    test_counts(random, ranks, experts, counts, 1 + static_cast<int>(table % 3));
  }
}

void test_random_worlds(int count) {
  Random random = {5};
  for (int i = 0; i < count; ++i) {
    const int ranks = 1 + random.below(5), experts = 1 + random.below(5);
    const int choices = 1 + random.below(std::min(4, ranks * experts));
    named = "random world " + std::to_string(i);
    std::vector<Routing> routing;
    for (int rank = 0; rank < ranks; ++rank)
      routing.push_back(world::route(random, ranks * experts, random.below(4) ? random.below(120) : 0,
                                     choices, random.below(2) != 0));
    const int columns = 8 * (1 + random.below(12));
    test_world(make(std::move(routing), experts, {columns, 8 * (1 + random.below(5))}), 1 + random.below(4));
  }
}

}  // namespace

int main(int argc, char**) {
  const bool thorough = argc > 1;
  test_all_regions();
  for (int experts = 1; experts <= 3; ++experts) test_tables(1, experts, {0, 1, 16, 17, 33}, 1000);
  test_tables(2, 1, {0, 1, 16, 17, 33}, 1000);
  test_tables(2, 2, {0, 17}, 1000);
  test_tables(2, 2, {0, 1, 17}, thorough ? 7000 : 1000);
  test_tables(2, 3, {0, 17}, 5000);
  test_tables(3, 1, {0, 17}, 1000);
  test_tables(3, 1, {0, 1, 17}, thorough ? 20000 : 1000);
  for (int experts : {2, 3}) test_tables(3, experts, {0, 1, 17}, 500);
  test_tables(4, 1, {0, 1}, thorough ? 70000 : 2000);
  for (int experts : {1, 2, 3}) test_tables(4, experts, {0, 1, 16, 17}, 300);
  test_random_worlds(thorough ? 1000 : 100);
  std::printf("%ld checks, %d failures\n", checks, failures);
  return failures != 0;
}
