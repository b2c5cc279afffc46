// The message of row counts that each rank sends to every rank, and the arguments of the kernels that write
// and read such messages.
//
// Letters: W ranks, F bins (equal ranges of a rank's tokens), n chunks of F / n neighbouring bins, E experts
// of a rank. The message for a rank has `words()` int32 numbers:
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
// header: the header of all messages.
// fault: where the fault of the header is read from; null if it is header[kFault].
// counts: (F, W * E), number of this rank's rows by bin and by the experts of all ranks.
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
//     kHeader numbers   of each number of the header, the largest of all ranks
//     1 number          1 if there is too little host memory for the rows that this rank receives, else 0
//     1 number          number of rows that this rank receives; 0 unless asks_rows
//     1 number          `irregular`
//     `degrees` numbers how often the chunks of each degree must be cut finer
// own_rank: this rank if rows from it to itself are not sent, and so do not count for degrees; else -1.
// host_rows: number of rows for which there is host memory; negative if that is not asked.
// degree: the numbers of chunks that are asked about. Each is a divisor of the number of bins.
// limit_a_token: with degree[d] chunks, each may have ceil(t * limit_a_token[d]) rows, where t is the largest
//     number of tokens of a rank.
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

// The arguments of order_kernel, which does up to four things for the n chunks of a pass. Rows of the rank
// `own_rank` to itself stay there, and are not sent; if it is -1, all rows are sent.
//
// The order of rows that arrive (skipped if of_chunks is null). The rows of a chunk arrive sorted by rank,
// then expert, then group, where a group is `joined` neighbouring bins. They are needed sorted by expert,
// then group, then rank.
//
//   received   (W, words), the message of each rank
//   of_chunks  (N,), for each chunk the index that sorts its rows: sorted[i] = arrived[index[i]]. The indices
//              of all chunks follow each other
//   of_all     (N,), the index that sorts numbers that arrived for the rows of all chunks in one message,
//              sorted by rank, then chunk. They are needed in the order of of_chunks
//
// The order of the numbers that are sent, one for each row, such as its routing weight (skipped if slot is
// null). This rank's rows are sorted by chunk, then by rank; those that stay are the last of their chunk. The
// numbers are sent in one message for all chunks, sorted by rank, then chunk. Behind them come the numbers of
// the rows that stay.
//
//   sent           (W, words), the messages of this rank
//   slot           (S,), the (token, choice) slot of each of this rank's sorted rows
//   number_slot    (S,), the slots in the order of the numbers
//   weight         the routing weight of each slot, or null
//   number_weight  (S,), these weights in the order of the numbers
//
// Where the rows of each expert end:
//
//   ends  (n + pieces, E), in each line the running sum of rows by expert: n lines for the rows that arrive
//         in a chunk, then `pieces` lines for the rows that stay. The first n - pieces + 1 chunks share the
//         first of these lines
//
// Zeros:
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

  // Numbers of blocks that write the order of rows that arrive, the order of numbers, and the ends.
  PMOE_HD int32_t row_blocks() const {
    return of_chunks == nullptr ? 0 : chunks * message.experts * groups();
  }
  PMOE_HD int32_t number_blocks() const { return slot == nullptr ? 0 : chunks * message.ranks; }
  PMOE_HD int32_t end_blocks() const { return chunks + pieces; }
  PMOE_HD int32_t blocks() const { return row_blocks() + number_blocks() + end_blocks(); }
};

// Returns the next finer number of chunks: chunks times the smallest prime factor of bins / chunks. It is
// `cuts` of pmoe/comm/counts.py. chunks must be a divisor of bins, and less.
PMOE_HD int32_t cut_finer(int32_t chunks, int32_t bins) {
  const int32_t left = bins / chunks;
  int32_t factor = 2;
  while (left % factor) ++factor;
  return chunks * factor;
}

}  // namespace pmoe::counts
