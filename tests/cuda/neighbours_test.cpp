// COMET's kernels beside a collective of NCCL's on every rank: who comes first is the adversary's choice,
// rank by rank. A collective holds multiprocessors of its device from when it comes until those of all ranks
// have come and run; a fused kernel comes as a whole, and waits for the other ranks'. Each rank has a device
// of its own, so many multiprocessors as it has blocks, and the spare ones.
#include "comet_ranks.h"

namespace {

constexpr uint64_t kNever = ~uint64_t{0};

struct Collective {
  int spare = 2;         // multiprocessors that fused kernels leave
  int wants = 2;         // that the collective needs, a block on each
  int cluster = 1;       // of which so many must lie in one of
  int gpcs = 2;          // the parts of a device, over which the free ones are spread
  unsigned first = 0;    // a bit a rank on which it comes before the fused kernel
  uint64_t outside = 0;  // the pass at which a rank outside of these has come, or kNever
};

std::string told(const Collective& n) {
  return "spare " + std::to_string(n.spare) + " wants " + std::to_string(n.wants) + " cluster " +
         std::to_string(n.cluster) + " first " + std::to_string(n.first) + " outside " +
         (n.outside == kNever ? "never" : std::to_string(n.outside));
}

// What the hooks of emulator_grid.h ask, launch by launch.
class Devices {
 public:
  Devices(const Case& c, const Collective& n) : c_(c), n_(n) {
    emu::between_passes = [this] { pass(); };
    emu::comes = [this](size_t block) { return comes(static_cast<int>(block) / c_.blocks); };
  }
  ~Devices() { emu::between_passes = nullptr, emu::comes = nullptr; }

  uint64_t most_passes = 0;  // of a launch

 private:
  enum class State { kWaits, kRuns, kDone };

  void pass() {
    const uint64_t now = emu::grid->passes;
    most_passes = larger(most_passes, now);
    if (now == 1) {
      state_.assign(static_cast<size_t>(c_.ranks), State::kWaits);
      came_.assign(state_.size(), false);
      all_since_ = 0;
    }
    bool all = now >= n_.outside;
    for (int r = 0; r < c_.ranks; ++r) {
      State& own = state_[static_cast<size_t>(r)];
      const bool turn = now > 1 || (n_.first >> r & 1);
      if (own == State::kWaits && turn && fits(is_resident(r))) own = State::kRuns;
      all = all && own != State::kWaits;
    }
    if (all && all_since_ == 0) all_since_ = now;
    if (all_since_ != 0 && now > all_since_ + 10)
      for (State& own : state_) own = State::kDone;
  }

  bool comes(int rank) {
    const auto at = static_cast<size_t>(rank);
    if (!came_[at]) came_[at] = n_.spare >= (state_[at] == State::kRuns ? n_.wants : 0);
    return came_[at];
  }

  bool is_resident(int rank) const {
    for (int i = 0; i < c_.blocks; ++i) {
      const emu::Block& block = *emu::grid->blocks[static_cast<size_t>(rank * c_.blocks + i)];
      if (block.come && !block.left) return true;
    }
    return false;
  }

  // Free ones are spread as evenly as can be.
  bool fits(bool beside) const {
    const int free = n_.spare + (beside ? 0 : c_.blocks);
    int blocks = 0;
    for (int part = 0; part < n_.gpcs; ++part) blocks += (free + part) / n_.gpcs / n_.cluster * n_.cluster;
    return blocks >= n_.wants;
  }

  Case c_;
  Collective n_;
  std::vector<State> state_;
  std::vector<bool> came_;
  uint64_t all_since_ = 0;
};

Case small(bool hopper) {
  Case c;
  c.hopper = hopper, c.tokens = {12, 20}, c.hidden = 8, c.rounds = 1, c.eagerness = 100;
  return c;
}

// Most passes of a launch, where all goes well.
uint64_t play(const Case& c, const Collective& n) {
  const int before = failures;
  Devices devices(c, n);
  World w(c);
  w.play();
  for (const Report& report : w.reports)
    expect(report.wait == 0, told(n) + ": rank " + std::to_string(report.rank) + " has waited too long");
  expect(failures == before, "beside a collective: " + told(n));
  return devices.most_passes;
}

// Where the spare ones suffice nothing holds up a fused kernel: in any order, however late other ranks'
// collectives come, and if they never do; also if a collective comes in clusters that find no room beside it.
void test_side_by_side(bool hopper) {
  const Case c = small(hopper);
  Collective n;
  n.wants = 0;
  const uint64_t by_itself = play(c, n);
  n.wants = 2;
  for (n.cluster = 1; n.cluster <= 2; ++n.cluster)
    for (n.first = 0; n.first < 4; ++n.first)
      for (uint64_t outside : {uint64_t{0}, uint64_t{500}, kNever}) {
        if (n.cluster == 2 && outside == 500) continue;
        n.outside = outside;
        const uint64_t passes = play(c, n);
        expect(passes <= by_itself,
               told(n) + ": " + std::to_string(passes) + " passes, by itself " + std::to_string(by_itself));
      }
}

// Where they do not, ranks that begin in one order go on one behind the other; in two orders they wait for
// each other, until the bound of a wait ends it and says who did not come.
void test_too_few() {
  const Case c = small(false);
  for (unsigned first = 0; first < 4; ++first) {
    Collective n;
    n.spare = 1, n.first = first;
    Devices devices(c, n);
    World w(c);
    w.bound = 100000;
    w.route(), w.clear();
    if (!w.step("dispatch + GEMM", [&] { w.forward_dispatch(); })) continue;
    int waited = 0;
    for (const Report& report : w.reports) waited += report.wait != 0;
    const bool crossed = first == 1 || first == 2;
    expect(crossed == (waited > 0), told(n) + ": " + std::to_string(waited) + " ranks gave up");
    // Who has come first gives up, and the other finds nobody any more.
    for (int r = 0; r < c.ranks && crossed; ++r)
      expect(w.reports[r].peer == 1 - r, told(n) + ": whom it has waited for");
  }
}

}  // namespace

int main() {
  for (const bool hopper : {true, false}) test_side_by_side(hopper);
  test_too_few();
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
