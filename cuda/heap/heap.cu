#include <cstring>
#include <stdexcept>

#include "common/device.cuh"
#include "common/on_device.h"
#include "common/prepared.h"
#include "heap/heap.h"
#include "peers/protocol.h"

namespace pmoe::heap {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes);

__global__ void raise_flag_kernel(uint32_t* flag, uint32_t value) { store_release_system(flag, value); }

__global__ void await_flag_kernel(const uint32_t* flag, uint32_t wanted, uint64_t bound, int64_t* waited) {
  const uint64_t start = nanoseconds();
  for (;;) {
    const bool came = peers::reached(load_acquire_system(flag), wanted);
    const uint64_t past = nanoseconds() - start;
    if (came || past > bound) {
      *waited = came ? static_cast<int64_t>(past) : -1;
      return;
    }
    pause();
  }
}

// Returns a hint for the user, if another rank's memory could not be opened.
std::string hint_for(cudaError_t error) {
  if (error == cudaErrorPeerAccessUnsupported)
    return ": these devices cannot access each other's memory by NVLink or PCIe (see nvidia-smi topo -p2p w)";
  if (error == cudaErrorMapBufferObjectFailed || error == cudaErrorInvalidResourceHandle)
    return ": its process must be alive, on this node, and see the same /dev/shm and process ids as this one";
  return "";
}

}  // namespace

void* allocate(int device, int64_t bytes) {
  if (bytes < 1) throw std::invalid_argument("bytes (" + std::to_string(bytes) + ") must be at least 1");
  const OnDevice on_device(device);
  const size_t allocated_bytes = static_cast<size_t>(ceil_div(bytes, kBlockBytes) * kBlockBytes);
  void* base = nullptr;
  const std::string call = "cudaMalloc(" + std::to_string(allocated_bytes) + " bytes)";
  check(cudaMalloc(&base, allocated_bytes), call.c_str());
  try {
    check(cudaMemset(base, 0, allocated_bytes), "cudaMemset of a heap");
    check(cudaDeviceSynchronize(), "zeroing a heap");
  } catch (...) {
    cudaFree(base);
    throw;
  }
  return base;
}

void release(int device, void* base) {
  const OnDevice on_device(device);
  check(cudaFree(base), "cudaFree of a heap");
}

std::string handle(int device, void* base) {
  const OnDevice on_device(device);
  cudaIpcMemHandle_t ipc_handle;
  check(cudaIpcGetMemHandle(&ipc_handle, base), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&ipc_handle), sizeof ipc_handle);
}

void* open(int device, const std::string& handle) {
  if (handle.size() != kHandleBytes)
    throw std::invalid_argument("a handle must have " + std::to_string(kHandleBytes) + " bytes, not " +
                                std::to_string(handle.size()));
  const OnDevice on_device(device);
  cudaIpcMemHandle_t ipc_handle;
  std::memcpy(&ipc_handle, handle.data(), sizeof ipc_handle);
  void* peer = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&peer, ipc_handle, cudaIpcMemLazyEnablePeerAccess);
  try {
    check(error, "cudaIpcOpenMemHandle");
  } catch (const std::runtime_error& known) {
    throw std::runtime_error(known.what() + hint_for(error));
  }
  return peer;
}

void close(int device, void* peer) {
  const OnDevice on_device(device);
  check(cudaIpcCloseMemHandle(peer), "cudaIpcCloseMemHandle");
}

void raise_flag(int device, void* stream, uint32_t* flag, uint32_t value) {
  const OnDevice on_device(device);
  Prepared("heap.raise_flag", raise_flag_kernel, {1, 1}, stream).launch(flag, value);
}

void await_flag(int device, void* stream, const uint32_t* flag, uint32_t wanted, uint64_t bound,
                int64_t* waited) {
  const OnDevice on_device(device);
  Prepared("heap.await_flag", await_flag_kernel, {1, 1}, stream).launch(flag, wanted, bound, waited);
}

void list_kernels(std::vector<KernelInfo>& found) {
  found.push_back({"heap.raise_flag", reinterpret_cast<const void*>(&raise_flag_kernel), 1, 0});
  found.push_back({"heap.await_flag", reinterpret_cast<const void*>(&await_flag_kernel), 1, 0});
}

}  // namespace pmoe::heap
