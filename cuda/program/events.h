// CUDA events that record no time. Before they are destroyed, their device is made current: a thread that has
// not chosen a device yet would otherwise create a context on device 0.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "common/on_device.h"

namespace pmoe::program {

// Returns a new event on the current device.
inline cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

// Destroys events of a device. It throws nothing: if the device has failed, its events are lost as well.
inline void destroy_events(int device, const std::vector<cudaEvent_t>& events) {
  try {
    const OnDevice on_device(device);
    for (const cudaEvent_t event : events) cudaEventDestroy(event);
  } catch (const std::exception&) {
  }
}

// A number of events on one device.
class Events {
 public:
  // device: the current device.
  Events(int64_t count, int device) : device_(device) {
    events_.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) events_.push_back(make_event());
  }
  ~Events() { destroy_events(device_, events_); }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  cudaEvent_t operator[](int64_t i) const { return events_[static_cast<size_t>(i)]; }

 private:
  const int device_;
  std::vector<cudaEvent_t> events_;
};

}  // namespace pmoe::program
