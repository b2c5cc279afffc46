// kHasPuts: whether the kernels of this build can send to peers whose memory they cannot map (puts.cuh).
#pragma once

namespace pmoe::peers {

#if defined(PMOE_NVSHMEM_PUTS) || defined(PMOE_LATE_PUTS)
constexpr bool kHasPuts = true;
#else
constexpr bool kHasPuts = false;
#endif

}  // namespace pmoe::peers
