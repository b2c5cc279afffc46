// COMET's two kernels as a protocol, run by threads under ThreadSanitizer: ranks that know of each other by
// their heaps alone, round after round on the same heaps, uneven rows and none. Every value is compared with
// a plain loop's. See comet_threads.h for the threads.
//
//   comet_protocol_test rounds RANKS [MISTAKE]   exit code 1: a value is wrong. MISTAKE: of kMistakes
//   comet_protocol_test absent RANKS             a rank that does not come: what the others report, and when
//   comet_protocol_test fill                     boards that several threads fill in together
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comet_threads.h"

namespace {

// ---- the plain loop

void check(const World& w, size_t round, int rank, const std::string& name) {
  const Member& m = w.rounds[round][static_cast<size_t>(rank)];
  const Routing& g = m.routing;
  const std::string where = name + ", round " + std::to_string(round + 1) + ", rank " + std::to_string(rank);
  for (int t = g.first_token; t < g.first_token + g.tokens; ++t) {
    float row[kColumns.columns];
    for (int c = 0; c < kColumns.columns; ++c)
      row[c] = widen(m.source[static_cast<size_t>(t * kColumns.columns + c)]);
    // Of each choice: its expert and hidden values.
    std::vector<int> experts;
    std::vector<std::vector<float>> hidden;
    for (int s = t * g.choices; s < (t + 1) * g.choices; ++s) {
      float dot = 0;
      if (g.is_kept(s)) {
        experts.push_back(g.expert[static_cast<size_t>(s)]);
        hidden.emplace_back();
        for (int h = 0; h < kHidden; ++h)
          hidden.back().push_back(hidden_value(experts.back(), row, h, g.weight[static_cast<size_t>(s)]));
        for (float value : hidden.back()) dot += value;
      }
      expect(m.gradient[static_cast<size_t>(s)] == dot,
             "the gradient of weight " + std::to_string(s) + ", " + where);
    }
    // Rounded where it leaves the rank that it was summed on, in the order of the choices.
    for (int c = 0; c < kColumns.columns; ++c) {
      float sum = 0;
      for (size_t k = 0; k < experts.size(); ++k) {
        const int target = experts[k] / w.experts;
        bool is_first = true;
        for (size_t j = 0; j < k; ++j) is_first = is_first && experts[j] / w.experts != target;
        if (!is_first) continue;
        float on_target = 0;
        for (size_t j = k; j < experts.size(); ++j)
          if (experts[j] / w.experts == target)
            on_target += widen(product_value(experts[j], hidden[j].data(), c));
        sum += widen(narrow<bf16>(on_target));
      }
      expect(m.result[static_cast<size_t>(t * kColumns.columns + c)].bits == narrow<bf16>(sum).bits,
             "token " + std::to_string(t) + ", column " + std::to_string(c) + ", " + where);
    }
  }
}

void test_rounds(int ranks, const Mistake& mistake) {
  signals_are_relaxed = mistake.is_relaxed;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    Random random = {seed * 77 + static_cast<uint32_t>(ranks)};
    const int experts = 1 + random.below(3), communicating = 1 + random.below(2);
    std::vector<std::vector<Routing>> routing;
    for (int round = 0; round < kRounds; ++round) {
      routing.emplace_back();
      for (int rank = 0; rank < ranks; ++rank) {
        const int tokens = random.below(4) ? 1 + random.below(40) : 0;
        const int choices = 1 + random.below(smaller(3, ranks * experts));
        routing.back().push_back(
            world::route(random, ranks * experts, tokens, choices, random.below(2) != 0));
      }
    }
    World w = make(std::move(routing), experts, communicating, mistake, seed % 3 ? seed : 0);
    for_ranks(ranks, [&](int rank) { run_rank(w, rank); });
    for (int rank = 0; rank < ranks; ++rank) {
      expect(!w.heaps->has_failed(rank), "a wait that did not end, on rank " + std::to_string(rank));
      for (size_t round = 0; round < kRounds; ++round) check(w, round, rank, "seed " + std::to_string(seed));
    }
  }
}

// ---- a rank that does not come

struct Absence {
  const char* name;
  int launches;                          // that rank 0 still makes in the second round, of two
  std::vector<std::vector<int>> counts;  // by rank and expert: rows of the second round
  int piece_raised;                      // of the absent rank's rows for each rank's expert 1, or -1
  // What each rank reports; of the absent one nothing. wait, peer, expert, part.
  std::vector<std::vector<int>> reports;
};

constexpr double kBoundSeconds = 1;

// One good round, then one in which rank 0 stops.
void test_absence(int ranks, const Absence& absence) {
  const int experts = 2;
  Random random = {3};
  std::vector<std::vector<Routing>> routing(2);
  for (int rank = 0; rank < ranks; ++rank) {
    routing[0].push_back(world::route(random, ranks * experts, 10, 2, false));
    routing[1].push_back(world::route_counts(random, absence.counts[static_cast<size_t>(rank)], 1, false));
  }
  World w = make(std::move(routing), experts, 1, kMistakes[0], 0);
  for (Member& m : w.rounds[1]) m.rank.watch.bound = static_cast<uint64_t>(kBoundSeconds * 1e9);
  for_ranks(ranks, [&](int rank) {
    launch(w.rounds[0][static_cast<size_t>(rank)], dispatch_thread);
    launch(w.rounds[0][static_cast<size_t>(rank)], combine_thread);
  });
  if (absence.piece_raised >= 0)
    for (int rank = 1; rank < ranks; ++rank) {
      const Member& m = w.rounds[1][static_cast<size_t>(rank)];
      Block block(m.rank, 1);
      world::fill(m.rank, block.board, 0, 1, [] {});
      const int first = block.board.first(level_of(0, rank, ranks), 1);
      peers::signal(w.rounds[1][0].rank.watch,
                    (*w.heaps)[rank] + w.heaps->layout().arrival(0, 1, first, absence.piece_raised));
    }
  std::vector<double> seconds(static_cast<size_t>(ranks), 0.0);
  for_ranks(ranks, [&](int rank) {
    Member& m = w.rounds[1][static_cast<size_t>(rank)];
    const uint64_t start = nanoseconds();
    if (rank != 0 || absence.launches > 0) launch(m, dispatch_thread);
    if (rank != 0) launch(m, combine_thread);
    seconds[static_cast<size_t>(rank)] = static_cast<double>(nanoseconds() - start) * 1e-9;
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const Report& found = w.rounds[1][static_cast<size_t>(rank)].report;
    const std::vector<int>& wanted = absence.reports[static_cast<size_t>(rank)];
    const std::string where = std::string(absence.name) + ", rank " + std::to_string(rank);
    check(w, 0, rank, where);
    if (wanted.empty()) {
      if (rank != 0) check(w, 1, rank, where);
      expect(found.wait == 0 && !w.heaps->has_failed(rank),
             where + ": a report where there is nothing to wait for");
      continue;
    }
    expect(w.heaps->has_failed(rank), where + ": did not fail");
    // Of the chunks that do not come back one or the other: those who wait for the last one came first,
    // maybe.
    const bool either = wanted[0] == static_cast<int>(Wait::kReturn);
    expect(found.wait == wanted[0] && found.peer == wanted[1] && found.expert == wanted[2] &&
               (either || found.part == wanted[3]),
           where + ": reports wait " + std::to_string(found.wait) + " for rank " +
               std::to_string(found.peer) + ", expert " + std::to_string(found.expert) + ", part " +
               std::to_string(found.part));
    expect(found.epoch == 2 && found.rank == rank, where + ": another round or rank");
    const double took = seconds[static_cast<size_t>(rank)];
    expect(took >= kBoundSeconds, where + ": gave up before the bound");
    expect(took < 2 * kBoundSeconds + 5, where + ": took " + std::to_string(took) + " seconds");
  }
}

std::vector<int> report_of(Wait wait, int peer, int expert, int part) {
  return {static_cast<int>(wait), peer, expert, part};
}

// rows(from, to, expert) of the second round; report(rank).
template <class Rows, class Reported>
void test_absence(int ranks, const char* name, int launches, int piece_raised, const Rows& rows,
                  const Reported& reported) {
  Absence absence = {name, launches, {}, piece_raised, {{}}};
  for (int from = 0; from < ranks; ++from) {
    absence.counts.emplace_back();
    for (int to = 0; to < ranks; ++to)
      for (int e = 0; e < 2; ++e) absence.counts.back().push_back(rows(from, to, e));
    if (from > 0) absence.reports.push_back(reported(from));
  }
  test_absence(ranks, absence);
}

// A rank that comes when the others have failed, and have begun the next round: it still writes where it was
// told to in its own one.
void test_late(int ranks) {
  const int experts = 2;
  Random random = {7};
  std::vector<std::vector<Routing>> routing(3);
  for (int round = 0; round < 3; ++round)
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int> counts;
      for (int to = 0; to < ranks; ++to)
        for (int e = 0; e < experts; ++e)
          counts.push_back(to == rank ? 2 + 3 * round : rank == 0 || to == 0 ? 4 : 0);
      routing[static_cast<size_t>(round)].push_back(world::route_counts(random, counts, 1, false));
    }
  World w = make(std::move(routing), experts, 1, kMistakes[0], 0);
  for (auto& round : w.rounds)
    for (Member& m : round) m.rank.watch.bound = static_cast<uint64_t>(kBoundSeconds * 1e9);
  for_ranks(ranks, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    launch(w.rounds[0][at], dispatch_thread);
    launch(w.rounds[0][at], combine_thread);
    if (rank == 0) return;
    launch(w.rounds[1][at], dispatch_thread);
    launch(w.rounds[1][at], combine_thread);
    launch(w.rounds[2][at], dispatch_thread);
  });
  const Layout& layout = w.heaps->layout();
  for (int rank = 1; rank < ranks; ++rank) {
    const std::string where = "a late rank, told by rank " + std::to_string(rank);
    expect(w.heaps->has_failed(rank), where + ": did not fail");
    Member& m = w.rounds[1][static_cast<size_t>(rank)];
    Block block(m.rank, 1);
    world::fill(m.rank, block.board, 0, 1, [] {});
    const uint8_t* const heap = (*w.heaps)[0];
    for (int e = 0; e < experts; ++e)
      expect(read(reinterpret_cast<const int32_t*>(heap + layout.grants(rank)) + e) ==
                 block.board.first(level_of(0, rank, ranks), e),
             where + ": where its rows of round 2 begin");
    expect(read(reinterpret_cast<const uint32_t*>(heap + layout.granted(rank))) == 2, where + ": the flag");
  }
  launch(w.rounds[1][0], dispatch_thread);
  const Report& found = w.rounds[1][0].report;
  expect(found.wait == static_cast<int>(Wait::kArrival) && found.epoch == 2, "a late rank: what it reports");
}

// A rank's own computing blocks that do not come.
void test_nothing_done() {
  Random random = {3};
  World w = make({{world::route_counts(random, {20, 3}, 1, false)}}, 2, 1, kMistakes[0], 0);
  Member& m = w.rounds[0][0];
  m.rank.watch.bound = static_cast<uint64_t>(kBoundSeconds * 1e9);
  launch(m, dispatch_thread);
  launch(m, [](Member& member, Block& block, int number, int warp) {
    if (number < member.rank.communicating) combine_thread(member, block, number, warp);
  });
  const Report& found = m.report;
  expect(
      found.wait == static_cast<int>(Wait::kDone) && found.peer == 0 && found.part == 0 && found.epoch == 1,
      "a chunk that is never computed");
}

int to_absent(int from, int to, int) { return from > 0 && to == 0 ? 3 : 0; }
int from_absent(int from, int to, int expert) { return from == 0 && to > 0 && expert == 1 ? 20 : 0; }
// From 0 to 1, and from each other rank to the one below it; some stay.
int in_a_chain(int from, int to, int expert) {
  return from == to || (from > 1 && to == from - 1) || (from == 0 && to == 1 && expert == 0) ? 5 : 0;
}

// Side by side, as most of the time is spent waiting.
void test_absences(int ranks) {
  std::vector<std::thread> all;
  all.emplace_back([=] {
    test_absence(ranks, "no grant", 0, -1, to_absent, [](int) { return report_of(Wait::kGrant, 0, 0, 0); });
  });
  all.emplace_back([=] {
    test_absence(ranks, "no rows", 0, -1, from_absent,
                 [](int) { return report_of(Wait::kArrival, 0, 1, 0); });
  });
  all.emplace_back([=] {
    test_absence(ranks, "half of the rows", 0, 0, from_absent,
                 [](int) { return report_of(Wait::kArrival, 0, 1, 1); });
  });
  all.emplace_back([=] {
    test_absence(ranks, "no return", 1, -1, to_absent, [](int) { return report_of(Wait::kReturn, 0, 0, 0); });
  });
  // Who waits for one who waits in vain, and one whom it does not concern.
  all.emplace_back([=] {
    test_absence(ranks, "a chain", 0, -1, in_a_chain, [](int rank) {
      return rank == 1   ? report_of(Wait::kArrival, 0, 0, 0)
             : rank == 2 ? report_of(Wait::kReturn, 1, 0, 0)
                         : std::vector<int>{};
    });
  });
  all.emplace_back(test_late, ranks);
  all.emplace_back(test_nothing_done);
  for (std::thread& each : all) each.join();
}

// ---- boards

void test_fill() {
  const int ranks = 5, experts = 3;
  const auto count = [](int source, int e) { return (source * 7 + e * 3) % 5; };
  const auto sent = [&](int i) { return count(i / experts, i % experts); };
  const auto fill = [&](int threads, std::vector<int32_t>& board, std::vector<int32_t>& send_table) {
    board.assign(static_cast<size_t>(ArrivalBoard::words(ranks, experts)), -1);
    send_table.assign(static_cast<size_t>(SendTable::words(ranks, experts)), -1);
    Barrier barrier(threads);
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; ++thread)
      all.emplace_back([&, thread] {
        const auto sync = [&] { barrier.sync(); };
        ArrivalBoard(board.data(), ranks, experts).fill(2, count, thread, threads, sync);
        SendTable(send_table.data(), ranks, experts).fill(sent, thread, threads, sync);
      });
    for (std::thread& thread : all) thread.join();
  };
  std::vector<int32_t> board, send_table, expected_board, expected_sends;
  fill(1, expected_board, expected_sends);
  for (const int threads : {3, 7, 20}) {
    fill(threads, board, send_table);
    expect(board == expected_board && send_table == expected_sends,
           "a board of " + std::to_string(threads) + " threads");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 2;
  const std::string planted = argc > 3 ? argv[3] : "none";
  if (what == "rounds") {
    bool is_known = false;
    for (const Mistake& mistake : kMistakes) {
      if (planted != mistake.name) continue;
      is_known = true;
      test_rounds(ranks, mistake);
    }
    expect(is_known, "no such mistake: " + planted);
  } else if (what == "absent") {
    test_absences(ranks);
  } else if (what == "fill") {
    test_fill();
  } else {
    expect(false, "nothing to run");
  }
  std::printf("%d failures\n", failures.load());
  return failures != 0;
}
