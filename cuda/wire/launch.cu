#include <stdexcept>
#include <string>

#include "common/on_device.h"
#include "common/prepared.h"
#include "wire/kernel.cuh"
#include "wire/launch.h"

namespace pmoe::wire {
namespace {

constexpr int64_t kMostChoices = 1 << 16;
constexpr int64_t kMostMessages = int64_t{1} << 31;  // positions are int32

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("pmoe._cuda: wire: " + what);
}

Rows rows_at(const RowsAt& rows) { return {static_cast<uint8_t*>(rows.data), rows.stride_bytes}; }

template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), const Wire& wire, const Arguments& arguments) {
  const OnDevice on_device(wire.device);
  Prepared(name, kernel, Grid{arguments.cut.blocks(), kThreads}, wire.stream).launch(arguments);
}

// A type of rows, and a format of messages.
template <class TypeValue, Format kFormatValue>
struct Kind {
  using Type = TypeValue;
  static constexpr Format kFormat = kFormatValue;
};

// Calls use(Kind<...>{}) for the kind of a wire.
template <class Use>
void with_kind(const Wire& wire, const Use& use) {
  if (wire.format == Format::kBf16 && wire.type == RowType::kFp32) return use(Kind<float, Format::kBf16>{});
  if (wire.format != Format::kE4m3)
    refuse("format (" + std::to_string(static_cast<int>(wire.format)) +
           ") must be 0 (e4m3), or 1 (bf16) for float32 rows");
  switch (wire.type) {
    case RowType::kFp32:
      return use(Kind<float, Format::kE4m3>{});
    case RowType::kBf16:
      return use(Kind<bf16, Format::kE4m3>{});
    case RowType::kFp16:
      return use(Kind<fp16, Format::kE4m3>{});
  }
  refuse("type (" + std::to_string(static_cast<int>(wire.type)) + ") must be 0, 1 or 2");
}

}  // namespace

void pack(const Wire& wire, int64_t tokens, int64_t choices, int64_t num_messages, const int32_t* position,
          RowsAt x, RowsAt messages) {
  if (choices < 1 || choices > kMostChoices || (position == nullptr && choices != 1))
    refuse("choices (" + std::to_string(choices) + ") must be from 1 to " + std::to_string(kMostChoices) +
           ", and 1 without positions");
  if (num_messages < 0) refuse("num_messages (" + std::to_string(num_messages) + ") must be at least 0");
  const Pack arguments{make_cut(tokens, wire.columns),
                       rows_at(x),
                       rows_at(messages),
                       position,
                       static_cast<int32_t>(choices),
                       static_cast<uint32_t>(smaller(num_messages, kMostMessages))};
  with_kind(wire, [&](auto kind) {
    launch("wire_pack", pack_kernel<typename decltype(kind)::Type, kind.kFormat>, wire, arguments);
  });
}

void unpack(const Wire& wire, int64_t rows, int64_t num_messages, const void* index, bool wide,
            RowsAt messages, RowsAt out) {
  const Unpack arguments{
      make_cut(rows, wire.columns), rows_at(messages), rows_at(out), index, wide, num_messages};
  with_kind(wire, [&](auto kind) {
    launch("wire_unpack", unpack_kernel<typename decltype(kind)::Type, kind.kFormat>, wire, arguments);
  });
}

void list_kernels(std::vector<KernelInfo>& found) {
#define PMOE_LIST(TYPE, FORMAT, NAME)                                                              \
  found.push_back(                                                                                 \
      {"wire_pack." NAME, reinterpret_cast<const void*>(pack_kernel<TYPE, FORMAT>), kThreads, 0}); \
  found.push_back(                                                                                 \
      {"wire_unpack." NAME, reinterpret_cast<const void*>(unpack_kernel<TYPE, FORMAT>), kThreads, 0})
  PMOE_LIST(float, Format::kE4m3, "fp32");
  PMOE_LIST(bf16, Format::kE4m3, "bf16");
  PMOE_LIST(fp16, Format::kE4m3, "fp16");
  PMOE_LIST(float, Format::kBf16, "fp32.as_bf16");
#undef PMOE_LIST
}

}  // namespace pmoe::wire
