// What pass programs ask of CUDA's streams: events, waits and copies, written down in one journal with the
// launches. Everything happens at once, in the order of the calls.
#pragma once
#include <cuda_runtime.h>

#define PMOE_NCCL_LIBRARY "libpmoe_nccl.so"  // nccl.cpp

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaEventRecordExternal = 1, cudaEventWaitExternal = 1;
typedef struct CUevent_st* cudaEvent_t;

namespace stub {

// A call on a stream. `launches` is the number of launches before it, which have a list of their own.
struct Noted {
  std::string what;
  uintptr_t stream;
  std::vector<int64_t> numbers;
  size_t launches;
};

inline std::vector<Noted> noted;
inline cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline std::set<cudaEvent_t> events;  // that exist
inline int64_t num_events = 0;
inline bool are_reached = true;   // whether the device has reached the events that were recorded
inline bool is_broken = false;    // whether a kernel has read memory that does not exist
inline int64_t fails_after = -1;  // so many calls on streams succeed, and then one fails

inline void note(const char* what, uintptr_t stream, std::vector<int64_t> numbers) {
  noted.push_back({what, stream, std::move(numbers), launched.size()});
}

inline cudaError_t call(const char* what, cudaStream_t stream, std::vector<int64_t> numbers) {
  need_context();
  if (fails_after == 0) {
    fails_after = -1;
    return refuse(cudaErrorInvalidValue, "a call that a test lets fail");
  }
  if (fails_after > 0) --fails_after;
  note(what, reinterpret_cast<uintptr_t>(stream), std::move(numbers));
  return cudaSuccess;
}

inline int64_t number(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
}

}  // namespace stub

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  stub::need_context();
  *event = reinterpret_cast<cudaEvent_t>(++stub::num_events);
  stub::events.insert(*event);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  stub::need_context();
  return stub::events.erase(event) ? cudaSuccess
                                   : stub::refuse(cudaErrorInvalidResourceHandle, "no such event");
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!stub::events.count(event)) return stub::refuse(cudaErrorInvalidResourceHandle, "no such event");
  return stub::call("record", stream, {stub::number(event)});
}
// With the flag "external" a graph itself records the event in each replay.
inline cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  if (!stub::events.count(event)) return stub::refuse(cudaErrorInvalidResourceHandle, "no such event");
  if (flags && !stub::captures)
    return stub::refuse(cudaErrorNotSupported, "an external record outside of a capture");
  return stub::call(flags ? "external record" : "record", stream, {stub::number(event)});
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!stub::events.count(event)) return stub::refuse(cudaErrorInvalidResourceHandle, "no such event");
  if (flags && !stub::captures)
    return stub::refuse(cudaErrorNotSupported, "an external wait outside of a capture");
  return stub::call(flags ? "external wait" : "wait", stream, {stub::number(event)});
}
// A capture takes in all streams.
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = stub::captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  stub::need_context();
  if (!stub::events.count(event)) return stub::refuse(cudaErrorInvalidResourceHandle, "no such event");
  if (stub::is_broken) return stub::refuse(cudaErrorIllegalAddress, "a read of memory that does not exist");
  return stub::are_reached ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  stub::need_context();
  std::swap(*mode, stub::capture_mode);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  const cudaError_t error =
      stub::call("copy", stream, {stub::number(to), stub::number(from), static_cast<int64_t>(bytes)});
  if (!error && stub::runs) std::memcpy(to, from, bytes);
  return error;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  const cudaError_t error = stub::call("set", stream, {stub::number(to), static_cast<int64_t>(bytes)});
  if (!error && stub::captures) {  // a graph repeats it as a launch of one thread
    const stub::Launched one = {nullptr, 1, 1, 1, 0, false, stream, stub::device};
    stub::captured.push_back({one, [=] { std::memset(to, value, bytes); }});
  }
  if (!error && stub::runs) std::memset(to, value, bytes);
  return error;
}
