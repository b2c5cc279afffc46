// The rule that chooses which operand the two blocks of a cluster share, if the caller does not say so; and
// the number of blocks of a launch. Only bindings and pass programs include this header, so that a change of
// the rule compiles no kernel again.
#pragma once
#include <stdexcept>
#include <string>

#include "launch.h"

namespace pmoe {

// Returns the value of an argument `sharing`. Throws std::invalid_argument for other numbers.
inline Sharing sharing_of(int number) {
  if (number < 0 || number > 3)
    throw std::invalid_argument("sharing (" + std::to_string(number) +
                                ") must be 0 (by rule), 1 (nothing), 2 (B) or 3 (A)");
  return static_cast<Sharing>(number);
}

// Chooses which operand the two blocks of a cluster share. The rule follows from the stored times of
// bench_grouped_gemm on an H200 (tests/unit/test_sharing_rule.py):
//
// kB: weight gradients with an even number of tiles below each other. Gathered rows of B are not shared,
//     because a block gathers rows only into its own shared memory. In the other forms the number of tiles of
//     an expert depends on its rows, so the last pair of tiles may be half empty: sharing B cost up to 6 %
//     there with 1,000 and 2,000 rows of an expert, and up to 11 % with 250.
// kA: other products with an even number of tiles side by side, if rows of A are not gathered. With an odd
//     number of tiles, sharing A cost 2 to 4 %.
//
// m, n: rows (of a weight gradient) and columns of each expert's result.
inline Sharing best_sharing(Form form, int m, int n, bool a_gathered, bool b_gathered = false) {
  constexpr int kTileRows = 128, kTileColumns = 256;
  if (form == Form::kWeight && !b_gathered && ceil_div(m, kTileRows) % 2 == 0) return Sharing::kB;
  return !a_gathered && ceil_div(n, kTileColumns) % 2 == 0 ? Sharing::kA : Sharing::kNothing;
}

// Sets which operand the two blocks of a cluster share, for Hopper's path. For kByRule, best_sharing()
// chooses by the product's sizes.
//
// Products in turns have tiles of half as many columns, and share A or nothing. For such a product this
// function throws std::invalid_argument if `sharing` is kB.
inline void share(GroupedGemm& which, Problem& p, Sharing sharing) {
  if (which.in_turns && sharing == Sharing::kB)
    throw std::invalid_argument(
        "sharing (2) must be 0, 1 or 3 for a product in turns: two blocks share A or nothing");
  if (sharing == Sharing::kByRule)
    sharing =
        best_sharing(which.form, p.m, which.in_turns ? 2 * p.n : p.n, p.a_gathered != 0, which.b_gathered);
  which.cluster = sharing == Sharing::kB ? 2 : 1;
  p.blocks_across = sharing == Sharing::kA ? 2 : 1;
}

// Returns the number of blocks of a launch: one block for each multiprocessor that is not left free, or two
// blocks on the path for sm_80.
//
// spare: number of multiprocessors that are left free.
inline int num_blocks(const GroupedGemm& which, const Problem& p, bool hopper, int multiprocessors,
                      int spare) {
  return larger(multiprocessors - spare, which.cluster * p.blocks_across) * (hopper ? 1 : 2);
}

}  // namespace pmoe
