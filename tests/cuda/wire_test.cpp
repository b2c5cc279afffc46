// The kernels of wires on the CPU (emulator.h), every thread of them, against plain loops; and every number
// of e4m3, against its definition.
//
// g++ -std=c++17 -O1 -Icuda -Itests/cuda tests/cuda/wire_test.cpp && ./a.out
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "wire/kernel.cuh"

using namespace pmoe;
using namespace pmoe::wire;

namespace {

int failures = 0;

void check(bool holds, const std::string& what) {
  if (!holds && ++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

// ---- numbers of e4m3

// The value of a number, from its three fields.
double value_of(int number) {
  const int exponent = number >> 3 & 15, mantissa = number & 7;
  if ((number & 0x7F) == 0x7F) return NAN;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 7 - 3) : std::ldexp(mantissa, 1 - 7 - 3);
  return number & 0x80 ? -size : size;
}

// The nearest number; of two as near, the even one.
int nearest(float value) {
  if (std::isnan(value)) return 0x7F;
  int best = 0;
  for (int number = 0; number < 0x7F; ++number) {
    const double far = std::abs(value_of(number) - std::abs(double{value}));
    const double least = std::abs(value_of(best) - std::abs(double{value}));
    if (far < least || (far == least && number % 2 == 0)) best = number;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

void test_every_number_is_its_value() {
  for (int number = 0; number < 256; ++number) {
    const double expected = value_of(number);
    const float found = of_e4m3(number);
    check(std::isnan(expected) ? std::isnan(found) : found == expected && std::signbit(found) == number >> 7,
          "the value of number " + std::to_string(number));
    if (!std::isnan(expected))
      check(static_cast<int>(to_e4m3(found)) == number, "number " + std::to_string(number) + " again");
  }
}

void test_floats_become_the_nearest_number() {
  std::vector<float> values = {0.0f, -0.0f, NAN, -NAN, 0x1p-149f, 0x1p-126f, 0x1p-10f, 463.9f, 448.0001f};
  for (int number = 0; number < 0x7E; ++number) {  // the middles between numbers, and the floats beside them
    const auto middle = static_cast<float>((value_of(number) + value_of(number + 1)) / 2);
    for (float each : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)})
      values.push_back(each), values.push_back(-each);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) {
    const float drawn =
        std::ldexp(std::uniform_real_distribution<float>(1, 2)(random), static_cast<int>(random() % 24) - 15);
    values.push_back(drawn < 464 ? drawn : 1.0f);
  }
  for (const float each : values) {
    const int expected = nearest(each), found = static_cast<int>(to_e4m3(each));
    check(std::isnan(each) ? (found & 0x7F) == 0x7F : found == expected,
          std::to_string(each) + " became " + std::to_string(found) + ", not " + std::to_string(expected));
  }
}

void test_quotients_are_those_of_a_division() {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> mantissa(1, 2);
  for (int i = 0; i < 3000000; ++i) {
    const int exponent = static_cast<int>(random() % 209) - 90;
    const float scale = std::ldexp(mantissa(random), exponent);
    // Quotients from 2^-10 to 448, of values that are floats; every eighth is near the middle of two numbers.
    float of_scale = std::min(std::ldexp(mantissa(random), static_cast<int>(random() % 19) - 10), 448.0f);
    if (i % 8 == 0) {
      const int number = static_cast<int>(random() % 0x7E);
      of_scale = static_cast<float>((value_of(number) + value_of(number + 1)) / 2);
    }
    float value = of_scale * scale;
    for (int j = static_cast<int>(random() % 4); j > 0; --j) value = std::nextafter(value, 0.0f);
    if (!std::isfinite(value) || std::abs(value) < 0x1p-102f) continue;
    const float expected = value / scale, found = quotient(value, scale, 1.0f / scale);
    if (found != expected)
      check(false,
            std::to_string(value) + " / " + std::to_string(scale) + " became " + std::to_string(found));
  }
  for (const float tiny : {0.0f, 0x1p-149f, 0x1.8p-140f, 0x1.fffffep-103f})  // with scales that are not
    for (const float scale : {0x1p-90f, 0x1.234p-80f, 1.5f, 0x1p120f})
      for (const float value : {tiny, -tiny}) {
        const float found = quotient(value, scale, 1.0f / scale);
        check(to_e4m3(found) == to_e4m3(value / scale), "a tiny value by " + std::to_string(scale));
      }
}

// ---- the division of rows among warps

void test_every_quad_has_one_lane() {
  for (int rows : {1, 2, 9, 33})
    for (int columns : {4, 60, 128, 132, 512, 516, 1024, 1540}) {
      const Cut cut = make_cut(rows, columns);
      std::vector<int> times(rows * columns / kQuad);
      for (int block = 0; block < cut.blocks(); ++block)
        for (int thread = 0; thread < kThreads; ++thread) {
          const auto [row, slice] = cut.place(block, thread);
          if (row >= rows) continue;
          for (int b = 0; b < kSliceBlocks; ++b) {
            const int column = cut.column(slice, b, thread % 32);
            if (column < columns) ++times[(row * columns + column) / kQuad];
          }
        }
      for (const int count : times) check(count == 1, "a quad with " + std::to_string(count) + " lanes");
    }
}

void test_what_no_grid_holds_is_refused() {
  const auto refuses = [](const std::string& number, int64_t rows, int64_t columns) {
    try {
      make_cut(rows, columns);
      check(false, "accepted " + number);
    } catch (const std::invalid_argument& error) {
      check(std::string(error.what()).find(number) != std::string::npos, error.what());
    }
  };
  refuses("rows (0)", 0, 64);
  refuses("columns (0)", 1, 0);
  refuses("columns (130)", 1, 130);
  refuses("columns (1073741828)", 1, (int64_t{1} << 30) + 4);
  refuses("rows (268435425)", 268435425, 4096);
  const Cut last = make_cut(268435424, 4096);
  const auto place = last.place(last.blocks() - 1, kThreads - 1);
  check(place.row == 268435423 && place.slice == 7, "the last warp of the largest grid");
}

// ---- the kernels

struct Bytes {
  Bytes(const std::string& name, int64_t rows, int64_t row_bytes, int64_t stride, bool writable)
      : stride(stride), data(rows * stride + 16, 0xEE) {
    base = data.data() + (16 - reinterpret_cast<uintptr_t>(data.data()) % 16) % 16;
    for (int64_t row = 0; row < rows; ++row)  // bytes between rows belong to no array
      emu::register_array(name, base + row * stride, row_bytes, writable);
  }
  template <class V>
  V get(int64_t row, int64_t byte) const {
    V found;
    std::memcpy(&found, base + row * stride + byte, sizeof(V));
    return found;
  }
  Rows rows() const { return {base, stride}; }

  int64_t stride;
  std::vector<uint8_t> data;
  uint8_t* base;
};

template <class T>
bool same(T found, T expected) {
  return std::isnan(widen<T>(expected)) ? std::isnan(widen<T>(found))
                                        : !std::memcmp(&found, &expected, sizeof(T));
}

// A row of a kind: values of usual size, zeros, tiny and huge ones, and one that is not finite.
template <class T>
std::vector<float> draw_row(int columns, int kind, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> row(columns);
  for (float& each : row) {
    each = kind == 1 ? -0.0f : normal(random);
    if (kind == 2) each *= sizeof(T) == 4 ? 0x1p-130f : 0x1p-20f;
    if (kind == 3) each = std::min(std::max(each * 0x1p14f, -60000.0f), 60000.0f);
  }
  if (kind == 4) row[random() % columns] = INFINITY;
  if (kind == 5) row[random() % columns] = NAN;
  if (kind == 6 && sizeof(T) == 4) row[random() % columns] = 3.4028235e38f;
  return row;
}

// What arrives of a row in e4m3, and its message, by the definition.
template <class T>
struct Sent {
  explicit Sent(const std::vector<T>& row) : number(row.size()), value(row.size()) {
    for (size_t begin = 0; begin < row.size(); begin += kBlock) {
      const size_t end = std::min(row.size(), begin + kBlock);
      float largest = 0;
      for (size_t i = begin; i < end; ++i) {
        const float size = std::abs(widen<T>(row[i]));
        if (size > largest || std::isnan(size)) largest = size;
        if (std::isnan(largest)) break;
      }
      const float by = largest / 448, of_block = by < 0x1p-126f ? 0x1p-126f : by;
      scale.push_back(of_block);
      for (size_t i = begin; i < end; ++i) {
        number[i] = static_cast<uint8_t>(nearest(widen<T>(row[i]) / of_block));
        value[i] = narrow<T>(static_cast<float>(value_of(number[i])) * of_block);
      }
    }
  }
  std::vector<uint8_t> number;
  std::vector<float> scale;
  std::vector<T> value;
};

bool same_number(uint8_t found, uint8_t expected) {
  return (expected & 0x7F) == 0x7F ? (found & 0x7F) == 0x7F : found == expected;
}

template <class T, Format kFormat>
void check_messages(int tokens, int choices, int columns, int64_t gap, bool wide, unsigned seed) {
  std::mt19937 random(seed);
  const std::string name = std::string(Scalar<T>::name) + " T=" + std::to_string(tokens) +
                           " K=" + std::to_string(choices) + " M=" + std::to_string(columns);
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
  const int64_t bytes = message_bytes(kFormat, columns);
  Bytes x("x", tokens, row_bytes, row_bytes + gap * 16, false);
  std::vector<std::vector<T>> row(tokens);
  for (int t = 0; t < tokens; ++t) {
    for (const float each : draw_row<T>(columns, t % 7, random)) row[t].push_back(narrow<T>(each));
    std::memcpy(x.base + t * x.stride, row[t].data(), row_bytes);
  }

  std::vector<int32_t> position(tokens * choices), token_of;
  for (int t = 0; t < tokens; ++t)
    for (int k = 0; k < choices; ++k) token_of.push_back(t);
  std::shuffle(token_of.begin(), token_of.end(), random);
  const int dropped = static_cast<int>(random() % 3);
  const int num = std::max<int>(1, static_cast<int>(token_of.size()) - dropped);
  std::vector<int> next(tokens);
  const int32_t outside[] = {-1, INT32_MIN, INT32_MAX, num};
  for (size_t i = 0; i < token_of.size(); ++i)
    position[token_of[i] * choices + next[token_of[i]]++] =
        static_cast<int>(i) < num ? static_cast<int32_t>(i) : outside[i % 4];
  emu::register_array("position", position.data(), position.size() * 4, false);
  const bool in_place = choices == 1 && seed % 2;  // without positions
  Bytes messages("messages", in_place ? tokens : num, bytes, bytes, true);

  const Pack pack{
      make_cut(tokens, columns), x.rows(), messages.rows(), in_place ? nullptr : position.data(), choices,
      static_cast<uint32_t>(num)};
  emu::launch(static_cast<unsigned>(pack.cut.blocks()), kThreads, seed,
              [&] { pack_kernel<T, kFormat>(pack); });
  const int count = in_place ? tokens : num;
  const auto token = [&](int message) { return in_place ? message : token_of[message]; };
  for (int m = 0; m < count; ++m) {
    const auto& of_token = row[token(m)];
    if constexpr (kFormat == Format::kBf16) {
      for (int i = 0; i < columns; ++i)
        check(same(messages.get<bf16>(m, 2 * i), narrow<bf16>(widen<T>(of_token[i]))), "bf16 " + name);
    } else {
      const Sent<T> sent(of_token);
      for (int i = 0; i < columns; ++i)
        check(same_number(messages.get<uint8_t>(m, i), sent.number[i]), "a number of " + name);
      for (size_t b = 0; b < sent.scale.size(); ++b)
        check(same(messages.get<float>(m, columns + 4 * static_cast<int64_t>(b)), sent.scale[b]),
              "a scale of " + name);
    }
  }

  std::vector<int64_t> index64(count + 3);
  for (auto& each : index64) each = random() % count;
  index64[0] = -1, index64[1] = count;
  std::vector<int32_t> index32(index64.begin(), index64.end());
  const bool has_index = seed % 3 != 0;
  const int rows = has_index ? static_cast<int>(index64.size()) : count;
  emu::register_array("index64", index64.data(), index64.size() * 8, false);
  emu::register_array("index32", index32.data(), index32.size() * 4, false);
  Bytes out("out", rows, row_bytes, row_bytes + gap * 16, true);
  const void* index = wide ? static_cast<const void*>(index64.data()) : index32.data();
  const Unpack unpack{
      make_cut(rows, columns), messages.rows(), out.rows(), has_index ? index : nullptr, wide, count};
  emu::launch(static_cast<unsigned>(unpack.cut.blocks()), kThreads, seed,
              [&] { unpack_kernel<T, kFormat>(unpack); });
  for (int r = 0; r < rows; ++r) {
    const int64_t m = has_index ? index64[r] : r;
    std::vector<T> expected(columns, narrow<T>(0.0f));
    if (m >= 0 && m < count) {
      if constexpr (kFormat == Format::kBf16)
        for (int i = 0; i < columns; ++i) expected[i] = widen<bf16>(narrow<bf16>(widen<T>(row[token(m)][i])));
      else
        expected = Sent<T>(row[token(m)]).value;
    }
    for (int i = 0; i < columns; ++i)
      check(same(out.get<T>(r, i * static_cast<int64_t>(sizeof(T))), expected[i]), "a row of " + name);
  }
  emu::unregister_arrays();
}

void test_kernels_against_plain_loops() {
  unsigned seed = 0;
  for (const int columns : {4, 8, 124, 128, 132, 512, 520, 1152})
    for (const int choices : {1, 2, 5}) {
      const int tokens = columns > 600 ? 7 : 15;
      const auto all = [&](auto check_one) { check_one(++seed), check_one(++seed); };
      all([&](unsigned s) {
        check_messages<float, Format::kE4m3>(tokens, choices, columns, s % 2, s % 2, s);
      });
      all([&](unsigned s) {
        check_messages<bf16, Format::kE4m3>(tokens, choices, columns, s % 2, s % 2, s);
      });
      all([&](unsigned s) {
        check_messages<fp16, Format::kE4m3>(tokens, choices, columns, s % 2, s % 2, s);
      });
      all([&](unsigned s) {
        check_messages<float, Format::kBf16>(tokens, choices, columns, s % 2, s % 2, s);
      });
    }
}

// Rows and messages that are more than 2**31 bytes apart: offsets in 32 bits would read and write elsewhere.
void test_far_rows() {
  constexpr int64_t kStride = (int64_t{1} << 32) + 64;
  constexpr int kColumns = 132, kRows = 3;
  const size_t size = kRows * kStride;
  const auto reserve = [&] {
    void* const memory =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no addresses for far rows");
    return Rows{static_cast<uint8_t*>(memory), kStride};
  };
  const Rows x = reserve(), messages = reserve(), out = reserve();
  std::mt19937 random(1);
  std::vector<std::vector<float>> row(kRows);
  for (int t = 0; t < kRows; ++t) {
    row[t] = draw_row<float>(kColumns, 0, random);
    std::memcpy(x.at(t, 0), row[t].data(), kColumns * 4);
    const int64_t bytes = message_bytes(Format::kE4m3, kColumns);
    emu::register_array("x", x.at(t, 0), kColumns * 4, false);
    emu::register_array("messages", messages.at(t, 0), bytes, true);
    emu::register_array("out", out.at(t, 0), kColumns * 4, true);
  }
  const std::vector<int32_t> position = {2, 0, 1}, index = {1, 2, 0};
  emu::register_array("position", position.data(), 12, false);
  emu::register_array("index", index.data(), 12, false);
  const Cut cut = make_cut(kRows, kColumns);
  const auto blocks = static_cast<unsigned>(cut.blocks());
  const Pack pack{cut, x, messages, position.data(), 1, kRows};
  emu::launch(blocks, kThreads, 1, [&] { pack_kernel<float, Format::kE4m3>(pack); });
  const Unpack unpack{cut, messages, out, index.data(), false, kRows};
  emu::launch(blocks, kThreads, 1, [&] { unpack_kernel<float, Format::kE4m3>(unpack); });
  for (int r = 0; r < kRows; ++r) {
    const int token = (index[r] + 1) % kRows;  // position[token] == index[r]
    const Sent<float> sent(row[token]);
    check(!std::memcmp(out.at(r, 0), sent.value.data(), kColumns * 4), "far row " + std::to_string(r));
  }
  emu::unregister_arrays();
  for (const Rows& each : {x, messages, out}) munmap(each.base, size);
}

// That the memory checks of this file see anything at all.
void test_an_access_past_a_message_is_seen() {
  Bytes x("x", 1, 256, 256, false), messages("messages", 1, 128 / 2 + 3, 80, true);
  const Pack pack{make_cut(1, 64), x.rows(), messages.rows(), nullptr, 1, 1};
  try {
    emu::launch(1, kThreads, 1, [&] { pack_kernel<float, Format::kE4m3>(pack); });
    check(false, "a write past the last scale went unseen");
  } catch (const emu::Error&) {
  }
  emu::unregister_arrays();
}

}  // namespace

int main() {
  test_every_number_is_its_value();
  test_floats_become_the_nearest_number();
  test_quotients_are_those_of_a_division();
  test_every_quad_has_one_lane();
  test_what_no_grid_holds_is_refused();
  test_an_access_past_a_message_is_seen();
  test_kernels_against_plain_loops();
  test_far_rows();
  if (failures) {
    std::printf("%d checks failed\n", failures);
    return 1;
  }
  std::printf("wire: all checks passed\n");
}
