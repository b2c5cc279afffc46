// A position in a ring of stages in shared memory. The producer, which loads operands, and each consumer of
// operands have a position of their own. Each stage has two barriers:
//
//   barrier   a phase ends when                         who waits for it
//   full      the operands of the stage have arrived    consumers
//   empty     every consumer has released the stage     the producer
//
// Producer and consumers go through the same sequence of steps, and a stage's phase changes once for each
// time around the ring.
#pragma once
#include "common/host_device.h"

namespace pmoe {

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  // Returns the position after `steps` steps from the start.
  PMOE_HD static Ring after(uint32_t steps) {
    return {static_cast<int>(steps % kStages), steps / kStages % 2};
  }

  // The parities of the phases whose end the producer (empty_parity) and a consumer (full_parity) await. The
  // first time around the ring all stages are empty. So the producer then awaits the end of the phase before
  // the first one, which counts as ended.
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
