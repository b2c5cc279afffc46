// Boxes, descriptors, accumulators and fragments against NVIDIA's own statement of them: CuTe, on the host.
// What the kernels and the emulator believe alike is shown to be so by somebody who knows.
#include <cstdio>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

// CUDA's own headers say these for a compiler that is no nvcc; the emulator has its own.
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __grid_constant__
#include "common/device.cuh"
#include "grouped_gemm/ampere.cuh"
#include "grouped_gemm/hopper.cuh"

namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;
namespace gmma = SM90::GMMA;

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

std::string at(const char* what, int line, int column) {
  return std::string(what) + " (" + std::to_string(line) + ", " + std::to_string(column) + ")";
}

constexpr int kDepth = pmoe::hopper::kDepth;
alignas(1024) Element place[256 * kDepth];

template <class Tensor>
int offset_of(const Tensor& tensor, int line, int k) {
  return static_cast<int>(reinterpret_cast<const char*>(&tensor(line, k)) -
                          reinterpret_cast<const char*>(place));
}

// An operand of kLines lines and 64 of the reduction. kTransposed: the reduction is in rows, further lines in
// further boxes.
template <int kLines, bool kTransposed>
auto operand() {
  if constexpr (kTransposed) {
    return make_tensor(make_smem_ptr(place), tile_to_shape(gmma::Layout_MN_SW128_Atom<Element>{},
                                                           Shape<Int<kLines>, _64>{}, Step<_2, _1>{}));
  } else {
    return make_tensor(make_smem_ptr(place),
                       tile_to_shape(gmma::Layout_K_SW128_Atom<Element>{}, Shape<Int<kLines>, _64>{}));
  }
}

template <int kLines, bool kTransposed>
void test_boxes(const char* what) {
  const auto tensor = operand<kLines, kTransposed>();
  for (int line = 0; line < kLines; ++line)
    for (int k = 0; k < kDepth; ++k) {
      const int ours = kTransposed ? line / 64 * pmoe::box_bytes(kDepth) +
                                         pmoe::chunk_offset(k, line % 64 / 8) + line % 8 * 2
                                   : pmoe::chunk_offset(line, k / 8) + k % 8 * 2;
      expect(offset_of(tensor, line, k) == ours, at(what, line, k));
    }
}

// In the emulator's one warp: descriptors of the kernels, and where the emulated products look by them.
template <int kLines, bool kTransposed>
void test_descriptor(const char* what) {
  auto tensor = operand<kLines, kTransposed>();
  const auto first = local_tile(tensor, Shape<Int<kLines>, _16>{}, make_coord(0, 0));
  constexpr auto kMajor = kTransposed ? gmma::Major::MN : gmma::Major::K;
  const GmmaDescriptor theirs = gmma::make_gmma_desc<kMajor>(first);
  emu::Block& block = *emu::self().block;
  uint8_t* const box = pmoe::shared_memory();
  for (int i = 0; i < kLines * kDepth; ++i) {
    // Values say where they lie, in words of 16 bits.
    const auto value = static_cast<uint16_t>(i);
    std::memcpy(box + 2 * i, &value, 2);
  }
  const uint64_t own = pmoe::hopper::descriptor(box, kTransposed);
  if (pmoe::thread_again() != 0) return;  // it takes a warp, one of which looks
  GmmaDescriptor ours;
  ours.desc_ = own;
  const auto same = [&](auto field, const char* name) {
    expect(field(ours) == field(theirs), std::string(what) + ": the descriptor's " + name);
  };
  same([](const auto& d) { return d.bitfield.stride_byte_offset_; }, "stride");
  // From box to box: transposed A has one alone.
  if (kLines > 64 || !kTransposed)
    same([](const auto& d) { return d.bitfield.leading_byte_offset_; }, "leading offset");
  same([](const auto& d) { return d.bitfield.base_offset_; }, "base offset");
  same([](const auto& d) { return d.bitfield.layout_type_; }, "layout");
  for (int step = 0; step < kDepth / 16; ++step) {
    // As multiply() goes forward by 16 of the reduction.
    const uint64_t forward = (kTransposed ? 16 * pmoe::kLineBytes : 32) / 16 * static_cast<uint64_t>(step);
    for (int line = 0; line < kLines; ++line)
      for (int k = 0; k < 16; ++k) {
        const int found = pmoe::operand_element(block, own + forward, kTransposed, line, k);
        expect(2 * found == offset_of(tensor, line, 16 * step + k),
               at(what, line, 16 * step + k) + " by descriptor");
      }
  }
}

void test_accumulators() {
  const auto layout = MMA_Traits<SM90_64x256x16_F32BF16BF16_SS<gmma::Major::K, gmma::Major::K>>::CLayout{};
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < 128; ++i) {
      const int place = static_cast<int>(layout(thread, i));
      expect(
          place % 64 == pmoe::accumulator_row(thread, i) && place / 64 == pmoe::accumulator_column(thread, i),
          at("accumulator", thread, i));
    }
}

uint16_t half_of(uint32_t word, int h) { return static_cast<uint16_t>(word >> 16 * h); }

// A box of the reduction's 64, whose elements are numbered: 64 line + k.
template <bool kTransposed>
uint8_t* numbered_box(int lines) {
  uint8_t* const box = pmoe::shared_memory();
  for (int line = 0; line < lines; ++line)
    for (int k = 0; k < kDepth; ++k) {
      const auto value = static_cast<uint16_t>(64 * line + k);
      const int offset = kTransposed ? line / 64 * pmoe::box_bytes(kDepth) +
                                           pmoe::chunk_offset(k, line % 64 / 8) + line % 8 * 2
                                     : pmoe::chunk_offset(line, k / 8) + k % 8 * 2;
      if (emu::self().linear == 0) std::memcpy(box + offset, &value, 2);
    }
  pmoe::sync_warp();
  return box;
}

// What the kernels' loads leave in the registers of mma.m16n8k16, against what the instruction takes.
template <bool kTransposed>
void test_fragments() {
  using Traits = MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>;
  const int lane = emu::self().linear;
  const uint8_t* const box = numbered_box<kTransposed>(128);
  for (int row = 0; row < 128; row += 16)
    for (int i = 0; i < kDepth / 16; ++i) {
      uint32_t a[4], b[4];
      pmoe::ampere::load_fragment_a<kTransposed>(a, box, row, i, lane);
      pmoe::ampere::load_fragment_b<kTransposed>(b, box, row, i, lane);
      for (int v = 0; v < 8; ++v) {
        const int of_a = static_cast<int>(Traits::ALayout{}(lane, v));
        expect(half_of(a[v / 2], v % 2) == 64 * (row + of_a % 16) + 16 * i + of_a / 16,
               at("fragment of A", lane, v));
        const int of_b = static_cast<int>(Traits::BLayout{}(lane, v % 4));
        expect(half_of(b[v / 2], v % 2) == 64 * (row + v / 4 * 8 + of_b % 8) + 16 * i + of_b / 8,
               at("fragment of B", lane, v));
      }
    }
}

// The result of mma.m16n8k16: A's row numbers times ones.
void test_results() {
  using Traits = MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>;
  const int lane = emu::self().linear;
  uint32_t a[4] = {}, b[2] = {};
  for (int v = 0; v < 8; ++v) {
    const int place = static_cast<int>(Traits::ALayout{}(lane, v)), row = place % 16, k = place / 16;
    const uint32_t value = pmoe::narrow<pmoe::bf16>(k == 0   ? static_cast<float>(row)
                                                    : k == 1 ? 16.0f
                                                             : 0.0f)
                               .bits;
    a[v / 2] |= value << 16 * (v % 2);
  }
  for (int v = 0; v < 4; ++v) {
    const int place = static_cast<int>(Traits::BLayout{}(lane, v)), column = place % 8, k = place / 8;
    const uint32_t value = pmoe::narrow<pmoe::bf16>(k == 0   ? 1.0f
                                                    : k == 1 ? static_cast<float>(column)
                                                             : 0.0f)
                               .bits;
    b[v / 2] |= value << 16 * (v % 2);
  }
  float d[4] = {};
  pmoe::mma_m16n8k16<pmoe::bf16>(d, a, b[0], b[1]);
  for (int v = 0; v < 4; ++v) {
    const int place = static_cast<int>(Traits::CLayout{}(lane, v));
    expect(d[v] == static_cast<float>(place % 16 + 16 * (place / 16)), at("result", lane, v));
  }
}

// ldmatrix and stmatrix of four matrices: which lane's address is which line, which lane has which word.
void test_matrices() {
  using Load = Copy_Traits<SM75_U32x4_LDSM_N>;
  using StoreTraits = Copy_Traits<SM90_U32x4_STSM_N>;
  const int lane = emu::self().linear;
  uint8_t* const lines = pmoe::shared_memory();  // 32 of 16 bytes, numbered by 16 bits
  for (int i = 0; i < 8; ++i) {
    const auto value = static_cast<uint16_t>(8 * lane + i);
    std::memcpy(lines + 16 * lane + 2 * i, &value, 2);
  }
  pmoe::sync_warp();
  uint32_t r[4];
  pmoe::ldmatrix_x4(r, lines + 16 * lane);
  for (int v = 0; v < 8; ++v)
    for (int from = 0, bits = static_cast<int>(Load::DstLayout{}(lane, 16 * v)); from < 32; ++from)
      for (int i = 0; i < 8; ++i)
        if (static_cast<int>(Load::SrcLayout{}(from, 16 * i)) == bits)
          expect(half_of(r[v / 2], v % 2) == 8 * from + i, at("ldmatrix", lane, v));
  for (int v = 0; v < 4; ++v)
    r[v] = static_cast<uint32_t>(8 * lane + 2 * v) | static_cast<uint32_t>(8 * lane + 2 * v + 1) << 16;
  pmoe::stmatrix_x4(lines + 16 * lane, r);
  pmoe::sync_warp();
  for (int i = 0; i < 8; ++i) {
    uint16_t found;
    std::memcpy(&found, lines + 16 * lane + 2 * i, 2);
    const int bits = static_cast<int>(StoreTraits::DstLayout{}(lane, 16 * i));
    expect(static_cast<int>(StoreTraits::SrcLayout{}(found / 8, 16 * (found % 8))) == bits,
           at("stmatrix", lane, i));
  }
}

}  // namespace

int main() {
  test_boxes<64, false>("box of A, half a tile");
  test_boxes<128, false>("box of A");
  test_boxes<256, false>("boxes of B");
  test_boxes<64, true>("transposed box");
  test_boxes<256, true>("transposed boxes of B");
  test_accumulators();
  try {
    emu::launch(1, 32, 1, [] {
      test_descriptor<64, false>("A");
      test_descriptor<256, false>("B");
      test_descriptor<64, true>("transposed A");
      test_descriptor<256, true>("transposed B");
    });
    emu::launch(1, 32, 1, [] {
      test_fragments<false>();
      pmoe::sync_warp();
      test_fragments<true>();
      test_results();
      pmoe::sync_warp();
      test_matrices();
    });
  } catch (const emu::Error& error) {
    expect(false, error.what());
  }
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
