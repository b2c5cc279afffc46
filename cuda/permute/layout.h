// The division of rows among threads: which lane of which warp and block copies which 16 bytes. Host and
// device share this arithmetic, which accesses no memory.
//
// A row is `row_vectors` vectors of 16 bytes. A group of 8, 16 or 32 neighbouring threads takes one slice of
// a row at a time, which is lanes * per_lane vectors. `parts` groups share the row of a token. With parts =
// 2:
//
//   row     | slice 0 | slice 1 | slice 2 | slice 3 |
//   group     part 0    part 1    part 0    part 1
//
// Inside a slice, lane l has the vectors l, l + lanes, ..., so each access of a group covers 128 to 512
// neighbouring bytes. The division depends on the row's bytes and never on the number of tokens, so that a
// sum over a row is added in the same order in every batch.
//
// Letters: T tokens, K choices, V vectors of a row.
#pragma once
#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace pmoe::permute {

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

// The division of rows among threads, and the functions by which a thread finds its vectors.
struct Cut {
  int64_t tokens;
  int32_t row_vectors;
  int32_t lanes;     // threads in a group: 8, 16 or 32
  int32_t per_lane;  // vectors of a slice that one lane has
  int32_t parts;     // groups that share a token
  int32_t threads;   // threads in a block

  struct Place {
    int64_t token;  // may be past the last one
    int32_t part;
    int32_t lane;
  };

  PMOE_HD int32_t slice_vectors() const { return lanes * per_lane; }
  PMOE_HD int32_t slices() const { return static_cast<int32_t>(ceil_div(row_vectors, slice_vectors())); }
  PMOE_HD int32_t groups() const { return threads / lanes; }  // groups in a block
  PMOE_HD int64_t blocks() const { return ceil_div(tokens * parts, groups()); }

  PMOE_HD int32_t group(int32_t thread) const { return thread / lanes; }

  PMOE_HD Place place(int64_t block, int32_t thread) const {
    const int64_t at = block * groups() + group(thread);
    const int64_t token = parts == 1 ? at : at / parts;
    return {token, static_cast<int32_t>(at - token * parts), thread % lanes};
  }

  // first: returns a lane's first vector of the first slice of its part.
  // step: returns the number of vectors from one slice of a part to the part's next slice.
  // vector: returns the lane's i-th vector of the slice in which the lane begins at `from`.
  PMOE_HD int32_t first(const Place& at) const { return at.part * slice_vectors() + at.lane; }
  PMOE_HD int32_t step() const { return parts * slice_vectors(); }
  PMOE_HD int32_t vector(int32_t from, int32_t i) const { return from + i * lanes; }

  // Both need all parts of a token to be in one block. block_tokens() returns the number of tokens of a
  // block, block_token() its first token.
  PMOE_HD int32_t block_tokens() const { return groups() / parts; }
  PMOE_HD int64_t block_token(int64_t block) const { return block * block_tokens(); }
};

constexpr int kFewestLanes = 8;

// Returns the smallest number of lanes for which a row is one slice; at most 32.
PMOE_HD constexpr int32_t lanes_for(int32_t row_vectors, int32_t per_lane) {
  int32_t lanes = kFewestLanes;
  while (lanes < 32 && int64_t{lanes} * per_lane < row_vectors) lanes *= 2;
  return lanes;
}

// Number of slices that each group of threads has if a block sums over rows. With two, the loads of one group
// overlap the sums of another.
constexpr int kSlicesOfPart = 2;

// Returns the division of rows among threads.
//
// per_lane: vectors of a slice that one lane has.
// threads: threads of a block.
// one_block: all parts of a token must be in one block, which can then sum over the row.
// parts: groups that share a token; 0 lets the function choose.
//
// Throws std::invalid_argument if there is nothing to launch, or if a grid cannot have that many blocks.
inline Cut make_cut(int64_t tokens, int64_t row_bytes, int per_lane, int threads, bool one_block,
                    int parts = 0) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (tokens < 1) refuse("tokens (" + std::to_string(tokens) + ") must be at least 1");
  if (row_bytes < 16 || row_bytes % 16 || row_bytes / 16 > (int64_t{1} << 29))
    refuse("row_bytes (" + std::to_string(row_bytes) + ") must be a multiple of 16, at most 2**33");
  Cut cut{tokens, static_cast<int32_t>(row_bytes / 16), 0, per_lane, 1, threads};
  cut.lanes = lanes_for(cut.row_vectors, per_lane);
  const int slices = cut.slices();
  if (!one_block) {
    cut.parts = parts > 0 ? smaller(parts, slices) : slices;
  } else if (parts > 0) {
    if (cut.groups() % parts || parts > slices)
      refuse("parts (" + std::to_string(parts) + ") must divide a block's groups (" +
             std::to_string(cut.groups()) + ") and be at most a row's slices (" + std::to_string(slices) +
             ")");
    cut.parts = parts;
  } else {
    while (cut.parts < cut.groups() && cut.parts * kSlicesOfPart < slices) cut.parts *= 2;
  }
  if (tokens > (int64_t{1} << 40) / cut.parts || cut.blocks() > kMostBlocks)
    refuse("tokens (" + std::to_string(tokens) + ") of " + std::to_string(row_bytes) +
           " bytes each need more than 2**31 - 1 blocks");
  return cut;
}

}  // namespace pmoe::permute
