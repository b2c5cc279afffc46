// Which of NVSHMEM's functions a put calls, in which order and with which arguments: beside declarations in
// place of NVSHMEM (tests/cuda/nvshmem), which write down their calls.
#define PMOE_NVSHMEM_PUTS
#define PMOE_THREADS

#include <cstdio>
#include <string>

#include "nvshmem/nvshmem.h"
#include "nvshmem_interface.cu"  // the declarations have the types of NVSHMEM's own, also on the CPU
#include "peers/puts.cuh"

using namespace pmoe::peers;  // not an alias `puts`: C has a function of this name

int main() {
  static_assert(pmoe::peers::kHasPuts);
  alignas(8) static unsigned char heap[128];
  nvshmem_base = heap;
  puts::put(3, heap + 16, heap + 80, 12);
  puts::put_with_flag(3, heap + 32, heap + 96, 8, heap + 40, 7u);
  puts::put_flag(1, heap + 48, 8u);
  puts::quiet(heap);
  puts::see(heap + 56, 9u);
  const std::string wanted =
      "threadfence_system\nput to 16 from 80 bytes 12 pe 3\nfence\n"
      "threadfence_system\nput to 32 from 96 bytes 8 pe 3\nsignal 40 value 7 op 9 pe 3\n"
      "signal alone 48 value 8 op 9 pe 1\n"
      "quiet\n"
      "wait 56 cmp 5 value 9\n";
  if (nvshmem_calls != wanted) std::printf("FAILED:\n%s", nvshmem_calls.c_str());
  std::printf("%d failures\n", nvshmem_calls != wanted);
  return nvshmem_calls != wanted;
}
