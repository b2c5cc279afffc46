// See cuda.h.
#pragma once
#include <cuda.h>

typedef CUresult (*PFN_cuGetErrorName_v6000)(CUresult, const char**);
typedef CUresult (*PFN_cuDevicePrimaryCtxGetState_v7000)(CUdevice_v1, unsigned*, int*);
typedef CUresult (*PFN_cuModuleGetLoadingMode_v11070)(CUmoduleLoadingMode*);
typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                                      const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                                      const cuuint32_t*, CUtensorMapInterleave,
                                                      CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                      CUtensorMapFloatOOBfill);
