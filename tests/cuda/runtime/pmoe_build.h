// In place of what setup.py writes.
#pragma once
#define PMOE_ARCHS "emulator"
#define PMOE_NVCC "none"
