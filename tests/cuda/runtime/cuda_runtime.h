// A CUDA runtime and driver without a device, for the host code of cuda/ as it is: launch.cu, bind.cpp,
// heap.cu. They refuse what CUDA's own refuse, by the same errors, and write down what they were asked. A
// launch runs in the emulator, by the maps that the host code has encoded.
//
// Contexts are as from CUDA 12 on: a thread begins without one, on device 0. cudaSetDevice makes one current,
// and so does each call that needs one; cudaGetDevice and cudaDeviceGetAttribute do not. The driver's
// functions take the one that is current, or fail.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator_grid.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801,
  cudaErrorInvalidClusterSize = 912,
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef struct CUstream_st* cudaStream_t;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
constexpr int cudaEnableDefault = 0;
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes, localSizeBytes;
  int numRegs, ptxVersion, binaryVersion;
};

enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative = 2, cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace stub {

constexpr int kDevices = 2, kFree = 48 << 10, kOptin = 232448 - 1024, kOfProcessor = 228 << 10;

struct Launched {
  const void* kernel;
  unsigned blocks, threads, cluster;
  size_t shared_bytes;
  bool together;
  cudaStream_t stream;
  int device;
};

struct Encoded {
  CUtensorMapDataType type;
  unsigned rank;
  const void* base;
  uint64_t size[3];
  uint64_t stride_bytes[2];
  unsigned box[3];
};

inline std::vector<Launched> launched;
inline std::vector<Encoded> encoded;
inline std::vector<std::string> refused;                     // in words, what was asked that cannot be
inline std::set<int> contexts;                               // devices that have one
inline std::set<const void*> asked;                          // kernels whose attributes were
inline std::map<std::tuple<const void*, int>, int> allowed;  // dynamic shared memory of a kernel on a device
inline int processors = 16;
inline thread_local int device = 0, current = -1;  // the runtime's device, and whose context is current
inline cudaError_t last = cudaSuccess;

// A launch that a graph holds: with the arguments that it had when the graph was captured.
struct Captured {
  Launched one;
  std::function<void()> body;
};
inline bool captures = false;  // whether launches are kept; they run all the same
inline std::vector<Captured> captured;

// How launches run, where they do.
inline bool runs = true;
inline unsigned seed = 1;
inline int eagerness = 50;
inline std::function<bool()> absent;  // threads that leave at once

inline cudaError_t refuse(cudaError_t error, const std::string& why) {
  refused.push_back(why);
  return last = error;
}

inline void need_context() { contexts.insert(current = device); }

inline cudaError_t allow(const cudaLaunchConfig_t& config, const Launched& one) {
  const auto found = allowed.find({one.kernel, device});
  const size_t most = found == allowed.end() ? kFree : static_cast<size_t>(found->second);
  if (one.shared_bytes > most) return refuse(cudaErrorInvalidValue, "more shared memory than was allowed");
  if (one.blocks < 1 || one.threads < 1 || one.threads > 1024)
    return refuse(cudaErrorInvalidConfiguration, "a grid that cannot be");
  if (one.cluster < 1 || one.cluster > 8 || one.blocks % one.cluster)
    return refuse(cudaErrorInvalidClusterSize, "a grid that is not of whole clusters");
  const auto resident = std::min<size_t>(2048 / one.threads, kOfProcessor / (one.shared_bytes + 1024));
  if (one.together && one.blocks > resident * static_cast<size_t>(processors))
    return refuse(cudaErrorCooperativeLaunchTooLarge, "more blocks than are resident at once");
  (void)config;
  return cudaSuccess;
}

inline void run(const Launched& one, const std::function<void()>& body) {
  emu::launch(
      one.blocks, one.threads, seed++, [&] { absent&& absent() ? void() : body(); }, eagerness, one.cluster,
      one.shared_bytes);
}

// Runs a launch of a graph again.
inline void replay(size_t number) { run(captured.at(number).one, captured.at(number).body); }

inline cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                          const std::function<void()>& body) {
  need_context();
  Launched one = {
      kernel, config.gridDim.x, config.blockDim.x, 1, config.dynamicSmemBytes, false, config.stream, device};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      one.cluster = config.attrs[i].val.clusterDim.x;
    else
      one.together = config.attrs[i].val.cooperative;
  }
  if (const cudaError_t error = allow(config, one)) return error;
  launched.push_back(one);
  if (captures) captured.push_back({one, body});
  if (runs) run(one, body);
  return cudaSuccess;
}

// ---- the driver

inline CUresult error_name(CUresult error, const char** name) {
  *name = error == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
          : error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
                                                : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}

inline CUresult context_state(CUdevice_v1 which, unsigned* flags, int* active) {
  *flags = 0, *active = static_cast<int>(contexts.count(which));
  return CUDA_SUCCESS;
}

inline CUresult loading_mode(CUmoduleLoadingMode* mode) {
  *mode = CU_MODULE_LAZY_LOADING;  // CUDA's default
  return CUDA_SUCCESS;
}

// The rules of the driver's manual, for tensors of 16-bit elements and boxes of 128-byte lines. Empty where
// all hold.
inline std::string wrong_map(const CUtensorMap* map, const Encoded& e, const cuuint32_t* steps,
                             CUtensorMapSwizzle swizzle) {
  if (reinterpret_cast<uintptr_t>(map) % 64) return "a map that is not aligned";
  if (e.rank < 2 || e.rank > 3) return "a rank that pmoe does not use";
  if (!e.base || reinterpret_cast<uintptr_t>(e.base) % 16) return "a tensor that is not aligned";
  for (unsigned i = 0; i < e.rank; ++i) {
    if (e.size[i] < 1 || e.size[i] > uint64_t{1} << 32) return "a size of a tensor";
    if (e.box[i] < 1 || e.box[i] > 256 || steps[i] != 1) return "a box";
  }
  for (unsigned i = 0; i + 1 < e.rank; ++i) {
    const uint64_t inner = i ? e.stride_bytes[i - 1] * e.size[i] : e.size[0] * 2;
    if (e.stride_bytes[i] % 16 || e.stride_bytes[i] >= uint64_t{1} << 40) return "a stride of a tensor";
    if (e.stride_bytes[i] < inner && e.size[i + 1] > 1) return "a stride shorter than what it steps over";
  }
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_128B || e.box[0] * 2 != 128)
    return "lines of a box that are not 128 bytes";
  return "";
}

inline CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (current < 0) {
    refused.push_back("a map in a thread without a context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  Encoded e = {type, rank, base, {1, 1, 1}, {0, 0}, {1, 1, 1}};
  for (unsigned i = 0; i < std::min(rank, 3u); ++i) e.size[i] = size[i], e.box[i] = box[i];
  for (unsigned i = 0; i + 1 < std::min(rank, 3u); ++i) e.stride_bytes[i] = stride[i];
  if (const std::string wrong = wrong_map(map, e, steps, swizzle); !wrong.empty()) {
    refused.push_back(wrong);
    return CUDA_ERROR_INVALID_VALUE;
  }
  encoded.push_back(e);
  emu::Map made = {
      static_cast<const uint8_t*>(base),
      static_cast<int>(rank),
      {static_cast<int64_t>(e.size[0]), static_cast<int64_t>(e.size[1]), static_cast<int64_t>(e.size[2])},
      {2, static_cast<int64_t>(e.stride_bytes[0]), static_cast<int64_t>(e.stride_bytes[1])},
      {static_cast<int>(e.box[0]), static_cast<int>(e.box[1]), static_cast<int>(e.box[2])},
      2};
  emu::write_map(map, made);
  return CUDA_SUCCESS;
}

}  // namespace stub

// ---- the runtime

inline const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorCooperativeLaunchTooLarge:
      return "cudaErrorCooperativeLaunchTooLarge";
    default:
      return "another error";
  }
}
inline const char* cudaGetErrorString(cudaError_t) {
  return stub::refused.empty() ? "" : stub::refused.back().c_str();
}
inline cudaError_t cudaGetLastError() { return std::exchange(stub::last, cudaSuccess); }

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = stub::kDevices;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = stub::device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= stub::kDevices) return stub::refuse(cudaErrorInvalidDevice, "no such device");
  stub::device = device;
  stub::need_context();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? stub::processors : stub::kOptin;
  return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned version,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  const std::map<std::pair<std::string, unsigned>, void*> known = {
      {{"cuGetErrorName", 6000}, reinterpret_cast<void*>(&stub::error_name)},
      {{"cuDevicePrimaryCtxGetState", 7000}, reinterpret_cast<void*>(&stub::context_state)},
      {{"cuModuleGetLoadingMode", 11070}, reinterpret_cast<void*>(&stub::loading_mode)},
      {{"cuTensorMapEncodeTiled", 12000}, reinterpret_cast<void*>(&stub::encode)}};
  const auto at = known.find({name, version});
  *entry = at == known.end() ? nullptr : at->second;
  *found = at == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  stub::need_context();
  if (bytes < 0 || bytes > stub::kOptin)
    return stub::refuse(cudaErrorInvalidValue, "more shared memory than a block can have");
  stub::allowed[{kernel, stub::device}] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* kernel) {
  stub::need_context();
  stub::asked.insert(kernel);
  *found = {0, 0, 64, 90, 90};
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                                 size_t shared_bytes) {
  stub::need_context();
  *blocks = static_cast<int>(std::min<size_t>(2048 / threads, stub::kOfProcessor / (shared_bytes + 1024)));
  return cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> kept(arguments...);  // as CUDA copies them
  return stub::launch(*config, reinterpret_cast<const void*>(kernel), [=] { std::apply(kernel, kept); });
}

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  stub::need_context();
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return *data ? cudaSuccess : stub::refuse(cudaErrorMemoryAllocation, "no memory");
}
inline cudaError_t cudaFree(void* data) {
  stub::need_context();
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  stub::need_context();
  std::memset(data, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  stub::need_context();
  return cudaSuccess;
}
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return stub::refuse(cudaErrorNotSupported, "handles of memory");
}
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return stub::refuse(cudaErrorNotSupported, "handles of memory");
}
inline cudaError_t cudaIpcCloseMemHandle(void*) {
  return stub::refuse(cudaErrorNotSupported, "handles of memory");
}
