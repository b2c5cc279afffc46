// Where a producer and its consumers stand in a ring of stages. Each stage has two barriers: `full` ends a
// phase when its operands have arrived, `empty` when all consumers have let go of it. Both sides walk the
// same sequence of steps; the phase of a stage flips each time round.
#pragma once
#include "common/host_device.h"

namespace pmoe {

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  // Where both sides stand behind so many steps.
  PMOE_HD static Ring behind(uint32_t steps) {
    return {static_cast<int>(steps % kStages), steps / kStages % 2};
  }

  // The producer waits on `empty`: the first time round nothing has to be let go of, so it waits for the
  // phase before the first, which counts as ended.
  PMOE_HD uint32_t empty_parity() const { return phase ^ 1; }
  PMOE_HD uint32_t full_parity() const { return phase; }

  PMOE_HD void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace pmoe
