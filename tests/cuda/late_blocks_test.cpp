// Grouped products whose blocks do not all find room at once, as beside a kernel of NCCL's: blocks that come
// late must not cost a second wave, and the result has the same bits. Time is the emulator's passes.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "common/device.cuh"
#include "grouped_gemm/launch.h"

using namespace pmoe;

namespace {

enum class Path { kHopper, kPairs, kBeside, kAmpere };  // pairs: of blocks that share B; beside: A

int failures = 0;

unsigned cluster_of(Path path) { return path == Path::kPairs || path == Path::kBeside ? 2 : 1; }

void expect(bool holds, const std::string& what) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

struct Work {
  std::vector<int32_t> ends;
  int n = 0, k = 0;
  std::vector<bf16> a, b, d;

  Work(std::vector<int> groups, int columns, int depth) : n(columns), k(depth) {
    int total = 0;
    for (int rows : groups) ends.push_back(total += rows);
    std::mt19937 random(7);
    const auto fill = [&](std::vector<bf16>& v, size_t count) {
      for (size_t i = 0; i < count + 8; ++i)
        v.push_back(narrow<bf16>(static_cast<float>(random() % 64) / 64));
    };
    fill(a, static_cast<size_t>(total) * k);
    fill(b, groups.size() * n * k);
    d.resize(static_cast<size_t>(total) * n + 8);
  }
};

bf16* aligned(std::vector<bf16>& v) {
  return reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(v.data()) + 15) & ~uintptr_t{15});
}

// The passes that it takes. room: for how many blocks there is room, at each pass; counted: tiles are taken
// as blocks come.
uint64_t run(Path path, Work& work, unsigned blocks, bool counted, const std::function<size_t()>& room) {
  uint32_t counter = 0;
  Problem p;
  p.a = aligned(work.a), p.a_stride = work.k, p.b = aligned(work.b), p.d = aligned(work.d),
  p.d_stride = work.n;
  p.ends = work.ends.data(), p.experts = static_cast<int>(work.ends.size()), p.rows = work.ends.back();
  p.n = work.n, p.k = work.k;
  p.next_tile = counted ? &counter : nullptr;
  p.blocks_across = path == Path::kBeside ? 2 : 1;
  std::fill(work.d.begin(), work.d.end(), bf16{0xFFFF});
  const GroupedGemm which = {Element::kBf16, Form::kForward, Epilogue::kPlain, Activation::kNone,
                             path == Path::kPairs ? 2 : 1};
  const GroupedGemmPath& launcher = path == Path::kAmpere ? ampere_path : hopper_path;
  stub::seed = 1, stub::eagerness = 100;
  emu::room = room;
  launcher.launch(which, p, p.rows, p.rows, static_cast<int>(blocks), nullptr);
  emu::room = nullptr;
  return emu::last_passes;
}

// G blocks of which m find room at first, and the others when one of those has ended: as long as m blocks
// alone take, to within a tile. In turn it takes longer, or the test would show nothing.
void test_late(Path path, const std::string& name) {
  const unsigned each = cluster_of(path), G = 4 * each;
  const int rows = path == Path::kPairs ? 256 : 128;
  const int columns = path == Path::kAmpere ? 128 : path == Path::kBeside ? 512 : 256;
  // 12 tiles of a cluster's size: 3 for each of 4, 4 for each of 3.
  Work work({2 * rows, 4 * rows}, 2 * columns, 64);
  Work one({rows}, columns, 64);
  const uint64_t tile = run(path, one, each, true, nullptr);
  run(path, work, G, false, nullptr);
  const std::vector<bf16> expected = work.d;
  const auto same = [&] {
    return !std::memcmp(expected.data(), work.d.data(), expected.size() * sizeof(bf16));
  };
  for (unsigned m : {each, 3 * each}) {
    const std::string what = name + ", room for " + std::to_string(m) + " of " + std::to_string(G);
    const auto room = [m] { return size_t{m}; };
    const uint64_t alone = run(path, work, m, false, nullptr);
    const uint64_t late = run(path, work, G, true, room);
    expect(same(), what + ": other bits");
    expect(late <= alone + tile, what + ": " + std::to_string(late) + " passes, not " +
                                     std::to_string(alone) + " and " + std::to_string(tile) + " of a tile");
    const uint64_t in_turn = run(path, work, G, false, room);
    expect(same(), what + ", in turn: other bits");
    if (m == 3 * each)
      expect(in_turn > alone + tile, what + ": tiles in turn take no longer, so this shows nothing");
  }
}

// A foreign kernel holds room and waits for another rank's, which comes late or never: the product ends
// nevertheless, and no later than with the room that is never taken away.
void test_foreign(Path path, const std::string& name) {
  const unsigned each = cluster_of(path), G = 4 * each;
  Work work({300, 0, 200, 1}, 264, 72);
  run(path, work, G, false, nullptr);
  const std::vector<bf16> expected = work.d;
  const uint64_t never = run(path, work, G, true, [each] { return size_t{each}; });
  for (uint64_t comes : {40u, 400u}) {
    const auto room = [&, comes] { return emu::grid->passes < comes ? size_t{each} : size_t{G}; };
    const uint64_t passes = run(path, work, G, true, room);
    const std::string what = name + ", the other rank's comes at " + std::to_string(comes);
    expect(!std::memcmp(expected.data(), work.d.data(), expected.size() * sizeof(bf16)),
           what + ": other bits");
    expect(passes <= never + 20,
           what + ": " + std::to_string(passes) + " passes, and without it " + std::to_string(never));
  }
}

}  // namespace

int main() {
  const std::pair<Path, std::string> paths[] = {{Path::kHopper, "hopper"},
                                                {Path::kPairs, "pairs"},
                                                {Path::kBeside, "beside"},
                                                {Path::kAmpere, "ampere"}};
  for (const auto& [path, name] : paths) {
    try {
      test_late(path, name);
      test_foreign(path, name);
    } catch (const emu::Error& error) {
      expect(false, name + ": " + error.what());
    }
  }
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
