// The interpreter with a backend that writes its calls down, as a C library for tests and benchmarks.
//
// Each call becomes words of an array. The first word is 0, 1 or 2 and says which kind of call it is.
// bench/recorded_program.py compiles this file and reads the words.
//
//   0 wait      lane  stream  event
//   1 signal    lane  stream  event
//   2 issue     lane  stream  record  kernel  first  flag  (Call in interpreter.h)
//               W  the numbers of rows to W ranks  the numbers of rows from W ranks
//               the number of operands  4 words for each operand (Memory in interpreter.h)
#include <exception>
#include <vector>

#include "program/interpreter.h"

using namespace pmoe::program;

namespace {

enum What : int64_t { kWait, kSignal, kIssue };

struct Recorder {
  std::vector<int64_t> words;
  int64_t fails_at = -1;  // the record whose call returns an error

  int write(const Call& call) {
    if (call.record == fails_at) return 7;
    words.insert(words.end(),
                 {kIssue, call.lane, call.stream, call.record, call.kernel, call.first, call.flag});
    const int64_t ranks = call.send ? call.ranks : 0;
    words.push_back(ranks);
    words.insert(words.end(), call.send, call.send + ranks);
    words.insert(words.end(), call.recv, call.recv + ranks);
    words.push_back(call.operands);
    for (int64_t i = 0; i < call.operands; ++i) {
      const Memory& memory = call.operand[i];
      words.insert(words.end(), {memory.address, memory.rows, memory.columns, memory.row_bytes});
    }
    return 0;
  }

  static int issue(void* self, const Call& call) { return static_cast<Recorder*>(self)->write(call); }

  static int wait(void* self, int64_t lane, int64_t stream, int64_t event) {
    auto& words = static_cast<Recorder*>(self)->words;
    words.insert(words.end(), {kWait, lane, stream, event});
    return 0;
  }

  static int signal(void* self, int64_t lane, int64_t stream, int64_t event) {
    auto& words = static_cast<Recorder*>(self)->words;
    words.insert(words.end(), {kSignal, lane, stream, event});
    return 0;
  }

  Backend backend() { return {this, issue, issue, issue, wait, signal}; }
};

// One program, the numbers of its last cut, and the calls of its last run.
struct Recorded {
  std::vector<int64_t> words;
  Words program;
  Cut cut;
  Recorder recorder;

  Recorded(const int64_t* from, int64_t size) : words(from, from + size), program(words.data(), size) {}
};

thread_local std::string error;

}  // namespace

extern "C" {

// Returns the text of the last error of this thread.
const char* program_error() { return error.c_str(); }

// Returns a program. If there is an error, it returns null, and program_error() returns the text.
void* program_make(const int64_t* words, int64_t size) {
  try {
    return new Recorded(words, size);
  } catch (const std::exception& raised) {
    error = raised.what();
    return nullptr;
  }
}

void program_free(void* program) { delete static_cast<Recorded*>(program); }

// Computes the numbers of a pass. Returns the bytes of all ring slots, or -1 if there is an error
// (program_error()).
int64_t program_cut(void* program, int64_t tokens, int64_t rank, const int64_t* send, const int64_t* recv) {
  auto* recorded = static_cast<Recorded*>(program);
  try {
    recorded->cut.compute(recorded->program, {tokens, rank, send, recv});
    return recorded->cut.arena_bytes;
  } catch (const std::exception& raised) {
    error = raised.what();
    return -1;
  }
}

// Returns the numbers that the last program_cut() computed. `size` receives how many they are.
const int64_t* program_numbers(void* program, int64_t* size) {
  const Cut& cut = static_cast<Recorded*>(program)->cut;
  *size = static_cast<int64_t>(cut.numbers.size());
  return cut.numbers.data();
}

// Runs the program with the recorder. Returns the number of words that were recorded, or -1 if there is an
// error.
//
// fails_at: index of the record whose call the recorder lets fail; -1 for none.
int64_t program_run(void* program, const int64_t* bases, const int64_t* streams, int64_t fails_at) {
  auto* recorded = static_cast<Recorded*>(program);
  recorded->recorder.words.clear();
  recorded->recorder.fails_at = fails_at;
  const Ending ending = run(recorded->program, recorded->cut, {bases, streams}, recorded->recorder.backend());
  if (ending.error) {
    error = "error " + std::to_string(ending.error) + " at record " + std::to_string(ending.record);
    return -1;
  }
  return static_cast<int64_t>(recorded->recorder.words.size());
}

// Returns the words that the last program_run() recorded.
const int64_t* program_calls(void* program) { return static_cast<Recorded*>(program)->recorder.words.data(); }

// Does what program_cut() and program_run() do, `times` times, with a backend that only counts calls. Returns
// the number of calls of the last time, or -1 if there is an error.
int64_t program_repeat(void* program, int64_t tokens, int64_t rank, const int64_t* send, const int64_t* recv,
                       const int64_t* bases, const int64_t* streams, int64_t times) {
  auto* recorded = static_cast<Recorded*>(program);
  int64_t calls = 0;
  const auto count = [](void* self, const Call&) { return ++*static_cast<int64_t*>(self), 0; };
  const auto event = [](void* self, int64_t, int64_t, int64_t) { return ++*static_cast<int64_t*>(self), 0; };
  const Backend counting{&calls, count, count, count, event, event};
  try {
    for (int64_t i = 0; i < times; ++i) {
      calls = 0;
      recorded->cut.compute(recorded->program, {tokens, rank, send, recv});
      run(recorded->program, recorded->cut, {bases, streams}, counting);
    }
  } catch (const std::exception& caught) {
    error = caught.what();
    return -1;
  }
  return calls;
}
}
