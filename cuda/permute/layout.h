// The division of rows among threads: which lane of which warp and block copies which 16 bytes. Host and
// device share this arithmetic, which accesses no memory.
//
//   vector   16 bytes of a row, which a thread loads at once
//   group    `lanes` neighbouring threads of a warp: 8, 16 or 32. Thread number l of a group is its lane l
//   slice    the lanes * per_lane vectors of a row that a group takes at a time
//   part     the slices of a token's row that one group takes. `parts` groups share the row, and each of them
//            takes every parts-th slice
//
// Example with parts = 2, so that two groups share the row of a token:
//
//   row     | slice 0 | slice 1 | slice 2 | slice 3 |
//   group     part 0    part 1    part 0    part 1
//
// Inside a slice, lane l has the vectors l, l + lanes, ..., so each access of a group covers 128 to 512
// neighbouring bytes. How a row is divided depends on its bytes and never on the number of tokens. So a sum
// over a row is added in the same order in every batch.
//
// Letters: T tokens, K choices, V vectors of a row.
#pragma once
#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace pmoe::permute {

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

// The division of rows among threads, and functions with which a thread finds its vectors.
struct Cut {
  int64_t tokens;
  int32_t row_vectors;
  int32_t lanes;     // threads in a group: 8, 16 or 32
  int32_t per_lane;  // vectors of a slice that one lane has
  int32_t parts;     // groups that share the row of a token
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

  // Which vectors of a row a lane has. A lane's group takes every parts-th slice of the row, called its part:
  //
  //   for (from = first(place); from < row_vectors; from += step())    the slices of the part
  //     for (i = 0; i < per_lane; ++i) vector(from, i)                 the lane's vectors in the slice
  PMOE_HD int32_t first(const Place& at) const { return at.part * slice_vectors() + at.lane; }
  PMOE_HD int32_t step() const { return parts * slice_vectors(); }
  PMOE_HD int32_t vector(int32_t from, int32_t i) const { return from + i * lanes; }

  // block_tokens() returns the number of tokens of a block, block_token() the block's first token. Both may
  // only be used if all groups that share a token's row are in one block.
  PMOE_HD int32_t block_tokens() const { return groups() / parts; }
  PMOE_HD int64_t block_token(int64_t block) const { return block * block_tokens(); }
};

constexpr int kFewestLanes = 8;

// Returns the number of threads in a group: the smallest of 8, 16 and 32 for which one slice has the whole
// row. If none is large enough, it returns 32.
PMOE_HD constexpr int32_t lanes_for(int32_t row_vectors, int32_t per_lane) {
  int32_t lanes = kFewestLanes;
  while (lanes < 32 && int64_t{lanes} * per_lane < row_vectors) lanes *= 2;
  return lanes;
}

// If the groups of a block sum over a row together, each group takes at least this number of slices of the
// row. With two or more slices, the loads of one group overlap the sums of another.
constexpr int kSlicesOfPart = 2;

// Returns the division of rows among threads.
//
// per_lane: number of 16-byte vectors that a thread loads together.
// threads: threads of a block.
// one_block: true puts all groups that share a token's row into one block, so that it can sum over the row.
// parts: number of groups of threads that share the row of a token; 0 lets the function choose.
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
