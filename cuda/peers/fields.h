// Reads arguments of kernels from Python dicts: those arguments that the kernels of COMET and of FlashDMoE
// have in common. This header needs no CUDA, so tests use it, too, when they run kernels on the CPU.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "peers/sizes.h"
#include "peers/watch.h"

namespace pmoe::peers {

namespace py = pybind11;

// Reads fields by name from the dict that has the arguments of one rank. A missing field is read as 0.
// finish() throws if the dict has a field that was not read, such as a misspelt name.
class Fields {
 public:
  explicit Fields(const py::dict& dict) : dict_(dict) {}

  int64_t number(const char* name) {
    if (!dict_.contains(name)) return 0;
    ++used_;
    return dict_[name].cast<int64_t>();
  }
  double real(const char* name) {
    if (!dict_.contains(name)) return 0;
    ++used_;
    return dict_[name].cast<double>();
  }
  int small(const char* name) { return static_cast<int>(number(name)); }
  template <class T>
  T* at(const char* name) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(number(name)));
  }
  void finish() const {
    if (used_ != dict_.size())
      throw py::value_error("a rank's dict has a field that the kernel does not know");
  }

 private:
  const py::dict& dict_;
  size_t used_ = 0;
};

inline Watch read_watch(Fields& fields, int rank) {
  Watch watch;
  watch.failed = fields.at<uint32_t>("failed");
  watch.report = fields.at<Report>("report");
  watch.rank = rank;
  watch.epoch = static_cast<uint32_t>(fields.number("epoch"));
  watch.round = fields.at<const uint32_t>("round");
  watch.bound = static_cast<uint64_t>(fields.number("bound_nanoseconds"));
  watch.delay_seed = static_cast<uint32_t>(fields.number("delay_seed"));
  watch.not_waited = static_cast<uint32_t>(fields.number("not_waited"));
  return watch;
}

// Returns the number of ranks in a launch. Throws if it is not from 1 to kMostVirtual.
inline int count_ranks(const py::list& ranks) {
  const int count = static_cast<int>(ranks.size());
  if (count < 1 || count > kMostVirtual)
    throw py::value_error("ranks of one launch (" + std::to_string(count) + ") must be from 1 to " +
                          std::to_string(kMostVirtual));
  return count;
}

}  // namespace pmoe::peers
