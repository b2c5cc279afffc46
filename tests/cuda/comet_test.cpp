// COMET's two kernels on the CPU, every thread of every rank, against a plain loop: forward and backward,
// round after round on the same heaps. With an argument, one planted mistake that must be found.
#include "comet_ranks.h"

namespace {

void play(const Case& c) { World(c).play(); }

// All that never arrives is named: by rank, and the others end.
void test_missing_rank(bool hopper, int blocks_across = 1) {
  Case c;
  c.hopper = hopper, c.ranks = 3, c.tokens = {20, 20, 20}, c.missing = 2;
  c.blocks_across = blocks_across, c.communicating = blocks_across,
  c.blocks = blocks_across == 1 ? c.blocks : 4;
  World w(c);
  w.bound = 200000;
  w.route(), w.clear();
  if (!w.step("dispatch + GEMM", [&] { w.forward_dispatch(); })) return;
  for (int r = 0; r < 2; ++r) {
    const Report& told_by = w.reports[r];
    const auto wait = static_cast<Wait>(told_by.wait);
    expect(wait == Wait::kGrant || wait == Wait::kArrival,
           "rank " + std::to_string(r) + " must tell what it awaited");
    expect(told_by.peer == 2 && told_by.rank == r && told_by.epoch == 1,
           "the report must name rank and round");
  }
}

// Leaves out a wait, and says whether the tests of values notice.
bool finds(const Case& given, Wait wait) {
  failures = 0;
  for (unsigned seed = 1; seed < 10 && !failures; ++seed) {
    Case c = given;
    c.seed = seed, c.delay_seed = seed, c.eagerness = 100, c.not_waited = 1u << static_cast<int>(wait);
    play(c);
  }
  return std::exchange(failures, 0) > 0;
}

}  // namespace

// thorough: more cases. planted: mistakes, each of which must be noticed.
int main(int argc, char** argv) {
  const std::string asked = argc > 1 ? argv[1] : "";
  Case small;
  small.tokens = {40, 70};
  if (asked == "planted") {
    quiet = true;
    for (const bool hopper : {true, false})
      for (const Wait wait : {Wait::kGrant, Wait::kArrival, Wait::kDone, Wait::kReturn}) {
        small.hopper = hopper;
        const bool found = finds(small, wait);
        std::printf("%s without wait %d: %s\n", hopper ? "hopper" : "ampere", static_cast<int>(wait),
                    found ? "found" : "NOT FOUND");
        if (!found) return 1;
      }
    return 0;
  }
  unsigned seed = 1;
  for (const bool hopper : {true, false}) {
    small.hopper = hopper;
    const auto go = [&](Case one) {
      one.seed = seed++;
      one.eagerness = one.seed % 3 == 0 ? 0 : one.seed % 3 == 1 ? 50 : 100;
      one.delay_seed = one.seed % 2 ? one.seed : 0;
      play(one);
    };
    go(small);
    Case skewed = small;
    skewed.ranks = 3, skewed.experts = 1, skewed.tokens = {90, 0, 60}, skewed.favour = 1,
    skewed.drop_percent = 20;
    skewed.activation = Activation::kSwiglu, skewed.bias = false, skewed.rounds = 1, go(skewed);
    Case alone = small;
    alone.ranks = 1, alone.experts = 3, alone.tokens = {150}, alone.top_k = 3, alone.model = 264;
    alone.communicating = 2, alone.blocks = 4, alone.activation = Activation::kSilu, alone.rounds = 1,
    go(alone);
    Case wide = small;
    wide.tokens = {33, 17}, wide.model = 520, wide.hidden = 8, wide.top_k = 1,
    wide.activation = Activation::kRelu;
    wide.chunk_columns = 256, wide.blocks = 2, wide.rounds = 1, go(wide);
    if (hopper) {  // rows of two bulk copies each, the second one of 16 bytes
      Case parts = small;
      parts.tokens = {21, 3}, parts.experts = 1, parts.model = 2056, parts.hidden = 8, parts.rounds = 1;
      parts.chunk_columns = 1024, go(parts);
    }
    // Pairs of which the second has columns, has few, and has none; chunks of a pair, and of a tile.
    Case pairs = small;
    pairs.blocks_across = hopper ? 2 : 1, pairs.communicating = 2, pairs.blocks = 4, pairs.rounds = 1;
    pairs.model = 520, pairs.chunk_columns = 512, pairs.hidden = 8, go(pairs);
    pairs.model = 264, pairs.chunk_columns = 256, pairs.hidden = 72, pairs.tokens = {150, 9};
    pairs.activation = Activation::kSwiglu, pairs.blocks = 6, go(pairs);
    Case nothing = small;
    nothing.tokens = {0, 0}, nothing.rounds = 1, go(nothing);
    if (asked == "thorough") {
      Case four = small;
      four.ranks = 4, four.experts = 2, four.top_k = 3, four.tokens = {30, 50, 1, 20}, four.blocks = 2,
      go(four);
      for (const Activation activation :
           {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
        Case one = small;
        one.activation = activation, one.tokens = {130, 140}, one.hidden = 136, one.model = 136,
        one.drop_percent = 5;
        go(one);
      }
    }
  }
  for (const bool hopper : {true, false}) test_missing_rank(hopper);
  test_missing_rank(true, 2);
  if (failures)
    std::printf("%d failures\n", failures);
  else
    std::printf("ok\n");
  return failures != 0;
}
