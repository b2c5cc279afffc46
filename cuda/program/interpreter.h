// Runs a compiled pass: goes through its records, and issues each record as calls of a backend. Example:
//
//   record of task C1                  calls of the backend, in this order
//   waits 3, 5                         wait(lane 0, event 3)   wait(lane 0, event 5)
//   kernel hidden, 6 operands          launch({hidden, lane 0, 6 addresses})
//   signal 6                           signal(lane 0, event 6)
//
// The interpreter knows no device, and of kernels only those of layout.h. A backend is a table of functions.
// The backend of cuda_backend.h launches kernels on the lane's stream, and records CUDA events. The backend
// of recorder.cpp writes the calls down.
#pragma once

#include "program/cut.h"

namespace pmoe::program {

// An operand of a call: `rows` rows of `columns` numbers. The next row begins `row_bytes` bytes after a row.
struct Memory {
  int64_t address;
  int64_t rows;
  int64_t columns;
  int64_t row_bytes;
};

// One call of a kernel, a copy or an all-to-all.
//
// first, flag: arguments of some kernels (pmoe.program.records.Kernel).
struct Call {
  int64_t record;  // index of the record
  int64_t kernel;
  int64_t lane;
  int64_t stream;  // the lane's stream, as the caller passed it
  int64_t first;
  int64_t flag;
  int64_t ranks;        // W, for an all-to-all
  const int64_t* send;  // (W,) rows to each rank; null unless the call is an all-to-all
  const int64_t* recv;  // (W,) rows from each rank
  int64_t operands;
  Memory operand[kMaxOperands];
};

// The functions that issue calls. Each returns 0, or another number for an error, which ends the pass.
struct Backend {
  void* self;
  int (*launch)(void* self, const Call& call);
  int (*copy)(void* self, const Call& call);
  int (*exchange)(void* self, const Call& call);
  int (*wait)(void* self, int64_t lane, int64_t stream, int64_t event);
  int (*signal)(void* self, int64_t lane, int64_t stream, int64_t event);
};

// What the caller of a pass provides: an address for each base, and a stream for each lane.
struct Places {
  const int64_t* bases;
  const int64_t* streams;
};

// How a pass ended. `error` is 0, or the number that a function of the backend returned for the record with
// the index `record`.
struct Ending {
  int error;
  int64_t record;
};

inline Memory resolve(const Operand& operand, const Cut& cut, const int64_t* bases) {
  const int64_t* numbers = cut.numbers.data();
  const int64_t base = bases[operand.base];
  const int64_t offset = operand.constant + numbers[operand.begin] + numbers[operand.row] * operand.row_bytes;
  return {base ? base + offset : 0, numbers[operand.rows], operand.columns, operand.row_bytes};
}

inline int issue(const Words& words, const Record& record, int64_t index, const Cut& cut,
                 const Places& places, const Backend& backend) {
  Call call;
  call.record = index;
  call.kernel = record.kernel;
  call.lane = record.lane;
  call.stream = places.streams[record.lane];
  call.first = cut.numbers[record.first];
  call.flag = record.flag;
  call.ranks = words.header().ranks;
  call.operands = record.operands;
  call.send = record.send_line < 0 ? nullptr : &cut.rows_by_rank[record.send_line * call.ranks];
  call.recv = record.recv_line < 0 ? nullptr : &cut.rows_by_rank[record.recv_line * call.ranks];
  for (int64_t i = 0; i < record.operands; ++i)
    call.operand[i] = resolve(words.operand(record.operand_begin + i), cut, places.bases);
  switch (record.kernel) {
    case kExchange:
      return backend.exchange(backend.self, call);
    case kCopy:
      return backend.copy(backend.self, call);
    default:
      return backend.launch(backend.self, call);
  }
}

// Issues all calls of a pass. The host waits for none of them.
inline Ending run(const Words& words, const Cut& cut, const Places& places, const Backend& backend) {
  for (int64_t i = 0; i < words.header().records; ++i) {
    const Record& record = words.record(i);
    const int64_t stream = places.streams[record.lane];
    for (int64_t w = 0; w < record.waits; ++w)
      if (const int error =
              backend.wait(backend.self, record.lane, stream, words.wait(record.wait_begin + w)))
        return {error, i};
    if (record.kernel != kNothing && cut.numbers[record.condition] != 0)
      if (const int error = issue(words, record, i, cut, places, backend)) return {error, i};
    if (record.signal >= 0)
      if (const int error = backend.signal(backend.self, record.lane, stream, record.signal))
        return {error, i};
  }
  return {0, -1};
}

}  // namespace pmoe::program
