// Computes where each chunk's rows begin and how many there are, from the row counts of a pass. The results
// are the numbers that layout.h lists (Whole, OfChunk).
//
// Example: 2 chunks, 2 ranks with one expert each, this rank is 0. Its counts by chunk, rank and expert:
//
//   send   chunk 0: 3 rows stay, 2 go to rank 1    chunk 1: 1 row stays, 4 go to rank 1
//   sorted rows      | 0 1 | 2 3 4 | 5 6 7 8 | 9 |
//   chunk 0            sent  stays                  kRowBegin 0, kSent 2, kLocalRowBegin 2, kLocal 3
//   chunk 1                          sent      stays    kRowBegin 5, kSent 4, kLocalRowBegin 9, kLocal 1
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "common/host_device.h"
#include "program/layout.h"

namespace pmoe::program {

// Row counts of a pass, as `pmoe.comm.counts.RankCounts` has them for n chunks. The shape of `send` and of
// `recv` is (n, W, E_local).
struct Counts {
  int64_t tokens;       // T, tokens of this rank
  int64_t rank;         // this rank
  const int64_t* send;  // rows that this rank has for each expert of each rank
  const int64_t* recv;  // rows that each rank has for each expert of this rank
};

// Access to the words of a program (layout.h). The words are not copied, so they must outlive this object.
class Words {
 public:
  // Throws std::invalid_argument if the words are no program, or if an index in them is out of range.
  Words(const int64_t* words, int64_t size) {
    require(size >= kHeaderWords, "too few words for a header");
    header_ = reinterpret_cast<const Header*>(words);
    require(header_->version == kVersion, "another version of records");
    require(header_->chunks > 0 && header_->ranks > 0 && header_->local_experts > 0, "an empty shape");
    require(is_flag(header_->keeps_own) && is_flag(header_->sends), "a flag that is not 0 or 1");
    for (const int64_t length : {header_->slots, header_->turns, header_->operands, header_->records,
                                 header_->waits, header_->events, header_->bases})
      require(length >= 0 && length <= size, "a length");
    turns_ = reinterpret_cast<const Turn*>(words + kHeaderWords);
    operands_ = reinterpret_cast<const Operand*>(turns_ + header_->turns);
    records_ = reinterpret_cast<const Record*>(operands_ + header_->operands);
    waits_ = reinterpret_cast<const int64_t*>(records_ + header_->records);
    require(waits_ + header_->waits == words + size, "another number of words than the header says");
    check_indices();
  }

  const Header& header() const { return *header_; }
  const Turn& turn(int64_t i) const { return turns_[i]; }
  const Operand& operand(int64_t i) const { return operands_[i]; }
  const Record& record(int64_t i) const { return records_[i]; }
  int64_t wait(int64_t i) const { return waits_[i]; }

  int64_t num_numbers() const { return first_slot() + header_->slots; }
  int64_t first_slot() const { return kNumWhole + header_->chunks * kNumOfChunk; }
  // Returns the number of lines of Cut::rows_by_rank. Line 2 i has the numbers of rows of chunk i that are
  // sent to each rank, line 2 i + 1 those received from each rank. The last two lines have the sums over all
  // chunks.
  int64_t lines() const { return 2 * header_->chunks + 2; }

 private:
  static constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);

  static bool is_flag(int64_t word) { return word == 0 || word == 1; }

  static void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("not a program: ") + what);
  }

  void check_indices() const {
    const auto in = [](int64_t index, int64_t size) { return index >= 0 && index < size; };
    const int64_t numbers = num_numbers();
    for (int64_t i = 0; i < header_->turns; ++i)
      require(in(turns_[i].slot, header_->slots) && in(turns_[i].rows, numbers), "a turn");
    for (int64_t i = 0; i < header_->operands; ++i) {
      const Operand& each = operands_[i];
      require(in(each.base, header_->bases) && in(each.begin, numbers), "an operand's memory");
      require(in(each.row, numbers) && in(each.rows, numbers), "an operand's rows");
    }
    for (int64_t i = 0; i < header_->waits; ++i) require(in(waits_[i], header_->events), "an awaited event");
    for (int64_t i = 0; i < header_->records; ++i) check_record(records_[i], numbers);
  }

  void check_record(const Record& each, int64_t numbers) const {
    const auto within = [](int64_t begin, int64_t count, int64_t size) {
      return begin >= 0 && count >= 0 && begin + count <= size;
    };
    require(each.lane >= 0 && each.lane < kNumLanes, "a lane");
    require(each.operands <= kMaxOperands, "too many operands");
    require(within(each.operand_begin, each.operands, header_->operands), "a record's operands");
    require(within(each.wait_begin, each.waits, header_->waits), "a record's waits");
    require(each.signal >= -1 && each.signal < header_->events, "a signal");
    require(within(each.condition, 1, numbers) && within(each.first, 1, numbers), "a record's numbers");
    require(each.send_line >= -1 && each.send_line < lines(), "a line of rows to send");
    require(each.recv_line >= -1 && each.recv_line < lines(), "a line of rows to receive");
    const bool sends = each.kernel == kExchange;
    require(sends == (each.send_line >= 0) && sends == (each.recv_line >= 0), "an exchange");
  }

  const Header* header_;
  const Turn* turns_;
  const Operand* operands_;
  const Record* records_;
  const int64_t* waits_;
};

// The numbers of one pass. If an object is used for several passes, only the first one allocates memory.
struct Cut {
  std::vector<int64_t> numbers;
  std::vector<int64_t> rows_by_rank;  // (Words::lines(), W) numbers of rows
  int64_t arena_bytes = 0;            // bytes of all ring slots together

  // Throws std::invalid_argument for a rank or a count that is out of range.
  void compute(const Words& words, const Counts& counts) {
    const Header& header = words.header();
    if (counts.rank < 0 || counts.rank >= header.ranks || counts.tokens < 0)
      throw std::invalid_argument("rank (" + std::to_string(counts.rank) + ") must be below " +
                                  std::to_string(header.ranks) + ", and tokens (" +
                                  std::to_string(counts.tokens) + ") must not be negative");
    numbers.assign(words.num_numbers(), 0);
    rows_by_rank.assign(words.lines() * header.ranks, 0);
    count_rows(header, counts);
    place_rows(header, counts.tokens);
    lay_out_slots(words);
  }

 private:
  // Sums the counts over experts, by chunk and rank. Rows that stay are not counted as sent or received.
  void count_rows(const Header& header, const Counts& counts) {
    const int64_t ranks = header.ranks;
    const int64_t experts = header.local_experts;
    int64_t* all_sent = &rows_by_rank[2 * header.chunks * ranks];
    int64_t* all_received = all_sent + ranks;
    for (int64_t i = 0; i < header.chunks; ++i) {
      int64_t* chunk = &numbers[kNumWhole + i * kNumOfChunk];
      int64_t* sent = &rows_by_rank[2 * i * ranks];
      int64_t* received = sent + ranks;
      int64_t sources = 0;
      int64_t rows = 0;
      int64_t rows_staying = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const bool stays = header.keeps_own && rank == counts.rank;
        for (int64_t expert = 0; expert < experts; ++expert) {
          const int64_t at = (i * ranks + rank) * experts + expert;
          const int64_t leaving = counts.send[at];
          const int64_t coming = counts.recv[at];
          if (leaving < 0 || coming < 0) refuse_count(i, leaving < 0 ? leaving : coming);
          // Kernels read where each expert's rows end as 32-bit numbers.
          rows += stays ? 0 : coming;
          rows_staying += stays ? leaving : 0;
          if (rows > INT32_MAX || rows_staying > INT32_MAX) refuse_count(i, larger(rows, rows_staying));
          if (stays) {
            chunk[kLocal] += leaving;
          } else {
            if (!header.sends && (leaving || coming))
              throw std::invalid_argument("rows must stay: the program sends none");
            sent[rank] += leaving;
            received[rank] += coming;
          }
        }
        sources += received[rank] > 0;
        chunk[kSent] += sent[rank];
        chunk[kReceived] += received[rank];
        all_sent[rank] += sent[rank];
        all_received[rank] += received[rank];
      }
      chunk[kIsSorted] = sources > 1;
    }
    int64_t sources = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) sources += all_received[rank] > 0;
    numbers[kMessageIsSorted] = sources > 1;
  }

  [[noreturn]] static void refuse_count(int64_t chunk, int64_t count) {
    throw std::invalid_argument("row counts of chunk " + std::to_string(chunk) + " (" +
                                std::to_string(count) + ") must be from 0 to 2147483647");
  }

  // Computes where the rows of each chunk begin, by prefix sums over chunks.
  void place_rows(const Header& header, int64_t tokens) {
    int64_t row = 0;
    int64_t local = 0;
    int64_t received = 0;
    for (int64_t i = 0; i < header.chunks; ++i) numbers[kSentRows] += of_chunk(i)[kSent];
    for (int64_t i = 0; i < header.chunks; ++i) {
      int64_t* chunk = of_chunk(i);
      chunk[kTokensBegin] = i * tokens / header.chunks;
      chunk[kTokens] = (i + 1) * tokens / header.chunks - chunk[kTokensBegin];
      chunk[kRowBegin] = row;
      chunk[kHome] = chunk[kSent] + chunk[kLocal];
      chunk[kLocalRowBegin] = row + chunk[kSent];
      chunk[kLocalBegin] = local;
      chunk[kLocalWeight] = numbers[kSentRows] + local;
      chunk[kReceivedBegin] = received;
      chunk[kIsStraight] = 1 - chunk[kIsSorted];
      chunk[kSorted] = chunk[kReceived] * chunk[kIsSorted];
      chunk[kStraight] = chunk[kReceived] * chunk[kIsStraight];
      row += chunk[kHome];
      local += chunk[kLocal];
      received += chunk[kReceived];
    }
    // Kernels read the index of a row as a 32-bit number.
    if (larger(row, received) > INT32_MAX)
      throw std::invalid_argument("rows of all chunks (" + std::to_string(larger(row, received)) +
                                  ") must be at most 2147483647");
    numbers[kOne] = 1;
    numbers[kRows] = row;
    numbers[kReceivedRows] = received;
    numbers[kMessageIsStraight] = 1 - numbers[kMessageIsSorted];
  }

  int64_t* of_chunk(int64_t i) { return &numbers[kNumWhole + i * kNumOfChunk]; }

  // Computes where each ring slot begins. Slots follow one another. A slot is as large as the largest of the
  // buffers that use it in turn. The first loop keeps the slots' bytes in `numbers`; the second loop replaces
  // them by the offsets where the slots begin.
  void lay_out_slots(const Words& words) {
    const int64_t first = words.first_slot();
    for (int64_t i = 0; i < words.header().turns; ++i) {
      const Turn& turn = words.turn(i);
      int64_t rows = numbers[turn.rows];
      if (turn.most_rows >= 0 && rows > turn.most_rows) rows = turn.most_rows;
      int64_t& bytes = numbers[first + turn.slot];
      if (rows * turn.row_bytes > bytes) bytes = rows * turn.row_bytes;
    }
    arena_bytes = 0;
    for (int64_t slot = 0; slot < words.header().slots; ++slot) {
      const int64_t bytes = numbers[first + slot];
      numbers[first + slot] = arena_bytes;
      arena_bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
};

}  // namespace pmoe::program
