#include <cstdio>

#include "common/driver.h"
#include "common/prepared.h"
#include "grouped_gemm/ampere.cuh"
#include "grouped_gemm/hopper.cuh"
#include "grouped_gemm/hopper_boxes.cuh"
#include "grouped_gemm/hopper_turns.cuh"
#include "grouped_gemm/instances.cuh"
#include "grouped_gemm/launch.h"

namespace pmoe {

namespace {

// A tensor of 16-bit elements in memory, as a tensor map describes it. `size` begins with the innermost
// dimension. A box of the map has `lines` lines of 64 columns.
struct Layout {
  const void* base;
  int rank;
  uint64_t size[3];
  uint64_t stride;  // elements between lines; matrices of a 3D tensor follow each other without gaps
  uint32_t lines;   // lines of a box
};

// Returns a text that names the encoder of tensor maps and its arguments, for error messages.
std::string describe_map(Element element, const Layout& layout, const cuuint64_t* sizes,
                         const cuuint64_t* strides) {
  std::string text = "cuTensorMapEncodeTiled(";
  text += element == Element::kBf16 ? "bf16" : "fp16";
  char address[24];
  std::snprintf(address, sizeof address, "%p", layout.base);
  text += std::string(", base ") + address + ", sizes";
  for (int i = 0; i < layout.rank; ++i) text += " " + std::to_string(sizes[i]);
  text += ", strides";
  for (int i = 0; i + 1 < layout.rank; ++i) text += " " + std::to_string(strides[i]);
  return text + " bytes, box " + std::to_string(kBoxColumns) + " " + std::to_string(layout.lines) + ")";
}

void encode(TensorMap* map, Element element, const Layout& layout) {
  static const auto encoder =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  const cuuint64_t sizes[3] = {layout.size[0], larger<uint64_t>(layout.size[1], 1), layout.size[2]};
  const cuuint64_t strides[2] = {layout.stride * 2, layout.stride * 2 * sizes[1]};
  const cuuint32_t box[3] = {kBoxColumns, layout.lines, 1}, steps[3] = {1, 1, 1};
  const auto type =
      element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  check_driver(encoder(map, type, static_cast<cuuint32_t>(layout.rank), const_cast<void*>(layout.base), sizes,
                       strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               [&] { return describe_map(element, layout, sizes, strides); });
}

Layout rows_of(const void* base, int columns, int64_t rows, int64_t stride, uint32_t lines) {
  return {base,
          2,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), 1},
          static_cast<uint64_t>(stride),
          lines};
}

Layout matrices(const void* base, int columns, int lines_each, int count, uint32_t lines) {
  return {base,
          3,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(lines_each), static_cast<uint64_t>(count)},
          static_cast<uint64_t>(columns),
          lines};
}

// Makes the maps of the results that a kernel stores as boxes.
StoreMaps encode_results(const GroupedGemm& which, const Problem& p) {
  StoreMaps maps = {};
  if (which.epilogue == Epilogue::kHiddenGradient) return maps;  // it is stored through registers
  const auto encode_one = [&](TensorMap& map, const void* base, int columns, int64_t rows, int64_t stride) {
    encode(&map, which.element, rows_of(base, columns, rows, stride, kBoxRows));
  };
  const bool halves = are_halves(which.epilogue, which.activation);
  const int columns = halves ? p.n / 2 : p.n;
  if (which.epilogue == Epilogue::kHidden)
    encode_one(maps.active, p.active, columns, p.rows, p.active_stride);
  if (which.form == Form::kWeight) {
    // A gradient in float is stored by the threads themselves.
    if (!p.wide) encode_one(maps.d, p.d, p.n, int64_t{p.experts} * p.m, p.n);
  } else if (p.d != nullptr && p.place == nullptr) {
    encode_one(maps.d, p.d, columns, p.rows, p.d_stride);
    // The two halves have a map each. If they had one map, a box at the end of the first half would reach
    // into the second half.
    if (halves) encode_one(maps.up, static_cast<const uint16_t*>(p.d) + columns, columns, p.rows, p.d_stride);
  }
  return maps;
}

HopperKernel hopper_kernel(const GroupedGemm& which) {
  return which.element == Element::kBf16 ? hopper_bf16(which) : hopper_fp16(which);
}

KernelWithStoreMaps kernel_with_store_maps(const GroupedGemm& which) {
  if (which.in_turns)
    return which.element == Element::kBf16 ? hopper_turns_bf16(which) : hopper_turns_fp16(which);
  return which.element == Element::kBf16 ? hopper_boxes_bf16(which) : hopper_boxes_fp16(which);
}

bool takes_store_maps(const GroupedGemm& which) { return which.in_turns || which.boxed; }

int hopper_shared_bytes(const GroupedGemm& which) {
  if (which.in_turns) return hopper::turns::kSharedBytes;
  return which.boxed ? hopper::kBoxedSharedBytes : hopper::kSharedBytes;
}

AmpereKernel ampere_kernel(const GroupedGemm& which) {
  return which.element == Element::kBf16 ? ampere_bf16(which) : ampere_fp16(which);
}

void launch_hopper(const GroupedGemm& which, const Problem& p, int64_t a_rows, int64_t b_rows, int blocks,
                   void* stream) {
  const int cluster = which.cluster * p.blocks_across;
  const Grid grid = {blocks / cluster * cluster, hopper::kThreads, hopper_shared_bytes(which), cluster};
  TensorMap a_map = {};
  TensorMap b_map = {};
  const bool halves = are_halves(which.epilogue, which.activation);
  const int b_lines =
      hopper::forward_lines(halves, which.in_turns ? hopper::turns::kColumns : hopper::kColumns);
  const auto encode_operands = [&] {
    encode_maps(which.element, which.form, p, a_rows, b_rows, &a_map, which.b_gathered ? nullptr : &b_map,
                b_lines);
  };
  const std::string name = name_of(which, hopper_path);
  if (takes_store_maps(which)) {
    const Prepared prepared(name, kernel_with_store_maps(which), grid, stream);
    encode_operands();
    prepared.launch(a_map, b_map, encode_results(which, p), p);
  } else {
    const Prepared prepared(name, hopper_kernel(which), grid, stream);
    encode_operands();
    prepared.launch(a_map, b_map, p);
  }
}

void launch_ampere(const GroupedGemm& which, const Problem& p, int64_t, int64_t, int blocks, void* stream) {
  const Grid grid = {blocks, ampere::kThreads, ampere::kSharedBytes};
  Prepared(name_of(which, ampere_path), ampere_kernel(which), grid, stream).launch(p);
}

}  // namespace

std::string name_of(const GroupedGemm& which, const GroupedGemmPath& path) {
  std::string name = std::string("grouped_gemm.") + path.name;
  name += which.element == Element::kBf16 ? ".bf16" : ".fp16";
  name += which.form == Form::kForward ? ".forward" : which.form == Form::kInput ? ".input" : ".weight";
  if (which.epilogue == Epilogue::kHidden) name += ".hidden";
  if (which.epilogue == Epilogue::kHiddenGradient) name += ".hidden_gradient";
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  name += names[static_cast<int>(which.activation)];
  if (which.in_turns) name += ".turns";
  if (which.boxed) name += ".boxes";
  if (which.b_gathered) name += ".gathered";
  return which.cluster == 2 ? name + ".pairs" : name;
}

void encode_maps(Element element, Form form, const Problem& p, int64_t a_rows, int64_t b_rows,
                 TensorMap* a_map, TensorMap* b_map, int b_lines) {
  const bool by_weight = form == Form::kWeight;
  // An operand without rows is never loaded, but its map must still point to valid memory.
  const void* a = a_rows ? p.a : p.d;
  const void* b = by_weight && !b_rows ? p.d : p.b;
  const Layout of_a = by_weight ? rows_of(a, p.m, a_rows, p.a_stride, hopper::kDepth)
                                : rows_of(a, p.k, a_rows, p.a_stride, hopper::kRows / p.blocks_across);
  const Layout of_b = by_weight ? rows_of(b, p.n, b_rows, p.b_stride, hopper::kDepth)
                      : form == Form::kForward
                          ? matrices(b, p.k, p.n, p.experts, static_cast<uint32_t>(b_lines))
                          : matrices(b, p.n, p.k, p.experts, hopper::kDepth);
  // Gathered rows are not loaded by a tensor map. Their strides may even be such that no map can describe
  // them.
  if (!p.a_gathered) encode(a_map, element, of_a);
  if (b_map != nullptr) encode(b_map, element, of_b);
}

const GroupedGemmPath hopper_path = {"sm_90a",
                                     [](const GroupedGemm& which) {
                                       if (takes_store_maps(which))
                                         return reinterpret_cast<const void*>(kernel_with_store_maps(which));
                                       return reinterpret_cast<const void*>(hopper_kernel(which));
                                     },
                                     launch_hopper, hopper::kThreads, hopper_shared_bytes};

const GroupedGemmPath ampere_path = {
    "sm_80", [](const GroupedGemm& which) { return reinterpret_cast<const void*>(ampere_kernel(which)); },
    launch_ampere, ampere::kThreads, [](const GroupedGemm&) -> int { return ampere::kSharedBytes; }};

}  // namespace pmoe
