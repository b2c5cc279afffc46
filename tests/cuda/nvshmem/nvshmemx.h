// NVSHMEM's extensions: nvshmem.h beside this file declares the one that is needed.
#pragma once
