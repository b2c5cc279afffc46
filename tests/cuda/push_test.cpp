// Exchanges over heaps (cuda/program/push.cuh): ranks that know of each other by their heaps alone, exchange
// after exchange into the same memory, uneven rows and none, rows in pieces and at once. It is compiled for
// the emulator, in which ranks are blocks of one grid, and for threads under ThreadSanitizer.
//
//   push_test exchanges RANKS [MISTAKE]   exit code 1: a row is wrong. MISTAKE: grant, arrival or signal
//   push_test absent RANKS                the last rank does not come: what the others report
#include "program/push.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef PMOE_THREADS
#include <barrier>
#endif

using namespace pmoe;
using namespace pmoe::program;

namespace {

constexpr int kExchanges = 6;
constexpr int kMostRows = 24;  // of a rank for another one
constexpr int64_t kArena = 1 << 14;
#ifdef PMOE_THREADS
constexpr uint64_t kBound = 20'000'000'000;  // nanoseconds of a wait
#else
constexpr uint64_t kBound = 10'000'000;  // the emulator's clock shows 100 for a turn of all threads
#endif

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

// One exchange of all ranks: a message of rows, and in some a second one of single numbers.
struct Exchange {
  int row_bytes[kMostMessages];
  int messages;
  std::vector<std::vector<int>> rows;  // by source and destination
};

uint32_t value_of(int exchange, int message, int source, int target, int word) {
  return peers::hash32(static_cast<uint32_t>(exchange * 7919 + message * 104729 + source * 31 + target) ^
                       static_cast<uint32_t>(word) << 12);
}

struct Rank {
  std::vector<uint8_t> heap_memory, source_memory, other_memory;
  uint8_t *heap, *source, *other;
  peers::Report report = {};
  bool is_direct = false;  // whether rows arrive in the heap's arena
  bool counts_on_device = false;
  std::vector<int64_t> send_rows, recv_rows;  // by exchange and other rank
};

uint8_t* aligned(std::vector<uint8_t>& memory, int64_t bytes) {
  memory.assign(static_cast<size_t>(bytes) + 1024, 0);
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 1023) & ~uintptr_t{1023});
}

struct World {
  int ranks;
  std::vector<Rank> rank;
  std::vector<Exchange> exchanges;
  uint32_t not_waited = 0;
  uint32_t delay_seed = 0;
  uint64_t bound;

  World(int ranks, unsigned seed, uint64_t bound)
      : ranks(ranks), rank(static_cast<size_t>(ranks)), bound(bound) {
    std::mt19937 random(seed);
    for (Rank& r : rank) {
      r.heap = aligned(r.heap_memory, HeapRegions::of(ranks).arena + kArena);
      r.source = aligned(r.source_memory, kArena);
      r.other = aligned(r.other_memory, kArena);
      r.is_direct = random() % 2;
      r.counts_on_device = random() % 2;
    }
    for (int e = 0; e < kExchanges; ++e) {
      Exchange exchange = {{random() % 2 ? 48 : 16, 4}, 1 + static_cast<int>(random() % 2), {}};
      for (int from = 0; from < ranks; ++from) {
        exchange.rows.emplace_back();
        const bool has_none = random() % 4 == 0;
        for (int to = 0; to < ranks; ++to)
          exchange.rows.back().push_back(has_none ? 0 : static_cast<int>(random() % (kMostRows + 1)));
      }
      exchanges.push_back(exchange);
    }
  }

  // Writes the row counts to where the kernels of some ranks read them.
  void put_counts() {
    for (int r = 0; r < ranks; ++r)
      for (int e = 0; e < kExchanges; ++e)
        for (int i = 0; i < ranks; ++i) {
          rank[static_cast<size_t>(r)].send_rows.push_back(rows(e, r, i));
          rank[static_cast<size_t>(r)].recv_rows.push_back(rows(e, i, r));
        }
  }

  uint8_t* target_of(int r) {
    Rank& own = rank[static_cast<size_t>(r)];
    return own.is_direct ? own.heap + HeapRegions::of(ranks).arena : own.other;
  }

  // Where the second message lies behind the first one, in a source or target.
  static int64_t second() { return kArena / 2; }

  Push push_of(int r, int e) {
    const Exchange& exchange = exchanges[static_cast<size_t>(e)];
    Rank& own = rank[static_cast<size_t>(r)];
    Push push = {};
    push.watch.failed = reinterpret_cast<uint32_t*>(own.heap);
    push.watch.report = &own.report;
    push.watch.rank = r;
    push.watch.epoch = static_cast<uint32_t>(e + 1);
    push.watch.bound = bound;
    push.watch.delay_seed = delay_seed;
    push.watch.not_waited = not_waited;
    push.ranks = ranks;
    push.messages = exchange.messages;
    for (int i = 0; i < ranks; ++i) push.heaps[i] = rank[static_cast<size_t>(i)].heap;
    for (int m = 0; m < exchange.messages; ++m) {
      Message& message = push.message[m];
      message.source = own.source + m * second();
      message.target = target_of(r) + m * second();
      message.target_offset = own.is_direct ? message.target - own.heap : -1;
      message.row_bytes = exchange.row_bytes[m];
      int64_t sent = 0, received = 0;
      for (int i = 0; i < ranks; ++i) {
        message.send_end[i] = sent += rows(e, r, i);
        message.recv_end[i] = received += rows(e, i, r);
      }
      if (!own.counts_on_device) continue;
      // The kernel does not read the ends. The grid of a launch follows from the last ones, whatever share of
      // the rows each rank has.
      for (int i = 0; i < ranks; ++i) {
        message.send_end[i] = sent * (i + 1) / ranks;
        message.recv_end[i] = received * (i + 1) / ranks;
      }
      message.send_rows = own.send_rows.data() + e * ranks;
      message.recv_rows = own.recv_rows.data() + e * ranks;
    }
    return push;
  }

  // Checks that the grid of an exchange has all channels of the rows from any rank to any other one. If it
  // had fewer, a peer would wait for the others.
  void check_grid(int r, int e) {
    const int64_t most = most_bytes_of(push_of(r, e));
    for (int m = 0; m < exchanges[static_cast<size_t>(e)].messages; ++m)
      for (int i = 0; i < ranks; ++i)
        for (const int number : {rows(e, r, i), rows(e, i, r)})
          expect(most >= int64_t{number} * exchanges[static_cast<size_t>(e)].row_bytes[m],
                 "the grid of rank " + std::to_string(r) + " in exchange " + std::to_string(e));
  }

  int rows(int e, int from, int to) const {
    return exchanges[static_cast<size_t>(e)].rows[static_cast<size_t>(from)][static_cast<size_t>(to)];
  }

  // Goes over the words of rank r's rows in an exchange: those it sends, or those it receives.
  template <class Visit>
  void for_words(int r, int e, bool sends, const Visit& visit) {
    const Exchange& exchange = exchanges[static_cast<size_t>(e)];
    for (int m = 0; m < exchange.messages; ++m) {
      auto* word = reinterpret_cast<uint32_t*>((sends ? rank[static_cast<size_t>(r)].source : target_of(r)) +
                                               m * second());
      for (int i = 0; i < ranks; ++i) {
        const int from = sends ? r : i, to = sends ? i : r;
        for (int w = 0; w < rows(e, from, to) * exchange.row_bytes[m] / 4; ++w)
          visit(word++, value_of(e, m, from, to, w));
      }
    }
  }

  // What a rank does before an exchange, on one of its threads: it writes its rows. What arrived in the last
  // exchange has been read, and the memory is used for something else.
  void fill(int r, int e) {
    for_words(r, e, true, [](uint32_t* word, uint32_t value) { *word = value; });
    for_words(r, e, false, [](uint32_t* word, uint32_t) { *word = 0xDEADu; });
  }

  void check(int r, int e) {
    int wrong = 0;
    for_words(r, e, false, [&](const uint32_t* word, uint32_t value) { wrong += *word != value; });
    expect(!wrong, std::to_string(wrong) + " words of rank " + std::to_string(r) + " in exchange " +
                       std::to_string(e));
  }
};

#ifdef PMOE_THREADS

// Runs the ranks' threads, one for each channel. A rank's threads meet between exchanges.
void run(World& w, int coming, unsigned) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<std::barrier<>>> meetings;
  for (int r = 0; r < coming; ++r) {
    meetings.push_back(std::make_unique<std::barrier<>>(kMostChannels));
    for (int channel = 0; channel < kMostChannels; ++channel)
      threads.emplace_back([&w, r, channel, meeting = meetings.back().get()] {
        for (int e = 0; e < kExchanges; ++e) {
          if (channel == 0) w.fill(r, e);
          meeting->arrive_and_wait();
          const Push push = w.push_of(r, e);
          push_channel(push, {0, 1, channel, kMostChannels});
          meeting->arrive_and_wait();
          if (channel == 0 && !w.rank[static_cast<size_t>(r)].report.wait) w.check(r, e);
        }
      });
  }
  for (std::thread& each : threads) each.join();
}

#else

void run(World& w, int coming, unsigned seed) {
  // Some ranks come late.
  std::mt19937 random(seed);
  std::vector<uint64_t> since(static_cast<size_t>(coming));
  for (uint64_t& pass : since) pass = random() % 2 ? random() % 3000 : 0;
  emu::comes = [&](size_t block) { return emu::grid->passes >= since[block]; };
  emu::launch(static_cast<unsigned>(coming), kPushThreads, seed, [&] {
    const int r = static_cast<int>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    for (int e = 0; e < kExchanges; ++e) {
      if (thread == 0) w.fill(r, e);
      sync_block();
      const Push push = w.push_of(r, e);
      push_channel(push, {thread % 32, 32, thread / 32, kMostChannels});
      sync_block();
      if (thread == 0 && !w.rank[static_cast<size_t>(r)].report.wait) w.check(r, e);
    }
  });
}

#endif

void test_exchanges(int ranks, const std::string& mistake) {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    World w(ranks, 100 * seed + static_cast<unsigned>(ranks), kBound);
    if (mistake == "grant") w.not_waited = 1u << static_cast<int>(peers::Wait::kGrant);
    if (mistake == "arrival") w.not_waited = 1u << static_cast<int>(peers::Wait::kArrival);
#ifdef PMOE_THREADS
    signals_are_relaxed = mistake == "signal";
#endif
    w.delay_seed = seed % 3 ? seed : 0;
    w.put_counts();
    for (int r = 0; r < ranks; ++r)
      for (int e = 0; e < kExchanges; ++e) w.check_grid(r, e);
    run(w, ranks, seed);
    for (const Rank& each : w.rank) expect(!each.report.wait, "a wait that did not end");
  }
}

void test_absent(int ranks) {
  World w(ranks, 5, 5'000'000);  // nanoseconds
  for (Exchange& each : w.exchanges)
    for (auto& rows : each.rows) rows.assign(static_cast<size_t>(ranks), 5);
  w.put_counts();
  run(w, ranks - 1, 1);
  for (int r = 0; r < ranks - 1; ++r) {
    const peers::Report& report = w.rank[static_cast<size_t>(r)].report;
    const bool waits = report.wait == static_cast<int32_t>(peers::Wait::kGrant);
    expect(waits && report.peer == ranks - 1 && report.rank == r && report.epoch == 1,
           "rank " + std::to_string(r) + " reports wait " + std::to_string(report.wait) + " for rank " +
               std::to_string(report.peer) + " in exchange " + std::to_string(report.epoch));
  }
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  const int ranks = count > 2 ? std::atoi(words[2]) : 2;
  try {
    if (what == "absent")
      test_absent(ranks);
    else
      test_exchanges(ranks, count > 3 ? words[3] : "");
  } catch (const std::exception& error) {  // the emulator refuses an access
    expect(false, error.what());
  }
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
