// Ranks of COMET's two kernels as threads: the experts that they compute, what each holds in a round, and the
// kernels themselves. A thread stands for a warp of a communicating block, and for a whole computing one; see
// comet/hopper.cuh for who does what.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comet/combine.cuh"
#include "comet/dispatch.cuh"
#include "comet_world.h"

using namespace pmoe;
using namespace pmoe::comet;
using world::Random;
using world::Routing;

namespace {

constexpr int kWarps = 2;             // of a communicating block
constexpr int kComputing = 2;         // blocks of a rank
constexpr int kHidden = 6;            // columns between the two products
constexpr TileShape kFirst = {4, 4};  // tiles of the first product
constexpr TileShape kSecond = {4, 16};
constexpr Chunks kColumns = {56, 32};  // of tokens: the last chunk and its last tile are narrower
constexpr int kRounds = 5;

std::atomic<int> failures{0};

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

// ---- mistakes that can be planted

struct Mistake {
  const char* name;
  Wait not_waited;
  bool grants_early;  // inboxes are granted for the next round while this one's products are on their way
  bool old_epoch;     // every round has the first one's number
  bool is_relaxed;    // signals order nothing
};

constexpr Mistake kMistakes[] = {
    {"none", Wait::kNone, false, false, false},
    {"no_grant_wait", Wait::kGrant, false, false, false},
    {"no_arrival_wait", Wait::kArrival, false, false, false},
    {"no_done_wait", Wait::kDone, false, false, false},
    {"no_return_wait", Wait::kReturn, false, false, false},
    {"reused_inbox", Wait::kNone, true, false, false},
    {"reused_flags", Wait::kNone, false, true, false},
    {"relaxed_signal", Wait::kNone, false, false, true},
};

// ---- the experts: whole numbers, so that sums are exact in any order

float first_weight(int expert, int from, int to) {
  return static_cast<float>((expert * 5 + from * 3 + to * 7) % 3);
}
float second_weight(int expert, int from, int to) { return static_cast<float>((expert + from * 5 + to) % 3); }

float hidden_value(int expert, const float* row, int column, float weight) {
  float sum = 0;
  for (int k = 0; k < kColumns.columns; ++k) sum += row[k] * first_weight(expert, k, column);
  return sum * weight;
}

bf16 product_value(int expert, const float* hidden, int column) {
  float sum = 0;
  for (int h = 0; h < kHidden; ++h) sum += hidden[h] * second_weight(expert, h, column);
  return narrow<bf16>(sum);
}

int parts_of_dots() { return ceil_div(kHidden, kFirst.columns); }

// ---- a rank in a round: what its kernels are given, and what they make

struct Member {
  Routing routing;
  std::vector<int32_t> receives;
  std::vector<bf16> source, result;           // by token
  std::vector<float> hidden, dots, gradient;  // by row, by part and row, by slot
  bool is_granted_before = false;             // a mistake
  Report report = {};
  Rank rank;
};

struct World {
  int experts = 1, communicating = 1;
  std::vector<std::vector<Member>> rounds;  // by round and rank
  std::unique_ptr<world::Heaps> heaps;

  int ranks() const { return static_cast<int>(rounds[0].size()); }
};

// routing: by round and rank.
World make(std::vector<std::vector<Routing>> routing, int experts, int communicating, const Mistake& mistake,
           uint32_t seed) {
  World w;
  w.experts = experts;
  w.communicating = communicating;
  Layout layout = {static_cast<int32_t>(routing[0].size()), experts, 0, 0, kColumns.columns * 2};
  for (const auto& round : routing)
    for (size_t r = 0; r < round.size(); ++r) {
      layout.rows = larger<int64_t>(
          layout.rows, static_cast<int64_t>(world::arrivals(round, static_cast<int>(r), experts).size()));
      layout.home_rows = larger<int64_t>(layout.home_rows, round[r].rows());
    }
  w.heaps = std::make_unique<world::Heaps>(layout);
  Random random = {seed};
  for (size_t i = 0; i < routing.size(); ++i) {
    w.rounds.emplace_back(routing[i].size());
    for (size_t rank = 0; rank < routing[i].size(); ++rank) {
      Member& m = w.rounds[i][rank];
      m.receives = world::receive_counts(routing[i], static_cast<int>(rank), experts);
      const auto rows = world::arrivals(routing[i], static_cast<int>(rank), experts).size();
      m.routing = routing[i][rank];
      const auto values = static_cast<size_t>((m.routing.first_token + m.routing.tokens) * kColumns.columns);
      for (size_t j = 0; j < values; ++j)
        m.source.push_back(narrow<bf16>(static_cast<float>(random.below(8))));
      m.result.assign(values, bf16{0xFFFF});
      m.hidden.assign(rows * kHidden, -1.0f);
      m.dots.assign(rows * static_cast<size_t>(parts_of_dots()), -1.0f);
      m.gradient.assign(m.routing.expert.size(), -1.0f);
      const int number = static_cast<int>(i) + 1;
      Rank& r = m.rank;
      r = world::rank_of(*w.heaps, static_cast<int>(rank), m.routing, m.receives,
                         static_cast<uint32_t>(mistake.old_epoch ? 1 : number), &m.report);
      r.watch.delay_seed = seed;
      if (mistake.not_waited != Wait::kNone) r.watch.not_waited = 1u << static_cast<int>(mistake.not_waited);
      m.is_granted_before = mistake.grants_early && i > 0;
      r.source = reinterpret_cast<const uint8_t*>(m.source.data());
      r.result = reinterpret_cast<uint8_t*>(m.result.data());
      r.source_stride = r.result_stride = layout.row_bytes;
      r.chunks = kColumns;
      r.row_dots = m.dots.data();
      r.dot_parts = parts_of_dots();
      r.dot_rows = static_cast<int64_t>(rows);
      r.weight_gradient = m.gradient.data();
      r.communicating = communicating;
      r.blocks = communicating + kComputing;
    }
  }
  return w;
}

// ---- kernels

class Barrier {  // the barrier of a block
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void sync() {
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    } else {
      while (generation_.load(std::memory_order_acquire) == generation) std::this_thread::yield();
    }
  }

 private:
  int threads_;
  std::atomic<int> arrived_{0}, generation_{0};
};

struct Block {
  Barrier barrier;
  std::vector<int32_t> words;
  ArrivalBoard board;
  SendTable send_table;

  Block(const Rank& r, int threads)
      : barrier(threads),
        words(static_cast<size_t>(ArrivalBoard::words(r.ranks(), r.experts()) +
                                  SendTable::words(r.ranks(), r.experts())),
              -1),
        board(words.data(), r.ranks(), r.experts()),
        send_table(words.data() + ArrivalBoard::words(r.ranks(), r.experts()), r.ranks(), r.experts()) {}
};

void read_row(const Rank& r, int row, float* values) {
  for (int v = 0; v < kColumns.columns / 8; ++v) {
    const Words words = load16(r.inbox(r.rank, row) + v * 16);
    for (int i = 0; i < 4; ++i) {
      values[v * 8 + 2 * i] = low_half<bf16>(words.word[i]);
      values[v * 8 + 2 * i + 1] = high_half<bf16>(words.word[i]);
    }
  }
}

void compute_first(Member& m, const ArrivalBoard& board, int block) {
  const Rank& r = m.rank;
  ArrivalWalk walk(board, kHidden, kFirst, block - r.communicating, r.blocks - r.communicating);
  Tile tile;
  while (walk.next(tile)) {
    const int begin = tile.group_begin + tile.row;
    await_rows(r, board, tile.expert, begin, begin + tile.rows, 0, 1);
    peers::test_delay(r.watch, static_cast<uint32_t>(block) + 4000);
    for (int row = begin; row < begin + tile.rows; ++row) {
      float values[kColumns.columns], dot = 0;
      read_row(r, row, values);
      const float weight = read(reinterpret_cast<const float*>(r.own() + r.layout.weights()) + row);
      for (int h = tile.column; h < smaller(kHidden, tile.column + kFirst.columns); ++h)
        dot += m.hidden[static_cast<size_t>(row * kHidden + h)] =
            hidden_value(r.rank * r.experts() + tile.expert, values, h, weight);
      m.dots[static_cast<size_t>(tile.column / kFirst.columns * r.dot_rows + row)] = dot;
    }
  }
}

void compute_second(Member& m, const ArrivalBoard& board, int block) {
  const Rank& r = m.rank;
  ColumnWalk walk(board, r.chunks, kSecond, block - r.communicating, r.blocks - r.communicating);
  Tile tile;
  while (walk.next(tile)) {
    const int chunk = tile.column / r.chunks.chunk_columns;
    const int end = smaller(tile.column + kSecond.columns, r.chunks.begin(chunk) + r.chunks.width(chunk));
    for (int row = tile.group_begin + tile.row; row < tile.group_begin + tile.row + tile.rows; ++row)
      for (int c = tile.column; c < end; c += 8) {
        Words words;
        for (int i = 0; i < 4; ++i) {
          const float* const hidden = m.hidden.data() + row * kHidden;
          const int expert = r.rank * r.experts() + tile.expert;
          words.word[i] = product_value(expert, hidden, c + 2 * i).bits |
                          uint32_t{product_value(expert, hidden, c + 2 * i + 1).bits} << 16;
        }
        store16(r.inbox(r.rank, row) + c * 2, words);
      }
    peers::test_delay(r.watch, static_cast<uint32_t>(block) + 5000);
    tile_done(r, chunk);
  }
}

void dispatch_thread(Member& m, Block& shared, int block, int warp) {
  const Rank& r = m.rank;
  const bool communicates = block < r.communicating;
  const int threads = communicates ? kWarps : 1;
  const auto sync = [&] { shared.barrier.sync(); };
  ArrivalBoard board = shared.board;
  world::fill(r, board, warp, threads, sync);
  if (!communicates) return compute_first(m, board, block);
  SendTable send_table = shared.send_table;
  world::fill(r, send_table, warp, threads, sync);
  if (block == 0 && !m.is_granted_before) grant(r, board, warp, threads, sync);
  LaneCopies copies;
  send_rows(r, send_table, {0, 1, block + warp * r.communicating, kWarps * r.communicating}, copies);
}

void combine_thread(Member& m, Block& shared, int block, int warp) {
  const Rank& r = m.rank;
  const bool communicates = block < r.communicating;
  const int threads = communicates ? kWarps : 1;
  const auto sync = [&] { shared.barrier.sync(); };
  ArrivalBoard board = shared.board;
  world::fill(r, board, warp, threads, sync);
  if (!communicates) compute_second(m, board, block);
  SendTable send_table = shared.send_table;
  world::fill(r, send_table, warp, threads, sync);
  const Tiling tiling = {row_tiles(board, kSecond.rows), kSecond.columns};
  const int first = kWarps * r.communicating, computing = r.blocks - r.communicating;
  if (communicates)
    combine<bf16>(r, board, send_table, tiling, {0, 1, block + warp * r.communicating, first}, computing);
  else
    combine_last_chunk<bf16>(r, board, send_table, tiling,
                             {0, 1, first + block - r.communicating, first + computing});
}

// A launch: all its threads, until they have ended.
template <class Body>
void launch(Member& m, const Body& body) {
  const Rank& r = m.rank;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> threads;
  for (int b = 0; b < r.blocks; ++b) {
    const int warps = b < r.communicating ? kWarps : 1;
    blocks.push_back(std::make_unique<Block>(r, warps));
    for (int warp = 0; warp < warps; ++warp)
      threads.emplace_back([&m, &body, b, warp, block = blocks.back().get()] { body(m, *block, b, warp); });
  }
  for (std::thread& thread : threads) thread.join();
}

void grant_before(const Rank& r) {
  Block block(r, 1);
  world::fill(r, block.board, 0, 1, [] {});
  grant(r, block.board, 0, 1, [] {});
}

// All rounds of one rank: it meets the others nowhere.
void run_rank(World& w, int rank) {
  for (size_t i = 0; i < w.rounds.size(); ++i) {
    Member& m = w.rounds[i][static_cast<size_t>(rank)];
    launch(m, dispatch_thread);
    if (m.is_granted_before) *m.rank.counters() = {};  // as a grant in time does
    if (i + 1 < w.rounds.size()) {
      const Member& next = w.rounds[i + 1][static_cast<size_t>(rank)];
      if (next.is_granted_before) grant_before(next.rank);
    }
    launch(m, combine_thread);
  }
}

// body(rank), by a thread for each rank.
template <class Body>
void for_ranks(int ranks, const Body& body) {
  std::vector<std::thread> drivers;
  for (int rank = 0; rank < ranks; ++rank) drivers.emplace_back([&body, rank] { body(rank); });
  for (std::thread& driver : drivers) driver.join();
}

}  // namespace
