// The emulator itself: it finds mistakes that are planted, and passes the same program without them.
#include <cstdio>

#include "common/device.cuh"
#include "grouped_gemm/box.h"
#include "grouped_gemm/ring.h"

using namespace pmoe;

namespace {

int failures = 0;

enum class Mistake {
  kNone,
  kNoFence,        // copied lines are announced without the fence of the asynchronous proxy
  kNoWait,         // ... before they have landed
  kFenceInFlight,  // ... before they have landed, with a fence that orders other writes of the same places
  kEarlyRelease,   // a stage is let go of before its products are done
  kNoArrival,      // a consumer forgets to let go
  kFewBytes,       // a barrier waits for fewer bytes than travel
  kWrongParity,    // the producer waits for the wrong phase
  kOutside,        // a result is written behind its array
  kDisagree,       // threads of a warpgroup name different operands
};

constexpr int kStages = 2, kSteps = 6, kBytes = box_bytes(64), kWide = box_bytes(256);

// One warp copies A (64 x 64 a step), one thread loads B (256 x 64) by TMA, one warpgroup adds up the
// products.
void pipeline(const bf16* a, const TensorMap* b_map, float* out, Mistake mistake) {
  struct Shared {
    alignas(1024) uint8_t a[kStages][kBytes];
    alignas(1024) uint8_t b[kStages][kWide];
    uint64_t full[kStages], empty[kStages];
  };
  Shared& s = *reinterpret_cast<Shared*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0)
    for (int i = 0; i < kStages; ++i) mbarrier_init(&s.full[i], 2), mbarrier_init(&s.empty[i], 4);
  sync_block();
  Ring<kStages> ring;
  if (thread >= 128 && thread < 160) {
    for (int step = 0; step < kSteps; ++step, ring.advance()) {
      mbarrier_wait(&s.empty[ring.stage],
                    mistake == Mistake::kWrongParity ? ring.full_parity() : ring.empty_parity());
      if (thread == 128) {
        mbarrier_arrive_expect(&s.full[ring.stage], mistake == Mistake::kFewBytes ? kWide / 2 : kWide);
        tma_load_2d(s.b[ring.stage], b_map, &s.full[ring.stage], step * 64, 0);
      }
      for (int i = thread - 128; i < 64 * kChunks; i += 32) {
        uint8_t* const place = s.a[ring.stage] + chunk_offset(i / kChunks, i % kChunks);
        if (mistake == Mistake::kFenceInFlight) store16(place, Words{});
        cp_async16(place, a + (i / kChunks) * (64 * kSteps) + step * 64 + i % kChunks * 8, true);
      }
      cp_async_commit();
      if (mistake != Mistake::kNoWait && mistake != Mistake::kFenceInFlight) cp_async_wait<0>();
      if (mistake != Mistake::kNoFence) fence_proxy_async();
      sync_warp();
      if (thread == 128) mbarrier_arrive(&s.full[ring.stage]);
    }
    cp_async_wait<0>();
  } else if (thread < 128) {
    float d[128];
    for (int step = 0; step < kSteps; ++step, ring.advance()) {
      mbarrier_wait(&s.full[ring.stage], ring.full_parity());
      const auto at = [](const void* p) {
        return uint64_t{shared_address(p)} >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
      };
      const bool leaves = thread % 32 == 0;
      for (int i = 0; i < 4; ++i) {
        const int own = mistake == Mistake::kDisagree && thread == 7 ? 0 : i;
        wgmma_m64n256k16<bf16, false, false>(d, at(s.a[ring.stage]) + own * 2, at(s.b[ring.stage]) + i * 2,
                                             step + i > 0);
      }
      wgmma_commit();
      if (mistake == Mistake::kEarlyRelease && leaves) mbarrier_arrive(&s.empty[ring.stage]);
      wgmma_wait<0>();
      if (mistake == Mistake::kEarlyRelease) continue;
      if (leaves && !(mistake == Mistake::kNoArrival && thread == 32)) mbarrier_arrive(&s.empty[ring.stage]);
    }
    const int row = thread / 32 * 16 + thread % 32 / 4 + (mistake == Mistake::kOutside ? 1 : 0);
    for (int i = 0; i < 128; ++i)
      write(out + (row + i / 2 % 2 * 8) * 256 + i / 4 * 8 + thread % 4 * 2 + i % 2, d[i]);
  }
}

enum class BulkMistake {
  kNone,
  kNoReadWait,  // a slot is filled again while a store still reads it
  kNoWait,      // stores are announced before they are written
  kNoFence,     // they come behind an acquire, without a fence of the asynchronous proxy
  kBytes,       // a size that is not of 16 bytes
};

constexpr int kParts = 6, kPartBytes = 64;

// One thread copies parts through two slots of shared memory, and tells another one, which looks.
void relay(const uint8_t* from, uint8_t* to, uint32_t* flags, BulkMistake mistake) {
  struct Shared {
    alignas(128) uint8_t slot[2][kPartBytes];
    uint64_t full[2];
  };
  Shared& s = *reinterpret_cast<Shared*>(shared_memory());
  if (threadIdx.x == 0) {
    for (uint64_t& full : s.full) mbarrier_init(&full, 1);
    load_acquire_system(flags);
    if (mistake != BulkMistake::kNoFence) fence_proxy_async_global();
    for (int i = 0; i < kParts; ++i) {
      const int bytes = mistake == BulkMistake::kBytes ? 8 : kPartBytes;
      if (mistake != BulkMistake::kNoReadWait) bulk_wait_read<1>();
      mbarrier_arrive_expect(&s.full[i % 2], bytes);
      bulk_load(s.slot[i % 2], from + i * kPartBytes, &s.full[i % 2], bytes);
      mbarrier_wait(&s.full[i % 2], i / 2 % 2);
      bulk_store(to + i * kPartBytes, s.slot[i % 2], bytes);
      bulk_commit();
    }
    if (mistake == BulkMistake::kNoWait)
      bulk_wait_read<0>();
    else
      bulk_wait<0>();
    store_release_system(flags, 1);
    for (int i = 0; i < 4; ++i) pause();
    bulk_wait<0>();
  } else if (threadIdx.x == 32) {
    while (load_acquire_system(flags) == 0) pause();
    if (std::memcmp(from, to, kParts * kPartBytes)) throw emu::Error("wrong bytes behind the flag");
  }
}

void expect_bulk(const char* name, BulkMistake mistake, const std::string& word) {
  alignas(16) uint8_t from[kParts * kPartBytes];
  for (int i = 0; i < kParts * kPartBytes; ++i) from[i] = static_cast<uint8_t>(1 + i % 251);
  emu::unregister_arrays();
  std::string said;
  bool found = false;
  for (unsigned seed = 1; seed <= 6; ++seed) {
    alignas(16) uint8_t to[kParts * kPartBytes] = {};
    uint32_t flags[1] = {0};
    said = "ok";
    try {
      emu::launch(1, 64, seed, [&] { relay(from, to, flags, mistake); });
    } catch (const emu::Error& error) {
      said = error.what();
    }
    if (mistake == BulkMistake::kNone ? said != word : said.find(word) != std::string::npos) found = true;
  }
  if (found == (mistake != BulkMistake::kNone)) return;
  ++failures;
  std::printf("FAILED: %s: \"%s\", not \"%s\"\n", name, said.c_str(), word.c_str());
}

enum class BoxMistake {
  kNone,
  kNoFence,     // a box is stored without a fence of the asynchronous proxy
  kOneFence,    // ... with a fence of the lane alone that stores it
  kLastFence,   // two lanes write the same 16 bytes, and only the later one issues a fence
  kNoReadWait,  // it is written again while a store still reads it
  kNoMeeting,   // the store begins before all lanes have written
  kNoGroup,     // stores are in no group, so that nothing waits for them
  kNoLastWait,  // the warp ends before its stores
};

constexpr int kBoxes = 5, kLines = 16;

// Lanes 1 and 0 write the first 16 bytes of a box, one after the other, as they are. Only lane 0 issues a
// fence, which does not order the write of lane 1. An emulator that remembers only the last writer of 16
// bytes takes them for fenced.
void write_again_with_one_fence(uint8_t* box, int lane) {
  auto* const words = reinterpret_cast<uint32_t*>(box);
  if (lane == 1) write(words + 1, words[1]);
  sync_warp();
  if (lane == 0) write(words, words[0]);
  if (lane == 0) fence_proxy_async();
  sync_warp();
}

// One warp writes boxes, each through one of two places in shared memory.
void store_boxes(const TensorMap* map, BoxMistake mistake) {
  struct Shared {
    alignas(1024) uint8_t box[2][box_bytes(kLines)];
  };
  Shared& s = *reinterpret_cast<Shared*>(shared_memory());
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kBoxes; ++i) {
    uint8_t* const box = s.box[i % 2];
    if (lane == 0 && mistake != BoxMistake::kNoReadWait) bulk_wait_read<1>();
    sync_warp();
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      const uint32_t words[4] = {1u + i, 2u + i, 3u + i, 4u + i};
      stmatrix_x4(box + chunk_offset(lane / 8 % 2 * 8 + lane % 8, chunk + lane / 16), words);
    }
    if (mistake != BoxMistake::kNoFence && (lane == 0 || mistake != BoxMistake::kOneFence))
      fence_proxy_async();
    if (mistake != BoxMistake::kNoMeeting) sync_warp();
    if (mistake == BoxMistake::kLastFence) write_again_with_one_fence(box, lane);
    if (lane != 0) continue;
    tma_store_2d(map, box, 0, i * kLines);
    if (mistake != BoxMistake::kNoGroup) bulk_commit();
  }
  if (lane == 0 && mistake != BoxMistake::kNoLastWait) bulk_wait<0>();
}

void expect_box(const char* name, BoxMistake mistake, const std::string& word) {
  constexpr int kColumns = 56, kStride = 72, kRows = kBoxes * kLines - 3;  // the last box has fewer lines
  bool found = false;
  std::string said;
  for (unsigned seed = 1; seed <= 6; ++seed) {
    std::vector<uint16_t> memory(kBoxes * kLines * kStride + 8, 0xFFFF);
    auto* out = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
    TensorMap map;
    emu::write_map(&map, {reinterpret_cast<const uint8_t*>(out),
                          2,
                          {kColumns, kRows, 1},
                          {2, kStride * 2, 0},
                          {64, kLines, 1},
                          2});
    emu::unregister_arrays();
    emu::register_array("out", out, (kRows * kStride) * 2, true);
    said = "ok";
    try {
      emu::launch(1, 32, seed, [&] { store_boxes(&map, mistake); }, static_cast<int>(seed) * 40 % 101);
      for (int row = 0; row < kBoxes * kLines; ++row)
        for (int column = 0; column < kStride; ++column) {
          const uint32_t word = 1u + row / kLines + row % kLines / 8 + column / 8 % 2 * 2;
          const bool exists = row < kRows && column < kColumns;
          const uint16_t right = !exists ? 0xFFFF : column % 2 ? 0 : static_cast<uint16_t>(word);
          if (out[row * kStride + column] != right) said = "wrong result";
        }
    } catch (const emu::Error& error) {
      said = error.what();
    }
    if (mistake == BoxMistake::kNone ? said != word : said.find(word) != std::string::npos) found = true;
  }
  if (found == (mistake != BoxMistake::kNone)) return;
  ++failures;
  std::printf("FAILED: %s: \"%s\", not \"%s\"\n", name, said.c_str(), word.c_str());
}

// Whether the run was right, and what was said of it if not.
bool is_right(Mistake mistake, unsigned seed, int eagerness, std::string& said) {
  std::mt19937 random(seed);
  const auto draw = [&] { return narrow<bf16>(static_cast<float>(static_cast<int>(random() % 9)) - 4); };
  constexpr int kDepth = 64 * kSteps;
  std::vector<bf16> a_memory(64 * kDepth + 8), b(256 * kDepth);
  auto* a = reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(a_memory.data()) + 15) & ~uintptr_t{15});
  for (int i = 0; i < 64 * kDepth; ++i) a[i] = draw();
  for (auto& each : b) each = draw();
  std::vector<float> out(64 * 256, -1e9f);
  TensorMap map;
  emu::write_map(
      &map,
      {reinterpret_cast<const uint8_t*>(b.data()), 2, {kDepth, 256, 1}, {2, kDepth * 2, 0}, {64, 256, 1}, 2});
  emu::unregister_arrays();
  emu::register_array("A", a, 64 * kDepth * 2, false);
  emu::register_array("out", out.data(), out.size() * 4, true);
  try {
    emu::launch(1, 160, seed, [&] { pipeline(a, &map, out.data(), mistake); }, eagerness);
  } catch (const emu::Error& error) {
    said = error.what();
    return false;
  }
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 256; ++j) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += widen(a[i * kDepth + k]) * widen(b[j * kDepth + k]);
      if (sum != out[i * 256 + j]) {
        said = "wrong result";
        return false;
      }
    }
  return true;
}

void expect_found(const char* name, Mistake mistake, const std::string& word) {
  bool found = false, told = false;
  std::string said;
  for (unsigned seed = 1; seed <= 6; ++seed) {
    said.clear();
    if (is_right(mistake, seed, static_cast<int>(seed) * 40 % 101, said)) continue;
    found = true;
    told = told || said.find(word) != std::string::npos;
  }
  if (found && told) return;
  ++failures;
  std::printf("FAILED: %s was not found, or said to be \"%s\", not \"%s\"\n", name, said.c_str(),
              word.c_str());
}

}  // namespace

int main() {
  std::string said;
  for (unsigned seed = 1; seed <= 6; ++seed)
    if (!is_right(Mistake::kNone, seed, static_cast<int>(seed) * 40 % 101, said)) {
      ++failures;
      std::printf("FAILED: the right program: %s\n", said.c_str());
    }
  expect_found("a missing fence", Mistake::kNoFence, "without a proxy fence");
  expect_found("copies not waited for", Mistake::kNoWait, "without a proxy fence");
  expect_found("copies over ordinary writes, not waited for", Mistake::kFenceInFlight,
               "without a proxy fence");
  expect_found("an early release", Mistake::kEarlyRelease, "w");
  expect_found("a missing arrival", Mistake::kNoArrival, "deadlock");
  expect_found("too few bytes", Mistake::kFewBytes, "w");
  expect_found("a wrong parity", Mistake::kWrongParity, "deadlock");
  expect_found("a write outside", Mistake::kOutside, "outside every array");
  expect_found("operands that differ", Mistake::kDisagree, "disagree");
  expect_bulk("bulk copies", BulkMistake::kNone, "ok");
  expect_bulk("a slot in use", BulkMistake::kNoReadWait, "wrong bytes");
  expect_bulk("bulk stores not waited for", BulkMistake::kNoWait, "wrong bytes");
  expect_bulk("a bulk store without a fence", BulkMistake::kNoFence, "without a fence");
  expect_bulk("a bulk copy of 8 bytes", BulkMistake::kBytes, "not of 16 bytes");
  expect_box("boxes", BoxMistake::kNone, "ok");
  expect_box("a box without a fence", BoxMistake::kNoFence, "without a proxy fence");
  expect_box("a box with one lane's fence", BoxMistake::kOneFence, "without a proxy fence");
  expect_box("a box with the last writer's fence", BoxMistake::kLastFence,
             "what thread 1 wrote without a proxy fence");
  expect_box("a box in use", BoxMistake::kNoReadWait, "may still read");
  expect_box("a box that is not written", BoxMistake::kNoMeeting, "without a proxy fence");
  expect_box("a box without a group", BoxMistake::kNoGroup, "may still read");
  expect_box("boxes not waited for", BoxMistake::kNoLastWait, "never waited for");
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
