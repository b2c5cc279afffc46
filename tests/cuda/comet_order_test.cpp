// The order of rows, pieces and tiles in cuda/comet/order.h, against plain loops and sorts: exhaustively over
// small numbers of ranks, experts and rows, and around the edges of real tiles.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "comet/layout.h"
#include "comet/order.h"
#include "common/device.cuh"

using namespace pmoe;
using namespace pmoe::comet;

namespace {

long checks = 0;
int failures = 0;

void expect(bool holds, const std::string& what) {
  ++checks;
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

// Rows by source and expert, that one rank receives.
struct Table {
  int ranks, experts;
  std::vector<int> rows;

  int at(int source, int expert) const { return rows[static_cast<size_t>(source * experts + expert)]; }
  std::string name() const {
    std::string text = std::to_string(ranks) + " ranks:";
    for (int n : rows) text += " " + std::to_string(n);
    return text;
  }
};

// Every table whose entries are among these.
template <class Body>
void for_all_tables(int ranks, int experts, const std::vector<int>& sizes, const Body& body) {
  const size_t entries = static_cast<size_t>(ranks * experts);
  std::vector<size_t> digit(entries, 0);
  for (;;) {
    Table table = {ranks, experts, {}};
    for (size_t d : digit) table.rows.push_back(sizes[d]);
    body(table);
    size_t i = 0;
    while (i < entries && ++digit[i] == sizes.size()) digit[i++] = 0;
    if (i == entries) return;
  }
}

template <class Body>
void for_random_tables(int count, int most_ranks, int most_experts, int most_rows, const Body& body) {
  std::mt19937 random(7);
  for (int i = 0; i < count; ++i) {
    Table table = {
        1 + static_cast<int>(random() % most_ranks), 1 + static_cast<int>(random() % most_experts), {}};
    for (int j = 0; j < table.ranks * table.experts; ++j)
      table.rows.push_back(random() % 3 ? static_cast<int>(random() % (most_rows + 1)) : 0);
    body(table);
  }
}

struct Filled {
  std::vector<int32_t> words;
  ArrivalBoard board;

  Filled(const Table& t, int rank)
      : words(ArrivalBoard::words(t.ranks, t.experts), -1), board(words.data(), t.ranks, t.experts) {
    board.fill(rank, [&](int source, int e) { return t.at(source, e); }, 0, 1, [] {});
  }
};

// ---- where rows stand

// The rank that each row comes from, in the order of the inbox: by expert, inside an expert by source, the
// rank itself first and then upwards around.
struct Row {
  int expert, source, level;
};

std::vector<Row> rows_of(const Table& t, int rank) {
  std::vector<Row> rows;
  for (int e = 0; e < t.experts; ++e)
    for (int level = 0; level < t.ranks; ++level) {
      const int source = (rank + level) % t.ranks;
      for (int i = 0; i < t.at(source, e); ++i) rows.push_back({e, source, level});
    }
  return rows;
}

void test_places(const Table& t) {
  for (int rank = 0; rank < t.ranks; ++rank) {
    const Filled filled(t, rank);
    const ArrivalBoard& board = filled.board;
    const std::vector<Row> rows = rows_of(t, rank);
    std::vector<int> places(rows.size(), 0);
    for (int e = 0; e < t.experts; ++e)
      for (int source = 0; source < t.ranks; ++source) {
        const int level = level_of(source, rank, t.ranks);
        expect(source_at(level, rank, t.ranks) == source, "a level is another source's");
        expect(target_at(level, source, t.ranks) == rank,
               "a rank sends in another order than its peers receive");
        expect(board.rows(level, e) == t.at(source, e), "rows of " + t.name());
        for (int i = board.first(level, e); i < board.first(level + 1, e); ++i) {
          const Row& row = rows[static_cast<size_t>(i)];
          expect(row.expert == e && row.source == source && row.level == level, "a row of " + t.name());
          ++places[static_cast<size_t>(i)];
        }
      }
    expect(std::count(places.begin(), places.end(), 1) == static_cast<long>(rows.size()),
           "a row in no place, or in two");
    expect(board.total() == static_cast<int>(rows.size()), "the sum of " + t.name());
    for (int e = 0, end = 0; e < t.experts; ++e) {
      expect(board.begin(e) == end, "an expert's first row");
      for (int source = 0; source < t.ranks; ++source) end += t.at(source, e);
      expect(board.end(e) == end && board.ends()[e] == end, "an expert's end");
    }
  }
}

void test_sends(const Table& t) {  // what is received from rank s is taken for what is sent to it
  std::vector<int32_t> words(static_cast<size_t>(SendTable::words(t.ranks, t.experts)), -1);
  SendTable send_table(words.data(), t.ranks, t.experts);
  send_table.fill([&](int i) { return t.rows[static_cast<size_t>(i)]; }, 0, 1, [] {});
  int before = 0;
  for (int target = 0; target < t.ranks; ++target) {
    int of_target = 0;
    for (int e = 0; e < t.experts; ++e) {
      expect(send_table.first(target, e) == before + of_target, "what is sent, of " + t.name());
      expect(send_table.rows(target, e) == t.at(target, e), "rows that are sent, of " + t.name());
      of_target += t.at(target, e);
    }
    expect(send_table.rows(target) == of_target, "rows to a rank, of " + t.name());
    before += of_target;
  }
  expect(send_table.total() == before, "all rows that are sent, of " + t.name());
}

// Any number of threads fills in the same, in whichever order they come between two meetings.
void test_fill_by_threads(const Table& t) {
  const Filled expected(t, t.ranks - 1);
  std::vector<int32_t> alone(static_cast<size_t>(SendTable::words(t.ranks, t.experts)), -1);
  const auto sent = [&](int i) { return t.rows[static_cast<size_t>(i)]; };
  SendTable(alone.data(), t.ranks, t.experts).fill(sent, 0, 1, [] {});
  for (const int threads : {1, 3, 7, 384}) {
    std::vector<int32_t> words(expected.words.size(), -1), send_table(alone.size(), -1);
    emu::launch(1, static_cast<unsigned>(threads), 11, [&] {
      const int thread = static_cast<int>(threadIdx.x);
      const auto sync = [] { sync_block(); };
      emu::maybe_yield();
      ArrivalBoard(words.data(), t.ranks, t.experts)
          .fill(
              t.ranks - 1,
              [&](int source, int e) {
                emu::maybe_yield();
                return t.at(source, e);
              },
              thread, threads, sync);
      SendTable(send_table.data(), t.ranks, t.experts)
          .fill(
              [&](int i) {
                emu::maybe_yield();
                return sent(i);
              },
              thread, threads, sync);
    });
    expect(words == expected.words, std::to_string(threads) + " threads fill in another board");
    expect(send_table == alone, std::to_string(threads) + " threads fill in other sends");
  }
}

// ---- pieces

void test_pieces(const Table& t) {
  const auto rows = [&](int step, int e) { return t.at(step, e); };
  std::vector<std::vector<int>> expected;
  for (int step = 0; step < t.ranks; ++step)
    for (int e = 0; e < t.experts; ++e)
      for (int begin = 0, number = 0; begin < t.at(step, e); begin += kPiece, ++number)
        expected.push_back({step, e, number, begin, std::min(kPiece, t.at(step, e) - begin)});
  for (const int warps : {1, 2, 5}) {
    std::vector<std::vector<int>> found(expected.size());
    size_t count = 0;
    for (int w = 0; w < warps; ++w) {
      PieceWalk walk(t.ranks, t.experts);
      Piece piece;
      int i = w;
      for (; walk.find(i, rows, piece); i += warps, ++count)
        if (static_cast<size_t>(i) < found.size())
          found[static_cast<size_t>(i)] = {piece.step, piece.expert, piece.number, piece.begin, piece.rows};
      expect(!walk.find(i + warps, rows, piece), "a walk over pieces goes on after its end");
    }
    expect(count == expected.size() && found == expected, "pieces of " + t.name());
  }
}

// ---- tiles

struct Place {  // in the order in which it is to be compared
  int outer, expert, band, right, down;
  Tile tile;

  auto key() const { return std::make_tuple(outer, expert, band, right, down); }
};

bool same(const Tile& a, const Tile& b) {
  return a.expert == b.expert && a.group_begin == b.group_begin && a.group_rows == b.group_rows &&
         a.row == b.row && a.rows == b.rows && a.column == b.column;
}

// Walks of all blocks, put together: block b has tiles b, b + blocks, b + 2 blocks...
template <class Make>
void expect_order(const std::vector<Place>& unsorted, int blocks, const Make& make, const std::string& what) {
  std::vector<Place> expected = unsorted;
  std::sort(expected.begin(), expected.end(),
            [](const Place& a, const Place& b) { return a.key() < b.key(); });
  size_t count = 0;
  bool right = true;
  for (int b = 0; b < blocks; ++b) {
    auto walk = make(b, blocks);
    Tile tile;
    for (size_t i = static_cast<size_t>(b); walk.next(tile); i += static_cast<size_t>(blocks), ++count)
      right = right && i < expected.size() && same(tile, expected[i].tile);
    for (int again = 0; again < 3; ++again) expect(!walk.next(tile), what + " goes on after its end");
  }
  expect(right && count == expected.size(), what);
}

// First what the rank has itself, then what each next source completes.
std::vector<Place> arrival_places(const Table& t, int rank, int columns, TileShape shape) {
  const std::vector<Row> rows = rows_of(t, rank);
  std::vector<Place> places;
  int begin = 0;
  for (int e = 0; e < t.experts; ++e) {
    int size = 0;
    for (int source = 0; source < t.ranks; ++source) size += t.at(source, e);
    std::vector<int> before(static_cast<size_t>(t.ranks), 0);  // row tiles of the same level
    for (int row = 0; row < size; row += shape.rows) {
      const int have = std::min(shape.rows, size - row);
      const int level = rows[static_cast<size_t>(begin + row + have - 1)].level;
      const int down = before[static_cast<size_t>(level)]++;
      for (int column = 0; column < columns; column += shape.columns)
        places.push_back({level, e, down / kBand, column, down, {e, begin, size, row, have, column}});
    }
    begin += size;
  }
  return places;
}

// Chunks of columns one after the other, each of all rows.
std::vector<Place> column_places(const Table& t, Chunks chunks, TileShape shape) {
  std::vector<Place> places;
  for (int first = 0, chunk = 0; first < chunks.columns; first += chunks.chunk_columns, ++chunk) {
    const int end = std::min(first + chunks.chunk_columns, chunks.columns);
    for (int e = 0, begin = 0; e < t.experts; ++e) {
      int size = 0;
      for (int source = 0; source < t.ranks; ++source) size += t.at(source, e);
      for (int row = 0, down = 0; row < size; row += shape.rows, ++down)
        for (int column = first; column < end; column += shape.columns)
          places.push_back({chunk,
                            e,
                            down / kBand,
                            column,
                            down,
                            {e, begin, size, row, std::min(shape.rows, size - row), column}});
      begin += size;
    }
  }
  return places;
}

void test_arrival(const Table& t, int rank, int columns, TileShape shape, const std::vector<int>& blocks) {
  const Filled filled(t, rank);
  const std::vector<Place> places = arrival_places(t, rank, columns, shape);
  for (int count : blocks)
    expect_order(
        places, count,
        [&](int first, int step) { return ArrivalWalk(filled.board, columns, shape, first, step); },
        "tiles as rows arrive, " + t.name());
}

void test_columns(const Table& t, Chunks chunks, TileShape shape, const std::vector<int>& blocks) {
  const Filled filled(t, 0);
  const std::vector<Place> places = column_places(t, chunks, shape);
  for (int count : blocks)
    expect_order(
        places, count,
        [&](int first, int step) { return ColumnWalk(filled.board, chunks, shape, first, step); },
        "tiles by columns, " + t.name());
  // What communicating warps count: the tiles of each chunk.
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    const long tiles =
        std::count_if(places.begin(), places.end(), [&](const Place& p) { return p.outer == chunk; });
    const long across = ceil_div(chunks.width(chunk), shape.columns);
    expect(tiles == row_tiles(filled.board, shape.rows) * across,
           "the number of a chunk's tiles, " + t.name());
    for (const Place& p : places)
      if (p.outer == chunk) expect(p.tile.column / chunks.chunk_columns == chunk, "the chunk of a tile");
  }
}

void test_small_tiles(const Table& t) {
  for (int rank = 0; rank < t.ranks; ++rank)
    for (int columns : {1, 3, 4}) test_arrival(t, rank, columns, {2, 2}, {1, 3});
  for (const Chunks chunks : {Chunks{1, 2}, Chunks{4, 2}, Chunks{7, 4}, Chunks{8, 4}, Chunks{5, 8}})
    test_columns(t, chunks, {2, 2}, {1, 3});
}

void test_real_tiles(const Table& t) {
  test_arrival(t, t.ranks - 1, 1408, {128, 256}, {1, 130});
  test_arrival(t, 0, 512, {128, 128}, {130});
  test_columns(t, {1408, 512}, {128, 256}, {1, 130});
  test_columns(t, {1000, 1024}, {128, 256}, {130});
}

}  // namespace

int main() {
  const auto places = [](const Table& t) {
    test_places(t);
    test_sends(t);
  };
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (int experts = 1; experts <= 3; ++experts) {
      const int entries = ranks * experts;
      const std::vector<int> few = entries <= 4 ? std::vector<int>{0, 1, 2, 3, 5} : std::vector<int>{0, 1, 3};
      const std::vector<int> sizes = entries <= 6 ? few : std::vector<int>{0, 2};
      for_all_tables(ranks, experts, sizes, places);
      for_all_tables(ranks, experts, entries <= 9 ? sizes : std::vector<int>{3}, test_small_tiles);
      if (entries <= 6) for_all_tables(ranks, experts, {0, 1, kPiece, kPiece + 1, 3 * kPiece}, test_pieces);
    }
  for_random_tables(200, 8, 8, 9, [&](const Table& t) {
    places(t);
    test_small_tiles(t);
  });
  for_random_tables(200, 8, 8, 60, test_pieces);
  for_random_tables(6, 4, 3, 20, test_fill_by_threads);
  for_random_tables(2, 64, 32, 20, test_fill_by_threads);
  // Sizes around the edges of real tiles, and of bands of them.
  for_all_tables(2, 2, {0, 1, 127, 128, 129, 255, 256, 257}, test_real_tiles);
  for_all_tables(3, 1, {0, 1, 128 * kBand - 1, 128 * kBand, 128 * kBand + 1, 5000}, test_real_tiles);
  for_random_tables(40, 8, 8, 700, test_real_tiles);
  std::printf("%ld checks, %d failures\n", checks, failures);
  return failures != 0;
}
