// The kernels of row counts on the CPU (emulator.h), every thread of them, against plain loops.
//
// g++ -std=c++17 -O1 -Icuda -Itests/cuda tests/cuda/counts_test.cpp && ./a.out
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "counts/kernel.cuh"
#include "emulator.h"

using namespace pmoe;
using namespace pmoe::counts;

namespace {

std::mt19937 generator(1);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Runs a kernel's blocks with exactly this much shared memory, in a random order of threads.
template <class Kernel>
void run(int blocks, int shared_bytes, const Kernel& kernel) {
  emu::launch(static_cast<unsigned>(blocks), kThreads, static_cast<unsigned>(generator()), kernel, 50, 1,
              static_cast<size_t>(shared_bytes));
}

struct Case {
  int ranks, bins, experts, most;  // most: largest count
  Message message() const { return {ranks, bins, experts}; }
  std::string name() const {
    return "W=" + std::to_string(ranks) + " F=" + std::to_string(bins) + " E=" + std::to_string(experts);
  }
};

const Case kCases[] = {{1, 1, 1, 3},   {2, 8, 4, 5},  {3, 6, 1, 2},  {5, 12, 3, 4},
                       {8, 32, 1, 9},  {9, 4, 2, 0},  {40, 2, 2, 3}, {2, 300, 2, 4},
                       {33, 1, 3, 70}, {4, 16, 5, 1}, {2, 2, 700, 2}};

// Messages of all ranks with random headers and counts; -1 is added behind them, to be found again.
std::vector<int32_t> draw_messages(const Case& c) {
  std::vector<int32_t> found;
  for (int rank = 0; rank < c.ranks; ++rank) {
    for (int i = 0; i < kHeader; ++i) found.push_back(draw(0, 1 << 30));
    for (int i = 0; i < c.bins * c.experts; ++i) found.push_back(draw(0, 3) ? draw(0, c.most) : 0);
  }
  return found;
}

int count_of(const Case& c, const std::vector<int32_t>& messages, int rank, int bin, int expert) {
  return messages[rank * c.message().words() + kHeader + bin * c.experts + expert];
}

// fault: of this rank, by its number. Null if the launch has none.
void test_pack(const Case& c, const int64_t* fault, int expected) {
  std::vector<int32_t> counts(c.bins * c.ranks * c.experts);
  for (auto& each : counts) each = draw(0, 1000);
  const int all = c.ranks * c.message().words();
  std::vector<int32_t> sent(all + 1, -1);
  const Pack a{c.message(), {11, 22, 33, 44}, fault, counts.data(), sent.data()};
  const int blocks = std::min((all + kThreads - 1) / kThreads, 3);
  run(blocks, 0, [&] { pack_kernel(a); });
  const int header[] = {11, expected, 33, 44};
  for (int rank = 0; rank < c.ranks; ++rank) {
    for (int i = 0; i < kHeader; ++i)
      expect(sent[rank * c.message().words() + i] == header[i], "header " + c.name());
    for (int bin = 0; bin < c.bins; ++bin)
      for (int expert = 0; expert < c.experts; ++expert)
        expect(count_of(c, sent, rank, bin, expert) ==
                   counts[bin * c.ranks * c.experts + rank * c.experts + expert],
               "counts " + c.name());
  }
  expect(sent[all] == -1, "writes behind the messages " + c.name());
}

int64_t plain_depth(const Case& c, const std::vector<int64_t>& rows, int degree, double limit) {
  int64_t depth = 0;
  for (int chunks = degree; chunks < c.bins;) {
    int64_t most = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int64_t sum = 0;
      for (int bin = 0; bin < c.bins / chunks; ++bin) sum += rows[chunk * (c.bins / chunks) + bin];
      most = std::max(most, sum);
    }
    depth += static_cast<double>(most) > limit;
    int factor = 2;
    while (c.bins / chunks % factor) ++factor;
    chunks *= factor;
  }
  return depth;
}

void test_agree(const Case& c, int own_rank, int64_t host_rows) {
  auto messages = draw_messages(c);
  for (int rank = 0; rank < c.ranks; ++rank) messages[rank * c.message().words()] = draw(1, 40);
  Agree a{};
  a.message = c.message(), a.own_rank = own_rank, a.host_rows = host_rows;
  a.asks_rows = draw(0, 1), a.irregular = draw(0, 1);
  for (int d = 1; d <= c.bins && a.degrees < kMostDegrees; ++d)
    if (c.bins % d == 0) {
      a.degree[a.degrees] = d;
      a.limit_a_token[a.degrees++] = draw(1, 30) * 0.3 / d;
    }
  std::vector<int64_t> agreed(kHeader + 3 + a.degrees + 1, -1), rows(c.bins);
  a.received = messages.data(), a.agreed = agreed.data();
  run(1, AgreeShared::bytes(c.bins), [&] { agree_kernel(a); });
  int64_t all = 0;
  for (int rank = 0; rank < c.ranks; ++rank)
    for (int bin = 0; bin < c.bins; ++bin)
      for (int expert = 0; expert < c.experts; ++expert) {
        const int count = count_of(c, messages, rank, bin, expert);
        all += count;
        if (rank != own_rank) rows[bin] += count;
      }
  int64_t most_tokens = 0;
  for (int i = 0; i < kHeader; ++i) {
    int64_t most = 0;
    for (int rank = 0; rank < c.ranks; ++rank)
      most = std::max<int64_t>(most, messages[rank * c.message().words() + i]);
    expect(agreed[i] == most, "largest header " + c.name());
    if (i == 0) most_tokens = most;
  }
  expect(agreed[kHeader] == (host_rows >= 0 && all > host_rows), "host memory " + c.name());
  expect(agreed[kHeader + 1] == (a.asks_rows ? all : 0), "rows " + c.name());
  expect(agreed[kHeader + 2] == a.irregular, "irregular " + c.name());
  for (int d = 0; d < a.degrees; ++d) {
    const double limit = std::ceil(static_cast<double>(most_tokens) * a.limit_a_token[d]);
    expect(agreed[kHeader + 3 + d] == plain_depth(c, rows, a.degree[d], limit),
           "depth of " + std::to_string(a.degree[d]) + ", " + c.name());
  }
  expect(agreed.back() == -1, "writes behind the result " + c.name());
}

// Rows that arrive, by their order, and where each expert's end, with the other parts of the kernel left out.
void test_row_order(const Case& c, int chunks, int joined, int own_rank) {
  const auto messages = draw_messages(c);
  const int chunk_bins = c.bins / chunks;
  // The rows in the order in which they are needed, each with its place among the rows that arrived.
  struct Row {
    int chunk, expert, group, rank;
    int64_t in_chunk, in_all;
  };
  std::vector<Row> rows;
  std::vector<int64_t> arrived(chunks, 0);
  int64_t in_all = 0;
  for (int rank = 0; rank < c.ranks; ++rank)
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int expert = 0; expert < c.experts; ++expert)
        for (int bin = 0; bin < chunk_bins; ++bin) {
          const int count = count_of(c, messages, rank, chunk * chunk_bins + bin, expert);
          for (int i = 0; i < count && rank != own_rank; ++i)
            rows.push_back({chunk, expert, bin / joined, rank, arrived[chunk]++, in_all++});
        }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::tie(a.chunk, a.expert, a.group, a.rank) < std::tie(b.chunk, b.expert, b.group, b.rank);
  });
  std::vector<int32_t> of_chunks(rows.size() + 1, -1);
  std::vector<int64_t> of_all(rows.size() + 1, -1);
  const int pieces = own_rank < 0 ? 0 : draw(1, chunks);
  std::vector<int32_t> ends((chunks + pieces) * c.experts + 1, -1);
  Order a{};
  a.message = c.message(), a.received = messages.data();
  a.chunks = chunks, a.joined = joined, a.own_rank = own_rank, a.pieces = pieces;
  a.of_chunks = of_chunks.data(), a.of_all = of_all.data(), a.ends = ends.data();
  run(a.blocks(), order_bytes(c.ranks), [&] { order_kernel(a); });
  for (size_t i = 0; i < rows.size(); ++i) {
    expect(of_chunks[i] == rows[i].in_chunk, "index of a chunk's row " + std::to_string(i) + ", " + c.name());
    expect(of_all[i] == rows[i].in_all, "index of a number " + std::to_string(i) + ", " + c.name());
  }
  expect(of_chunks.back() == -1 && of_all.back() == -1, "writes behind the tables " + c.name());
  std::vector<int32_t> expected(ends.size(), 0);
  expected.back() = -1;
  for (int rank = 0; rank < c.ranks; ++rank)
    for (int bin = 0; bin < c.bins; ++bin)
      for (int expert = 0; expert < c.experts; ++expert) {
        const int chunk = bin / chunk_bins, piece = std::max(0, chunk - (chunks - pieces));
        const int line = rank == own_rank ? chunks + piece : chunk;
        for (int e = expert; e < c.experts; ++e)
          expected[line * c.experts + e] += count_of(c, messages, rank, bin, expert);
      }
  expect(ends == expected, "ends " + c.name());
}

// The numbers that are sent, by their order, with the order of rows that arrive left out.
void test_number_order(const Case& c, int chunks, int own_rank, bool weighted) {
  const auto sent = draw_messages(c), received = draw_messages(c);
  const int chunk_bins = c.bins / chunks;
  // This rank's rows, as it sorts them: by chunk, then rank, and in each chunk last those that stay.
  struct Row {
    bool stays;
    int rank, chunk;
    int32_t slot;
  };
  std::vector<Row> rows;
  for (int chunk = 0; chunk < chunks; ++chunk)
    for (int turn = 0; turn < 2; ++turn)
      for (int rank = 0; rank < c.ranks; ++rank) {
        if ((rank == own_rank) != (turn == 1)) continue;
        for (int bin = 0; bin < chunk_bins; ++bin)
          for (int expert = 0; expert < c.experts; ++expert)
            for (int i = count_of(c, sent, rank, chunk * chunk_bins + bin, expert); i > 0; --i)
              rows.push_back({turn == 1, rank, chunk, 0});
      }
  std::vector<int32_t> slot(rows.size() + 1, -1);
  std::vector<float> weight;
  for (size_t i = 0; i < rows.size(); ++i) {
    slot[i] = static_cast<int32_t>(i);
    weight.push_back(static_cast<float>(draw(1, 1000)));
  }
  std::shuffle(slot.begin(), slot.end() - 1, generator);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].slot = slot[i];
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::tie(a.stays, a.rank, a.chunk) < std::tie(b.stays, b.rank, b.chunk);
  });
  const int pieces = own_rank < 0 ? 0 : chunks;
  std::vector<int64_t> number_slot(rows.size() + 1, -1);
  std::vector<float> number_weight(rows.size() + 1, -1);
  std::vector<int32_t> ends((chunks + pieces) * c.experts), zeros(301, -1);
  Order a{};
  a.message = c.message(), a.received = received.data(), a.sent = sent.data();
  a.chunks = chunks, a.joined = 1, a.own_rank = own_rank, a.pieces = pieces;
  a.slot = slot.data(), a.number_slot = number_slot.data(), a.ends = ends.data();
  if (weighted) a.weight = weight.data(), a.number_weight = number_weight.data();
  a.zeros = zeros.data(), a.num_zeros = 300;
  run(a.blocks(), order_bytes(c.ranks), [&] { order_kernel(a); });
  for (size_t i = 0; i < rows.size(); ++i) {
    expect(number_slot[i] == rows[i].slot, "slot of number " + std::to_string(i) + ", " + c.name());
    expect(number_weight[i] == (weighted ? weight[rows[i].slot] : -1.0f),
           "weight of number " + std::to_string(i) + ", " + c.name());
  }
  expect(number_slot.back() == -1 && number_weight.back() == -1, "writes behind the numbers " + c.name());
  expect(zeros.back() == -1, "writes behind the zeros " + c.name());
  zeros.pop_back();
  expect(zeros == std::vector<int32_t>(300, 0), "zeros " + c.name());
}

}  // namespace

int main() {
  for (const Case& c : kCases) {
    const int64_t fault = 7;
    test_pack(c, nullptr, 22);
    test_pack(c, &fault, 7);
    for (int own_rank : {-1, 0, c.ranks - 1})
      for (int64_t host_rows : {int64_t{-1}, int64_t{0}, int64_t{1} << 40})
        test_agree(c, own_rank, host_rows);
    for (int chunks = 1; chunks <= std::min(c.bins, 6); ++chunks) {
      if (c.bins % chunks) continue;
      for (int joined = 1; joined <= c.bins / chunks; ++joined)
        if (c.bins / chunks % joined == 0 && c.bins / joined * c.experts <= 130)
          for (int own_rank : {-1, c.ranks / 2}) test_row_order(c, chunks, joined, own_rank);
      for (int own_rank : {-1, 0, c.ranks - 1}) test_number_order(c, chunks, own_rank, chunks % 2 == 0);
    }
  }
  std::puts("ok");
  return 0;
}
