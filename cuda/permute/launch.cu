#include <stdexcept>
#include <string>

#include "common/on_device.h"
#include "common/prepared.h"
#include "permute/kernel.cuh"
#include "permute/launch.h"

namespace pmoe::permute {
namespace {

Rows rows_at(const RowsAt& rows) { return {static_cast<uint8_t*>(rows.data), rows.stride_bytes}; }

Slots slots_of(const Moving& m) {
  if (m.choices < 1 || m.choices > kMostChoices)
    throw std::invalid_argument("choices (" + std::to_string(m.choices) + ") must be from 1 to " +
                                std::to_string(kMostChoices));
  if (m.num_rows < 0)
    throw std::invalid_argument("num_rows (" + std::to_string(m.num_rows) + ") must be at least 0");
  constexpr int64_t kMost = int64_t{1} << 31;
  if (m.first_row < 0 || m.first_row >= kMost)
    throw std::invalid_argument("first_row (" + std::to_string(m.first_row) +
                                ") must be from 0 to 2**31 - 1");
  const auto num_rows = static_cast<uint32_t>(smaller<int64_t>(m.num_rows, kMost - m.first_row));
  return {m.position, m.weight, static_cast<int32_t>(m.choices), num_rows,
          static_cast<uint32_t>(m.first_row)};
}

template <class Kernel, class... Arguments>
void launch(const Moving& m, const char* name, Kernel kernel, int shared_bytes, const Cut& cut,
            const Arguments&... arguments) {
  const OnDevice on_device(m.device);
  const Grid grid = {static_cast<int>(cut.blocks()), cut.threads, shared_bytes};
  Prepared(name, kernel, grid, m.stream).launch(cut, arguments...);
}

template <class T>
struct Type {
  using type = T;
};

template <class Use>
void with_type(RowType type, const Use& use) {
  switch (type) {
    case RowType::kFp32:
      return use(Type<float>{});
    case RowType::kBf16:
      return use(Type<bf16>{});
    case RowType::kFp16:
      return use(Type<fp16>{});
  }
  throw std::invalid_argument("type (" + std::to_string(static_cast<int>(type)) + ") must be 0, 1 or 2");
}

// How a lane loads sorted rows: kVectors 16-byte vectors of each of kChoices choices of a token before it
// uses any. It is always eight vectors: four of each of two choices, or two of each of four.
template <int kVectorsValue, int kChoicesValue>
struct Shape {
  static constexpr int kVectors = kVectorsValue, kChoices = kChoicesValue;
};
using Wide = Shape<4, 2>;
using Deep = Shape<2, 4>;

template <class Use>
void with_shape(int64_t choices, const Use& use) {
  if (choices <= Wide::kChoices)
    use(Wide{});
  else
    use(Deep{});
}

template <class Kernel>
const void* address(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

template <Of kOf>
void backward(const Moving& m, const char* name, const RowsAt& a, const RowsAt& b, const RowsAt& out,
              float* d_weight) {
  const Slots slots = slots_of(m);
  with_type(m.type, [&](auto type) {
    with_shape(m.choices, [&](auto shape) {
      using T = typename decltype(type)::type;
      const Cut cut = make_cut(m.tokens, m.row_bytes, shape.kVectors, kThreads, true, m.parts);
      launch(m, name, backward_kernel<T, shape.kVectors, shape.kChoices, kOf>, dots_bytes(cut, slots.choices),
             cut, slots, rows_at(a), rows_at(b), rows_at(out), d_weight);
    });
  });
}

}  // namespace

void permute(const Moving& m, RowsAt x, RowsAt rows) {
  const Slots slots = slots_of(m);
  const Cut cut = make_cut(m.tokens, m.row_bytes, kPermuteVectors, kThreads, false, m.parts);
  // Without weights the kernel only copies bytes, so the element type does not matter.
  if (m.weight == nullptr)
    return launch(m, "permute", permute_kernel<float, false>, 0, cut, slots, rows_at(x), rows_at(rows));
  with_type(m.type, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(m, "permute", permute_kernel<T, true>, 0, cut, slots, rows_at(x), rows_at(rows));
  });
}

void permute_several(const std::vector<Copying>& all) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("permute_several: " + what);
  };
  if (all.empty() || all.size() > kMostCopies)
    refuse("copies (" + std::to_string(all.size()) + ") must be 1 to " + std::to_string(kMostCopies));
  const Moving& first = all[0].moving;
  Copies copies{};
  int64_t blocks = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const Moving& m = all[i].moving;
    if (m.weight != nullptr || m.row_bytes != first.row_bytes || m.parts != first.parts)
      refuse("copy " + std::to_string(i) + " must have no weights, and rows of " +
             std::to_string(first.row_bytes) + " bytes in " + std::to_string(first.parts) + " parts");
    const Cut cut = make_cut(m.tokens, m.row_bytes, kPermuteVectors, kThreads, false, m.parts);
    if (i == 0) copies.cut = cut;
    copies.tokens[i] = m.tokens;
    copies.first_block[i] = static_cast<uint32_t>(blocks);
    copies.slots[i] = slots_of(m);
    copies.a[i] = rows_at(all[i].x), copies.b[i] = rows_at(all[i].rows);
    blocks += cut.blocks();
    if (blocks > kMostBlocks) refuse("the copies need more than 2**31 - 1 blocks");
  }
  for (size_t i = all.size(); i < kMostCopies; ++i) copies.first_block[i] = UINT32_MAX;
  const OnDevice on_device(first.device);
  const Grid grid = {static_cast<int>(blocks), copies.cut.threads, 0};
  Prepared("permute_several", permute_several_kernel, grid, first.stream).launch(copies);
}

void unpermute(const Moving& m, RowsAt rows, RowsAt y) {
  const Slots slots = slots_of(m);
  with_type(m.type, [&](auto type) {
    with_shape(m.choices, [&](auto shape) {
      using T = typename decltype(type)::type;
      const Cut cut = make_cut(m.tokens, m.row_bytes, shape.kVectors, kThreads, false, m.parts);
      const auto start = [&](auto kernel) {
        launch(m, "unpermute", kernel, 0, cut, slots, rows_at(rows), rows_at(y));
      };
      if (m.weight == nullptr)
        start(unpermute_kernel<T, shape.kVectors, shape.kChoices, false>);
      else
        start(unpermute_kernel<T, shape.kVectors, shape.kChoices, true>);
    });
  });
}

void permute_backward(const Moving& m, RowsAt x, RowsAt d_rows, RowsAt d_x, float* d_weight) {
  backward<Of::kPermute>(m, "permute_backward", x, d_rows, d_x, d_weight);
}

void unpermute_backward(const Moving& m, RowsAt d_y, RowsAt rows, RowsAt d_rows, float* d_weight) {
  backward<Of::kUnpermute>(m, "unpermute_backward", d_y, rows, d_rows, d_weight);
}

void list_kernels(std::vector<KernelInfo>& found) {
  const auto add = [&](const char* name, const void* kernel, int shared_bytes = 0) {
    found.push_back({name, kernel, kThreads, shared_bytes});
  };
  constexpr int kDots = kThreads / kFewestLanes * kMostChoices * static_cast<int>(sizeof(float));
  add("permute", address(permute_kernel<float, false>));
  add("permute_several", address(permute_several_kernel));
  add("permute.weighted.fp32", address(permute_kernel<float, true>));
  add("permute.weighted.bf16", address(permute_kernel<bf16, true>));
  add("permute.weighted.fp16", address(permute_kernel<fp16, true>));
#define PMOE_LIST(TYPE, NAME)                                                                            \
  add("unpermute." NAME ".top_2", address(unpermute_kernel<TYPE, 4, 2, false>));                         \
  add("unpermute." NAME, address(unpermute_kernel<TYPE, 2, 4, false>));                                  \
  add("unpermute.weighted." NAME ".top_2", address(unpermute_kernel<TYPE, 4, 2, true>));                 \
  add("unpermute.weighted." NAME, address(unpermute_kernel<TYPE, 2, 4, true>));                          \
  add("permute_backward." NAME ".top_2", address(backward_kernel<TYPE, 4, 2, Of::kPermute>), kDots);     \
  add("permute_backward." NAME, address(backward_kernel<TYPE, 2, 4, Of::kPermute>), kDots);              \
  add("unpermute_backward." NAME ".top_2", address(backward_kernel<TYPE, 4, 2, Of::kUnpermute>), kDots); \
  add("unpermute_backward." NAME, address(backward_kernel<TYPE, 2, 4, Of::kUnpermute>), kDots)
  PMOE_LIST(float, "fp32");
  PMOE_LIST(bf16, "bf16");
  PMOE_LIST(fp16, "fp16");
#undef PMOE_LIST
}

}  // namespace pmoe::permute
