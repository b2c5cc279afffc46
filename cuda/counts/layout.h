// The message of row counts that each rank sends to every rank, and the arguments of the kernels that write
// and read such messages.
//
// Letters: W ranks, F bins (equal ranges of a rank's tokens), n chunks of F / n neighbouring bins, E experts
// of a rank. The message for a rank has `words()` int32 numbers. A count of a bin is the number of the
// sender's rows in that bin for one of the receiver's experts:
//
//   header (kHeader)  |  bin 0: E counts  |  bin 1: E counts  |  ...  |  bin F - 1: E counts
#pragma once
#include "common/host_device.h"

namespace pmoe::counts {

constexpr int kHeader = 4;  // pmoe/comm/counts.py says what the numbers of a header are
constexpr int kFault = 1;   // index of the fault in a header
constexpr int kMostDegrees = 16;
constexpr int kMostBins = 1 << 12;
constexpr int kMostRanks = 1 << 11;

struct Message {
  int32_t ranks, bins, experts;

  PMOE_HD int32_t words() const { return kHeader + bins * experts; }
};

// The arguments of write_messages (messages.cuh).
//
// header: the header, which is the same in all messages.
// fault: address of the number that takes the place of header[kFault]; null if header[kFault] is used.
// counts: (F, W * E), number of this rank's rows in each bin for each expert of all ranks.
// sent: (W, words), the messages.
struct Pack {
  Message message;
  int32_t header[kHeader];
  const int64_t* fault;
  const int32_t* counts;
  int32_t* sent;
};

// The arguments of agree_kernel.
//
// received: (W, words), the message of each rank.
// agreed: (kHeader + 3 + degrees,), the result:
//     kHeader numbers   for each number of the header, its maximum over all ranks
//     1 number          1 if this rank receives more rows than host_rows, else 0
//     1 number          number of rows that this rank receives; 0 unless asks_rows
//     1 number          `irregular`
//     `degrees` numbers number d says how often the degree[d] chunks must be cut finer (cut_finer)
// own_rank: this rank, if its rows for itself are not sent, so that they do not count when chunks are cut;
//     else -1.
// host_rows: number of rows for which there is host memory; negative if host memory does not matter.
// irregular: 1 if some choices of this rank's tokens have no row, or more than one row; else 0.
// degree: the numbers of chunks that are asked about. Each of them is a divisor of the number of bins.
// limit_a_token: with degree[d] chunks, a chunk may have ceil(t * limit_a_token[d]) rows, where t is the
//     largest number of tokens of a rank.
struct Agree {
  Message message;
  const int32_t* received;
  int64_t* agreed;
  int32_t own_rank;
  int64_t host_rows;
  int32_t asks_rows, irregular;
  int32_t degrees;
  int32_t degree[kMostDegrees];
  double limit_a_token[kMostDegrees];
};

// The arguments of order_kernel, which does up to four things for the n chunks of a pass. If own_rank is this
// rank, its rows for its own experts stay on it and are not sent. If own_rank is -1, all rows are sent.
//
// 1. The order of rows that arrive (skipped if of_chunks is null). N is the number of rows that arrive. The
// rows of a chunk arrive sorted by rank, then expert, then group, where a group is `joined` neighbouring
// bins. The experts need them sorted by expert, then group, then rank. For each row a number arrives, too,
// such as its routing weight. The numbers of all chunks arrive in one message, sorted by rank, chunk, expert,
// then group.
//
//   received   (W, words), the message of each rank
//   of_chunks  (N,), the index that sorts the rows of a chunk: sorted[i] = arrived[index[i]]. The indices of
//              chunk 0 are followed by those of chunk 1, and so on
//   of_all     (N,), the index that brings the arrived numbers of all chunks into the order of the sorted
//              rows: sorted_number[i] = arrived_number[of_all[i]]
//
// 2. The order of the numbers that this rank sends, one for each of its S rows (skipped if slot is null).
// This rank's rows are sorted by chunk, then by rank; the rows that stay are the last of their chunk. The
// numbers of all chunks are sent in one message, sorted by rank, then chunk. The numbers of the rows that
// stay follow the message.
//
//   sent           (W, words), the messages of this rank
//   slot           (S,), the (token, choice) slot of each of this rank's sorted rows
//   number_slot    (S,), the slots in the order of the numbers
//   weight         the routing weight of each slot, or null
//   number_weight  (S,), the routing weights in the order of the numbers
//
// 3. Where the rows of each expert end. The rows that stay are computed in `pieces` blocks (pieces <= n). The
// first block has the rows of the first n - pieces + 1 chunks, each other block those of one later chunk.
//
//   ends  (n + pieces, E), in each line the running sum of the experts' numbers of rows. The first n lines
//         are for the rows that arrive in each chunk, the other lines for the blocks of rows that stay
//
// 4. Zeros:
//
//   zeros  (num_zeros,), numbers that are set to 0. Products of experts use them as counters of tiles
struct Order {
  Message message;
  const int32_t* received;
  const int32_t* sent;
  int32_t chunks, joined, own_rank, pieces;
  int32_t* of_chunks;
  int64_t* of_all;
  const int32_t* slot;
  int64_t* number_slot;
  const float* weight;
  float* number_weight;
  int32_t* ends;
  int32_t* zeros;
  int32_t num_zeros;

  PMOE_HD int32_t chunk_bins() const { return message.bins / chunks; }
  PMOE_HD int32_t groups() const { return message.bins / chunks / joined; }

  // Numbers of thread blocks that write the order of rows that arrive, the order of numbers, and the ends.
  PMOE_HD int32_t row_blocks() const {
    return of_chunks == nullptr ? 0 : chunks * message.experts * groups();
  }
  PMOE_HD int32_t number_blocks() const { return slot == nullptr ? 0 : chunks * message.ranks; }
  PMOE_HD int32_t end_blocks() const { return chunks + pieces; }
  PMOE_HD int32_t blocks() const { return row_blocks() + number_blocks() + end_blocks(); }
};

// Returns the next finer number of chunks: `chunks` times the smallest prime factor of bins / chunks.
// `chunks` must divide `bins` and be less than it. `cuts` in pmoe/comm/counts.py has the same rule.
PMOE_HD int32_t cut_finer(int32_t chunks, int32_t bins) {
  const int32_t left = bins / chunks;
  int32_t factor = 2;
  while (left % factor) ++factor;
  return chunks * factor;
}

}  // namespace pmoe::counts
