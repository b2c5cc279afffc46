// The words of a compiled pass: what pmoe/program/records.py writes, and cut.h and interpreter.h read.
//
// A program is one array of int64 words: a Header, then four arrays whose lengths are in the header.
//
//   Header | Turn ... | Operand ... | Record ... | waits ... |
//
// A record is one call of a kernel, of a copy, or of an all-to-all, on one lane:
//
//   Record   kernel 7 (hidden)   lane 0   waits for events 3, 5   then signals event 6
//            operands            T_DI.1   w1   b1   T_M.1   active.1   ends
//   Operand  T_DI.1: rows numbers[41] of 1024 columns, at bases[arena] + numbers[90]
//
// The words depend only on the schedule, the layer and the dtype. What changes from pass to pass is not among
// the words: addresses (bases), streams, and row counts, from which cut.h computes `numbers`.
#pragma once

#include <cstdint>

namespace pmoe::program {

constexpr int64_t kVersion = 3;
constexpr int kMaxOperands = 8;

// The number of lanes of a schedule: those of pmoe.schedule.tasks.Lane, in that order. A pass has a stream
// for each lane.
constexpr int kNumLanes = 5;

// Bytes at whose multiples ring slots begin: pmoe.schedule.buffer_sizes.ALIGNMENT.
constexpr int64_t kAlignment = 256;

// The kernels that the interpreter itself knows. A backend knows the others (pmoe.program.records.Kernel).
enum Kernel : int64_t {
  kNothing = 0,   // only waits and signals
  kCopy = 1,      // copies rows between device and host
  kExchange = 2,  // all-to-all
};

// The bases that the interpreter itself knows. A base is a tensor, or other memory, whose address the caller
// of a pass provides. pmoe.program.records.Base has the other bases.
enum Base : int64_t {
  kNowhere = 0,  // address 0: for an input that the record does not have, or a result that nothing reads
};

// Numbers of a pass as a whole, which are the first in `numbers`. "Sorted rows" are all rows of this rank's
// tokens, sorted by chunk: in each chunk first the rows that are sent, then the rows that stay.
enum Whole : int {
  kZero,               // 0
  kOne,                // 1
  kRows,               // number of sorted rows
  kSentRows,           // number of rows that all chunks send
  kReceivedRows,       // number of rows that all chunks receive
  kMessageIsSorted,    // 1 if routing weights come from several ranks and must be sorted, else 0
  kMessageIsStraight,  // 1 - kMessageIsSorted
  kNumWhole,
};

// Numbers of a chunk. Those of chunk 0 follow the numbers of Whole, then come those of chunk 1, and so on.
// The rows that a chunk receives must be sorted by expert if they come from several ranks.
enum OfChunk : int {
  kTokensBegin,    // index of the chunk's first token
  kTokens,         // number of tokens
  kRowBegin,       // index of the chunk's first sorted row
  kSent,           // number of rows that it sends
  kLocal,          // number of rows that stay on this rank
  kHome,           // kSent + kLocal, the number of its sorted rows
  kLocalRowBegin,  // index of the first sorted row that stays
  kLocalBegin,     // index of the same row among the rows of all chunks that stay
  kLocalWeight,    // index of its routing weight, in an order where the weights of all sent rows come first
  kReceivedBegin,  // index of the chunk's first received row among the received rows of all chunks
  kReceived,       // number of rows that it receives
  kSorted,         // kReceived if the received rows must be sorted, else 0
  kStraight,       // kReceived - kSorted
  kIsSorted,       // 1 if the received rows must be sorted, else 0
  kIsStraight,     // 1 - kIsSorted
  kNumOfChunk,
};

// The first words of a program: facts of the layer, the lengths of the arrays (turns, operands, records,
// waits), and the numbers of ring slots, events and bases.
struct Header {
  int64_t version;
  int64_t chunks;         // n
  int64_t ranks;          // W
  int64_t local_experts;  // E_local
  int64_t keeps_own;      // 1 if rows for this rank's own experts stay on it, else 0
  int64_t sends;          // 1 if rows are sent, else 0
  int64_t slots;          // ring slots
  int64_t turns;
  int64_t operands;
  int64_t records;
  int64_t waits;
  int64_t events;
  int64_t bases;
};

// A buffer, and the ring slot that it uses in turn with other buffers. The slot is as large as the largest of
// them.
struct Turn {
  int64_t slot;
  int64_t rows;       // index into numbers: the buffer's number of rows
  int64_t most_rows;  // the largest number of rows for which the buffer needs room; -1 for no limit
  int64_t row_bytes;
};

// A matrix, vector or list that a record reads or writes:
//
//   address = bases[base] + constant + numbers[begin] + numbers[row] * row_bytes
struct Operand {
  int64_t base;
  int64_t constant;  // bytes
  int64_t begin;     // index into numbers: bytes, where a ring slot begins
  int64_t row;       // index into numbers: the first row
  int64_t rows;      // index into numbers: the number of rows
  int64_t columns;
  int64_t row_bytes;  // from one row to the next
};

// One call of a kernel, of a copy, or of an all-to-all.
struct Record {
  int64_t kernel;
  int64_t lane;
  int64_t task;       // index of the task in the schedule to which the record belongs; -1 for none
  int64_t condition;  // index into numbers: if the number is 0, the record only waits and signals
  int64_t operand_begin;
  int64_t operands;
  int64_t wait_begin;
  int64_t waits;
  int64_t signal;     // event that is recorded afterwards; -1 for none
  int64_t first;      // index into numbers: an argument of some kernels
  int64_t flag;       // an argument of some kernels
  int64_t send_line;  // index of the line of Cut::rows_by_rank with the rows sent to each rank; -1 for none
  int64_t recv_line;  // index of the line with the rows received from each rank; -1 for none
};

}  // namespace pmoe::program
