#include "comet/ampere.cuh"
#include "comet/hopper.cuh"
#include "comet/launch.h"
#include "common/prepared.h"

namespace pmoe::comet {

const Path hopper_path = {"sm_90a",
                          [](const Which& which) {
                            return which.element == Element::kBf16 ? hopper_bf16(which) : hopper_fp16(which);
                          },
                          hopper::kThreads,
                          sizeof(HopperShared),
                          hopper::kRows,
                          hopper::kColumns,
                          kBoardWords};

const Path ampere_path = {"sm_80",
                          [](const Which& which) {
                            return which.element == Element::kBf16 ? ampere_bf16(which) : ampere_fp16(which);
                          },
                          ampere::kThreads,
                          sizeof(AmpereShared),
                          ampere::kRows,
                          ampere::kColumns,
                          kSmallBoardWords};

std::string name_of(const Which& which, const Path& path) {
  std::string name = which.kernel == Kernel::kDispatch ? "comet.dispatch_gemm." : "comet.gemm_combine.";
  name += path.name;
  name += which.element == Element::kBf16 ? ".bf16" : ".fp16";
  name += which.form == Form::kForward ? ".forward" : ".input";
  if (which.epilogue == Epilogue::kHidden) name += ".hidden";
  if (which.epilogue == Epilogue::kHiddenGradient) name += ".hidden_gradient";
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  return name + names[static_cast<int>(which.activation)];
}

bool may_pair_blocks(const Path& path, const Which& which, const Launch& launch, int ranks) {
  bool may_pair = &path == &hopper_path && launch.blocks % 2 == 0;
  for (int i = 0; i < ranks; ++i) {
    const Fused& f = launch.fused[i];
    const int columns = which.kernel == Kernel::kCombine ? f.rank.chunks.chunk_columns : f.problem.n;
    may_pair = may_pair && f.rank.communicating % 2 == 0 &&
               pmoe::may_pair_tiles(ceil_div(columns, path.tile_columns));
  }
  return may_pair;
}

void launch(const Path& path, const Which& which, Launch& launch, int ranks, const int64_t* a_rows,
            void* stream) {
  const int blocks_across = launch.fused[0].problem.blocks_across;
  const Grid grid = {ranks * launch.blocks, path.threads, path.shared_bytes,
                     blocks_across > 1 ? blocks_across : 0, true};
  const Prepared prepared(name_of(which, path), path.kernel(which), grid, stream);
  for (int i = 0; i < ranks && &path == &hopper_path; ++i) {
    Fused& f = launch.fused[i];
    if (f.rank.computes) encode_maps(which.element, which.form, f.problem, a_rows[i], 0, &f.a_map, &f.b_map);
  }
  prepared.launch(launch);
}

}  // namespace pmoe::comet
