// NVSHMEM as a provider of heaps: memory that ranks of other nodes access by loads and stores, if NVLink
// connects the nodes. This file is only compiled if setup.py finds NVSHMEM's headers. It has been run with
// one process, never with several.
//
// This file uses only NVSHMEM's host interface. The kernels of pmoe._cuda access the memory by ordinary loads
// and stores. pointer() returns 0 for the memory of a rank that this rank cannot map. pmoe/comm/heap then
// lets FlashDMoE's kernels send rows to that rank by NVSHMEM's puts (cuda/nvshmem), or refuses the heap.
//
// The library is opened when it is first needed, so that pmoe works without it.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <host/nvshmem_api.h>
#include <host/nvshmemx_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/on_device.h"
#include "module.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using pmoe::check;
using pmoe::OnDevice;

// NVSHMEM's host library, opened by dlopen. If other code of the process has opened it before, this is the
// same library.
class Library {
 public:
  explicit Library(const char* path) : file_(dlopen(path, RTLD_NOW | RTLD_GLOBAL)) {
    if (file_ == nullptr) throw std::runtime_error(std::string("pmoe._cuda: NVSHMEM: ") + dlerror());
    find(get_uniqueid, "nvshmemx_get_uniqueid");
    find(set_uniqueid, "nvshmemx_set_attr_uniqueid_args");
    find(init, "nvshmemx_hostlib_init_attr");
    find(status, "nvshmemx_init_status");
    find(my_pe, "nvshmem_my_pe");
    find(n_pes, "nvshmem_n_pes");
    find(allocate, "nvshmem_malloc");
    find(release, "nvshmem_free");
    find(pointer, "nvshmem_ptr");
  }

  decltype(&nvshmemx_get_uniqueid) get_uniqueid;
  decltype(&nvshmemx_set_attr_uniqueid_args) set_uniqueid;
  decltype(&nvshmemx_hostlib_init_attr) init;
  decltype(&nvshmemx_init_status) status;
  decltype(&nvshmem_my_pe) my_pe;
  decltype(&nvshmem_n_pes) n_pes;
  decltype(&nvshmem_malloc) allocate;
  decltype(&nvshmem_free) release;
  decltype(&nvshmem_ptr) pointer;

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(file_, name));
    if (function == nullptr)
      throw std::runtime_error(std::string("pmoe._cuda: NVSHMEM's library has no ") + name);
  }

  void* file_;  // never closed: what the library has started cannot be undone
};

std::unique_ptr<Library> opened;

Library& library() {
  if (!opened) throw std::runtime_error("pmoe._cuda: NVSHMEM is not open: call nvshmem_open first");
  return *opened;
}

void expect_zero(int status, const char* call) {
  if (status != 0)
    throw std::runtime_error(std::string("pmoe._cuda: ") + call + " failed with status " +
                             std::to_string(status) + " (set NVSHMEM_DEBUG=INFO for details)");
}

void open(const std::string& path) {
  if (!opened) opened = std::make_unique<Library>(path.c_str());
}

std::string unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  expect_zero(library().get_uniqueid(&id), "nvshmemx_get_uniqueid");
  return std::string(reinterpret_cast<const char*>(&id), sizeof id);
}

// Starts NVSHMEM in this process, together with all ranks that pass the same id. A process can start NVSHMEM
// only once; later calls start nothing.
//
// Returns the (rank, number of ranks) with which NVSHMEM was started. The caller compares them with its own.
std::pair<int, int> init(int device, const std::string& id, int rank, int ranks) {
  if (id.size() != sizeof(nvshmemx_uniqueid_t))
    throw std::invalid_argument("id (" + std::to_string(id.size()) + " bytes) must have this many bytes: " +
                                std::to_string(sizeof(nvshmemx_uniqueid_t)));
  const OnDevice on_device(device);
  check(cudaFree(nullptr), "starting CUDA");
  Library& nvshmem = library();
  if (nvshmem.status() < NVSHMEM_STATUS_IS_INITIALIZED) {
    nvshmemx_uniqueid_t unique_id;
    std::memcpy(&unique_id, id.data(), sizeof unique_id);
    nvshmemx_init_attr_t attributes;
    std::memset(&attributes, 0, sizeof attributes);
    nvshmemx_init_init_attr_ver_only(attributes);
    expect_zero(nvshmem.set_uniqueid(rank, ranks, &unique_id, &attributes),
                "nvshmemx_set_attr_uniqueid_args");
    expect_zero(nvshmem.init(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes), "nvshmemx_hostlib_init_attr");
  }
  return {nvshmem.my_pe(), nvshmem.n_pes()};
}

// Allocates zeroed memory. It is a collective, as is release(): all ranks of NVSHMEM must call it together.
Address allocate(int device, int64_t bytes) {
  const OnDevice on_device(device);
  void* const base = library().allocate(static_cast<size_t>(bytes));
  if (base == nullptr)
    throw std::runtime_error("pmoe._cuda: nvshmem_malloc(" + std::to_string(bytes) +
                             " bytes) found no memory: raise NVSHMEM_SYMMETRIC_SIZE "
                             "or NVSHMEM_MAX_MEMORY_PER_GPU");
  check(cudaMemset(base, 0, static_cast<size_t>(bytes)), "cudaMemset of a heap");
  check(cudaDeviceSynchronize(), "zeroing a heap");
  return reinterpret_cast<Address>(base);
}

void release(int device, Address base) {
  const OnDevice on_device(device);
  library().release(reinterpret_cast<void*>(base));
}

// Returns the address by which this process accesses another rank's part of an allocation; 0 if loads and
// stores cannot access that part.
//
// base: address of this rank's part of the allocation.
// peer: the other rank.
Address pointer(int device, Address base, int peer) {
  const OnDevice on_device(device);
  return reinterpret_cast<Address>(library().pointer(reinterpret_cast<void*>(base), peer));
}

using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_nvshmem(py::module_& m) {
  using py::arg;
  m.attr("NVSHMEM") = std::to_string(NVSHMEM_VENDOR_MAJOR_VERSION) + "." +
                      std::to_string(NVSHMEM_VENDOR_MINOR_VERSION) + "." +
                      std::to_string(NVSHMEM_VENDOR_PATCH_VERSION);
  m.def("nvshmem_open", &open, arg("path"), "Opens the library libnvshmem_host, once per process.", no_gil());
  m.def(
      "nvshmem_unique_id", [] { return py::bytes(unique_id()); },
      "Returns an id, which one rank makes and gives to all others.");
  m.def(
      "nvshmem_init",
      [](int device, const py::bytes& id, int rank, int ranks) {
        const std::string unique_id = id;
        const py::gil_scoped_release without_gil;
        return init(device, unique_id, rank, ranks);
      },
      arg("device"), arg("id"), arg("rank"), arg("ranks"),
      "Starts NVSHMEM, once per process. Collective. Returns (rank, ranks) as of its first start.");
  m.def("nvshmem_allocate", &allocate, arg("device"), arg("bytes"), "Allocates zeroed memory. Collective.",
        no_gil());
  m.def("nvshmem_free", &release, arg("device"), arg("base"), "Frees memory. Collective.", no_gil());
  m.def("nvshmem_pointer", &pointer, arg("device"), arg("base"), arg("peer"),
        "Returns where this rank sees a peer's part, or 0 if loads and stores cannot reach it.", no_gil());
}

void list_none(std::vector<pmoe::KernelInfo>&) {}

const pmoe::Module module(bind_nvshmem, list_none);

}  // namespace
