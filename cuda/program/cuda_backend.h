// A backend of the interpreter that issues a pass on a CUDA device. The program's events are CUDA events.
//
//   call of the program                what the backend issues
//   wait                               cudaStreamWaitEvent
//   signal                             cudaEventRecord
//   COPY                               cudaMemcpyAsync
//   EXCHANGE                           a group of NCCL's sends and receives (nccl.h), or a launch that writes
//                                      into the heaps of other ranks (heap_exchanger.h)
//   HIDDEN, OUTPUT and other products  a grouped product (products.h)
//   PLACE                              a permute; up to kMostCopies calls in a row share a launch
//   SUM                                an unpermute
//   TAKE of rows                       an unpermute with one choice for each token
//   PUT of rows                        a permute with one choice for each token
//   TAKE, PUT of single numbers        a kernel of kernel.cuh
//   BIAS_DOTS, SCALE, BIAS_GRADIENT    a kernel of kernel.cuh; only experts with biases have these calls
//
// HIDDEN_GRADIENT stores partial sums of the routing weights' gradients. A kernel of kernel.cuh adds these
// partial sums up. One launch of that kernel does so for up to two calls of HIDDEN_GRADIENT.
//
// The host never waits for the device. Nothing in this folder has run on a GPU.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/on_device.h"
#include "permute/launch.h"
#include "program/events.h"
#include "program/exchanger.h"
#include "program/launch.h"
#include "program/products.h"

namespace pmoe::program {

// Issues the calls of one program. Its functions throw exceptions, which CudaProgram turns into errors that
// name the record of the call (Record in layout.h).
class CudaBackend {
 public:
  // Throws std::invalid_argument if the program has a record that cannot run on a device. The device must be
  // the current one.
  //
  // words, exchanger: must outlive this object. exchanger may be null if the program sends no rows.
  // labels: the name of each record for messages.
  CudaBackend(const Words& words, const std::vector<std::string>& labels, const Facts& facts,
              Exchanger* exchanger)
      : words_(words),
        facts_(facts),
        exchanger_(exchanger),
        events_(words.header().events + 1, facts.device),
        products_(static_cast<size_t>(words.header().records)) {
    const Header& header = words.header();
    if (header.sends && (!exchanger || exchanger->ranks() != header.ranks))
      throw std::invalid_argument("a program for " + std::to_string(header.ranks) +
                                  " ranks needs a communicator of as many");
    for (int64_t i = 0; i < header.records; ++i) {
      const Record& record = words.record(i);
      if (const char* problem = problem_of(record))
        throw std::invalid_argument("record " + std::to_string(i) + " (" + labels.at(i) + ") " + problem);
      if (!is_product(record.kernel)) continue;
      Product& product = products_[static_cast<size_t>(i)];
      product = make_product(words, record, facts);
      product.counter = num_products_++;
      if (record.kernel == kHiddenGradient) {
        const int64_t width = product.problem.n;
        parts_ = facts.hopper ? hopper_row_dot_parts(static_cast<int>(width))
                              : ampere_row_dot_parts(static_cast<int>(width));
      }
    }
  }

  // Returns the bytes of device memory that a pass needs besides its bases: for the products' tile counters,
  // and for partial sums of routing weights' gradients. The partial sums of at most two products exist at a
  // time.
  int64_t workspace_bytes(const Cut& cut) const {
    int64_t largest = 0;
    int64_t second = 0;
    for (int64_t i = 0; i < words_.header().records; ++i) {
      if (words_.record(i).kernel != kHiddenGradient) continue;
      const int64_t rows = cut.numbers[words_.operand(words_.record(i).operand_begin).rows];
      second = larger(second, smaller(rows, largest));
      largest = larger(largest, rows);
    }
    const int64_t parts = parts_ > 1 ? parts_ * (largest + second) : 0;
    return counter_bytes() + parts * int64_t{sizeof(float)};
  }

  // Prepares a pass: the calls that follow belong to it.
  void begin(const int64_t* streams, void* workspace) {
    if (exchanger_) exchanger_->begin(stream_of(streams[0]));
    placed_.clear();
    exchanged_.clear();
    unsummed_.clear();
    workspace_ = static_cast<uint8_t*>(workspace);
    are_counters_set_ = !takes_counters();
  }

  void wait(int64_t stream, int64_t event) {
    launch_put_off();
    check(cudaStreamWaitEvent(stream_of(stream), events_[event], 0), "cudaStreamWaitEvent");
  }

  void signal(int64_t stream, int64_t event) {
    launch_put_off();
    if (stream == stream_of_sums_) launch_sums();
    check(cudaEventRecord(events_[event], stream_of(stream)), "cudaEventRecord");
  }

  void copy(const Call& call) {
    launch_put_off();
    const Memory& source = call.operand[0];
    check(cudaMemcpyAsync(at(call, 1), at(call, 0), static_cast<size_t>(source.rows * source.row_bytes),
                          cudaMemcpyDefault, stream_of(call.stream)),
          "cudaMemcpyAsync");
  }

  // Takes an exchange. It is put off if the exchanger can issue several together, because the next exchange
  // may then share its launch.
  void exchange(const Call& call) {
    launch_placed();
    if (!exchanged_.empty() && exchanged_.front().stream != call.stream) launch_exchanges();
    exchanged_.push_back(call);
    if (exchanged_.size() == exchanger_->most_calls()) launch_exchanges();
  }

  void launch(const Call& call) {
    if (call.kernel == kPlace) return put_off(call);
    launch_put_off();
    if (is_product(call.kernel))
      multiply(call);
    else if (call.kernel == kBiasDots || call.kernel == kScale || call.kernel == kBiasGradient)
      compute_bias(call);
    else if (call.operand[0].row_bytes == sizeof(float))
      move_numbers(call);
    else
      move_rows(call);
  }

  // Launches the PLACE calls and the exchanges that were put off, but not the sums. Every wait, every signal
  // and every call that is not put off does this first, so that the order of the records stays. No call stays
  // put off for ever: it is followed by a product that reads its rows, or by a signal for another lane.
  void launch_put_off() {
    launch_placed();
    launch_exchanges();
  }

  // Launches the PLACE calls that were put off.
  void launch_placed() {
    if (placed_.empty()) return;
    try {
      if (placed_.size() == 1)
        permute::permute(placed_[0].moving, placed_[0].x, placed_[0].rows);
      else
        permute::permute_several(placed_);
    } catch (const std::exception& raised) {  // CudaProgram itself only knows the record of the current call
      throw std::runtime_error("the copies of record " + std::to_string(first_placed_) + ": " +
                               raised.what());
    }
    placed_.clear();
  }

  // Issues the exchanges that were put off.
  void launch_exchanges() {
    if (exchanged_.empty()) return;
    const std::vector<Call> calls = std::move(exchanged_);
    exchanged_.clear();
    if (exchanger_->most_calls() == 1) return exchanger_->exchange(calls);
    try {
      exchanger_->exchange(calls);
    } catch (const std::exception& raised) {  // CudaProgram itself only knows the record of the current call
      throw std::runtime_error("the exchange of record " + std::to_string(calls.front().record) + ": " +
                               raised.what());
    }
  }

  // Launches the sums of routing weights' gradients that were put off, at most two. It is called before
  // anything can read the results of these sums: in signal(), because another lane may wait for that event;
  // before TAKE and PUT of numbers; and before BIAS_DOTS, which adds to the results. It is also called as
  // soon as two sums are put off.
  void launch_sums() {
    if (unsummed_.empty()) return;
    const PartialSums none = {nullptr, nullptr, 0};
    try {
      sum_parts(reinterpret_cast<void*>(stream_of_sums_), parts_, unsummed_[0],
                unsummed_.size() > 1 ? unsummed_[1] : none);
    } catch (const std::exception& raised) {  // CudaProgram itself only knows the record of the current call
      throw std::runtime_error("the sums of record " + std::to_string(first_unsummed_) + ": " +
                               raised.what());
    }
    unsummed_.clear();
  }

  // Makes the compute lane wait for all other lanes, after an error. The caller may then free the pass's
  // memory as after a pass without errors. Errors of these calls are not reported.
  void join(const int64_t* streams) {
    const cudaEvent_t event = events_[words_.header().events];
    for (int lane = 1; lane < kNumLanes; ++lane)
      if (cudaEventRecord(event, stream_of(streams[lane])) == cudaSuccess)
        cudaStreamWaitEvent(stream_of(streams[0]), event, 0);
    cudaGetLastError();
  }

 private:
  static cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

  static void* at(const Call& call, int i) { return reinterpret_cast<void*>(call.operand[i].address); }

  // Returns why a record cannot run; null if it can.
  const char* problem_of(const Record& record) const {
    const auto operand = [&](int64_t i) -> const Operand& {
      return words_.operand(record.operand_begin + i);
    };
    if (record.kernel < kNothing || record.kernel > kBiasGradient) return "calls an unknown kernel";
    if (record.kernel == kBiasDots || record.kernel == kScale || record.kernel == kBiasGradient) {
      const Operand& rows = operand(record.kernel == kScale ? 1 : 0);
      if (rows.row_bytes != 2 * rows.columns || rows.columns % 2)
        return "has rows that are not pairs of 16-bit numbers";
      const bool is_weighted = record.kernel != kBiasGradient;
      if (is_weighted && operand(record.kernel == kScale ? 0 : 2).row_bytes != sizeof(float))
        return "has routing weights that are not float32";
    }
    if (is_product(record.kernel)) {
      if (record.lane != 0) return "is a product outside of the compute lane";
      if (operand(0).row_bytes != 2 * operand(0).columns) return "has rows whose numbers are not 16 bits";
      const bool is_weighted = record.kernel == kOutput || record.kernel == kHiddenGradient;
      if (is_weighted && operand(3).row_bytes != sizeof(float))
        return "has routing weights that are not float32";
      for (int64_t i = 0; i + 1 < record.operands; ++i)  // the last one is the ends
        if (operand(i).row_bytes != sizeof(float) && operand(i).row_bytes % 16)
          return "has rows that are not multiples of 16 bytes";
    }
    const bool moves = record.kernel == kCopy || record.kernel == kExchange;
    if (moves && operand(0).row_bytes != operand(1).row_bytes) return "copies between rows of unequal bytes";
    return nullptr;
  }

  bool takes_counters() const { return facts_.spare > 0 && num_products_ > 0; }

  int64_t counter_bytes() const {
    const int64_t bytes = takes_counters() ? num_products_ * int64_t{sizeof(uint32_t)} : 0;
    return ceil_div(bytes, kAlignment) * kAlignment;
  }

  void multiply(const Call& call) {
    const bool is_split = call.kernel == kHiddenGradient && parts_ > 1;
    float* dots = call.kernel == kHiddenGradient ? static_cast<float*>(at(call, 6)) : nullptr;
    if (is_split) dots = put_off_sum(call, dots);
    auto* const counters = takes_counters() ? reinterpret_cast<uint32_t*>(workspace_) : nullptr;
    if (!are_counters_set_)
      check(cudaMemsetAsync(counters, 0, static_cast<size_t>(num_products_) * sizeof(uint32_t),
                            stream_of(call.stream)),
            "cudaMemsetAsync of tile counters");
    are_counters_set_ = true;
    launch_product(products_[static_cast<size_t>(call.record)], call, facts_.hopper, dots, counters);
    if (unsummed_.size() == kMostUnsummed) launch_sums();
  }

  // Puts off adding up the partial sums of a HIDDEN_GRADIENT call. Returns the address to which the product
  // must write these partial sums.
  //
  // dots: where the added sums, the gradients of the routing weights, will be written.
  float* put_off_sum(const Call& call, float* dots) {
    float* parts = reinterpret_cast<float*>(workspace_ + counter_bytes());
    for (const PartialSums& each : unsummed_) parts += parts_ * each.count;
    if (unsummed_.empty()) first_unsummed_ = call.record;
    unsummed_.push_back({parts, dots, call.operand[0].rows});
    stream_of_sums_ = call.stream;  // all products are on the compute lane
    return parts;
  }

  // Issues a call that backward makes only for experts with biases.
  void compute_bias(const Call& call) {
    void* const stream = reinterpret_cast<void*>(call.stream);
    const Element type = facts_.element;
    if (call.kernel == kScale) {
      const Memory& grad = call.operand[1];
      return scale_rows(stream, type, static_cast<const float*>(at(call, 0)), at(call, 1), grad.rows,
                        grad.columns / 2);
    }
    const Memory& grad = call.operand[0];
    const RowsByExpert rows = {static_cast<const uint32_t*>(at(call, 0)),
                               static_cast<const int32_t*>(at(call, static_cast<int>(call.operands) - 1)),
                               static_cast<int32_t>(words_.header().local_experts), grad.rows,
                               grad.columns / 2};
    if (call.kernel == kBiasGradient)
      return sum_rows(stream, type, rows, static_cast<float*>(at(call, 1)), call.flag != 0);
    launch_sums();  // add_bias_dots() adds to their results
    add_bias_dots(stream, type, rows, at(call, 1), static_cast<float*>(at(call, 2)));
  }

  // Issues a TAKE or PUT of single numbers, one for each row.
  void move_numbers(const Call& call) {
    launch_sums();
    const auto* const source = static_cast<const float*>(at(call, 0));
    const auto* const index = static_cast<const int32_t*>(at(call, 1));
    auto* const out = static_cast<float*>(at(call, 2));
    auto* const stream = reinterpret_cast<void*>(call.stream);
    const int64_t count = call.operand[1].rows;
    if (call.kernel == kPut) return put_numbers(stream, source, index, out, count);
    // The first launch of a forward pass is a TAKE on the compute lane. It also sets the products' tile
    // counters to 0, which saves a memset.
    const bool clears = !are_counters_set_ && call.lane == 0;
    take_numbers(stream, source, index, out, count, reinterpret_cast<uint32_t*>(workspace_),
                 clears ? num_products_ : 0);
    are_counters_set_ = are_counters_set_ || clears;
  }

  // Puts off a PLACE call: up to kMostCopies PLACE calls that follow one another on a stream share a launch.
  void put_off(const Call& call) {
    launch_exchanges();
    const permute::Copying copying = {moving_of(call), tokens_of(call), sorted_of(call)};
    const bool joins = placed_.size() < permute::kMostCopies && !placed_.empty() &&
                       placed_[0].moving.stream == copying.moving.stream;
    if (!joins) launch_placed();
    if (placed_.empty()) first_placed_ = call.record;
    placed_.push_back(copying);
  }

  // Issues a SUM, or a TAKE or PUT of rows.
  void move_rows(const Call& call) {
    if (is_sum(call))
      permute::unpermute(moving_of(call), sorted_of(call), tokens_of(call));
    else
      permute::permute(moving_of(call), tokens_of(call), sorted_of(call));
  }

  // PLACE, SUM, TAKE and PUT have three operands: source, position (or index), and out. SUM and TAKE read
  // sorted rows from the source, and write a row for each token to `out`. PLACE and PUT read a row for each
  // token from the source, and write sorted rows to `out`.
  static bool is_sum(const Call& call) { return call.kernel == kSum || call.kernel == kTake; }
  static const Memory& sorted_memory(const Call& call) { return call.operand[is_sum(call) ? 0 : 2]; }
  static const Memory& tokens_memory(const Call& call) { return call.operand[is_sum(call) ? 2 : 0]; }

  permute::Moving moving_of(const Call& call) const {
    const Memory& sorted = sorted_memory(call);
    const Memory& position = call.operand[1];
    return {facts_.device,
            reinterpret_cast<void*>(call.stream),
            facts_.element == Element::kBf16 ? permute::RowType::kBf16 : permute::RowType::kFp16,
            tokens_memory(call).rows,
            position.columns,
            sorted.rows,
            sorted.row_bytes,
            reinterpret_cast<const int32_t*>(position.address),
            nullptr,
            0,
            call.first};
  }

  // The kernels take the address of sorted row 0. The operand's memory begins only with row `first`.
  static permute::RowsAt sorted_of(const Call& call) {
    const Memory& sorted = sorted_memory(call);
    return {reinterpret_cast<void*>(sorted.address - call.first * sorted.row_bytes), sorted.row_bytes};
  }

  static permute::RowsAt tokens_of(const Call& call) {
    const Memory& tokens = tokens_memory(call);
    return {reinterpret_cast<void*>(tokens.address), tokens.row_bytes};
  }

  static constexpr size_t kMostUnsummed = 2;  // sum_parts() takes two lists

  const Words& words_;
  const Facts facts_;
  Exchanger* const exchanger_;
  const Events events_;            // those of the program, and one for join()
  std::vector<Product> products_;  // one for each record; unused if the record is no product
  int num_products_ = 0;
  int parts_ = 1;  // number of partial sums that kHiddenGradient stores for each row
  uint8_t* workspace_ = nullptr;
  bool are_counters_set_ = false;         // whether the products' tile counters are 0, or not used
  std::vector<Call> exchanged_;           // exchanges that were put off
  std::vector<permute::Copying> placed_;  // calls of PLACE that were put off
  int64_t first_placed_ = -1;             // the record of the first of them
  std::vector<PartialSums> unsummed_;     // sums of calls of HIDDEN_GRADIENT that were put off
  int64_t first_unsummed_ = -1;           // the record of the first of them
  int64_t stream_of_sums_ = -1;           // the stream of all of them
};

// A program that was loaded for a device. Several threads may call run(): a thread waits there until no other
// thread issues a pass of this program.
class CudaProgram {
 public:
  CudaProgram(std::vector<int64_t> words, std::vector<std::string> labels, const Facts& facts,
              std::shared_ptr<Exchanger> exchanger)
      : words_of_(std::move(words)),
        labels_(std::move(labels)),
        device_(facts.device),
        exchanger_(std::move(exchanger)),
        words_(words_of_.data(), static_cast<int64_t>(words_of_.size())) {
    if (static_cast<int64_t>(labels_.size()) != words_.header().records)
      throw std::invalid_argument("labels (" + std::to_string(labels_.size()) + ") must be one for each of " +
                                  std::to_string(words_.header().records) + " records");
    const OnDevice on_device(device_);
    backend_ = std::make_unique<CudaBackend>(words_, labels_, facts, exchanger_.get());
  }

  const Words& words() const { return words_; }
  const CudaBackend& backend() const { return *backend_; }

  // Returns the numbers of a pass. Throws std::invalid_argument for counts that are out of range.
  Cut cut(const Counts& counts) const {
    if (exchanger_ && counts.rank != exchanger_->rank())
      throw std::invalid_argument("rank (" + std::to_string(counts.rank) + ") must be the communicator's (" +
                                  std::to_string(exchanger_->rank()) + ")");
    Cut cut;
    cut.compute(words_, counts);
    return cut;
  }

  // Issues a pass. Throws std::invalid_argument for an address that is not a multiple of 16, before anything
  // is issued, and std::runtime_error, which names the record, for an error of CUDA or NCCL.
  //
  // bases: an address for each base.
  // streams: a stream for each lane. A lane that the pass does not use may have the stream of the compute
  //     lane.
  // workspace: CudaBackend::workspace_bytes() bytes of device memory.
  void run(const Cut& cut, const std::vector<int64_t>& bases, const std::vector<int64_t>& streams,
           void* workspace) {
    check_places(bases, streams);
    const std::lock_guard<std::mutex> lock(mutex_);
    const OnDevice on_device(device_);
    error_.clear();
    backend_->begin(streams.data(), workspace);
    const Backend backend = {this, launch, copy, exchange, wait, signal};
    const Ending ending = program::run(words_, cut, {bases.data(), streams.data()}, backend);
    const auto stream = reinterpret_cast<cudaStream_t>(streams[0]);
    if (!ending.error) {
      if (exchanger_) exchanger_->end(stream);
      return;
    }
    backend_->join(streams.data());
    // Exchanges that were issued before the error may wait for ranks that never come. end() makes the
    // exchanger watch for this, as in a pass without errors.
    try {
      if (exchanger_) exchanger_->end(stream);
    } catch (const std::exception&) {  // not thrown on: the error of the record came first
    }
    throw std::runtime_error("pass program: record " + std::to_string(ending.record) + " (" +
                             labels_[static_cast<size_t>(ending.record)] + "): " + error_);
  }

 private:
  void check_places(const std::vector<int64_t>& bases, const std::vector<int64_t>& streams) const {
    if (static_cast<int64_t>(bases.size()) != words_.header().bases || streams.size() != kNumLanes)
      throw std::invalid_argument("a pass needs " + std::to_string(words_.header().bases) +
                                  " addresses and " + std::to_string(kNumLanes) + " streams");
    for (size_t i = 0; i < bases.size(); ++i)
      if (bases[i] % 16)
        throw std::invalid_argument("address of base " + std::to_string(i) + " (" + std::to_string(bases[i]) +
                                    ") must be a multiple of 16");
  }

  // Calls the backend. If the backend throws, this function keeps the message and returns 1; else it returns
  // 0.
  template <class Issue>
  static int guarded(void* self, const Issue& issue) {
    auto* const program = static_cast<CudaProgram*>(self);
    try {
      issue(*program->backend_);
      return 0;
    } catch (const std::exception& raised) {
      program->error_ = raised.what();
      return 1;
    }
  }

  static int launch(void* self, const Call& call) {
    return guarded(self, [&](CudaBackend& backend) { backend.launch(call); });
  }
  static int copy(void* self, const Call& call) {
    return guarded(self, [&](CudaBackend& backend) { backend.copy(call); });
  }
  static int exchange(void* self, const Call& call) {
    return guarded(self, [&](CudaBackend& backend) { backend.exchange(call); });
  }
  static int wait(void* self, int64_t, int64_t stream, int64_t event) {
    return guarded(self, [&](CudaBackend& backend) { backend.wait(stream, event); });
  }
  static int signal(void* self, int64_t, int64_t stream, int64_t event) {
    return guarded(self, [&](CudaBackend& backend) { backend.signal(stream, event); });
  }

  const std::vector<int64_t> words_of_;
  const std::vector<std::string> labels_;
  const int device_;
  const std::shared_ptr<Exchanger> exchanger_;
  const Words words_;
  std::unique_ptr<CudaBackend> backend_;
  std::mutex mutex_;  // a pass uses the program's events from its first call to its last
  std::string error_;
};

}  // namespace pmoe::program
